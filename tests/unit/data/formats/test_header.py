"""Headers of CSV files: delimiter, names, and first rows that are data."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from builders.faults import rejects

from rayrec.data.formats.columns import check_columns
from rayrec.data.formats.csv_reader import csv_columns, read_csv
from rayrec.data.formats.header import looks_like_data, read_header
from rayrec.data.logs.table_parser import parse_table
from rayrec.schema import Schema

CLICKS = Schema(label="click", dense=("age",), sparse=("user", "job"))
ORDER = ("job", "click", "unused", "age", "user")
STORED = CLICKS.replace(header=ORDER, header_row=True)


def write(folder: Path, text: str) -> str:
    path = folder / "log.csv"
    path.write_bytes(text.encode())
    return str(path)


@pytest.mark.parametrize(
    ("first", "rows", "expected"),
    [
        pytest.param(
            ["user", "item", "click"],
            [["u1", "i1", "0"], ["u2", "i1", "1"]],
            False,
            id="names",
        ),
        pytest.param(
            ["u1", "i1", "0"],
            [["u2", "i1", "1"], ["u3", "i2", "0"]],
            True,
            id="text occurs in its column",
        ),
        pytest.param(
            ["u1", "i1"],
            [["i1", "u1"], ["u2", "i2"]],
            False,
            id="text occurs in another column",
        ),
        pytest.param(
            ["196", "242", "3", "881250949"],
            [["186", "302", "3", "891717742"]],
            True,
            id="numbers",
        ),
        pytest.param(["1", "2", "3"], [["7", "8", "9"]], True, id="few numbers that count up"),
        pytest.param([str(n) for n in range(40)], [["5"] * 40], False, id="names of pandas from 0"),
        pytest.param([str(n) for n in range(1, 41)], [["5"] * 40], False, id="names from 1"),
        pytest.param([str(n) for n in range(8)], [["5"] * 8], False, id="eight names from 0"),
        pytest.param(
            [str(n) for n in range(7)],
            [["5"] * 7],
            True,
            id="seven numbers that count up",
        ),
        pytest.param(
            ["label", "1", "2", "3"],
            [["1", "5", "6", "7"]],
            False,
            id="numbered names beside a label",
        ),
        pytest.param(["u1", "2024-05-01", "i1"], [["u2", "2024-05-02", "i2"]], True, id="date"),
        pytest.param(["u1", "3.5", "i1"], [["u2", "4.5", "i2"]], True, id="decimal beside texts"),
        pytest.param(
            ["0", "u1", "i1"],
            [["1", "u2", "i2"], ["0", "u3", "i3"]],
            True,
            id="label of 0 and 1",
        ),
        pytest.param(["user", "0"], [["u1", "7"], ["u2", "0"]], False, id="column 0 of pandas"),
        pytest.param(
            ["user", "item"],
            [
                ["u1", "i1"],
                ["user", "item"],
                ["u2", "i1"],
            ],
            False,
            id="repeated header",
        ),
        pytest.param([" u1 ", "x"], [["u1", "y"]], True, id="blanks around values"),
        pytest.param(["", "click"], [["", "1"], ["", "0"]], False, id="unnamed column"),
        pytest.param([], [], False, id="no fields"),
        pytest.param(["user", "item"], [], False, id="one row"),
    ],
)
def test_looks_like_data_recognizes_rows(
    first: list[str],
    rows: list[list[str]],
    expected: bool,
) -> None:
    assert looks_like_data(first, rows) is expected


@pytest.mark.parametrize(
    ("head", "delimiter", "columns"),
    [
        pytest.param(
            '"click, or not";age;user;job\n',
            ";",
            ("click, or not", "age", "user", "job"),
            id="commas in quotes",
        ),
        pytest.param('"a\tb",click\n1,2\n', ",", ("a\tb", "click"), id="tab in quotes"),
        pytest.param('"a;b;c","d;e"\n1,2\n', ",", ("a;b;c", "d;e"), id="semicolons in quotes"),
        pytest.param('"a\n;;;",click\n1,2\n', ",", ("a\n;;;", "click"), id="line end in quotes"),
        pytest.param("a\tb,c,d\n", "\t", ("a", "b,c,d"), id="tab first"),
        pytest.param("a,b\r1;2;3;4\r", ",", ("a", "b"), id="carriage returns"),
        pytest.param('5" disk;a,b;c\n', ";", ('5" disk', "a,b", "c"), id="quote inside a name"),
    ],
)
def test_delimiter_search_skips_quoted_text(
    head: str,
    delimiter: str,
    columns: tuple[str, ...],
) -> None:
    header = read_header(head.encode(), Schema(label=None, sparse=("-",)), path="log.csv")
    assert (header.delimiter, header.columns, header.is_row) == (delimiter, columns, True)


@pytest.mark.parametrize("end", ["item", '"item', "u,", ""])
def test_row_without_end_is_not_compared(end: str) -> None:
    head = f"item,user\nitem_1,user_1\n{end}".encode()
    header = read_header(head, Schema(label=None, sparse=("item", "user")), path="log.csv")
    assert (header.columns, header.is_row) == (("item", "user"), True)


def test_header_names_are_trimmed(tmp_path: Path) -> None:
    path = write(tmp_path, "click, age , user, job\n1, 30 , u1,clerk\n")
    assert csv_columns(path, CLICKS.replace(delimiter=",")) == ("click", "age", "user", "job")
    (table,) = read_csv(path, CLICKS)
    raw, faults = parse_table(table, CLICKS)
    assert (raw.numbers.tolist(), faults.total) == ([[30.0]], 0)


def test_header_keeps_blanks_named_in_schema(tmp_path: Path) -> None:
    path = write(tmp_path, "click, age,user,job\n1,30,u1,clerk\n")
    assert csv_columns(path, CLICKS.replace(dense=(" age",))) == ("click", " age", "user", "job")


@pytest.mark.parametrize(
    "other",
    [pytest.param(" user", id="blank"), pytest.param("User", id="case")],
)
def test_header_rejects_similar_names(tmp_path: Path, other: str) -> None:
    path = write(tmp_path, f"click,age,user,job,{other}\n1,30,u1,clerk,u2\n")
    rejects(
        re.escape(f"names 'user' and {other!r} differ only in blanks or case"),
        list,
        read_csv(path, CLICKS),
    )


def test_schema_may_use_names_differing_in_case(tmp_path: Path) -> None:
    both = CLICKS.replace(sparse=("user", "User", "job"))
    path = write(tmp_path, "click,age,user,User,job\n1,30,u1,u2,clerk\n")
    assert csv_columns(path, both) == ("click", "age", "user", "User", "job")


HEADLESS = "clerk,1,x,30,u1\nclerk,0,y,31,u2\n"


def test_file_without_header_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path, HEADLESS)
    rejects(
        r"first row looks like data, so there is no header\. .*`header: \[\.\.\.\]`",
        list,
        read_csv(path, CLICKS),
    )
    rejects("first row looks like data", csv_columns, path, Schema(label=None, sparse=("clerk",)))
    no_order = CLICKS.replace(header=())
    rejects(
        "no header, and the training log had no order of columns",
        list,
        read_csv(path, no_order),
    )


@pytest.mark.parametrize(
    "header_row",
    [pytest.param(False, id="declared"), pytest.param(True, id="of the training log")],
)
@pytest.mark.parametrize(
    ("text", "labelled"),
    [
        pytest.param(HEADLESS, True, id="all columns"),
        pytest.param("clerk,x,30,u1\nclerk,y,31,u2\n", False, id="no label"),
    ],
)
def test_lines_without_header_use_stored_order(
    tmp_path: Path,
    header_row: bool,
    text: str,
    labelled: bool,
) -> None:
    schema = CLICKS.replace(header=ORDER, header_row=header_row)
    schema = schema if labelled else schema.unlabelled()
    for ending in ("\n", "\r\n"):
        raw, faults = parsed(write(tmp_path, text.replace("\n", ending)), schema)
        assert (raw.numbers.tolist(), faults.total) == ([[30.0], [31.0]], 0)
        expected, _ = parsed(
            write(tmp_path, "click,age,user,job\n1,30,u1,clerk\n0,31,u2,clerk\n"),
            schema,
        )
        assert (raw.categories == expected.categories).all()
        assert ("click" in raw.labels) is labelled


def parsed(path: str, schema: Schema) -> tuple:
    (table,) = read_csv(path, schema)
    return parse_table(table, schema)


def test_header_row_overrides_stored_order(tmp_path: Path) -> None:
    raw, _ = parsed(write(tmp_path, "age,job,user,click\n7,clerk,u1,1\n"), STORED)
    assert raw.numbers.tolist() == [[7.0]]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("clerk,1,x,30\nclerk,1,x,31\n1,2,3\n", None, id="no label"),
        pytest.param(
            "clerk,1,30\nclerk,0,31\n",
            "it has 3 columns, and lines of this log have 5 or 4",
            id="too few",
        ),
        pytest.param(
            "job,clicked,unused,age,user\nclerk,1,x,30,u1\n",
            "no column named click; did you mean clicked",
            id="other name",
        ),
        pytest.param("a,b,c,d,e\nclerk,1,x,30,u1\n", "no column named click", id="other names"),
    ],
)
def test_lines_without_header_need_log_width(tmp_path: Path, text: str, why: str | None) -> None:
    path = write(tmp_path, text)
    if why is None:
        assert csv_columns(path, STORED) == ("job", "unused", "age", "user")
    else:
        rejects(re.escape(why), list, read_csv(path, STORED))


def test_declared_header_reads_unique_texts(tmp_path: Path) -> None:
    towers = Schema(label=None, sparse=("user", "item"), header=("item", "user"))
    path = write(tmp_path, "i1,u1\ni2,u2\n")
    assert csv_columns(path, towers) == ("item", "user")
    # The log of the training had a header, so these may be other names.
    rejects("no column named user", list, read_csv(path, towers.replace(header_row=True)))


@pytest.mark.parametrize(
    ("text", "is_row"),
    [
        pytest.param("User,item,x1,x2\n", True, id="half of the names"),
        pytest.param("user,x1,x2,x3\n", False, id="fewer names"),
    ],
)
def test_header_row_matches_columns(text: str, is_row: bool) -> None:
    towers = Schema(
        label=None,
        sparse=("user", "item", "a", "b"),
        header=("item", "user", "a", "b"),
    )
    header = read_header(text.encode(), towers.replace(delimiter=","), path="log.csv")
    assert (header.is_row, header.columns[0]) == (is_row, "User" if is_row else "item")


def test_declared_names_in_first_row_are_header(tmp_path: Path) -> None:
    years = Schema(label="click", sparse=("2021", "2022"), header=("2021", "2022", "click"))
    raw, faults = parsed(write(tmp_path, "2021,2022,click\n7,8,1\n"), years)
    assert (raw.rows, faults.total) == (1, 0)


@pytest.mark.parametrize(
    ("names", "column", "meant"),
    [
        pytest.param(
            [*(f"c{number}" for number in range(50)), "userid"],
            "user_id",
            "did you mean userid?",
            id="behind 12 names",
        ),
        pytest.param(["click", "User_ID"], "user_id", "did you mean User_ID?", id="case"),
        pytest.param(["click", " user_id"], "user_id", "did you mean ' user_id'?", id="blanks"),
    ],
)
def test_missing_column_error_proposes_nearest(
    names: Sequence[str],
    column: str,
    meant: str,
) -> None:
    rejects(
        re.escape(f"no column named {column}; {meant}"),
        check_columns,
        names,
        [column],
        path="log.csv",
    )


def test_missing_column_error_omits_unlike_names() -> None:
    rejects(
        "no column named user; it has a, b",
        check_columns,
        ["a", "b"],
        ["user"],
        path="log.csv",
    )


SPARK = '1,30,"a ""quoted"" b",clerk\n0,31,"a \\"quoted\\" b",clerk\n1,32,"c:\\\\dir",clerk\n'


def test_text_after_closing_quote_is_invalid(tmp_path: Path) -> None:
    raw, faults = parsed(write(tmp_path, "click,age,user,job\n" + SPARK), CLICKS)
    assert (raw.rows, faults.counts) == (2, {"text after a closing quote": 1})
    assert (
        faults.text_fix()
        == "if the file writes quotes as \\\", name the character in the schema: `escape: '\\'`"
    )


def test_escape_reads_backslash_quotes(tmp_path: Path) -> None:
    schema = CLICKS.replace(escape="\\")
    raw, faults = parsed(write(tmp_path, "click,age,user,job\n" + SPARK), schema)
    expected, _ = parsed(
        write(tmp_path, 'click,age,user,job\n1,30,"a ""quoted"" b",clerk\n1,32,c:\\dir,clerk\n'),
        schema,
    )
    users = raw.categories[:, 0].tolist()
    assert (faults.total, users[0] == users[1]) == (0, True)
    assert users[1:] == expected.categories[:, 0].tolist()


def test_blanks_after_closing_quote_are_skipped(tmp_path: Path) -> None:
    raw, faults = parsed(
        write(tmp_path, 'click,age,user,job\n1,30,"u1" ,clerk\n1,30,u1,"clerk"\t\n'),
        CLICKS,
    )
    assert (faults.total, raw.categories[0].tolist()) == (0, raw.categories[1].tolist())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        pytest.param({"escape": '"'}, "escape must be one ASCII character", id="quote"),
        pytest.param({"escape": "\t"}, "escape must be one ASCII character", id="delimiter"),
        pytest.param(
            {"encoding": "latin-17"},
            "encoding must be one of Python's",
            id="unknown encoding",
        ),
        pytest.param(
            {"encoding": "base64"},
            "encoding must be one of Python's",
            id="no text encoding",
        ),
        pytest.param(
            {"tokens": "hexadecimal", "escape": "\\"},
            "escape needs tokens: any",
            id="hexadecimal",
        ),
    ],
)
def test_schema_rejects_unusable_text_fields(changes: dict, why: str) -> None:
    rejects(why, CLICKS.replace, **changes)
