"""Many rows of all functions of formulas: one result everywhere, to the last bit."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from builders.encoded import check_same, encoded_by
from builders.logs import learn, open_index

import rayrec
from rayrec.data.encoding.fitting import fit
from rayrec.data.engine import ThreadEngine
from rayrec.data.log_source import LogSource
from rayrec.data.logs.reading import read_raw
from rayrec.data.materialized.formats import named_columns
from rayrec.data.raw_block import RawBlock
from rayrec.formula.types import FUNCTIONS
from rayrec.inference.export.plain_encoder import Encoder
from rayrec.inference.export.side_tables import write_tables
from rayrec.schema import Schema, load_schema
from rayrec.serve.requests import RequestBody, open_body
from rayrec.serve.row_readers import make_reader

pytestmark = [pytest.mark.extended, pytest.mark.exhaustive, pytest.mark.timeout(1800)]

NUM_ROWS = 100_000
NUM_ALONE = 2_000
"""Rows that are also read alone, as requests of one row."""
CHUNK_ROWS = 20_000
SCHEMA = """
label: click
timestamp: time
delimiter: ","
nan: missing
dense: [price, age]
sparse: [user, item, history]
lists: [history]
vectors: [{name: point, length: 2}]
tables:
  items: {path: ITEMS, key: item}
  costs: {path: COSTS, key: item, time: since}
