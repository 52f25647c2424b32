"""Parser compared with a slow, obvious one; every kind of invalid line is counted, located and
skipped.
"""

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data.logs.faults import Faults
from rayrec.data.logs.text_parser import MAX_LINE_BYTES, TextParser, max_rows_in, padded, parse
from rayrec.data.raw_block import RawBlock
from rayrec.datasets.criteo import SCHEMA
from rayrec.schema import Schema


def columns(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(count))


SCHEMAS = [SCHEMA, SCHEMA.unlabelled()]
SCHEMAS += [
    Schema(
        tokens="hexadecimal",
        label=label,
        dense=columns("d", dense),
        sparse=columns("s", sparse),
    )
    for label, dense, sparse in (
        ("y", 0, 3),
        ("y", 3, 0),
        (None, 1, 0),
        (None, 0, 1),
        (None, 2, 62),
    )
]
Row = tuple[int | None, list[int], list[int], int]


def reference(schema: Schema, text: bytes) -> tuple[list[Row], list[tuple[int, str, str]]]:
    """Return rows as (label, integers, tokens, missing) and faults as (byte, kind, column)."""
    rows: list[Row] = []
    faults: list[tuple[int, str, str]] = []
    byte = 0
    for line in re.findall(rb"[^\n]*\n|[^\n]+$", text):
        kind_or_row = reference_line(schema, line)
        if isinstance(kind_or_row[0], str):
            faults.append((byte, *kind_or_row))  # type: ignore[arg-type]
        else:
            rows.append(kind_or_row)  # type: ignore[arg-type]
        byte += len(line)
    return rows, faults


def reference_line(schema: Schema, line: bytes) -> Row | tuple[str, str]:
    if len(line.removesuffix(b"\n")) > MAX_LINE_BYTES:
        return "line too long", ""
    if line.endswith(b"\r\n"):
        line = line[:-2]
    line = line.removesuffix(b"\n")
    if not line:
        return "empty line", ""
    fields = line.split(b"\t")
    if len(fields) != len(schema.columns):
        return ("too few columns" if len(fields) < len(schema.columns) else "too many columns"), ""
    label = None
    if schema.label:
        if fields[0] not in (b"0", b"1"):
            return "label is not 0 or 1", schema.label
        label = int(fields.pop(0))
    num_dense = len(schema.dense)
    integers = fields[:num_dense]
    tokens = fields[num_dense:]
    for name in other_fields(schema.dense, integers, rb"-?[0-9]{1,18}"):
        return "not an integer", name
    for name in other_fields(schema.sparse, tokens, rb"[0-9a-fA-F]{8}"):
        return "not 8 hexadecimal digits", name
    missing = sum((not field) << bit for bit, field in enumerate(fields))
    return (
        label,
        [int(field or b"0") for field in integers],
        [int(field or b"0", 16) for field in tokens],
        missing,
    )


def other_fields(names: tuple[str, ...], fields: list[bytes], pattern: bytes) -> list[str]:
    """Return the names of the fields that have a value which does not match the pattern."""
    pairs = zip(names, fields, strict=True)
    return [name for name, field in pairs if field and not re.fullmatch(pattern, field)]


def rows_of(raw: RawBlock) -> list[Row]:
    labels = (
        raw.labels[raw.schema.label].astype(int).tolist() if raw.schema.label else [None] * raw.rows
    )
    return list(
        zip(
            labels,
            raw.numbers.tolist(),
            raw.categories.tolist(),
            raw.missing.tolist(),
            strict=True,
        )
    )


def check(schema: Schema, text: bytes) -> None:
    rows, faults = reference(schema, text)
    raw, found = parse(schema, text)
    assert rows_of(raw) == rows
    assert [(fault.byte, fault.kind, fault.column) for fault in found.first] == faults[
        : Faults.keep
    ]
    assert found.counts == Counter(kind for _, kind, _ in faults)
    assert found.total == len(faults)


