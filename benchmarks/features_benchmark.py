"""Benchmark of declared features: rows/s with 20 formulas, rows/s with lookups among a million
keys, and latency over HTTP. The peers' logs have the same columns, computed before.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rows import emit, in_turn, interleaved, median_of, part, timed
from serve_benchmark import hosted, measure, percentiles_ms
from subprocesses import child, run_task

from rayrec.checkpoint import step_folder
from rayrec.data.encoding.fitting import fit_to_table
from rayrec.data.features.lookups import with_contents
from rayrec.data.formats.registry import find_format
from rayrec.data.logs.table_parser import derived_columns, parse_table
from rayrec.native import keep_freed_memory
from rayrec.schema import Feature, NamedTable, Schema

BLOCK_ROWS = 8192
"""Rows of a table, as training reads them from Parquet."""
FILES = 8
KEYS = 1_000_000
"""Rows of the side table."""
FORMULAS = {
    "log_price": "log(clip(price, 0, 1000))",
    "margin": "(price - cost) / price",
    "price_level": "bucketize(price, [1, 2, 5, 10, 20, 50])",
    "price_bin": "quantile(price, 20)",
    "cost_scaled": "zscore(log(cost))",
    "hour": "hour(time, 'Europe/Berlin')",
    "weekday": "weekday(time, 'Europe/Berlin')",
    "since": "age(time, opened)",
    "place": "cross(city, device)",
    "user_device": "cross(user, device, 100000)",
    "user_row": "hash(user, 50000)",
    "discount_or_0": "coalesce(discount, 0)",
    "kind": "when(price > 20, device, 'cheap')",
    "amount_number": "number(amount)",
    "city_lower": "lower(city)",
    "seen": "count_in(history, item)",
    "num_seen": "len(history)",
    "recent": "last(history, 3)",
    "common": "overlap(history, basket)",
    "words": "tokens(title)",
}
"""20 formulas by the names of their columns, with most of the functions."""
LOOKUPS = {
    "item_price": "number(lookup(items, item, price))",
    "item_category": "lookup(items, item, category)",
}


# -- Logs
def log(rows: int) -> pa.Table:
    """Generate a log with the columns that the formulas read."""
    random = np.random.default_rng(0)

    def texts(count: int, form: str) -> pa.Array:
        names = pa.array([form.format(number) for number in range(count)])
        return names.take(pa.array(random.integers(0, count, rows)))

    def lists(longest: int) -> pa.Array:
        lengths = random.integers(0, longest + 1, rows)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        items = random.zipf(1.2, ends[-1]) % KEYS
        return pa.ListArray.from_arrays(pa.array(ends), pa.array(items))

    def times(days: int) -> pa.Array:
        seconds = 1_760_000_000 + random.integers(0, days * 86_400, rows)
        return pa.array(1_000_000 * seconds, pa.timestamp("us"))

    return pa.table(
        {
            "click": pa.array((random.random(rows) < 0.25).astype(np.int64)),
            "user": pa.array(random.integers(0, 200_000, rows)),
            "item": pa.array(random.integers(0, KEYS, rows)),
            "device": texts(12, "device {}"),
            "city": texts(1000, "City {}"),
            "title": texts(5000, "A Short-Title, no. {} of 5000"),
            "amount": texts(10_000, "{}.25"),
            "price": pa.array(random.lognormal(2, 1, rows).round(2)),
            "cost": pa.array(random.lognormal(1, 1, rows).round(2)),
            "discount": pa.array(random.random(rows).round(2), mask=random.random(rows) < 0.5),
            "history": lists(8),
            "basket": lists(4),
            "time": times(30),
            "opened": times(7),
        }
    )


def items() -> pa.Table:
    """Generate the side table."""
    random = np.random.default_rng(1)
    categories = pa.array([f"category {number}" for number in range(500)])
    return pa.table(
        {
            "item": pa.array(random.permutation(KEYS)),
            "price": pa.array(random.lognormal(2, 1, KEYS).round(2)),
            "category": categories.take(pa.array(random.integers(0, 500, KEYS))),
        }
    )


def declared(formulas: Mapping[str, str], items_path: str) -> Schema:
    """Return a schema of the log with formulas."""
    uses_items = any("lookup" in formula for formula in formulas.values())
    return Schema(
        label="click",
        dense=("price",),
        sparse=("user", "item", "device"),
        features=tuple(Feature(name=name, formula=text) for name, text in formulas.items()),
        tables=(NamedTable(name="items", path=items_path, key="item"),) if uses_items else (),
    )


def prepared(
    formulas: Mapping[str, str], table: pa.Table, items_path: str
) -> tuple[Schema, Schema, pa.Table]:
    """Return a schema with formulas and their constants, one with the same columns in the log, and
    its log.
    """
    schema = fit_to_table(with_contents(declared(formulas, items_path)), table, path="the log")
    plain = Schema(
        label=schema.label,
        dense=schema.dense,
        sparse=schema.sparse,
        lists=schema.lists,
    )
    return schema, plain, derived_columns(table, schema).select([*plain.columns])


def written(table: pa.Table, folder: str) -> list[str]:
    """Write a log to files of Parquet and return their paths."""
    os.makedirs(folder)
    paths = []
    rows = -(-len(table) // FILES)
    for number in range(FILES):
        paths.append(os.path.join(folder, f"{number}.parquet"))
        pq.write_table(table.slice(number * rows, rows), paths[-1], row_group_size=BLOCK_ROWS)
    return paths


# -- Rows/s in two threads, as of an engine without Ray
def parse_rate(table: pa.Table, schema: Schema) -> float:
    """Measure the rows/s of parsing a log in memory."""
    blocks = [table.slice(start, BLOCK_ROWS) for start in range(0, len(table), BLOCK_ROWS)]

    def parsed(block: pa.Table) -> int:
        raw, _ = parse_table(block, schema)
        return raw.rows

    with ThreadPoolExecutor(2) as threads:
        rows, seconds = timed(lambda: sum(threads.map(parsed, blocks)))
    assert rows == len(table)
    return rows / seconds


def read_rate(paths: list[str], schema: Schema) -> float:
    """Measure the rows/s of reading and parsing files."""

    def parsed(path: str) -> int:
        tables = find_format(path, schema).tables(path, schema, schema.columns)
        return sum(parse_table(table, schema, path=path)[0].rows for table in tables)

    with ThreadPoolExecutor(2) as threads:
        rows, seconds = timed(lambda: sum(threads.map(parsed, paths)))
    return rows / seconds


def compare(
    workload: str,
    ours: Callable[[], float],
    plain: Callable[[], float],
    *,
    repeats: int,
) -> None:
    """Print the rows/s with computed columns against a log that has these columns."""
    rates = interleaved(repeats, ours=ours, plain=plain)
    emit(
        "features",
        peer="the same columns in the log",
        workload=workload,
        value=rates["ours"],
        ratio=rates["ours"] / rates["plain"],
        repeats=repeats,
        peer_rows_per_s=round(rates["plain"]),
    )


def compute_formulas(rows: int, items_path: str, *, repeats: int) -> None:
    table = log(rows)
    schema, plain, plain_table = prepared(FORMULAS, table, items_path)
    compare(
        f"{len(FORMULAS)} formulas, Arrow tables to raw rows, 2 threads",
        lambda: parse_rate(table, schema),
        lambda: parse_rate(plain_table, plain),
        repeats=repeats,
    )


def measure_lookups(rows: int, items_path: str, *, repeats: int) -> None:
    table = log(rows).select(["click", "user", "item", "device", "price"])
    schema, plain, plain_table = prepared(LOOKUPS, table, items_path)
    folder = os.path.dirname(items_path)
    paths = written(table, os.path.join(folder, "log"))
    plain_paths = written(plain_table, os.path.join(folder, "plain"))
    compare(
        f"{len(LOOKUPS)} lookups among {KEYS:,} keys, Parquet to raw rows, 2 threads",
        lambda: read_rate(paths, schema),
        lambda: read_rate(plain_paths, plain),
        repeats=repeats,
    )


# -- Latency over HTTP
def make_checkpoints(*, folder: str, rows: int) -> dict[str, str]:
    """Save an untrained model with formulas and lookups, and one of the same size without, with the
    same rows as requests, and return both folders.
    """
    items_path = os.path.join(folder, "items.parquet")
    table = log(rows)
    schema, plain, plain_table = prepared({**FORMULAS, **LOOKUPS}, table, items_path)
    folders = {}
    for name, its_schema, its_table in (
        ("formulas", schema, table),
        ("plain", plain, plain_table),
    ):
        folders[name] = step_folder(os.path.join(folder, f"model of {name}"), 1)
        save_untrained(folders[name], its_schema, its_table)
        named = its_table.select([each for each in its_schema.columns if each != "click"])
        # A time as clients send it
        row = {
            field: value.isoformat() if hasattr(value, "isoformat") else value
            for field, value in named.slice(0, 1).to_pylist()[0].items()
        }
        Path(body_of(folders[name])).write_text(json.dumps({"rows": [row]}))
    return folders


def body_of(checkpoint: str) -> str:
    """Return the path of the request to a checkpoint's model."""
    return f"{checkpoint}.json"