features:
- {name: amount, from: "number(text)"}
- {name: bucket, from: "bucketize(price, [-1, 0, 0.5, 100])"}
- {name: level, from: "quantile(price, 20)"}
- {name: score, from: "zscore(age) * 2 - price / age"}
- {name: both, from: "cross(level, quantile(score, 7))"}
- {name: logged, from: "log(lookup(costs, item, cost)) + clip(price, -5, 10)"}
- {name: hashed, from: "hash(lower(text), 1000)"}
- {name: crossed, from: "cross(user, lookup(items, item, kind), 5000)"}
- {name: last_two, from: "last(concat(history, lookup(items, item, similar)), 2)"}
- {name: parts, from: "split(text, ',')"}
- {name: words, from: "tokens(text)"}
- {name: grams, from: "ngrams(text, 3)"}
- {name: hour_there, from: "hour(time, 'America/New_York')"}
- {name: hour_here, from: "hour(seen)"}
- {name: day, from: "weekday(time, 'Europe/Berlin')"}
- {name: days, from: "age(time, seen) / 86400"}
- {name: size, from: "len(history)"}
- {name: same, from: "overlap(history, lookup(items, item, similar))"}
- {name: again, from: "count_in(history, item)"}
- {name: first, from: "coalesce(lookup(items, item, kind), user, 'none')"}
- {name: old, from: "when(age > 30, 'old', level)"}
- {name: chosen, from: "when(user in ['1', '2'], price, age)"}
- {name: mean, from: "aggregate(point, 'mean')"}
- {name: match, from: "dot(history, weights)"}
"""
TEXTS = [
    *("", "a", "A,b,,c", "12.5", " -3e2\t", "nan", "007", "Straße, İstanbul"),
    *("東京、タワー", "x—y", "e\u0301🙂", "true", "1e999", "a,a", "0", "-0.0", "ß1 ½²"),
]
CHANGES = [1711846800, 1729990800, 1730613600, 1710054000]
"""Seconds from 1970 to hours in which Berlin and New York change their clocks."""


def schema_of(folder: Path) -> Schema:
    text = SCHEMA.replace("ITEMS", str(folder / "items.csv"))
    return load_schema(text.replace("COSTS", str(folder / "costs.csv")), "schema.yaml")


def write_tables_of_log(folder: Path) -> None:
    rng = np.random.default_rng(1)
    similar = ["", "1|2", "3", "40|41|42", "7|7"]
    kinds = [f"k{n % 9}" if n % 7 else "" for n in range(400)]
    items = [f"{n},{kind},{similar[n % 5]}\n" for n, kind in enumerate(kinds)]
    (folder / "items.csv").write_text("item,kind,similar\n" + "".join(items))
    costs = [
        f"{n},{rng.choice(['', '1.5', '20', '-3e-3'])},{2023 + k}-0{1 + k}-01\n"
        for n in range(450)
        for k in range(3)
    ]
    (folder / "costs.csv").write_text("item,cost,since\n" + "".join(costs))


def lists(rng: np.random.Generator, values: list[str], most: int) -> pa.Array:
    """Return lists of at most so many values."""
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, most + 1, NUM_ROWS))])
    items = pa.array(values).take(pa.array(rng.integers(0, len(values), offsets[-1])))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items)


def numbers(rng: np.random.Generator) -> np.ndarray:
    """Return numbers with ties, extremes and NaN."""
    values = rng.lognormal(0, 2, NUM_ROWS) - 1
    values = np.where(rng.random(NUM_ROWS) < 0.3, np.round(values), values)
    values = np.where(rng.random(NUM_ROWS) < 0.02, rng.choice([0.0, -0.0, 1e17, -1e-300]), values)
    return np.where(rng.random(NUM_ROWS) < 0.05, np.nan, values)


def log_rows() -> pa.Table:
    rng = np.random.default_rng(0)
    seconds = np.where(
        rng.random(NUM_ROWS) < 0.5,
        rng.choice(CHANGES, NUM_ROWS) + rng.integers(-9000, 9000, NUM_ROWS),
        rng.integers(1_600_000_000, 1_800_000_000, NUM_ROWS),
    )
    seen = pa.array(seconds - rng.integers(0, 10**8, NUM_ROWS), mask=rng.random(NUM_ROWS) < 0.1)
    point = pa.FixedSizeListArray.from_arrays(
        pa.array(rng.normal(size=2 * NUM_ROWS)), 2, mask=pa.array(rng.random(NUM_ROWS) < 0.1)
    )
    return pa.table(
        {
            "click": rng.integers(0, 2, NUM_ROWS),
            "time": seconds,
            "seen": seen,
            "price": numbers(rng),
            "age": numbers(rng),
            "user": rng.integers(0, 50, NUM_ROWS),
            "item": rng.integers(0, 500, NUM_ROWS),
            "text": pa.array(TEXTS).take(pa.array(rng.integers(0, len(TEXTS), NUM_ROWS))),
            "history": lists(rng, [*map(str, range(60)), "7:0.5", "9:-2"], 4),
            "weights": lists(rng, ["1:0.5", "2:3", "7", "9:1e-3", "7:2"], 3),
            "point": point.cast(pa.list_(pa.float64())),
        }
    )


def as_text(table: pa.Table) -> pa.Table:
    """Return the table with its lists as text."""
    for name in ("history", "weights", "point"):
        lists_of_text = pc.cast(table.column(name), pa.list_(pa.string()))
        text = pc.fill_null(pc.binary_join(lists_of_text, "|"), "")
        table = table.set_column(table.column_names.index(name), name, text)
    return table


def chunks(table: pa.Table) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, NUM_ROWS, CHUNK_ROWS):
        rows = table.slice(start, CHUNK_ROWS).to_pylist()
        yield [{name: without_nan(value) for name, value in row.items()} for row in rows]


def without_nan(value: Any) -> Any:
    """Return a value, None for NaN, which JSON does not have."""
    return None if isinstance(value, float) and math.isnan(value) else value


def read(path: Path, schema: Schema, folder: Path) -> RawBlock:
    index = open_index(path, schema, segment_bytes=8 << 20, cache=folder / "cache")
    assert index.rows == NUM_ROWS
    return read_raw(index.segments, schema)


def request_of(rows: list[dict[str, Any]], schema: Schema) -> RequestBody:
    scored = schema.unlabelled().columns
    body = {"rows": [{name: row[name] for name in scored} for row in rows]}
    return open_body(json.dumps(body).encode(), "json", schema=schema, max_rows=len(rows))


def test_formulas_have_one_result_everywhere(tmp_path: Path) -> None:
    operators = {"add", "subtract", "multiply", "divide"}
    assert not [name for name in {*FUNCTIONS} - operators if f"{name}(" not in SCHEMA]
    write_tables_of_log(tmp_path)
    table = log_rows()
    pa_csv.write_csv(as_text(table), tmp_path / "log.csv")
    pq.write_table(table, tmp_path / "log.parquet")
    schema = LogSource.at(str(tmp_path / "log.csv")).schema(schema_of(tmp_path))
    index = open_index(
        tmp_path / "log.csv", schema, segment_bytes=8 << 20, cache=tmp_path / "cache"
    )
    schema = fit(schema, index, (0, NUM_ROWS), ThreadEngine(2))
    preprocessor = learn(index, schema)
    whole = read(tmp_path / "log.csv", schema, tmp_path)
    expected = preprocessor.encode(whole)
    in_parquet = read(tmp_path / "log.parquet", schema, tmp_path)
    check_same(preprocessor.encode(in_parquet), expected, "Parquet")

    transformed = rayrec.transform(preprocessor, table)
    columns = named_columns(expected, preprocessor.inputs)
    for name in (*preprocessor.inputs.dense, *preprocessor.inputs.sparse):
        assert transformed.column(name).equals(columns.column(name)), name

    preprocessor.save(str(tmp_path / "preprocessor"))
    write_tables(str(tmp_path / "preprocessor"), schema)
    encoder = Encoder(str(tmp_path / "preprocessor"))
    reader = make_reader(schema)
    for number, rows in enumerate(chunks(table)):
        start = number * CHUNK_ROWS
        expected = preprocessor.encode(whole.cut(start, start + CHUNK_ROWS))
        served, _ = reader.read([request_of(rows, schema)])
        check_same(preprocessor.encode(served), expected, f"requests, chunk {number}")
        check_same(encoded_by(encoder, rows), expected, f"encode.py, chunk {number}")
        # One row at a time
        for row in range(NUM_ALONE * CHUNK_ROWS // NUM_ROWS):
            alone, _ = reader.read([request_of([rows[row]], schema)])
            expected_row = preprocessor.encode(whole.cut(start + row, start + row + 1))
            check_same(preprocessor.encode(alone), expected_row, f"row {start + row}")
