"""Synthetic logs the benchmarks run on; the same bytes on every machine."""

from __future__ import annotations

import os
import tempfile

from rayrec.data.synthetic import generate


def synthetic_log(rows: int, *, seed: int = 0) -> str:
    """Path of a generated Kaggle-format log of so many rows; made once per machine."""
    name = f"kaggle-{rows}-{seed}" if seed else f"kaggle-{rows}"
    folder = os.path.join(tempfile.gettempdir(), f"rayrec-benchmark-{os.getuid()}", name)
    if not os.path.exists(os.path.join(folder, "truth.json")):
        generate(folder, rows=rows, seed=seed)
    return os.path.join(folder, "train.txt")


def dated_log(rows: int, days: int, *, drift: int) -> list[str]:
    """Folders of the days, in order, of a generated log; made once per machine."""
    name = f"dated-{rows}-{days}-{drift}"
    folder = os.path.join(tempfile.gettempdir(), f"rayrec-benchmark-{os.getuid()}", name)
    if not os.path.exists(os.path.join(folder, "truth.json")):
        generate(folder, rows=rows, days=days, drift=drift, first_date="2026-01-01")
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.startswith("dt="))


def preprocessor_of(path: str) -> str:
    """Folder of a Kaggle-format log's Preprocessor, made once: all candidates have the same tables and the same ids."""
    from rayrec.data.encoding.presets import RAYREC, make_preprocessor
    from rayrec.data.logs.text_parser import RawRows, max_rows_in, padded, parse_into
    from rayrec.datasets.criteo import SCHEMA

    folder = os.path.join(os.path.dirname(path), "preprocessor")
    if not os.path.exists(os.path.join(folder, "preprocessor.json")):
        with open(path, "rb") as file:
            text = file.read()
        raw = RawRows(SCHEMA, max_rows_in(SCHEMA, len(text)))
        parse_into(raw, padded(text), len(text))
        preset = RAYREC.replace(min_count=10)
        counts = preset.counting(SCHEMA).empty()
        counts.add_rows(raw, 0)
        make_preprocessor(preset, SCHEMA, counts).save(folder)
    return folder
