"""How many processes or threads score, and what they hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrec.checkpoint import Checkpoint
from rayrec.config import InputError
from rayrec.quantities import size_text

if TYPE_CHECKING:
    from rayrec.launch.cluster import Node
    from rayrec.workloads.scoring import Device

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
