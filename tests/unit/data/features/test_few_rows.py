"""Formulas of a few rows, which definitions compute, against those of a whole table."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.same import assert_same

from rayrec.data.features.lookups import with_contents
from rayrec.data.logs.table_parser import derived_columns, parse_table
from rayrec.schema import Feature, NamedTable, Schema

TEXTS = [
    "a",
    "",
    None,
    "True",
    "FALSE",
    "5",
    "5.0",
    " x ",
    "Straße, b",
    "東京、x",
    "a:1",
    "-0",
    "b",
]
TIMES = [
    *("2026-01-31", "2026-01-31T10:00", "2026-01-31 10:00:01.5", "2026-01-31T10:00:00.123456Z"),
    *("2026-01-31T10:00:00+02:00", "0001-01-01", "2026-02-30", "2026-01-31T24:00", "true", "x"),
    *("0", "-5", "1760000000", "1760000000123", "1760000000123457", "99999999999999999999", "1.5"),
    *(" 7", "", None, "31.01.2026 10:00", "2026-01-31T10:00:00-0330", "0000-01-01", "nan"),
    *("2161-12-31T23:59:59.999999", "2026-01-31T10:00:60", "2026-01-31T10:00:00+99:00"),
]
FORMULAS = {
    "words": "tokens(lower(c))",
    "crossed": "cross(c, device, 97)",
    "hour": "hour(t, 'Europe/Berlin')",
    "since": "age(t, u)",
    "scaled": "log(x) / y",
    "amount": "number(c)",
    "seen": "count_in(l, c)",
    "recent": "last(l, 2)",
}
LOOKUPS = {
    "price": "number(lookup(items, device, price))",
    "name": "lower(lookup(items, device, name))",
    "tags": "concat(lookup(items, device, tags), l)",
    "known": "len(lookup(items, device, tags))",
    "newest": "lookup(prices, c, price) + 1",
    "plain_name": "lookup(items, device, name)",
    "named": "cross(lookup(items, device, name), c, 97)",
    "either": "coalesce(lookup(items, device, name), lookup(items, device, size))",
    "size": "when(lookup(items, device, size) == lookup(items, device, name), device, 'none')",
    "size_number": "number(plain_name) + lookup(items, device, size)",
    "similar": "last(lookup(items, device, similar), 2)",
    "sizes": "count_in(lookup(items, device, sizes), lookup(items, device, size))",
}


def schema_of(formulas: dict[str, str], folder: Path | None = None) -> Schema:
    tables = (
        ()
        if folder is None
        else (
            NamedTable(name="items", path=str(folder / "items.parquet"), key="item"),
            NamedTable(
                name="prices",
                path=str(folder / "prices.parquet"),
                key="item",
                time="since",
            ),
        )
    )
    schema = Schema(
        features=tuple(Feature(name=name, formula=text) for name, text in formulas.items()),
        tables=tables,
        timestamp="at" if tables else None,
    )
    return with_contents(schema) if tables else schema


def table_of(rows: int = 200, **columns: pa.Array) -> pa.Table:
    """Return a log with random values in the columns that are not given."""
    random = np.random.default_rng(0)

    def drawn(values: list[Any], kind: pa.DataType) -> pa.Array:
        return pa.array(values, kind).take(pa.array(random.integers(0, len(values), rows)))

    drawn_columns = {
        "label": pa.array([1] * rows),
        "x": drawn([0.0, -0.0, 1.5, None, 1e300, float("nan")], pa.float64()),
        "y": drawn([0.0, 2.0, None], pa.float64()),
        "c": drawn(TEXTS, pa.large_string()),
        "device": drawn([7, None, -1], pa.int64()),
        "t": drawn(["2026-07-31T10:00"], pa.large_string()),
        "u": drawn(["1760000000", None], pa.large_string()),
        "l": drawn([["a", None, "True"], [], None, ["", "5"]], pa.large_list(pa.large_string())),
        "at": drawn([0, 10**15, 2 * 10**15], pa.timestamp("us")),
    }
    return pa.table({**drawn_columns, **columns})


def check_rows(table: pa.Table, schema: Schema) -> None:
    """Check that each row alone has the values, bit for bit, and the faults of the table."""
    _, faults = parse_table(table, schema)
    expected = derived_columns(table, schema).select([*schema.derived])
    counts: Counter[str] = Counter()
    for number in range(len(table)):
        row = table.slice(number, 1)
        counts.update(parse_table(row, schema)[1].counts)
        computed = derived_columns(row, schema).select([*schema.derived])
        assert computed.schema == expected.schema
        # The text of numbers, since 0.0 equals -0.0
        assert repr(computed.to_pylist()) == repr(expected.slice(number, 1).to_pylist())
    assert counts == faults.counts


def test_row_alone_has_values_of_table() -> None:
    check_rows(table_of(), schema_of(FORMULAS))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.large_binary()])
def test_single_time_matches_table(kind: pa.DataType) -> None:
    times = pa.array(TIMES, pa.string()).cast(kind)
    check_rows(table_of(len(TIMES), t=times), schema_of({"since": "age(t, u)", "hour": "hour(t)"}))


def test_infinite_number_alone_is_fault() -> None:
    table = table_of(9, x=pa.array(3 * [1.0, float("inf"), None]))
    check_rows(table, schema_of({"scaled": "log(x)"}))
    raw, faults = parse_table(table.slice(1, 1), schema_of({"scaled": "log(x)"}))
    assert (raw.rows, faults.total) == (0, 1)


def test_invalid_utf8_alone_is_fault() -> None:
    table = table_of(9, c=pa.array(3 * [b"a", b"\xff", None], pa.large_binary()))
    check_rows(table, schema_of({"words": "tokens(c)"}))


def test_markers_and_integers_of_row_alone() -> None:
    schema = schema_of({"crossed": "cross(c, device)"}).replace(missing=("a", "7"))
    check_rows(table_of(), schema)


def test_lookups_of_row_alone(tmp_path: Path) -> None:
    items = {
        "item": ["7", "-1", "8"],
        "price": ["1.5", None, "2"],
        "name": ["Chair", "3", "True"],
        "tags": pa.array([["x", None, "y"], None, []], pa.list_(pa.string())),
        "size": pa.array([3, 4, None], pa.int16()),
        "similar": ["1|2|a", "3", ""],
        "sizes": pa.array([[3, 4, 3], None, [5]], pa.list_(pa.int32())),
    }
    pq.write_table(pa.table(items), tmp_path / "items.parquet")
    prices = {
        "item": ["a", "a", "5"],
        "price": [1.0, 2.0, float("nan")],
        "since": pa.array([0, 10**15, 0], pa.timestamp("us")),
    }
    pq.write_table(pa.table(prices), tmp_path / "prices.parquet")
    schema = schema_of(LOOKUPS, tmp_path).replace(list_delimiter="|")
    check_rows(table_of(), schema)
    newest = derived_columns(table_of(), schema).column("newest")
    assert {1.0 + 1, 2.0 + 1, None} == {*newest.to_pylist()}


def test_part_of_text_column_is_lowered() -> None:
    texts = pa.array([f"City {number}" for number in range(3000)])
    table = table_of(len(texts), c=texts).slice(1000, 500)
    lowered = derived_columns(table, schema_of({"lowered": "lower(c)"})).column("lowered")
    lowered.validate(full=True)
    assert_same(lowered.to_pylist(), [f"city {number}" for number in range(1000, 1500)])