def save_untrained(folder: str, schema: Schema, table: pa.Table) -> None:
    """Save a checkpoint of an untrained model of recipe clicks."""
    from rayrec import checkpoint as checkpoints
    from rayrec import recipes
    from rayrec.data.encoding.presets import RAYREC, make_preprocessor
    from rayrec.models.base import ModelInputs
    from rayrec.models.sharded_model import build_click_model

    counts = RAYREC.counting(schema).empty()
    counts.add_rows(parse_table(table, schema)[0], 0)
    preprocessor = make_preprocessor(RAYREC, schema, counts)
    config = recipes.clicks("the log", schema)
    model = build_click_model(
        config.workload.model,  # type: ignore[attr-defined]
        ModelInputs.from_schema(preprocessor.inputs),
        num_embeddings=preprocessor.num_embeddings,
        embedding_device="cpu",
    )

    def extra_files(target: str) -> None:
        Path(target, "config.yaml").write_text(config.to_yaml())
        preprocessor.save(f"{target}/preprocessor")

    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoints.save(folder, weights, state={}, extra_files=extra_files)


def answer(folder: str, rows: int, *, seconds: float, repeats: int) -> None:
    from hosts.ports import free_ports

    checkpoints = child(__file__, "make_checkpoints", folder=folder, rows=rows)
    with contextlib.ExitStack() as servers:
        calls = {}
        for name, checkpoint in checkpoints.items():
            port = free_ports(1)
            servers.enter_context(hosted("host_direct", path="", checkpoint=checkpoint, port=port))
            calls[name] = partial(requests, port, body_of(checkpoint), seconds=seconds)
        results = in_turn(
            repeats,
            lambda number: calls,
            shown=lambda result: str(percentiles_ms([result])),
        )
    median_ms = {
        name: median_of(rounds, lambda result: percentiles_ms([result])["p50_ms"])
        for name, rounds in results.items()
    }
    emit(
        "features",
        peer="the same inputs in the request",
        workload=(
            f"{len(FORMULAS)} formulas and {len(LOOKUPS)} lookups, JSON, 1 row a request, 1 "
            "connection, ingress direct"
        ),
        unit="p50_ms",
        value=median_ms["formulas"],
        ratio=median_ms["formulas"] / median_ms["plain"],
        repeats=repeats,
        peer_p50_ms=median_ms["plain"],
    )


def requests(port: int, body: str, *, seconds: float) -> dict[str, Any]:
    result = measure(port, "/v1/score", body=body, connections=1, seconds=seconds)
    if result["failures"]:
        raise RuntimeError(f"requests failed: {result['failures']}")
    return result


def main(*, quick: bool) -> None:
    rows = 100_000 if quick else 1_000_000
    repeats = 2 if quick else 5
    keep_freed_memory()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, RAYREC_CACHE=os.path.join(folder, "cache")),
    ):
        items_path = os.path.join(folder, "items.parquet")
        pq.write_table(items(), items_path)
        with part("features", "formulas"):
            compute_formulas(rows, items_path, repeats=repeats)
        with part("features", "lookups"):
            measure_lookups(rows, items_path, repeats=repeats)
        with part("features", "latency of one row"):
            answer(folder, rows // 10, seconds=1.0 if quick else 3.0, repeats=repeats)


if __name__ == "__main__":
    run_task(make_checkpoints)
