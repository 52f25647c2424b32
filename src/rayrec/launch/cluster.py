"""Reaches a Ray cluster, or starts a local one, and decides what of it trains and what of it prepares data."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayrec.config import InputError
from rayrec.data.placement import TaskPlacement

_OBJECT_STORE_SHARE = 0.25
"""Part of the cluster's object store that ingest may fill ahead of training; the rest holds vocabularies and slack."""


_PROBE_S = 2.0
_ROUNDING = 1e-4
"""Ray counts resources in ten-thousandths."""


@dataclass(frozen=True)
class Node:
    """One alive node of a cluster."""

    node_id: str
    resources: dict[str, float]


@dataclass(frozen=True)
class Layout:
    """How a run shares out a cluster."""

    num_workers: int
    cpus_per_worker: float
    worker_resources: dict[str, float]
    """What each training worker reserves."""
    per_worker: TaskPlacement
    """What each worker's data pipeline may use while training."""
    driver: TaskPlacement
    """What data tasks may use while no worker runs."""
    workers_only: frozenset[str] = frozenset()
    """Ids of the nodes that data tasks stay off; nodes that join later take data tasks."""


def connect(address: str | None, *, num_cpus: int | None, object_store_bytes: int | None, log_to_driver: bool) -> str:
    """Connects this process to Ray and returns the address of its head: of the existing connection, of the cluster at `address`
    or RAY_ADDRESS (None: RAY_ADDRESS), or of a new local Ray.

    Raises InputError within some 20 s if the address does not answer, and if the cluster refuses this user or this environment;
    OSError if a local Ray does not start.
    """
    # Ray 2.60 turns token authentication on for clusters it starts; the token file serves this user alone.
    import ray

    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    source = address or f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}"
    address = address or os.environ.get("RAY_ADDRESS")
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address and address != "local":
        _join(address, source, log_to_driver=log_to_driver)
    else:
        _start(num_cpus=num_cpus, object_store_bytes=object_store_bytes, log_to_driver=log_to_driver)
    import ray.data  # sets up its own logger, which is then quietened

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray.get_runtime_context().gcs_address


def _join(address: str, source: str, *, log_to_driver: bool) -> None:
    import ray

    from rayrec.launch.head import require_head

    require_head(address, source=source)
    try:
        ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{source}: the Ray cluster answers, but this machine cannot join it ({_in_one_line(error)}); run the command on "
            "one of its nodes"
        ) from None


def _start(*, num_cpus: int | None, object_store_bytes: int | None, log_to_driver: bool) -> None:
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=object_store_bytes,
            log_to_driver=log_to_driver,
            logging_level=logging.ERROR,
            include_dashboard=False,
        )
    except ValueError as error:  # of too small an object store, for one
        raise InputError(f"a local Ray does not start: {_in_one_line(error)}") from None
    except Exception as error:  # Ray 2.60 raises no narrower class if its processes are not up in 30 s
        raise OSError(
            f"a local Ray did not start ({_in_one_line(error)}); the machine may be short of CPU, memory or disk: look at "
            "/tmp/ray/session_latest/logs, then give the same command again"
        ) from None


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def connect_for_data(address: str | None) -> TaskPlacement:
    """Connects to Ray for work that has no training beside it; returns where its data tasks may run."""
    connect(address, num_cpus=None, object_store_bytes=None, log_to_driver=False)
    return TaskPlacement(num_cpus=1.0)


def ship_code(owner: type) -> None:
    """Where a class is the user's own, its module goes to Ray's processes as code: their nodes need not have its file."""
    module = owner.__module__
    if module.partition(".")[0] not in ("rayrec", "__main__"):  # whose classes go as code anyway
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[module])