def valid_row(schema: Schema, rng: random.Random, missing: float = 0.2) -> bytes:
    fields = [rng.choice([b"0", b"1"])] if schema.label else []
    for _ in schema.dense:
        value = rng.choice(
            [
                0,
                1,
                rng.randrange(100),
                -rng.randrange(4),
                rng.randrange(10**6),
                10**18 - 1,
                1 - 10**18,
            ]
        )
        fields.append(b"" if rng.random() < missing else str(value).encode())
    for _ in schema.sparse:
        fields.append(
            b""
            if rng.random() < missing
            else (rng.choice([b"%08x", b"%08X"]) % rng.getrandbits(32))
        )
    return b"\t".join(fields)


PIECES = [bytes([byte]) for byte in b"\t\n\r\0-+ 019afgAFGxX.,/:@`\x80\xff\xb0"]
PIECES += [
    b"\r\n",
    b"\t\t",
    b"\n\n",
    b"\xc3\xa4",
    b"9" * 17,
    b"9" * 19,
    b"0" * 30,
    b"abcdef0",
    b"abcdef012",
    b"1" * 4090,
]
KINDS = st.sampled_from(["insert", "delete", "replace", "cut"])


@settings(max_examples=800, deadline=None)
@given(
    schema=st.sampled_from(SCHEMAS),
    seed=st.integers(0, 1 << 30),
    num_rows=st.integers(0, 5),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    last_ending=st.booleans(),
    changes=st.lists(
        st.tuples(KINDS, st.integers(0, 1 << 20), st.sampled_from(PIECES)),
        max_size=6,
    ),
)
def test_mutated_rows(
    *,
    schema: Schema,
    seed: int,
    num_rows: int,
    ending: bytes,
    last_ending: bool,
    changes: list[tuple[str, int, bytes]],
) -> None:
    rng = random.Random(seed)
    text = ending.join(valid_row(schema, rng) for _ in range(num_rows)) + (
        ending if last_ending and num_rows else b""
    )
    for kind, where, piece in changes:
        at = where % (len(text) + 1)
        if kind == "cut" and where % 5 == 0:
            text = text[:at]
        else:
            text = (
                text[:at] + (b"" if kind == "delete" else piece) + text[at + (kind != "insert") :]
            )
    check(schema, text)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(SCHEMAS),
    st.binary(max_size=300) | st.text("01-\t\n\rafF", max_size=60).map(str.encode),
)
def test_any_bytes(schema: Schema, text: bytes) -> None:
    check(schema, text)


def test_every_byte_is_checked_in_tokens_labels_and_integers() -> None:
    schema = Schema(
        tokens="hexadecimal",
        label=None,
        dense=(),
        sparse=("s",),
    )
    for place in range(8):
        check(
            schema,
            b"".join(
                b"12cdEF9a"[:place] + bytes([b]) + b"12cdEF9a"[place + 1 :] + b"\n"
                for b in range(256)
            ),
        )
    schema = Schema(
        tokens="hexadecimal",
        label="y",
        dense=("d",),
        sparse=(),
    )
    check(schema, b"".join(bytes([b]) + b"\t5\n" for b in range(256)))
    check(schema, b"".join(b"1\t" + bytes([b]) + b"\n" for b in range(256)))
    check(schema, b"".join(b"1\t3" + bytes([b]) + b"4\n" for b in range(256)))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_empty_rows_fit_capacity(schema: Schema) -> None:
    line = (b"1" if schema.label else b"") + b"\t" * (len(schema.columns) - 1)
    if len(schema.columns) == 1:
        line = b"1" if schema.dense else b"00000000"
    for text in (
        b"\n".join([line] * 50),
        b"\n".join([line] * 50) + b"\n",
        b"\n".join([line] * 50) + b"\n\n",
    ):
        check(schema, text)


