"""Scores blocks of rows in an ordered stream of Ray Data, by processes that each hold the model once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, final

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext, ExecutionOptions

from rayrec.serve.pool import Pool

if TYPE_CHECKING:
    from rayrec.workloads.scoring import Device, Scoring


@final
class _ScoringProcess:
    """One scoring process. The model is loaded with the first block, so that a damaged one fails as a task does."""

    def __init__(self, load: Callable[[Device], Callable[[int], pa.Table]], device: Device, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        logging.getLogger("torch").setLevel(logging.ERROR)  # torchrec's import makes torch.fx warn
        self._load, self._device = load, device

    @cached_property
    def _score(self) -> Callable[[int], pa.Table]:
        return self._load(self._device)

    def __call__(self, numbers: pa.Table) -> pa.Table:
        """The scores of the blocks whose numbers come in column `block`."""
        return pa.concat_tables([self._score(number.as_py()) for number in numbers.column("block")])


def scored_dataset(scoring: Scoring, *, pool: Pool, device: Device, first_block: int = 0) -> ray.data.Dataset:
    """A Dataset with one block of scores a block of rows, in order, from block `first_block` on. Nothing runs until it is read.

    Its input, the blocks' numbers, lies in the object store already: the pool needs no task to feed it, so it may hold
    all CPUs of a cluster, and a single one is enough.
    """
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options = ExecutionOptions(preserve_order=True)
    with DataContext.current(context):
        wanted = range(first_block, scoring.num_blocks)
        numbers = ray.data.from_blocks([pa.table({"block": [number]}) for number in wanted])
        return numbers.map_batches(
            _ScoringProcess,
            fn_constructor_args=(scoring.load, device, max(1, int(pool.cpus_per_actor))),
            batch_size=None,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=pool.num_actors),
            num_cpus=pool.cpus_per_actor,
            num_gpus=pool.gpus_per_actor or None,
        )
