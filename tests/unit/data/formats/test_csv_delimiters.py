"""Delimiters of several characters: splitting, search in a file's first rows, and bounds."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from builders.faults import rejects

from rayrec.data.formats.csv_reader import CsvRange, read_csv, row_start
from rayrec.data.formats.header import read_header
from rayrec.data.formats.registry import find_format
from rayrec.data.formats.row_faults import FAULT
from rayrec.inference.export.plain_encoder import Encoder
from rayrec.schema import Schema
from rayrec.serve.requests import open_body, row_ends

NAMES = ("user", "movie", "note")
RATINGS = Schema(label=None, sparse=NAMES, header=NAMES, delimiter="::")

TEXT = """u1::m1::plain
u2::m2::ends:
:u3::m3::a:b
"u4::x"::"m""4"::","
u5::"two
::lines"::y
u6:::m6::half
"u7" ::"m7"::::
u8::m8
u9::"m9:" ::z
"""
ROWS = [
    ("u1", "m1", "plain"),
    ("u2", "m2", "ends:"),
    (":u3", "m3", "a:b"),
    ("u4::x", 'm"4', ","),
    ("u5", "two\n::lines", "y"),
    ("u6", ":m6", "half"),
    None,  # Two delimiters at the end
    None,
    ("u9", "m9:", "z"),
]


def write(folder: Path, text: str) -> str:
    path = folder / "log.dat"
    path.write_bytes(text.encode())
    return str(path)


def rows_of(tables: Sequence[pa.Table]) -> list[tuple[str, ...] | None]:
    """Return the rows of tables, None for an invalid one."""
    rows: list[tuple[str, ...] | None] = []
    for row in (row for table in tables for row in table.to_pylist()):
        fields = tuple(row[name].decode() for name in NAMES)
        rows.append(None if row[FAULT] else fields)
    return rows


@pytest.mark.parametrize("read_bytes", [*range(1, 12), 1 << 20])
def test_rows_are_equal_for_any_block_edge(tmp_path: Path, read_bytes: int) -> None:
    path = write(tmp_path, TEXT)
    assert rows_of([*read_csv(path, RATINGS, NAMES, read_bytes=read_bytes)]) == ROWS


def test_half_delimiter_at_block_edge_is_no_text_after_quote(tmp_path: Path) -> None:
    text = 'u1::"a\nb"::c\n'
    half = text.index('"::') + 2
    path = write(tmp_path, text)
    tables = list(read_csv(path, RATINGS, NAMES, read_bytes=half))
    assert rows_of(tables) == [("u1", "a\nb", "c")]


def test_half_delimiter_at_file_end_is_text(tmp_path: Path) -> None:
    path = write(tmp_path, "u1::m1::a:")
    assert rows_of([*read_csv(path, RATINGS, NAMES)]) == [("u1", "m1", "a:")]


def test_ranges_have_rows_of_file(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT)
    start = row_start(path, TEXT.index("u6"))
    first = CsvRange(path, RATINGS, NAMES, 0, start)
    second = CsvRange(path, RATINGS, NAMES, start, len(TEXT))
    assert rows_of([*first, *second]) == ROWS
    assert (first.end, second.end) == (start, len(TEXT))


@pytest.mark.parametrize("delimiter", [", ", "||", "~|~", "\t\t", "§", " - ", "  "])
def test_delimiters_divide_rows(tmp_path: Path, delimiter: str) -> None:
    lines = [("u1", "a b", "x"), (f'"q{delimiter}q"', '"m"', "y")]
    path = write(tmp_path, "".join(f"{delimiter.join(line)}\n" for line in lines))
    tables = [*read_csv(path, RATINGS.replace(delimiter=delimiter), NAMES)]
    assert rows_of(tables) == [("u1", "a b", "x"), (f"q{delimiter}q", "m", "y")]


def test_trimming_keeps_blanks_of_delimiter(tmp_path: Path) -> None:
    path = write(tmp_path, '"a"  - "b" -  c \n')
    schema = RATINGS.replace(delimiter=" - ")
    assert rows_of([*read_csv(path, schema, NAMES)]) == [("a", "b", "c")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("1::Toy, The::a\n2::Jumanji::b\n3::Heat::c\n", "::", id="commas in text"),
        pytest.param('1::"a\n::b;c"::x\n2::d::y\n', "::", id="quotes"),
        pytest.param("user::movie\n1::2\n", "::", id="names"),
        pytest.param("name,kind\nstd::map,1\nstd::set,2\n", ",", id="in a comma's column"),
        pytest.param("std::map,1\nstd::set,2\n", ",", id="both divide all rows"),
        pytest.param('"a::b",1\n"c::d",2\n', ",", id="only in quotes"),
        pytest.param("a::b\tc\nd\te::f\n", "\t", id="tab"),
        pytest.param("a::b\nc\nd,e\nf::g::h\n", "\t", id="nothing divides all rows"),
    ],
)
def test_header_finds_double_colon(text: str, expected: str) -> None:
    schema = Schema(label=None, sparse=("-",), header=("-",))
    fields = len(text.splitlines()[0].split(expected))
    schema = schema.replace(header=("-", *(f"c{number}" for number in range(1, fields))))
    if '"a\n' in text:
        schema = schema.replace(header=("-", "b", "c"))
    assert read_header(text.encode(), schema, path="log").delimiter == expected


def test_header_keeps_double_colon_in_lists_of_colons() -> None:
    schema = Schema(label=None, sparse=("a",), list_delimiter=":", header=("a",))
    assert read_header(b"x::y\nz::v\n", schema, path="log").delimiter == "\t"


def test_movielens_is_csv(tmp_path: Path) -> None:
    path = write(tmp_path, "1::1193::5::978300760\n1::661::3::978302109\n")
    names = ("user", "movie", "rating", "at")
    schema = Schema(label=None, sparse=names, header=names)
    assert find_format(path, schema).name == "csv"
    (table,) = read_csv(path, schema)
    assert table["at"].to_pylist() == [b"978300760", b"978302109"]


@pytest.mark.parametrize("delimiter", ["", "a\nb", '"', '::"', "\x01\x02", "x" * 17, "\r"])
def test_schema_rejects_delimiters(delimiter: str) -> None:
    rejects("delimiter must be 1 to 16 printable characters", RATINGS.replace, delimiter=delimiter)


def test_schema_rejects_escape_in_delimiter() -> None:
    rejects("escape must be one ASCII character", RATINGS.replace, delimiter="^^", escape="^")


def test_schema_keeps_delimiter_in_description() -> None:
    described = RATINGS.describe()
    assert described["delimiter"] == "::"
    assert Schema.described(described).delimiter == "::"


# -- Text of requests, and of encode.py
def test_row_ends_skip_quoted_lines() -> None:
    text = b'a::"b\nc"::d\n:::"e\nf"::g\r\nlast::"x\ny"'
    ends = [text[:end].count(b"\n") for _, end in row_ends(text, "::")]
    # The second row's quote follows a colon that is the field's own, so its line end ends a row.
    assert ends == [2, 3, 4]


def test_body_of_default_schema_may_have_double_colon() -> None:
    schema = Schema(label=None, sparse=NAMES, header=NAMES)
    body = open_body(b"u1::m,1::x\nu2::m2::y\n", "csv", schema=schema, max_rows=5)
    assert (body.delimiter, body.num_rows) == ("::", 2)


@pytest.mark.parametrize("declared", ["::", "\t"])
def test_encoder_splits_lines_like_reader(declared: str) -> None:
    encoder = Encoder.__new__(Encoder)
    encoder.schema = {"delimiter": declared, "header": list(NAMES)}
    encoder._hexadecimal = False
    encoder._booleans = True
    valid = [row for row in ROWS if row is not None]
    lines = [line for line in TEXT.splitlines() if "u7" not in line and "u8" not in line]
    assert [tuple(row) for row in encoder._split_lines(lines, {3})] == valid


def test_encoder_rejects_text_after_quote() -> None:
    encoder = Encoder.__new__(Encoder)
    encoder.schema = {"delimiter": "::", "header": list(NAMES)}
    encoder._hexadecimal = False
    encoder._booleans = True
    with pytest.raises(ValueError, match="row 0 has an unmatched quote, or text after a closing"):
        encoder._split_lines(['"u1":x::m::n'], {3})
