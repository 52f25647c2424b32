"""Training steps on batches in memory, in one process, with Criteo's number of columns."""

import time
from collections.abc import Iterator
from typing import Any, Final

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
    from builders.click_models import hashed_preprocessor

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
    preprocessor = InProcess(hashed_preprocessor(SIZES))
    prepared = Prepared(preprocessor, "", SCHEMA, list(SIZES), {"train": order}, 0, "", None)
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
