"""The pool of processes or threads that scores blocks of rows: its size, and the ordered scores that it gives."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

import pyarrow as pa

from rayrec.checkpoint import Checkpoint
from rayrec.config import InputError
from rayrec.data.engine import in_order
from rayrec.quantities import size_text

if TYPE_CHECKING:
    import ray.data

    from rayrec.cluster.layout import Node
    from rayrec.workloads.scoring import Device, Scoring


_PROCESS_BYTES = 1 << 30
"""Memory of a scoring process beside its weights: torch and Ray, a block's rows, its columns and activations."""


@dataclass(frozen=True)
class Pool:
    """The processes that score, or the threads of one."""

    num_actors: int
    cpus_per_actor: float
    gpus_per_actor: float


def plan_pool(
    nodes: Sequence[Node],
    *,
    weight_bytes: int,
    blocks: int,
    spare_cpus: int,
    device: Device,
    shared_weights: bool = False,
) -> Pool:
    """How many processes score, and with how many cores each: as many as memory lets hold the weights. Pure.

    `spare_cpus` stay free for whatever the caller's Dataset does next, if there are that many. `shared_weights`: the members are
    threads, one a core, that share the weights. Raises InputError if no node can hold the weights or, for "cuda", has a GPU.
    """
    if device == "cuda":
        num_gpus = int(sum(node.resources.get("GPU", 0) for node in nodes))
        if not num_gpus:
            raise InputError("device: cuda needs a GPU, and there is none; score on cpu")
        return Pool(max(1, min(num_gpus, blocks)), 1.0, 1.0)
    needed = weight_bytes + _PROCESS_BYTES
    if shared_weights:
        (node,) = nodes
        if node.resources["memory"] < needed:
            raise InputError(
                f"scoring needs {size_text(needed)} of memory for the weights, this machine has "
                f"{size_text(node.resources['memory'])} free; free some, or use a larger machine"
            )
        return Pool(max(1, min(int(node.resources["CPU"]), blocks)), 1.0, 0.0)
    usable = [(node.resources.get("CPU", 0.0), int(node.resources.get("memory", 0) // needed)) for node in nodes]
    usable = [(cpus, fitting) for cpus, fitting in usable if cpus > 0 and fitting > 0]
    if not usable:
        largest = max((node.resources.get("memory", 0) for node in nodes), default=0)
        raise InputError(
            f"scoring needs {size_text(needed)} of memory on one node for the weights, the largest node offers "
            f"Ray {size_text(largest)}; use larger nodes"
        )
    cpus_each = max(_cpus_each(cpus, fitting) for cpus, fitting in usable)
    num_actors = sum(int(cpus // cpus_each) for cpus, _ in usable)
    free = sum(cpus for cpus, _ in usable) - num_actors * cpus_each
    while free < spare_cpus and num_actors > 1:
        num_actors -= 1
        free += cpus_each
    if free < spare_cpus:
        cpus_each = max(cpus_each - spare_cpus, cpus_each / 2)
    return Pool(max(1, min(num_actors, blocks)), cpus_each, 0.0)


def _cpus_each(cpus: float, fitting: int) -> float:
    """Cores of each of as many processes as fit on a node, one a core at most."""
    return math.ceil(int(cpus) / min(fitting, int(cpus))) if cpus >= 1 else cpus


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Size of all weights, without optimizer state."""
    tensors = checkpoint.manifest()["tensors"]
    return sum(
        chunk["bytes"] for name, entry in tensors.items() if name.startswith("model.") for chunk in entry["chunks"]
    )


@final
class _ScoringProcess:
    """One scoring process. The model is loaded with the first block, so that a damaged one fails as a task does."""

    def __init__(self, load: Callable[[Device], Callable[[int], pa.Table]], device: Device, threads: int) -> None:
        import torch

        from rayrec.layers.cpu_watch import CpuWatch

        torch.set_num_threads(threads)
        self._watch = CpuWatch()
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
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext, ExecutionOptions

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


def scored_tables(scoring: Scoring, *, pool: Pool, device: Device, first_block: int = 0) -> Iterator[pa.Table]:
    """A table of scores a block of rows, in order, from block `first_block` on; the same as processes on Ray make."""
    import torch

    threads = torch.get_num_threads()
    shared = scoring.load(device) if scoring.thread_safe else None
    own = threading.local()

    def scored(number: int) -> pa.Table:
        if not hasattr(own, "score"):
            torch.set_num_threads(max(1, int(pool.cpus_per_actor)))  # of operators that this thread calls
            own.score = shared or scoring.load(device)
        return own.score(number)

    try:
        yield from in_order(
            scored,
            range(first_block, scoring.num_blocks),
            name="score",
            num_threads=pool.num_actors,
            ahead=2,
        )
    finally:
        torch.set_num_threads(threads)
