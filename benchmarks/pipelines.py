"""Batches in memory, and the speed of pipelines that train on them in one process without Ray."""

import tempfile
import time
from typing import Any

from logs import build_preprocessor


def ready_batches(path: str, batch_size: int, number: int) -> tuple[list[int], list[Any]]:
    """Return the table sizes, and batches of the log's rows, permuted and encoded, in memory. Has
    one batch per step, because a model that repeats a few rows memorizes them and has another
    speed.
    """
    import numpy as np
    import torch

    from rayrec.batch import Batch
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.data.logs.text_parser import parse
    from rayrec.datasets.criteo import SCHEMA
    from rayrec.ingest.batches import sparse_features

    preprocessor = Preprocessor.load(build_preprocessor(path))
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
    return preprocessor.num_embeddings, batches


def begin_group() -> None:
    import torch

    folder = tempfile.mkdtemp()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=0, world_size=1
    )


def pipeline_rate(
    pipeline: Any, batches: list[Any], steps: int, *, batch_size: int, before_step: Any = None
) -> float:
    """Measure the rows/s of `steps` steps after a warm-up of a fifth as many."""
    from itertools import cycle, islice

    warm = max(5, steps // 5)
    source = islice(cycle(batches), warm + steps + 8)
    for step in range(warm + steps):
        if step == warm:
            start = time.perf_counter()
        if before_step:
            before_step(step, steps)
        pipeline.progress(source)
    return steps * batch_size / (time.perf_counter() - start)
