"""Rows of benchmarks/results for the documentation. `python tools/results.py` (part of make pictures) writes the summary table
of docs/benchmarks.md again from them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PLACE = re.compile(r"(<!-- tools/results.py writes this table -->\n\n)(?:\|.*\n)*\n*")


class Measured(NamedTuple):
    """Which rows a line of the table is of."""

    job: str
    name: str
    """Of the benchmark, which is the command's argument, too."""
    workload: str
    peer: str
    peer_text: str
    limit: str = ""
    """The row whose peer is the machine's or a part's limit; empty: none was measured."""
    limit_text: str = ""
    unit: str = "rows"
    mine: str = "{unit}_per_s"
    """Field of rayrec's own figure; `peer_...` is the peer's."""


INGEST = "criteo kaggle TSV -> shuffled batches of 2048, 2 CPUs"
COUNT = "index and count 26 columns of 800,000 Criteo rows, 2 CPUs"
FP32 = "criteo_kaggle network, fp32, batch 2048, 1 worker, from raw TSV"
BF16 = "criteo_kaggle network, bf16, batch 8192, 1 worker, from raw TSV"
TORCHREC = "TorchRec's own DLRM on preprocessed batches"
COPY = "copying 160 bytes a row to the same disk"
FORWARD = "bare PyTorch forward over ready tensors, all cores"
MNIST = "mnist_resnet18, fp32, global batch 128, 1 worker, 2 CPUs"
GPT2 = "gpt2_tiny, loop rayrec, bf16, 16 blocks of 128 tokens a step, 1 worker, 2 CPUs"

SUMMARY = (
    Measured(
        "raw log to shuffled batches",
        "ingest",
        INGEST,
        "Ray DLRM notebook's pipeline",
        "Ray's DLRM notebook",
        "the same kernels in two threads",
        "bare kernels",
    ),
    Measured(
        "raw log to vocabulary",
        "vocabulary",
        COUNT,
        "Spark groupBy on RayDP, start-up left out",
        "Spark on RayDP",
        "our kernels without Ray: read, parse, count, one core, times two",
        "bare kernels",
    ),
    Measured("the same", "vocabulary", COUNT, "pyarrow on one core, without Ray", "pyarrow, one core"),
    Measured(
        "raw log to npy files",
        "preprocess",
        "criteo kaggle TSV, indexed -> npy, 2 CPUs",
        COPY,
        "a plain copy",
        COPY,
        "the disk",
    ),
    Measured(
        "DLRM from a raw log, fp32",
        "train",
        FP32,
        TORCHREC,
        "TorchRec, batches in memory",
        "matrix-product peak",
        "matrix peak",
    ),
    Measured(
        "the same, bf16, batch 8192",
        "train",
        BF16,
        TORCHREC,
        "TorchRec, batches in memory",
        "matrix-product peak",
        "matrix peak",
    ),
    Measured(
        "a log to scores, with the start",
        "predict",
        "criteo_kaggle network, fp32, 1,200,000 rows of raw TSV to Parquet, batches of 8192",
        FORWARD,
        "a bare forward in memory",
        mine="rows_per_s_with_start",
    ),
    Measured(
        "ResNet18 on MNIST",
        "mnist",
        MNIST,
        "plain PyTorch DDP script",
        "plain DDP script",
        "matrix-product peak",
        "matrix peak",
        "images",
    ),
    Measured(
        "GPT-2 (tiny), bf16",
        "gpt2",
        GPT2,
        "plain HuggingFace Trainer script",
        "plain Trainer script",
        "matrix-product peak",
        "matrix peak",
        "tokens",
    ),
)


def find(name: str, workload: str, peer: str) -> tuple[str, dict[str, Any]]:
    """Date and content of the newest row of a benchmark with this workload and figures, whose peer begins so."""
    found = []
    for path in sorted(RESULTS.glob("*.jsonl")):
        rows = map(json.loads, path.read_text().splitlines())
        date = path.stem.rpartition("_")[2]
        found += [
            (date, row)
            for row in rows
            if (row["name"], row["workload"]) == (name, workload) and (row["peer"] or "").startswith(peer)
        ]
    if not found:
        raise SystemExit(f"no row of {name}, {workload!r}, {peer!r} in {RESULTS.name}; correct tools/results.py")
    return found[-1]


def table() -> str:
    """The summary, as Markdown."""
    lines = [
        "| job | rayrec | peer | ours / it | limit: share of it | date | `rayrec benchmark` |",
        "| --- | ---: | --- | ---: | --- | --- | --- |",
    ]
    for measured in SUMMARY:
        date, row = find(measured.name, measured.workload, measured.peer)
        per_s = f"{measured.unit}_per_s"
        mine, peer = row[measured.mine.format(unit=measured.unit)], row[f"peer_{per_s}"]
        limit = ""
        if measured.limit:
            of = find(measured.name, measured.workload, measured.limit)[1][f"peer_{per_s}"]
            limit = f"{measured.limit_text}: {mine / of:.2f}"
        ratio = f"{mine / peer:.2f}" if mine / peer < 20 else f"{mine / peer:.0f}"
        speed, of_peer = f"{mine:,.0f} {measured.unit}/s", f"{measured.peer_text}: {peer:,.0f}"
        lines.append(f"| {measured.job} | {speed} | {of_peer} | {ratio} | {limit} | {date} | `{measured.name}` |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table as it must be."""
    assert PLACE.search(text), "docs/benchmarks.md has no place for the table"
    return PLACE.sub(lambda place: place[1] + table() + "\n", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
