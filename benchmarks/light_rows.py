"""Benchmark of lighter click models: AUROC, bytes and multiply-adds beside criteo_kaggle's network,
each exported and scored.

`--data PATH` names a log in Criteo's format; without it a synthetic one of 60,000 rows is used. The
log is rotated: each time another fourteenth of its rows is the test (zoo_benchmark.py). All models
train by criteo_demo's rules. `--rotations N` limits the rotations.
"""

import math
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from logs import synthetic_log
from rows import emit, note, part
from zoo_benchmark import Log, lines_of, option, rotated

import rayrec
from rayrec.data.logs.text_parser import parse
from rayrec.inference.model import open_served
from rayrec.metrics.binary import binary_metrics
from rayrec.models.base import ModelInputs
from rayrec.models.cost import network_multiply_adds
from rayrec.observe.console import Console
from rayrec.recipes import criteo_demo

ROTATIONS: Final = 5
FULL: Final[dict[str, Any]] = {
    "embedding_dim": 16,
    "bottom_mlp": (512, 256, 64, 16),
    "top_mlp": (512, 256, 1),
}
"""criteo_kaggle's network."""
NARROW: Final[dict[str, Any]] = {
    "embedding_dim": 16,
    "bottom_mlp": (128, 64, 16),
    "top_mlp": (128, 64, 1),
}
"""criteo_demo's network."""
HALF: Final[dict[str, Any]] = {
    "embedding_dim": 8,
    "bottom_mlp": (128, 32, 8),
    "top_mlp": (256, 128, 1),
}
QUARTER: Final[dict[str, Any]] = {
    "embedding_dim": 4,
    "bottom_mlp": (64, 16, 4),
    "top_mlp": (128, 64, 1),
}
"""criteo_kaggle_distilled's network."""
COMMON: Final[dict[str, Any]] = {"min_count": 10}
"""Categories with fewer rows share one row of their table."""
HASHED: Final[dict[str, Any]] = {"max_num_embeddings": 1000}
"""Rarer categories share 1000 rows by a hash."""


@dataclass(frozen=True)
class Candidate:
    """Changes of the full model."""

    model: dict[str, Any]
    preset: dict[str, Any]
    quantize: str | None = None


CANDIDATES: Final = {
    "full": Candidate(FULL, {}),
    "int8": Candidate(FULL, {}, "int8"),
    "narrow": Candidate(NARROW, {}),
    "narrow-int8": Candidate(NARROW, {}, "int8"),
    "half": Candidate(HALF, {}),
    "half-int8": Candidate(HALF, {}, "int8"),
    "quarter": Candidate(QUARTER, {}),
    "common": Candidate(FULL, COMMON),
    "narrow-common-int8": Candidate(NARROW, COMMON, "int8"),
    "hashed": Candidate(FULL, HASHED),
    "half-common-int8": Candidate(HALF, COMMON, "int8"),
}


@dataclass(frozen=True)
class Measured:
    """Quality on the test rows, and cost, of an exported model."""

    auroc: float
    logloss: float
    bytes: int
    multiply_adds: float


def main(*, quick: bool) -> None:
    rotations = int(option("--rotations") or (2 if quick else ROTATIONS))
    with tempfile.TemporaryDirectory() as folder:
        lines = lines_of(option("--data") or synthetic_log(60_000))
        logs = [rotated([], lines, folder, number, rotations) for number in range(rotations)]
        full: list[Measured] = []
        for name in CANDIDATES:
            with part("light", name):
                results = [_measured(CANDIDATES[name], log, folder) for log in logs]
                full = full or results
                _emit(name, results, full, rows=len(lines))


def _emit(name: str, results: list[Measured], full: list[Measured], *, rows: int) -> None:
    better = [one.auroc - other.auroc for one, other in zip(results, full, strict=True)]
    error = statistics.stdev(better) / math.sqrt(len(better)) if len(better) > 1 else 0.0
    auroc, logloss, size, adds = (
        statistics.mean(getattr(one, field) for one in results)
        for field in Measured.__annotations__
    )
    peer = statistics.mean(one.auroc for one in full)
    lighter = statistics.mean(one.bytes for one in full) / size
    note(
        f"  {name}: {auroc:.4f} {logloss:.4f}, over full {auroc - peer:+.4f} ± {error:.4f}, "
        f"{size:,.0f} bytes, {adds:,.0f}"
    )
    emit(
        "light",
        peer="criteo_kaggle's network",
        workload=f"{name}, {rows:,} rows",
        unit="auroc",
        value=auroc,
        ratio=(auroc - 0.5) / (peer - 0.5),
        repeats=len(results),
        logloss=round(logloss, 4),
        over_full=round(auroc - peer, 4),
        standard_error=round(error, 4),
        bytes=round(size),
        times_smaller=round(lighter, 1),
        multiply_adds=round(adds),
    )


def _measured(candidate: Candidate, log: Log, folder: str) -> Measured:
    """Train, or take the run of the same network; export, and score the test rows by the export."""
    settings = {**candidate.model, **candidate.preset}
    name = f"{log.number}-" + "-".join(
        f"{key}{value}".replace(" ", "") for key, value in settings.items()
    )
    config = criteo_demo(log.path).replace(
        workload={"model": {**candidate.model, "first_order": False}, "preset": candidate.preset},
        storage_path=os.path.join(folder, "runs"),
        name=name.replace("(", "").replace(")", "").replace(",", "."),
        seed=log.number,
        scaling={"num_workers": 1},
        trackers={"prometheus": False, "tensorboard": False},
    )
    checkpoint = rayrec.train(config, console=Console(quiet=True)).checkpoint
    out = Path(tempfile.mkdtemp(dir=folder), "export")
    rayrec.export(checkpoint, out=str(out), quantize=candidate.quantize, ignore_parity=True)
    served = open_served(str(out))
    raw, _ = parse(served.preprocessor.schema, Path(log.test_path).read_bytes())
    (labels,) = raw.labels.values()
    metrics = binary_metrics(served.score(served.preprocessor.encode(raw)), labels)
    model: Any = config.workload
    network = model.model.build(inputs := ModelInputs.from_schema(served.preprocessor.inputs))
    adds = network_multiply_adds(network, inputs, model.model) or math.nan
    return Measured(
        metrics["auroc"],
        metrics["logloss"],
        sum(p.stat().st_size for p in out.rglob("*.safetensors")),
        adds,
    )
