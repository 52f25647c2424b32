"""Benchmark of every model's training speed, relative to the same network in a plain PyTorch loop.

Models have one label and single categories. Both sides train in turn on the same batches in memory,
in one process, with sparse Adam on the tables.
"""

import logging
import os
import statistics
import tempfile
import time
from itertools import cycle
from typing import Any, Final

from rows import emit, note, part
from table_steps import SIZES, batches_of, setup_of, times

from rayrec.models.ensemble import build_network

MODELS: Final = (
    "dlrm",
    "linear",
    "widedeep",
    "deepfm",
    "xdeepfm",
    "autoint",
    "dcnv2",
    "gdcn",
    "dcnv3",
    "masknet",
    "finalmlp",
    "finalnet",
    "wukong",
)
BATCH: Final = 2048


def main(*, quick: bool) -> None:
    import torch

    from rayrec import models
    from rayrec.datasets.criteo import SCHEMA
    from rayrec.models.base import ModelInputs
    from rayrec.models.cost import network_cost
    from rayrec.native import keep_freed_memory
    from rayrec.recipes import criteo_kaggle

    keep_freed_memory()
    logging.disable(logging.WARNING)
    torch.set_num_threads(os.cpu_count() or 1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tempfile.mkdtemp()}/init", rank=0, world_size=1
    )
    rounds, steps = (2, 5) if quick else (3, 10)
    batches = batches_of(BATCH, number=steps)
    inputs = ModelInputs.from_schema(SCHEMA)
    workload: Any = criteo_kaggle("").workload
    for name in MODELS:
        with part("models", name):
            cls = models.config_class(name)
            assert cls is not None
            config = (
                workload.model if isinstance(workload.model, cls) else cls.replacing(workload.model)
            )
            setup = setup_of("sparse_adam", batch_size=BATCH, model=config)
            plain = _plain(config, inputs)
            spent: dict[str, list[float]] = {"ours": [], "plain": []}
            for number in range(rounds + 1):
                measured = times(setup, cycle(batches), steps)[0], _seconds(plain, batches)
                if number:  # the first round warms up
                    for seconds, times_s in zip(measured, spent.values(), strict=True):
                        times_s.append(seconds)
            ours, theirs = (
                steps * BATCH / statistics.median(times_s) for times_s in spent.values()
            )
            macs = network_cost(build_network(config, inputs), inputs, config).multiply_adds or 0
            note(f"  {name}: {ours:,.0f} rows/s, plain PyTorch {theirs:,.0f}: {ours / theirs:.2f}")
            emit(
                "models",
                peer="the same network in a plain PyTorch loop",
                workload=(
                    f"{name}, {len(SIZES)} tables, {sum(SIZES):,} rows of 16, sparse Adam, batch "
                    f"{BATCH}, 1 worker, no Ray"
                ),
                value=ours,
                ratio=statistics.median(b / a for a, b in zip(*spent.values(), strict=True)),
                repeats=rounds,
                peer_rows_per_s=round(theirs),
                multiply_adds_per_row=macs,
                gflop_per_s=round(6 * macs * ours / 1e9, 1),
            )
    torch.distributed.destroy_process_group()


def _plain(config: Any, inputs: Any) -> Any:
    import torch
    from peers.plain_clicks import PlainClicks

    torch.manual_seed(0)
    return PlainClicks(
        build_network(config, inputs), inputs.features, SIZES, dim=config.table_width
    )


def _seconds(plain: Any, batches: list[Any]) -> float:
    start = time.perf_counter()
    for batch in batches:
        plain.step(batch)
    return time.perf_counter() - start
