"""Columns of Parquet files that kernels decode, compared with what Arrow reads."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.config import InputError
from rayrec.data.logs.parquet import read_rows
from rayrec.schema import Schema

ROWS = 5_000
SCHEMA = Schema(
    label="clicked",
    dense=("price", "ratio", "count", "age"),
    sparse=("user", "city", "page", "tags"),
    lists=("tags",),
    tokens="any",
)
TEXTS = ("user", "city", "page")


def columns_of(rows: int, missing: float) -> pa.Table:
    draw = np.random.default_rng(rows)

    def column(values: Any, kind: pa.DataType) -> pa.Array:
        return pa.array(values, kind, mask=draw.random(rows) < missing)

    cities = np.array(["Genève", "", "Oslo", "a\0b", "北京"], object)
    repeated = np.repeat(np.arange(rows // 100 + 1), 100)[:rows]
    return pa.table(
        {
            "clicked": column(draw.integers(0, 2, rows), pa.int64()),
            "price": column(draw.integers(0, 900, rows) / 8, pa.float64()),
            "ratio": column(draw.integers(0, 9, rows) / 4, pa.float32()),
            "count": column(draw.integers(-9, 9, rows), pa.int32()),
            "age": column(repeated, pa.int64()),
            "user": column([f"user-{n}" for n in draw.integers(0, 700, rows)], pa.string()),
            "city": column(cities[draw.integers(0, 5, rows)], pa.large_string()),
            "page": column([b"\xff%d" % n for n in repeated], pa.binary()),
            "tags": column([["x", "y"]] * rows, pa.list_(pa.string())),
        }
    )


def read(path: Path, rows: int = ROWS) -> pa.Table:
    table, _ = read_rows(str(path), 0, rows, SCHEMA, dictionaries=True)
    return table


def assert_as_arrow(read: pa.Table, table: pa.Table) -> None:
    """Compare values, nulls and, of numbers, types."""
    read.validate(full=True)
    assert len(read) == len(table)
    for name in table.column_names:
        column = read.column(name)
        wanted = table.column(name)
        if name in TEXTS:
            chunks = [chunk.cast(pa.large_binary()) for chunk in column.chunks]
            column = pa.chunked_array(chunks, pa.large_binary())
            wanted = wanted.cast(pa.large_binary())
        assert column.combine_chunks().equals(wanted.combine_chunks()), name


def is_decoded(table: pa.Table) -> list[str]:
    """Return the columns of text that kernels, not Arrow, have read as dictionaries."""
    kind = pa.dictionary(pa.int32(), pa.large_binary())
    return [name for name in TEXTS if table.column(name).type == kind]


@pytest.mark.parametrize("missing", [0.0, 0.1, 0.999, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "lz4"},
        {"compression": "none", "data_page_size": 400, "row_group_size": 1_300},
        {"compression": "lz4", "data_page_size": 100, "data_page_version": "2.0"},
        {"data_page_version": "2.0", "write_page_index": True, "write_page_checksum": True},
    ],
)
def test_kernels_and_arrow_read_equal_values(
    tmp_path: Path, options: dict[str, Any], missing: float
) -> None:
    table = columns_of(ROWS, missing)
    pq.write_table(table, tmp_path / "log.parquet", **options)
    found = read(tmp_path / "log.parquet")
    assert_as_arrow(found, table)
    assert is_decoded(found) == [*TEXTS]


def test_required_columns_have_no_levels(tmp_path: Path) -> None:
    table = columns_of(ROWS, 0.0)
    table = table.cast(pa.schema(field.with_nullable(False) for field in table.schema))
    for version in ("1.0", "2.0"):
        pq.write_table(table, tmp_path / "log.parquet", data_page_version=version)
        found = read(tmp_path / "log.parquet")
        assert_as_arrow(found, table)
        assert is_decoded(found) == [*TEXTS]


@pytest.mark.parametrize(
    "options",
    [
        {"use_dictionary": False},
        {"compression": "zstd"},
        {"compression": "gzip", "data_page_version": "2.0"},
        {"dictionary_pagesize_limit": 100, "data_page_size": 100},
    ],
)
def test_other_pages_are_left_to_arrow(tmp_path: Path, options: dict[str, Any]) -> None:
    table = columns_of(ROWS, 0.1)
    pq.write_table(table, tmp_path / "log.parquet", **options)
    found = read(tmp_path / "log.parquet")
    assert_as_arrow(found, table)
    assert "user" not in is_decoded(found)


def test_text_of_categoricals_is_decoded(tmp_path: Path) -> None:
    table = columns_of(ROWS, 0.1)
    city = table.column_names.index("city")
    coded = table.set_column(city, "city", table.column("city").dictionary_encode())
    pq.write_table(coded, tmp_path / "log.parquet")
    found = read(tmp_path / "log.parquet")
    assert_as_arrow(found, table)
    assert is_decoded(found) == [*TEXTS]


def test_file_without_rows_has_columns(tmp_path: Path) -> None:
    table = columns_of(0, 0.0)
    pq.write_table(table, tmp_path / "log.parquet")
    assert_as_arrow(read(tmp_path / "log.parquet", 0), table)


def test_damaged_pages_end_in_one_line(tmp_path: Path) -> None:
    """Damage that no checksum of the format shows may also be read as other values."""
    table = columns_of(400, 0.1)
    pq.write_table(table, tmp_path / "log.parquet", data_page_size=200)
    content = (tmp_path / "log.parquet").read_bytes()
    draw = random.Random(0)
    outcomes = set()
    for turn in range(300):
        changed = bytearray(content)
        for _ in range(1 + turn % 3):
            changed[draw.randrange(4, len(content) // 2)] = draw.randrange(256)
        path = tmp_path / f"{turn}.parquet"
        path.write_bytes(changed)
        message = ""
        try:
            read(path, 400).validate(full=True)
        except InputError as error:
            message = str(error)
        assert "\n" not in message
        outcomes.add(bool(message))
        path.unlink()
    assert outcomes == {False, True}
