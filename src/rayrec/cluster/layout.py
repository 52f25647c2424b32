"""Assignment of cluster and machine resources to workers and data tasks, and this process's place
among torchrun's processes.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from rayrec import host_resources
from rayrec.config import InputError
from rayrec.data.engine import TaskPlacement
from rayrec.humanize import size_text

DataNodes = Literal["auto", "any", "separate"]
"""Placement of data tasks; see `layout`."""
_OBJECT_STORE_FRACTION = 0.25
"""Fraction of the object store for prefetched training data; the rest is for vocabularies and
slack.
"""
_ENOUGH_CPUS = 4.0
"""CPUs per worker for data tasks that suffice to keep these off the workers' nodes."""
_ROUNDING = 1e-4
"""Resolution of Ray's resource counts."""


@dataclass(frozen=True)
class TorchrunEnv:
    """Rank of this process in its group, from torchrun's variables."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restarts: int
    is_torchrun: bool = field(default=True, kw_only=True)
    """Whether torchrun started this process. If not, it trains alone."""
    num_cpus: int | None = field(default=None, kw_only=True)
    """Granted CPUs of this machine. None for all usable ones."""

    @classmethod
    def alone(cls, num_cpus: int | None) -> Self:
        """Return the only process of a run, limited to `num_cpus` CPUs."""
        return cls(0, 1, 0, 1, 0, is_torchrun=False, num_cpus=num_cpus)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Return this process by its variables, or None without torchrun. Raises InputError if they
        are inconsistent.
        """
        if any(
            name not in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        ):
            return None
        defaults = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
        names = ("RANK", "WORLD_SIZE", *defaults)
        try:
            env = cls(*(int(environment.get(name, defaults.get(name, ""))) for name in names))
        except ValueError:
            values = ", ".join(
                f"{name}={environment[name]}" for name in names if name in environment
            )
            raise InputError(f"{values}: variables of torchrun must be integers") from None
        if not 0 <= env.rank < env.world_size or not 0 <= env.local_rank < env.local_world_size:
            raise InputError(
                f"RANK={env.rank} of WORLD_SIZE={env.world_size}, LOCAL_RANK={env.local_rank} of "
                f"LOCAL_WORLD_SIZE={env.local_world_size}: a rank must be below the number of "
                "processes. With srun, export RANK=$SLURM_PROCID, LOCAL_RANK=$SLURM_LOCALID and "
                "LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE"
            )
        return env

    @property
    def cpus(self) -> int:
        """CPUs for this process."""
        return max(1, self.usable_cpus // self.local_world_size)

    @property
    def usable_cpus(self) -> int:
        """CPUs for all processes of this machine."""
        return host_resources.usable_cpus(granted=self.num_cpus)


@dataclass(frozen=True)
class Node:
    """Alive node of a cluster."""

    node_id: str
    resources: dict[str, float]


@dataclass(frozen=True)
class Layout:
    """Allocation of cluster resources to a run."""

    num_workers: int
    cpus_per_worker: float
    worker_resources: dict[str, float]
    """Resources reserved by each training worker."""
    per_worker: TaskPlacement
    """Placement of each worker's data tasks during training."""
    driver: TaskPlacement
    """Placement of data tasks while no worker runs."""
    workers_only: frozenset[str] = frozenset()
    """Ids of nodes without data tasks. Nodes that join later accept data tasks."""
    num_nodes: int = 1
    idle_cpus: float = 0.0
    """CPUs of nodes that are unsuitable for workers, if data tasks nevertheless run on all
    nodes.
    """

    def text(self) -> str:
        reserved = ", ".join(f"{amount:g} {name}" for name, amount in self.worker_resources.items())
        num_data = self.num_nodes - len(self.workers_only)
        nodes = (
            f"{num_data} of {self.num_nodes} nodes, without workers"
            if self.workers_only
            else f"all {self.num_nodes} nodes"
        )
        line = (
            f"{self.num_workers} workers, each with {reserved}; data tasks on {nodes}, "
            f"{self.per_worker.max_cpus or 0:.3g} CPUs for each worker"
        )
        if self.idle_cpus:
            each = self.idle_cpus / self.num_workers
            line += (
                f" (nodes without workers have {each:.2g} for each; --cluster.data-nodes separate "
                "uses those alone)"
            )
        return line


def _training_nodes(nodes: list[Node], required: dict[str, float], special: set[str]) -> list[Node]:
    """Return the nodes with enough special resources for a worker. Raises InputError if none has
    enough.
    """
    training = [
        node
        for node in nodes
        if all(node.resources.get(name, 0) >= required[name] for name in special)
    ]
    if training:
        return training
    needed = ", ".join(f"{required[name]:g} {name}" for name in sorted(special))
    have = ", ".join(
        f"{sum(node.resources.get(name, 0) for node in nodes):g} {name}" for name in sorted(special)
    )
    gpus = (
        "To train on CPUs, omit --gpus and set --scaling.no-use-gpu. `rayrec doctor` shows "
        "the GPUs that torch sees"
    )
    fix = gpus if "GPU" in special else "Change scaling.resources_per_worker"
    raise InputError(
        f"scaling: a worker needs {needed} on one machine, and all machines together have "
        f"{have}. {fix}"
    )


def layout(
    nodes: list[Node],
    *,
    num_workers: int | tuple[int, int],
    use_gpu: bool,
    cpus_per_worker: float | None,
    resources_per_worker: dict[str, float],
    data_nodes: DataNodes,
    task_memory_bytes: int | None = None,
) -> Layout:
    """Allocate a cluster's resources: number of workers (from a minimum to a maximum), their
    resources, the nodes of data tasks, and the data CPUs per worker. Pure. If only some nodes have
    the workers' special resources (GPUs, custom resources), `data_nodes` places data tasks: auto on
    the other nodes if they have enough CPUs for each worker, separate always on the other nodes,
    any on all nodes. `task_memory_bytes` is the memory that a data task reserves. Raises InputError
    if the minimum number of workers does not fit or leaves data tasks no CPU or memory, and for
    separate without other nodes.
    """
    min_workers, max_workers = (
        (num_workers, num_workers) if isinstance(num_workers, int) else num_workers
    )
    required = dict(resources_per_worker)
    if use_gpu:
        required.setdefault("GPU", 1.0)
    special = required.keys() - {"CPU"}
    if min_workers < max_workers and not special and cpus_per_worker is None:
        raise InputError(
            f"scaling.num_workers {min_workers} to {max_workers}: how many fit depends on the "
            "resources of a worker. Set --scaling.cpus-per-worker, --scaling.use-gpu or "
            "--scaling.resources-per-worker"
        )
    training = _training_nodes(nodes, required, special)
    # Without special resources, every node suits workers, and there are no others.
    other_nodes = [node for node in nodes if node not in training]
    if data_nodes == "separate" and not _cpus(other_nodes):
        raise InputError(
            "cluster.data_nodes separate: every node with CPUs suits workers. Add other nodes, or "
            "choose auto"
        )
    # The most workers that fit. If not even the fewest fit, the reason is theirs.
    for workers in range(max_workers, min_workers - 1, -1):
        enough = has_enough_cpus(
            _cpus(other_nodes),
            all_cpus=_cpus(nodes),
            workers=workers,
            cpus_per_worker=cpus_per_worker or float(use_gpu),
        )
        is_separate = {"separate": True, "auto": enough, "any": False}[data_nodes]
        usual = 1.0 if use_gpu or is_separate else min(1.0, _cpus(training) / (2 * max_workers))
        each = usual if cpus_per_worker is None else cpus_per_worker
        assignment = _Assignment(
            workers, each, {"CPU": each, **required}, nodes, training, other_nodes, is_separate
        )
        unfit_reason = assignment.unfit_reason()
        if unfit_reason is None:
            return assignment.layout(task_memory_bytes)
    raise InputError(unfit_reason)


@dataclass(frozen=True)
class _Assignment:
    """Assignment of a cluster's nodes to workers and data tasks, which may not fit."""

    workers: int
    cpus_per_worker: float
    worker_resources: dict[str, float]
    nodes: list[Node]
    training: list[Node]
    """Nodes that suit workers."""
    other_nodes: list[Node]
    is_separate: bool
    """Whether data tasks run on the other nodes alone."""

    @property
    def data_cpus(self) -> float:
        """CPUs of all data tasks."""
        if self.is_separate:
            return _cpus(self.other_nodes)
        return _cpus(self.nodes) - self.cpus_per_worker * self.workers

    def unfit_reason(self) -> str | None:
        """Return why the workers do not fit, or None."""
        reason = _unfit_reason(self.workers, self.training, self.worker_resources)
        if reason is None and self.data_cpus <= 0:
            reason = (
                f"scaling: {self.workers} workers reserve all {_cpus(self.nodes):g} CPUs and leave "
                "none for data tasks. Lower --scaling.cpus-per-worker or --scaling.num-workers"
            )
        return reason

    def layout(self, task_memory_bytes: int | None) -> Layout:
        """Return the layout of workers that fit. Raises InputError if a data task does not fit."""
        takes_data = self.other_nodes if self.is_separate else self.nodes
        _check_memory(takes_data, task_memory_bytes)
        store = sum(node.resources.get("object_store_memory", 0) for node in takes_data)
        workers_only: frozenset[str] = frozenset()
        selector = None
        if self.is_separate:
            workers_only = frozenset(node.node_id for node in self.training)
            # Excludes workers' nodes instead of listing the others, so that nodes that join later
            # accept data tasks.
            selector = {"ray.io/node-id": f"!in({','.join(sorted(workers_only))})"}
        data_cpus = self.data_cpus / self.workers
        return Layout(
            num_workers=self.workers,
            cpus_per_worker=self.cpus_per_worker,
            worker_resources=self.worker_resources,
            per_worker=TaskPlacement(
                num_cpus=min(1.0, data_cpus),
                memory_bytes=task_memory_bytes,
                max_cpus=data_cpus,
                max_object_store_bytes=int(store * _OBJECT_STORE_FRACTION / self.workers) or None,
                label_selector=selector,
            ),
            driver=TaskPlacement(
                num_cpus=min(1.0, _cpus(takes_data)),
                memory_bytes=task_memory_bytes,
                label_selector=selector,
            ),
            workers_only=workers_only,
            num_nodes=len(self.nodes),
            idle_cpus=0.0 if self.is_separate else _cpus(self.other_nodes),
        )


def _check_memory(nodes: list[Node], task_memory_bytes: int | None) -> None:
    """Check that one of the nodes has the memory of a data task, or an unknown size. Raises
    InputError.
    """
    memory = max(
        (node.resources["memory"] for node in nodes if "memory" in node.resources),
        default=math.inf,
    )
    if task_memory_bytes is not None and task_memory_bytes > memory:
        raise InputError(
            f"cluster.data_task_memory_bytes: a data task needs {size_text(task_memory_bytes)}, "
            f"but its nodes have at most {size_text(memory)}. Lower it, or raise "
            "`ray start --memory`"
        )


def has_enough_cpus(
    other_nodes: float, *, all_cpus: float, workers: int, cpus_per_worker: float
) -> bool:
    """Return whether other nodes' CPUs suffice for data tasks: 4 per worker, or half its share if
    all nodes run them. Pure.
    """
    if other_nodes <= 0:
        return False
    shared = (all_cpus - cpus_per_worker * workers) / workers
    return other_nodes / workers >= min(_ENOUGH_CPUS, shared / 2)


def _cpus(nodes: list[Node]) -> float:
    return sum(node.resources.get("CPU", 0) for node in nodes)


def _unfit_reason(
    num_workers: int, nodes: list[Node], worker_resources: dict[str, float]
) -> str | None:
    """Return why the workers do not fit on the nodes, or None."""
    # scarce resources first
    for name, each in sorted(worker_resources.items(), key=lambda item: item[0] == "CPU"):
        have = sum(node.resources.get(name, 0) for node in nodes)
        if have < each * num_workers:
            other = "--scaling.cpus-per-worker" if name == "CPU" else "add nodes"
            return (
                f"scaling: {num_workers} workers need {each * num_workers:g} {name}, but the "
                f"cluster has {have:g} for them. Lower --scaling.num-workers or {other}"
            )
    capacity = sum(
        min(
            int(node.resources.get(name, 0) / each + 1e-9)
            for name, each in worker_resources.items()
            if each
        )
        for node in nodes
    )
    if capacity < num_workers:
        return (
            f"scaling: {num_workers} workers with {worker_resources} each do not fit on the nodes, "
            f"only {capacity} do. Lower --scaling.num-workers or the resources per worker, or add "
            "nodes"
        )
    return None


def nodes_for_tasks(
    nodes: list[Node], placement_groups: Sequence[Mapping[str, Any]], allocation: Layout
) -> list[Node]:
    """Return the nodes that can run data tasks, with the resources that placement groups (as in
    Ray's table) leave. Pure.
    """
    left = {
        node.node_id: dict(node.resources)
        for node in nodes
        if node.node_id not in allocation.workers_only
    }
    for group in placement_groups:
        if group["state"] == "REMOVED":
            continue
        for bundle, node_id in group["bundles_to_node_id"].items():
            for name, amount in group["bundles"][bundle].items():
                if node_id in left:
                    left[node_id][name] = left[node_id].get(name, 0.0) - amount
    task = allocation.per_worker
    needs = {"CPU": task.num_cpus - _ROUNDING, "memory": task.memory_bytes or 0.0}
    return [
        Node(node_id, resources)
        for node_id, resources in left.items()
        if all(resources.get(name, 0.0) >= amount for name, amount in needs.items())
    ]