def alive_nodes(*, probe: bool = False, free: bool = False) -> list[Node]:
    """The nodes that Ray believes alive, less those that it was told will go; with `probe` those that also take a connection.
    Ray needs some 15 s to see that one is gone, and whoever reserves workers on it waits for them in vain. With `free` their
    resources are those that nobody holds now."""
    import ray
    from ray._private import state  # of nodes that are to go, and of what is free on each, Ray tells nowhere else

    leaving = state.state.get_draining_nodes()
    left = state.available_resources_per_node() if free else {}
    return [
        Node(node["NodeID"], left.get(node["NodeID"], {}) if free else node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
        and node["NodeID"] not in leaving
        and (not probe or _answers(node["NodeManagerAddress"], node["NodeManagerPort"]))
    ]


def data_nodes(shares: Layout, *, probe: bool = False) -> list[Node]:
    """The nodes that can run data tasks of a run with this layout now, with the CPUs that are left for such tasks.

    A node counts if it is alive, is not about to be drained, is not kept for workers, and has the CPUs of one task beyond what
    placement groups (the run's workers, and those of other jobs) reserve on it. CPUs that tasks hold at the moment count: tasks
    end. With `probe` a node must also take a TCP connection: Ray needs some 15 s to see that a node is gone.

    If the list is empty, Ray queues the run's data tasks without an error until such a node joins. Needs a connection to Ray;
    makes three short calls to its head, so poll it every few seconds at most. Call it on the driver.
    """
    from ray.util.placement_group import placement_group_table

    return with_room_for_tasks(alive_nodes(probe=probe), list(placement_group_table().values()), shares)


def with_room_for_tasks(nodes: list[Node], placement_groups: Sequence[Mapping[str, Any]], shares: Layout) -> list[Node]:
    """The nodes of `nodes` that can run data tasks, with the resources that placement groups (as in Ray's table) leave. Pure."""
    left = {node.node_id: dict(node.resources) for node in nodes if node.node_id not in shares.workers_only}
    for group in placement_groups:
        if group["state"] == "REMOVED":
            continue
        for bundle, node_id in group["bundles_to_node_id"].items():
            for name, amount in group["bundles"][bundle].items():
                if node_id in left:
                    left[node_id][name] = left[node_id].get(name, 0.0) - amount
    enough = shares.per_worker.num_cpus - _ROUNDING
    return [Node(node_id, resources) for node_id, resources in left.items() if resources.get("CPU", 0.0) >= enough]


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


def layout(
    nodes: list[Node],
    *,
    num_workers: int | tuple[int, int],
    use_gpu: bool,
    cpus_per_worker: float | None,
    resources_per_worker: dict[str, float],
    keep_data_off_workers: bool,
) -> Layout:
    """Shares out a cluster: how many workers (of least and most), what one reserves, where data tasks may run and how many
    CPUs each pipeline of them gets. Pure.

    Where some nodes have what workers need (GPUs, or the named resources) and others do not, data tasks go to the
    others. Raises InputError where (the least) workers do not fit, or where they would leave data tasks no CPU.
    """
    least, most = (num_workers, num_workers) if isinstance(num_workers, int) else num_workers
    wanted = dict(resources_per_worker)
    if use_gpu:
        wanted.setdefault("GPU", 1.0)
    special = {name for name in wanted if name != "CPU"}
    if least < most and not special and cpus_per_worker is None:
        raise InputError(
            f"scaling.num_workers {least} to {most}: how many fit depends on what a worker needs; give "
            "--scaling.cpus-per-worker, --scaling.use-gpu or --scaling.resources-per-worker"
        )
    training = [node for node in nodes if all(node.resources.get(name, 0) >= wanted[name] for name in special)]
    if not training:
        have = {name: sum(node.resources.get(name, 0) for node in nodes) for name in sorted(special)}
        raise InputError(
            f"scaling: a worker needs {wanted}, but the cluster has {have}; change scaling.use_gpu or resources_per_worker"
        )
    others = [node for node in nodes if node not in training] if special else []
    apart = bool(others) and keep_data_off_workers and _cpus(others) > 0
    if cpus_per_worker is None:
        cpus_per_worker = 1.0 if use_gpu or apart else min(1.0, _cpus(training) / (2 * most))
    worker_resources = {"CPU": cpus_per_worker, **wanted}
    data_nodes = others if apart else nodes
    for chosen in range(most, least - 1, -1):
        free = _cpus(others) if apart else _cpus(nodes) - cpus_per_worker * chosen
        misfit = _misfit(chosen, training, worker_resources) or (
            f"scaling: {chosen} workers reserve all {_cpus(nodes):g} CPUs and leave none for data tasks; "
            "lower --scaling.cpus-per-worker or --scaling.num-workers"
            if free <= 0
            else None
        )
        if misfit is None:
            break
    else:
        raise InputError(misfit)
    share = free / chosen
    store = sum(node.resources.get("object_store_memory", 0) for node in data_nodes)
    workers_only = frozenset(node.node_id for node in training) if apart else frozenset()
    # Not the ids of the others: nodes that join later take data tasks too.
    selector = {"ray.io/node-id": f"!in({','.join(sorted(workers_only))})"} if apart else None
    return Layout(
        num_workers=chosen,
        cpus_per_worker=cpus_per_worker,
        worker_resources=worker_resources,
        per_worker=TaskPlacement(
            num_cpus=min(1.0, share),
            max_cpus=share,
            max_object_store_bytes=int(store * _OBJECT_STORE_SHARE / chosen) or None,
            label_selector=selector,
        ),
        driver=TaskPlacement(num_cpus=min(1.0, _cpus(data_nodes)), label_selector=selector),
        workers_only=workers_only,
    )


def _cpus(nodes: list[Node]) -> float:
    return sum(node.resources.get("CPU", 0) for node in nodes)


def _misfit(num_workers: int, nodes: list[Node], worker_resources: dict[str, float]) -> str | None:
    """Why so many workers do not fit on the nodes; None where they do."""
    for name, each in sorted(worker_resources.items(), key=lambda item: item[0] == "CPU"):  # what is scarce first
        have = sum(node.resources.get(name, 0) for node in nodes)
        if have < each * num_workers:
            return (
                f"scaling: {num_workers} workers need {each * num_workers:g} {name}, the cluster has {have:g} for them; "
                f"lower --scaling.num-workers{' or --scaling.cpus-per-worker' if name == 'CPU' else ' or add nodes'}"
            )
    room = sum(
        min(int(node.resources.get(name, 0) / each + 1e-9) for name, each in worker_resources.items() if each)
        for node in nodes
    )
    if room < num_workers:
        return (
            f"scaling: {num_workers} workers with {worker_resources} each do not fit on the nodes, {room} do; "
            "lower --scaling.num-workers or what a worker needs, or add nodes"
        )
    return None
