"""Benchmark of training speed with criteo_kaggle's network.

Candidates: from raw TSV through Ray, from preprocessed batches without Ray, TorchRec's DLRM, and
the machine's matrix-product peak. Every candidate runs in a separate process, all in turn.
"""

import os
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from typing import Any

from logs import build_preprocessor, synthetic_log
from pipelines import begin_group, pipeline_rate, ready_batches, torchrec_batches
from rows import emit, interleaved, note
from run_metrics import matrix_peak as peak_of
from subprocesses import child, run_task

MULTIPLY_ADDS = 486_032
# backward costs twice the forward pass, less the gradient of the input
FLOP_PER_ROW = 6 * MULTIPLY_ADDS - 2 * 13 * 512


def recipe(
    path: str, *, precision: str, batch_size: int, workers: int, steps: int, storage: str
) -> Any:
    from rayrec.recipes import criteo_kaggle

    return criteo_kaggle(path).replace(
        precision=precision,
        batch_size=batch_size,
        steps=steps,
        evaluate_every=10**9,
        log_every=10,
        storage_path=storage,
        scaling={"num_workers": workers},
        cluster={"num_cpus": 2},
        workload={"preprocessor": build_preprocessor(path)},
    )


def from_binary(**arguments: Any) -> float:
    """Measure the rows/s as `from_raw`, from the same log preprocessed as memory-mapped binary
    rows.
    """
    from rayrec import preprocess

    path = arguments["path"]
    folder = os.path.join(os.path.dirname(path), "binary")
    if not os.path.exists(folder):
        preprocess(
            path,
            out=folder,
            format="binary",
            preprocessor=build_preprocessor(path),
            split="sevenths",
        )
    return from_raw(**{**arguments, "path": folder, "log": path})


