"""Figures of README.md and docs/ from the rows of benchmarks/results.

`python tools/results.py` (part of make pictures) rewrites the tables of docs/benchmarks.md below
`<!-- tools/results.py: NAME -->`, and each figure in prose, written as

    <!--= BENCHMARK; WORKLOAD; PEER; FIELD; DIGITS-->1.89<!--/-->

WORKLOAD and PEER are parts of the row's texts, with `*` for any text, `^` and `$` for its ends. The
newest date counts. FIELD is a field of the row, `A/B` a ratio of two. `least FIELD` and `most
FIELD` choose among several rows. DIGITS is the number of significant digits, with `*FACTOR` for
another unit. Rows that differ in the field are an error.
"""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
TABLE = re.compile(r"(<!-- tools/results\.py: (\w+) -->\n\n)(?:\|.*\n)*\n*")
FIGURE = re.compile(r"(<!--= ([^>]*)-->)[^<]*(<!--/-->)")


class Measured(NamedTuple):
    """Selector of the rows of a table line."""

    job: str
    name: str
    """Name of the rows."""
    workload: str
    peer: str
    peer_text: str
    limit: str = ""
    """The row whose peer is the machine's or a part's limit; empty: none was measured."""
    limit_text: str = ""
    unit: str = "rows"
    our_field: str = "{unit}_per_s"
    """Field of rayrec's own figure; `peer_...` is the peer's."""


MERGED = {"vocabulary": "ingest", "preprocess": "ingest", "predict": "serve"}
"""Benchmarks by the names of rows that they print in addition to their own."""
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
    Measured(
        "the same", "vocabulary", COUNT, "pyarrow on one core, without Ray", "pyarrow, one core"
    ),
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
        our_field="rows_per_s_with_start",
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


@functools.cache
def _rows(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (date, row) of a benchmark's rows, oldest first, without failed measurements."""
    rows = [
        (path.stem.rpartition("_")[2], json.loads(line))
        for path in sorted(RESULTS.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [(date, row) for date, row in rows if row["name"] == name and "error" not in row]


def find(name: str, workload: str, peer: str) -> tuple[str, dict[str, Any]]:
    """Return (date, row) of a benchmark's newest row with this workload and figures, and with a
    peer that starts with `peer`.
    """
    matches = [
        (date, row)
        for date, row in _rows(name)
        if row["workload"] == workload and (row["peer"] or "").startswith(peer)
    ]
    if not matches:
        raise SystemExit(
            f"no row of {name}, {workload!r}, {peer!r} in {RESULTS.name}; correct tools/results.py"
        )
    return matches[-1]


def figure(key: str) -> str:
    """Return the text of a figure from the newest rows, as its mark specifies."""
    try:
        name, workload, peer, field, form = (part.strip() for part in key.split(";"))
    except ValueError:
        raise SystemExit(f"{key!r}: must be BENCHMARK; WORKLOAD; PEER; FIELD; DIGITS") from None
    newest = {
        (row["workload"], row["peer"]): (date, row)
        for date, row in _rows(name)
        if _contains(row["workload"], workload) and _contains(row["peer"] or "", peer)
    }
    last = max((date for date, _ in newest.values()), default=None)
    choice, _, field = field.rpartition(" ")
    above, _, below = field.partition("/")
    rows = [
        row
        for date, row in newest.values()
        if date == last and None not in map(row.get, (above, below or above))
    ]
    values = {float(row[above]) / (float(row[below]) if below else 1) for row in rows}
    if not values or (len(values) > 1 and not choice):
        raise SystemExit(
            f"{key!r}: {len(values)} different values in {RESULTS.name}; there must be one"
        )
    digits, _, factor = form.partition("*")
    return number(
        {"least": min, "most": max}[choice or "least"](values) * float(factor or 1), int(digits)
    )


def _contains(text: str, part: str) -> bool:
    pattern = re.escape(part).replace(r"\*", ".*")
    return re.search(re.sub(r"^\\\^", "^", re.sub(r"\\\$$", "$", pattern)), text) is not None


def number(value: float, digits: int) -> str:
    """Format a number with N significant digits, and commas between thousands."""
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    decimals = digits - 1 - exponent
    return f"{round(value, decimals):,.{max(decimals, 0)}f}"


def table() -> str:
    """Return the summary as Markdown."""
    lines = [
        "| job | rayrec | peer | ours / it | limit: share of it | date | `rayrec benchmark` |",
        "| --- | ---: | --- | ---: | --- | --- | --- |",
    ]
    for measured in SUMMARY:
        date, row = find(measured.name, measured.workload, measured.peer)
        per_s = f"{measured.unit}_per_s"
        ours = row[measured.our_field.format(unit=measured.unit)]
        peer = row[f"peer_{per_s}"]
        limit = ""
        if measured.limit:
            bound = find(measured.name, measured.workload, measured.limit)[1][f"peer_{per_s}"]
            limit = f"{measured.limit_text}: {ours / bound:.2f}"
        ratio = f"{ours / peer:.2f}" if ours / peer < 20 else f"{ours / peer:.0f}"
        speed = f"{ours:,.0f} {measured.unit}/s"
        peer_cell = f"{measured.peer_text}: {peer:,.0f}"
        lines.append(
            f"| {measured.job} | {speed} | {peer_cell} | {ratio} | {limit} | {date} | "
            f"`{MERGED.get(measured.name, measured.name)}` |"
        )
    return "\n".join(lines) + "\n"


def serving() -> str:
    """Return requests per second and latencies over HTTP by size of request and connections, as
    Markdown.
    """
    peers = ("behind Ray Serve's HAProxy", "ingress direct", "same forward", "small MLP")
    lines = [
        "| rows a request, connections | `--ingress serve` | behind Ray Serve's HAProxy | "
        "`--ingress direct` | bare handler, the same forward over preprocessed rows | bare "
        "handler, small MLP, which looks at no row |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for rows, connections in (
        (rows, connections) for rows in (1, 256, 2048) for connections in (1, 16, 64)
    ):
        workload = f"serve; raw TSV, {rows} rows a request, {connections} connections"
        sides = ("", *("peer_" for _ in peers))
        shown = [
            "; ".join(
                (
                    figure(f"{workload}; {peer}; {side}requests_per_s; 3"),
                    " / ".join(
                        figure(f"{workload}; {peer}; {side}{part}_ms; 3") for part in ("p50", "p99")
                    ),
                )
            )
            for side, peer in zip(sides, (peers[0], *peers), strict=True)
        ]
        lines.append(f"| {rows:,}, {connections} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


TABLES: Final[dict[str, Callable[[], str]]] = {"summary": table, "serving": serving}


def page(text: str) -> str:
    """Return a page with current tables and figures."""
    text = TABLE.sub(lambda match: match[1] + TABLES[match[2]]() + "\n", text)
    return FIGURE.sub(lambda mark: mark[1] + figure(mark[2]) + mark[3], text)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text()))
