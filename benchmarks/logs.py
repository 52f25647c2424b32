"""Synthetic logs for the benchmarks, with the same bytes on every machine."""

import functools
import os
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from rayrec.data.synthetic import generate
from rayrec.schema import Schema

ANY = Schema(
    label="clicked",
    dense=tuple(f"number_{i}" for i in range(13)),
    sparse=(*(f"name_{i}" for i in range(20)), *(f"code_{i}" for i in range(6))),
    tokens="any",
)
"""Numbers with a fraction, categories that are strings, and categories that are integers."""


def synthetic_log(rows: int, *, seed: int = 0) -> str:
    """Generate a Kaggle-format log once per machine and return its path."""
    name = f"kaggle-{rows}-{seed}" if seed else f"kaggle-{rows}"
    folder = os.path.join(tempfile.gettempdir(), f"rayrec-benchmark-{os.getuid()}", name)
    if not os.path.exists(os.path.join(folder, "truth.json")):
        generate(folder, rows=rows, seed=seed)
    return os.path.join(folder, "train.txt")


def dated_log(rows: int, days: int, *, drift: int) -> list[str]:
    """Generate a dated log once per machine and return the folders of its days, in order."""
    name = f"dated-{rows}-{days}-{drift}"
    folder = os.path.join(tempfile.gettempdir(), f"rayrec-benchmark-{os.getuid()}", name)
    if not os.path.exists(os.path.join(folder, "truth.json")):
        generate(folder, rows=rows, days=days, drift=drift, first_date="2026-01-01")
    return sorted(
        os.path.join(folder, name) for name in os.listdir(folder) if name.startswith("dt=")
    )


def any_log(rows: int, suffix: str) -> str:
    """Generate a log of any tokens (`ANY`), as .parquet or .csv, once per machine and return its
    path. A tenth of the values is missing.
    """
    folder = os.path.join(tempfile.gettempdir(), f"rayrec-benchmark-{os.getuid()}", f"any-{rows}")
    path = os.path.join(folder, f"clicks{suffix}")
    if not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        random = np.random.default_rng(0)
        columns = {"clicked": pa.array((random.random(rows) < 0.25).astype(np.int64))}
        for name in (*ANY.dense, *ANY.sparse):
            missing = random.random(rows) < 0.1
            if name in ANY.dense:
                columns[name] = pa.array(random.lognormal(size=rows).round(4), mask=missing)
                continue
            codes = random.zipf(1.2, rows) % 100_000
            texts = (
                [f"{name}-{code}" for code in range(100_000)]
                if name.startswith("name")
                else range(100_000)
            )
            columns[name] = pa.array(texts).take(pa.array(codes, mask=missing))
        write = {
            ".parquet": functools.partial(pq.write_table, row_group_size=8192),
            ".csv": pyarrow.csv.write_csv,
        }
        write[suffix](pa.table(columns), f"{path}.part")
        os.replace(f"{path}.part", path)
    return path


def build_preprocessor(path: str) -> str:
    """Create a Kaggle-format log's Preprocessor once and return its folder. All candidates have the
    same tables and ids.
    """
    from rayrec.data.encoding.presets import RAYREC, make_preprocessor
    from rayrec.data.logs.text_parser import parse
    from rayrec.datasets.criteo import SCHEMA

    folder = os.path.join(os.path.dirname(path), "preprocessor")
    if not os.path.exists(os.path.join(folder, "preprocessor.json")):
        with open(path, "rb") as file:
            text = file.read()
        raw, _ = parse(SCHEMA, text)
        preset = RAYREC.replace(min_count=10)
        counts = preset.counting(SCHEMA).empty()
        counts.add_rows(raw, 0)
        make_preprocessor(preset, SCHEMA, counts).save(folder)
    return folder
