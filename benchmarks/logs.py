"""Synthetic logs the benchmarks run on; the same bytes on every machine."""

from __future__ import annotations

import os
import tempfile

from rayrec.data.synthetic import generate


def synthetic_log(rows: int) -> str:
    """Path of a generated Kaggle-format log of so many rows; made once per machine."""
    folder = os.path.join(tempfile.gettempdir(), f"rayrec-benchmark-{os.getuid()}", f"kaggle-{rows}")
    if not os.path.exists(os.path.join(folder, "truth.json")):
        generate(folder, rows=rows)
    return os.path.join(folder, "train.txt")