def test_parse_stops_at_length_appends_rows_and_has_positions() -> None:
    rng = random.Random(3)
    rows = [valid_row(SCHEMA, rng) + b"\n" for _ in range(20)]
    text = b"".join(rows)
    # in the middle of the second row, as of a truncated log
    for cut in range(len(rows[0]) + 1, len(rows[0]) + len(rows[1])):
        parser = TextParser(SCHEMA, max_rows_in(SCHEMA, cut))
        faults = parser.parse(padded(text), cut)
        expected, expected_faults = reference(SCHEMA, text[:cut])
        assert rows_of(parser.block()) == expected
        assert [(fault.byte, fault.kind) for fault in faults.first] == [
            f[:2] for f in expected_faults
        ]
    parser = TextParser(
        Schema(
            tokens="hexadecimal",
            label="y",
            dense=("d",),
            sparse=(),
        ),
        10,
    )
    parser.parse(padded(b"1\t5\n"), 4, path="p", first_byte=0)
    faults = parser.parse(padded(b"0\t6\n1\tx\n"), 8, path="p", first_byte=1000)
    assert rows_of(parser.block()) == [(1, [5], [], 0), (0, [6], [], 0)]
    assert parser.block().files == (("p", 0, 2),)
    parser.drop_after(1)
    parser.parse(padded(b"7\n"), 2, path="q", labelled=False)
    assert parser.block().numbers.tolist() == [[5], [7]]
    assert parser.block().files == (("p", 0, 1), ("q", 1, 2))
    assert str(faults.first[0]) == "p at byte 1004: not an integer in column d"


GOOD = b"1" + b"\t3" * 13 + b"\tdeadbeef" * 26
INTEGERS = (b"1" * 19, b" 3", b"3 ", b"3\0", *b"x 3.0 +3 - --3 3- NaN 0x3 \xd9\xa3".split())
TOKENS = (
    b"dead eef",
    b"deadbee\0",
    *b"deadbee deadbeef0 deadbeeg -eadbeef 0xadbeef \xffeadbee".split(),
)
BAD_LINES = {
    "too few columns": [
        GOOD.rsplit(b"\t", 1)[0],
        b"a header line",
        b"1",
        b"\t" * 38,
        GOOD.replace(b"\t", b","),
    ],
    "too many columns": [GOOD + b"\t", GOOD + b"\tdeadbeef", b"\t" * 40, GOOD + GOOD],
    "label is not 0 or 1": [
        *(start + GOOD[1:] for start in (b"2", b"", b"-1", b" 1", b"\xef\xbb\xbf1")),
        "\t".join(SCHEMA.columns).encode(),
    ],
    "not an integer": [GOOD.replace(b"\t3", b"\t" + value, 1) for value in INTEGERS],
    "not 8 hexadecimal digits": [
        *(GOOD.replace(b"deadbeef", value, 1) for value in TOKENS),
        *(GOOD[:-1], GOOD + b" ", GOOD + b"\r\r"),
    ],
    "empty line": [b""],
    "line too long": [b"x" * 4097, b"\t" * 4097, GOOD + b"0" * 4096, b"1" * 100_000],
}


@pytest.mark.parametrize(
    ("kind", "line"),
    [(kind, line) for kind, lines in BAD_LINES.items() for line in lines],
)
@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_bad_lines(kind: str, line: bytes, ending: bytes) -> None:
    text = GOOD + ending + line + ending + GOOD + ending
    raw, faults = parse(SCHEMA, text, path="log")
    assert (raw.rows, faults.counts) == (2, {kind: 1})
    (fault,) = faults.first
    assert (fault.path, fault.byte, fault.kind) == ("log", len(GOOD + ending), kind)
    assert kind in faults.describe()
    check(SCHEMA, text)


def test_only_first_faults_have_details() -> None:
    raw, faults = parse(SCHEMA, b"x\n" * 25)
    assert (raw.rows, faults.total) == (0, 25)
    assert [fault.byte for fault in faults.first] == list(range(0, 20, 2))
    faults.add(faults)
    assert (faults.total, len(faults.first)) == (50, 10)
    assert "50 x too few columns" in faults.describe()
    assert Faults().describe() == "no invalid rows"
