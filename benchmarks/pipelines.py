"""Batches in memory, and the speed of pipelines that train on them in one process without Ray."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rayrec.data.encoding.preprocessor import Preprocessor


def ready_batches(
    path: str, preprocessor: Preprocessor, *, batch_size: int, number: int
) -> list[Any]:
    """Return batches of a Kaggle-format log's rows, permuted and encoded, in memory. Should be one
    batch per step, because a model that repeats a few rows memorizes them and has another speed.
    """
    import numpy as np
    import torch

    from rayrec.batch import Batch
    from rayrec.data.logs.text_parser import parse
    from rayrec.datasets.criteo import SCHEMA
    from rayrec.ingest.batches import sparse_features

    with open(path, "rb") as file:
        text = file.read(300 * batch_size * number)
    text = text[: text.rindex(b"\n") + 1]
    raw, _ = parse(SCHEMA, text)
    order = np.random.default_rng(0).permutation(raw.rows)
    batches = []
    for start in range(0, batch_size * number, batch_size):
        rows = preprocessor.encode(raw, order[start : start + batch_size])
        batches.append(
            Batch(
                {"dense": torch.from_numpy(rows.dense)},
                1 / batch_size,
                sparse_features(SCHEMA.sparse, rows.ids, len(rows)),
                {"label": torch.from_numpy(rows.label)},
            )
        )
    return batches


def torchrec_batches(batches: list[Any], *, pinned: bool) -> list[Any]:
    """Return `ready_batches` as TorchRec's pipeline takes them. `pinned`: in pinned memory, for
    copies to a GPU.
    """
    from torchrec.datasets.utils import Batch

    theirs = [
        Batch(batch.tensors["dense"], batch.sparse_features, batch.labels["label"])
        for batch in batches
    ]
    return [batch.pin_memory() for batch in theirs] if pinned else theirs


def begin_group(device: torch.device | None = None) -> None:
    """Make this process the only worker of a group, on a GPU if `device` is one."""
    from torch import distributed

    gpu = device is not None and device.type == "cuda"
    distributed.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=f"file://{tempfile.mkdtemp()}/init",
        rank=0,
        world_size=1,
    )


def pipeline_rate(
    pipeline: Any,
    batches: list[Any],
    *,
    steps: int,
    batch_size: int,
    warm_steps: int | None = None,
    before_step: Callable[[int, int], None] | None = None,
    wait: Callable[[], None] = lambda: None,
) -> float:
    """Measure the rows/s of `steps` steps after a warm-up, by default of a fifth as many.
    `wait`: returns once the device is done.
    """
    from itertools import cycle, islice

    warm = max(5, steps // 5) if warm_steps is None else warm_steps
    source = islice(cycle(batches), warm + steps + 8)
    for step in range(warm + steps):
        if step == warm:
            wait()
            start = time.perf_counter()
        if before_step:
            before_step(step, steps)
        pipeline.progress(source)
    wait()
    return steps * batch_size / (time.perf_counter() - start)
