"""Warnings of columns whose values only grow or never return: in counted rows and in the data
report.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.logs import counts_of
from builders.runs import QUIET

import rayrec
from rayrec.data.encoding.counts import Counts, find_trends
from rayrec.data.encoding.growth import RowOrder, find_trend
from rayrec.data.encoding.presets import RAYREC
from rayrec.data.logs.table_parser import parse_table
from rayrec.schema import Schema

SCHEMA = Schema(
    label="click",
    dense=("time", "price"),
    sparse=("row", "day", "user"),
    tokens="any",
)
ROWS = 4000


def table(**changes: Any) -> pa.Table:
    """Return rows in time order, with numbers of rows and days as categories."""
    rng = np.random.default_rng(0)
    columns = {
        "click": rng.integers(0, 2, ROWS),
        "time": 1.7e9 + np.sort(rng.uniform(0, 30 * 86400, ROWS)),
        "price": np.exp(rng.normal(size=ROWS)),
        "row": np.arange(ROWS),
        "day": [f"2024-01-{1 + row * 30 // ROWS:02d}" for row in range(ROWS)],
        "user": rng.integers(0, 300, ROWS),
    }
    return pa.table({**columns, **changes})


def counted(rows: pa.Table) -> Counts:
    raw, faults = parse_table(rows, SCHEMA)
    assert not faults.total
    return counts_of(raw, SCHEMA, RAYREC)


def test_growing_columns_are_named() -> None:
    time, row, day = find_trends(counted(table()), SCHEMA)
    assert time.startswith("column time only grows from row to row")
    assert "declare a time as `timestamp`" in time
    assert row.startswith("the categories of column row come one after another and never return")
    assert row.replace("column row", "column day") == day


def test_shuffled_columns_grow_not() -> None:
    order = np.random.default_rng(1).permutation(ROWS)
    (row,) = find_trends(counted(table().take(order)), SCHEMA)
    assert row.startswith("the categories of column row")  # One row each, in any order


def test_rows_in_several_tasks_have_one_trend() -> None:
    raw, _ = parse_table(table(time=-table()["time"].to_numpy()), SCHEMA)
    job = RAYREC.counting(SCHEMA)
    total = job.empty()
    for start in range(ROWS - 400, -1, -400):
        part = job.empty()
        part.add_rows(raw.cut(start, start + 400), 0)
        total.add(part.to_table(), first_row=start)
    assert total.row_orders[0].trend == "falls"
    assert total.row_orders[1].trend is None
    assert len(total.row_orders[0].spans) <= 64


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param(np.arange(100.0), "grows", id="numbers of rows"),
        pytest.param(np.arange(100.0)[::-1], "falls", id="falling"),
        pytest.param(
            np.arange(1000.0) + np.random.default_rng(0).uniform(-5, 5, 1000),
            "grows",
            id="almost in order",
        ),
        pytest.param(np.repeat([1.0, 2.0, 3.0, 4.0], 50), "grows", id="days"),
        pytest.param(np.append(np.zeros(99), 1.0), None, id="late flag"),
        pytest.param(np.zeros(100), None, id="constant"),
        pytest.param(np.sin(np.arange(100.0)), None, id="up and down"),
        pytest.param(np.arange(7.0), None, id="few rows"),
        pytest.param(np.zeros(0), None, id="no rows"),
    ],
)
def test_trend_of_values(values: np.ndarray, expected: str | None) -> None:
    order = RowOrder()
    order.add(values, 0)
    assert order.trend == expected


def test_limits_without_values_have_no_trend() -> None:
    assert find_trend([]) is None


def test_report_warns_of_growing_columns(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "log.parquet")
    report = rayrec.validate(str(tmp_path / "log.parquet"), schema=SCHEMA, console=QUIET)
    assert report.content["dense"]["time"]["trend"] == "grows"
    assert "trend" not in report.content["dense"]["price"]
    warned = [text for text in report.warnings if "leave" in text]
    assert [text.partition(":")[0].split()[1] for text in warned] == ["time", "row", "day"]


def test_trend_of_report_ignores_division_into_files(tmp_path: Path) -> None:
    rows = table()
    (tmp_path / "log").mkdir()
    for number, start in enumerate((0, 1500)):
        pq.write_table(
            rows.slice(start, 1500 if number == 0 else None),
            tmp_path / "log" / f"part-{number}.parquet",
        )
    report = rayrec.validate(str(tmp_path / "log"), schema=SCHEMA, console=QUIET)
    assert report.content["slices_by"] == "file"
    assert {name: column.get("trend") for name, column in report.content["dense"].items()} == {
        "time": "grows",
        "price": None,
    }


def test_report_warns_of_times_after_counted_rows(tmp_path: Path) -> None:
    rows = table()
    shuffled = rows.take(np.random.default_rng(1).permutation(ROWS))
    pq.write_table(shuffled, tmp_path / "old.parquet")
    later = shuffled.set_column(1, "time", pa.array(shuffled["time"].to_numpy() + 29 * 86400))
    pq.write_table(later, tmp_path / "new.parquet")
    rayrec.vocabulary(
        str(tmp_path / "old.parquet"),
        out=str(tmp_path / "made"),
        schema=SCHEMA,
        console=QUIET,
    )
    report = rayrec.validate(
        str(tmp_path / "new.parquet"),
        schema=SCHEMA,
        preprocessor=str(tmp_path / "made"),
        console=QUIET,
    )
    assert report.content["dense"]["time"]["clipped_rate"] == pytest.approx(29 / 30, abs=0.01)
    assert report.content["dense"]["price"]["clipped_rate"] == 0
    assert any(text.startswith("column time: 96") for text in report.warnings)