def from_raw(
    *, path: str, precision: str, batch_size: int, workers: int, steps: int, log: str | None = None
) -> float:
    """Measure the rows/s from raw TSV, or from `path`, under Ray Train, after the first fifth of
    the steps.
    """
    from rayrec.observe.console import Console
    from rayrec.observe.events import read_events
    from rayrec.training.trainer import train

    with tempfile.TemporaryDirectory() as storage:
        cache = os.path.join(os.path.dirname(log or path), ".cache")
        os.makedirs(cache, exist_ok=True)
        os.symlink(cache, os.path.join(storage, ".cache"))
        config = recipe(
            log or path,
            precision=precision,
            batch_size=batch_size,
            workers=workers,
            steps=steps,
            storage=storage,
        ).replace(train_data={"path": path})
        result = train(config, console=Console(quiet=True))
        events = read_events(os.path.join(result.folder, "events.jsonl"), kinds={"step"})
    late = [event for event in events if event["step"] > steps // 5]
    rows = late[-1]["rows"] - late[0]["rows"]
    seconds = sum((b["rows"] - a["rows"]) / b["rows_per_s"] for a, b in pairwise(late))
    blocked = sum(event["blocked_fraction"] for event in late) / len(late)
    print(f"blocked on data {blocked:.1%}", file=sys.stderr)
    return rows / seconds


def from_ready(*, path: str, precision: str, batch_size: int, steps: int) -> float:
    """Measure the rows/s of the same training code on batches in memory, without Ray."""
    import torch

    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.data.engine import InProcess, ThreadEngine
    from rayrec.data.logs.index import Segment
    from rayrec.datasets.criteo import SCHEMA
    from rayrec.ingest.block_order import BlockOrder, SegmentRange
    from rayrec.native import keep_freed_memory
    from rayrec.workloads.base import WorkerContext
    from rayrec.workloads.recsys.settings import Prepared

    keep_freed_memory()
    torch.set_num_threads(os.cpu_count() or 1)
    begin_group()
    config = recipe(
        path, precision=precision, batch_size=batch_size, workers=1, steps=steps, storage=""
    )
    preprocessor = Preprocessor.load(build_preprocessor(path))
    batches = ready_batches(path, preprocessor, batch_size=batch_size, number=steps * 6 // 5 + 20)
    order = BlockOrder((SegmentRange(Segment("", 0, 1, 0, 10**9), 0, 10**9),), "none", 0, 1)
    prepared = Prepared(
        InProcess(preprocessor),
        "",
        SCHEMA,
        preprocessor.num_embeddings,
        {"train": order},
        0,
        "",
        None,
    )
    setup = config.workload.set_up(
        WorkerContext(config, 0, 1, torch.device("cpu"), ThreadEngine(1)), prepared
    )
    setup.model.train()
    return pipeline_rate(
        setup.pipeline, batches, steps=steps, batch_size=batch_size, before_step=setup.begin_step
    )


def torchrec_dlrm(*, path: str, precision: str, batch_size: int, steps: int) -> float:
    """Measure the rows/s of TorchRec's DLRM, planned, sharded and pipelined by TorchRec, on
    preprocessed batches, without Ray.
    """
    import torch
    from peers.torchrec_dlrm import build

    from rayrec.data.encoding.preprocessor import Preprocessor

    torch.set_num_threads(os.cpu_count() or 1)
    begin_group()
    preprocessor = Preprocessor.load(build_preprocessor(path))
    batches = ready_batches(path, preprocessor, batch_size=batch_size, number=steps * 6 // 5 + 20)
    return pipeline_rate(
        build(preprocessor.num_embeddings, precision=precision),
        torchrec_batches(batches, pinned=False),
        steps=steps,
        batch_size=batch_size,
    )


def matrix_peak(*, precision: str, engine: str) -> float:
    """Measure the FLOP/s of a 2048 x 512 x 512 product through MKL (torch's default for float32
    here) or oneDNN, all cores.
    """
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.randn(2048, 512).to(dtype)
    w = torch.randn(512, 512).to(dtype)
    b = torch.zeros(512, dtype=dtype)
    if engine == "default":
        product = lambda: torch.nn.functional.linear(x, w, b)  # noqa: E731
    else:
        product = lambda: torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")  # noqa: E731
    best = 0.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            product()
        best = max(best, 20 * 2 * 2048 * 512 * 512 / (time.perf_counter() - start))
    return best


def main(*, quick: bool) -> None:
    rows = 500_000 if quick else 2_000_000
    path = synthetic_log(rows)
    repeats = 1 if quick else 2
    _two_workers(path, steps=60 if quick else 450, repeats=1 if quick else 3)
    for precision in ("fp32", "bf16"):
        peak, default_peak = (peak_of(precision, engine=engine) for engine in ("onednn", "default"))
        for batch_size in (2048, 8192):
            steps = (60 if quick else 450) * 2048 // batch_size
            common: dict[str, Any] = {
                "path": path,
                "precision": precision,
                "batch_size": batch_size,
                "steps": steps,
            }
            note(f"{precision}, batch {batch_size}:")
            rates = interleaved(
                repeats,
                raw=partial(child, __file__, "from_raw", workers=1, **common),
                binary=partial(child, __file__, "from_binary", workers=1, **common),
                ready=partial(child, __file__, "from_ready", **common),
                torchrec=partial(child, __file__, "torchrec_dlrm", **common),
            )
            workload = (
                f"criteo_kaggle network, {precision}, batch {batch_size}, 1 worker, from raw TSV"
            )
            limit = peak / FLOP_PER_ROW
            for peer, rate in (
                ("our memory-mapped binary, made ready by rayrec preprocess", rates["binary"]),
                ("preprocessed batches in memory, the same code without Ray", rates["ready"]),
                ("TorchRec's own DLRM on preprocessed batches", rates["torchrec"]),
                (
                    f"matrix-product peak {peak / 1e9:.0f} GFLOP/s (torch's default engine "
                    f"{default_peak / 1e9:.0f})",
                    limit,
                ),
            ):
                emit(
                    "train",
                    peer=peer,
                    workload=workload,
                    value=rates["raw"],
                    ratio=rates["raw"] / rate,
                    repeats=repeats,
                    peer_rows_per_s=round(rate),
                )


def _two_workers(path: str, *, steps: int, repeats: int) -> None:
    """Compare two workers with one that has both cores. Steps have as many rows."""
    for batch_size in (2048, 8192):
        common: dict[str, Any] = {
            "path": path,
            "precision": "fp32",
            "steps": steps * 2048 // batch_size,
        }
        rates = interleaved(
            repeats,
            two=partial(
                child, __file__, "from_raw", workers=2, batch_size=batch_size // 2, **common
            ),
            one=partial(child, __file__, "from_raw", workers=1, batch_size=batch_size, **common),
        )
        emit(
            "train",
            peer="one worker with both cores",
            workload=f"criteo_kaggle network, fp32, batch {batch_size}, 2 workers, from raw TSV",
            value=rates["two"],
            ratio=rates["two"] / rates["one"],
            repeats=repeats,
            peer_rows_per_s=round(rates["one"]),
        )


if __name__ == "__main__":
    run_task(from_raw, from_binary, from_ready, torchrec_dlrm, matrix_peak)
