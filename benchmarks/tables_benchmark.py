"""Benchmark of training speed by table optimizer: one network on the same batches in memory, in one
process, in turn.
"""

import functools
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any, Final

from rows import emit, in_turn, median_of, part

KINDS: Final = ("rowwise_adagrad", "sparse_adam", "adam")
SIZES: Final = (
    1_400,
    550,
    190_000,
    110_000,
    300,
    20,
    11_000,
    620,
    5,
    40_000,
    5_000,
    170_000,
    3_100,
    26,
    9_900,
    140_000,
    10,
    4_300,
    1_900,
    5,
    160_000,
    15,
    16,
    38_000,
    80,
    30_000,
)
"""Rows of the tables: about 0.9 million, as in FuxiCTR's Criteo_x4."""
SKEW: Final = 4
"""Ids are a uniform number to this power, times the table's rows: some are far more frequent than
others.
"""


def batches_of(batch_size: int, number: int) -> list[Any]:
    """Generate random batches with 13 numbers and 26 categories."""
    import torch

    from rayrec.batch import Batch
    from rayrec.datasets.criteo import SCHEMA
    from rayrec.ingest.batches import sparse_features

    draw = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(number):
        ids = [
            (torch.rand(batch_size, generator=draw) ** SKEW * rows).int().numpy() for rows in SIZES
        ]
        batches.append(
            Batch(
                {"dense": torch.rand(batch_size, 13, generator=draw)},
                1 / batch_size,
                sparse_features(SCHEMA.sparse, ids, batch_size),
                {"label": torch.rand(batch_size, generator=draw).round()},
            )
        )
    return batches


def setup_of(kind: str, *, batch_size: int, model: Any = None) -> Any:
    """Set up training in this process, with this optimizer for the tables. `model` None:
    criteo_kaggle's network.
    """
    import torch

    from rayrec.data.engine import InProcess, ThreadEngine
    from rayrec.data.logs.index import Segment
    from rayrec.datasets.criteo import SCHEMA
    from rayrec.ingest.block_order import BlockOrder, SegmentRange
    from rayrec.recipes import criteo_kaggle
    from rayrec.workloads.base import WorkerContext
    from rayrec.workloads.recsys.settings import Prepared

    config = criteo_kaggle("").replace(
        batch_size=batch_size, workload={"sparse_optimizer": {"kind": kind, "learning_rate": 0.001}}
    )
    if model is not None:
        config = config.replace(workload=config.workload.replace(model=model))
    order = BlockOrder((SegmentRange(Segment("", 0, 1, 0, 10**9), 0, 10**9),), "none", 0, 1)
    preprocessor: Any = type("Columns", (), {"sparse": [], "multi_hot": object()})()
    prepared = Prepared(
        InProcess(preprocessor), "", SCHEMA, list(SIZES), {"train": order}, 0, "", None
    )
    context = WorkerContext(config, 0, 1, torch.device("cpu"), ThreadEngine(1))
    setup = config.workload.set_up(context, prepared)
    setup.model.train()
    return setup


def times(setup: Any, source: Iterator[Any], steps: int) -> tuple[float, float]:
    """Return the wall and CPU seconds of `steps` steps."""
    start = time.perf_counter()
    start_cpu = time.process_time()
    for step in range(steps):
        setup.begin_step(step, steps)
        setup.pipeline.progress(source)
    return time.perf_counter() - start, time.process_time() - start_cpu


def main(*, quick: bool) -> None:
    import torch

    from rayrec.native import keep_freed_memory

    keep_freed_memory()
    logging.disable(logging.WARNING)
    torch.set_num_threads(os.cpu_count() or 1)
    folder = tempfile.mkdtemp()
    repeats = 2 if quick else 4
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=0, world_size=1
    )
    for batch_size in (2048, 8192):
        with part("tables", f"batch {batch_size}"):
            compare(
                batch_size=batch_size,
                steps=(40 if quick else 80) * 2048 // batch_size,
                repeats=repeats,
            )
    torch.distributed.destroy_process_group()


def compare(*, batch_size: int, steps: int, repeats: int) -> None:
    batches = batches_of(batch_size, number=steps)
    setup = functools.cache(functools.partial(setup_of, batch_size=batch_size))
    calls = {kind: lambda kind=kind: times(setup(kind), cycle(batches), steps) for kind in KINDS}
    # The first round warms up.
    spent = in_turn(repeats + 1, lambda number: calls, shown=lambda seconds: f"{seconds[0]:.2f} s")
    rows = steps * batch_size
    by_clock = {
        kind: rows / median_of(spent[kind][1:], lambda seconds: seconds[0]) for kind in KINDS
    }
    by_cpu = {kind: rows / median_of(spent[kind][1:], lambda seconds: seconds[1]) for kind in KINDS}
    for kind in KINDS[1:]:
        emit(
            "tables",
            peer=f"the same with {KINDS[0]}",
            workload=(
                f"criteo_kaggle network, {kind}, {sum(SIZES):,} rows of 16, batch {batch_size}, 1 "
                "worker, no Ray"
            ),
            value=by_clock[kind],
            ratio=by_clock[kind] / by_clock[KINDS[0]],
            repeats=repeats,
            peer_rows_per_s=round(by_clock[KINDS[0]]),
            ratio_by_cpu_time=round(by_cpu[kind] / by_cpu[KINDS[0]], 4),
        )
