"""Reaches a Ray cluster, or starts a local one, and decides what of it trains and what of it prepares data."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rayrec.cluster import forked_worker
from rayrec.cluster.fork_server import ForkServer
from rayrec.config import Config, InputError
from rayrec.data.engine import TaskPlacement

DataNodes = Literal["auto", "any", "separate"]
"""Where data tasks run: see `layout`."""

IN_PROCESS: Final = "none"
"""The address that asks for no Ray: all work in the command's own process."""
_OBJECT_STORE_SHARE = 0.25
"""Part of the cluster's object store that ingest may fill ahead of training; the rest holds vocabularies and slack."""


_ENOUGH_CPUS = 4.0
"""CPUs for each worker's data tasks that are enough to keep them off the workers' nodes."""
_LOCAL_ENVIRONMENT: Final = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_worker_maximum_startup_concurrency": "64",
}
"""Of the processes of a local Ray. Its only node is not drained, so a process that watches for that would be in vain. By default
a process waits while as many others start as there are CPUs."""
_SUBMITTED: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable in which Ray gives a submitted job its configuration, as JSON."""
_OWN_PYTHON: Final = frozenset({"py_executable", "pip", "uv", "conda", "container", "image_uri"})
"""Fields of a runtime environment that say which Python runs."""
_started: set[str] = set()
"""Addresses of the local Rays that this process started."""
_fork_server: ForkServer | None = None
"""Of all of them."""
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
    num_nodes: int = 1
    """Nodes of the cluster."""
    idle_cpus: float = 0.0
    """CPUs of nodes that cannot hold workers, if data tasks nevertheless run on all nodes."""

    def text(self) -> str:
        """One line: the workers, what each reserves, and where their data tasks run."""
        reserved = ", ".join(f"{amount:g} {name}" for name, amount in self.worker_resources.items())
        num_data = self.num_nodes - len(self.workers_only)
        where = (
            f"{num_data} of {self.num_nodes} nodes, without workers"
            if self.workers_only
            else f"all {self.num_nodes} nodes"
        )
        line = (
            f"{self.num_workers} workers, each with {reserved}; data tasks on {where}, {self.per_worker.max_cpus or 0:.3g} CPUs "
            "for each worker"
        )
        if self.idle_cpus:
            each = self.idle_cpus / self.num_workers
            line += f" (nodes without workers have {each:.2g} for each; --cluster.data-nodes separate uses those alone)"
        return line


def is_in_process(address: str | None) -> bool:
    """Whether what one process can do is done without Ray: the address asks for that, or nothing names a Ray: no address, no
    RAY_ADDRESS, no connection that this process has."""
    if address is not None:
        return address == IN_PROCESS
    return not is_connected() and not os.environ.get("RAY_ADDRESS")


def is_connected() -> bool:
    """Whether this process has a connection to Ray; does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized()


def connect(
    address: str | None,
    *,
    num_cpus: int | None,
    object_store_bytes: int | None,
    log_to_driver: bool,
    ahead: Sequence[str] = (),
) -> str:
    """Connects this process to Ray and returns the address of its head: of the existing connection, of the cluster at `address`
    or RAY_ADDRESS (None: RAY_ADDRESS), or of a new local Ray, which imports the modules `ahead` for processes that name them.

    Raises InputError within some 20 s if the address does not answer, and if the cluster refuses this user or this environment;
    OSError if a local Ray does not start.
    """
    if address == IN_PROCESS:
        raise InputError(f"address {IN_PROCESS}: this needs Ray; leave the address out, or give local or HOST:PORT")
    # Ray 2.60 turns token authentication on for clusters it starts; the token file serves this user alone.
    import ray

    require_direct(address)
    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    address, source = _named(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address and address != "local":
        _join(address, source, log_to_driver=log_to_driver)
    else:
        _start(num_cpus=num_cpus, object_store_bytes=object_store_bytes, log_to_driver=log_to_driver, ahead=ahead)
    import ray.data  # sets up its own logger, which is then quietened

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray.get_runtime_context().gcs_address


def require_direct(address: str | None) -> None:
    """Raise InputError if this process is connected to Ray, or by this address (None: RAY_ADDRESS) would be, through Ray's client
    server: then it has no node of the cluster, as rayrec needs."""
    named, source = _named(address)
    if is_connected():
        from ray.util.client import ray as client

        named, source = "ray://" if client.is_connected() else "", "ray.init"
    if named.startswith("ray://"):
        raise InputError(
            f"{source}: must be reached directly, got Ray's client server (ray://). Run the command on a node of the cluster, "
            "with HOST:PORT of its head or auto as the address, or submit the command as a job (`ray job submit`)"
        )


def _named(address: str | None) -> tuple[str, str]:
    """The address that is given or that RAY_ADDRESS names, or nothing; and what to call it."""
    of_environment = os.environ.get("RAY_ADDRESS", "")
    return (address, address) if address else (of_environment, f"RAY_ADDRESS={of_environment}")


def _join(address: str, source: str, *, log_to_driver: bool) -> None:
    import ray

    from rayrec.cluster.head import require_head
    from rayrec.cluster.node_storage import runtime_env

    job_env = {**(runtime_env(os.environ) or {}), **_python_of_workers(os.environ)}
    require_head(address, source=source)
    try:
        ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.ERROR, runtime_env=job_env or None)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{source}: the Ray cluster answers, but this machine cannot join it ({_in_one_line(error)}); run the command on "
            "one of its nodes"
        ) from None


def _python_of_workers(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of a job's runtime environment that has the nodes fork its processes (`forked_worker.py`). Empty in a job that was
    submitted with a Python of its own. Pure."""
    submitted = json.loads(environment.get(_SUBMITTED, "{}")).get("runtime_env") or {}
    if not _OWN_PYTHON.isdisjoint(submitted):
        return {}
    return {"py_executable": forked_worker.python_of_a_job()}


def _start(*, num_cpus: int | None, object_store_bytes: int | None, log_to_driver: bool, ahead: Sequence[str]) -> None:
    global _fork_server
    if _fork_server is None:
        _fork_server = ForkServer(ahead)  # imports while Ray starts
    import ray

    from rayrec.compat.ray_compat import local_node_with

    own = {**_LOCAL_ENVIRONMENT, forked_worker.SOCKET: _fork_server.address}
    try:
        with _inherited(own), local_node_with(worker_program=forked_worker.__file__, log_monitor=log_to_driver):
            ray.init(
                address="local",
                num_cpus=num_cpus,
                object_store_memory=object_store_bytes,
                log_to_driver=log_to_driver,
                logging_level=logging.ERROR,
                include_dashboard=False,
            )
        _started.add(ray.get_runtime_context().gcs_address)
    except ValueError as error:  # of too small an object store, for one
        raise InputError(f"a local Ray does not start: {_in_one_line(error)}") from None
    except Exception as error:  # Ray 2.60 raises no narrower class if its processes are not up in 30 s
        raise OSError(
            f"a local Ray did not start ({_in_one_line(error)}); the machine may be short of CPU, memory or disk: look at "
            "/tmp/ray/session_latest/logs, then give the same command again"
        ) from None


def is_own() -> bool:
    """Whether the Ray that this process is connected to is one of this machine alone that it started itself."""
    import ray

    return is_connected() and ray.get_runtime_context().gcs_address in _started


def train_environment() -> dict[str, str]:
    """The variables that Ray Train's controller has from the start of the connected Ray, beside this process's own, and hands on
    to its workers."""
    return {name: value for name, value in _LOCAL_ENVIRONMENT.items() if name.startswith("RAY_TRAIN_") and is_own()}


@contextlib.contextmanager
def _inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Within it processes that are started have these variables, except those that are set already."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def connect_for_data(address: str | None) -> TaskPlacement:
    """Connects to Ray for work that has no training beside it; returns where its data tasks may run."""
    connect(address, num_cpus=None, object_store_bytes=None, log_to_driver=False)
    return TaskPlacement(num_cpus=1.0)


def ship_code(config: Config) -> None:
    """Makes Ray send the user's own modules as code to its processes, whose nodes then do not need the files: the modules of the
    classes of `config` and of the configurations nested in it, but not what these modules import."""
    modules = own_modules(config)
    if modules:
        import ray

        for module in modules:
            ray.cloudpickle.register_pickle_by_value(sys.modules[module])


def own_modules(config: Config) -> set[str]:
    """Names of the modules outside rayrec that define the class of `config` or of a configuration nested in it. Without
    `__main__`, because pickle sends its classes as code already."""
    nested = (getattr(config, field.name) for field in dataclasses.fields(config))
    modules = set().union(*(own_modules(value) for value in nested if isinstance(value, Config)))
    module = type(config).__module__
    return modules | ({module} if module.partition(".")[0] not in ("rayrec", "__main__") else set())


def alive_nodes(*, probe: bool = False, free: bool = False) -> list[Node]:
    """The nodes that Ray believes alive, less those that it was told will go; with `probe` those that also take a connection.
    Ray needs some 15 s to see that one is gone, and a reservation of workers on it waits in vain. With `free` their
    resources are those that nobody holds now."""
    import ray

    from rayrec.compat.ray_compat import state

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
    data_nodes: DataNodes,
) -> Layout:
    """Assigns a cluster's resources: the number of workers (between a least and a most), what each reserves, where data tasks may
    run and how many CPUs each worker's data pipeline gets. Pure.

    If some nodes have what workers need (GPUs, or named resources) and others do not, `data_nodes` chooses where data tasks run:
    with auto on the others alone if those have enough CPUs for each worker, with separate on the others alone in any case, with
    any on all nodes. Raises InputError if (the least) workers do not fit, if they would leave data tasks no CPU, and for separate
    if there are no other nodes.
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
    if data_nodes == "separate" and not _cpus(others):
        raise InputError(
            "cluster.data_nodes separate: every node with CPUs has what workers need; add nodes without, or choose auto"
        )
    misfit = None
    for chosen in range(most, least - 1, -1):
        apart = data_nodes == "separate" or (
            data_nodes == "auto"
            and has_enough_cpus(
                _cpus(others), all_cpus=_cpus(nodes), workers=chosen, cpus_per_worker=cpus_per_worker or float(use_gpu)
            )
        )
        usual = 1.0 if use_gpu or apart else min(1.0, _cpus(training) / (2 * most))
        each = usual if cpus_per_worker is None else cpus_per_worker
        worker_resources = {"CPU": each, **wanted}
        free = _cpus(others) if apart else _cpus(nodes) - each * chosen
        misfit = _misfit(chosen, training, worker_resources) or (
            f"scaling: {chosen} workers reserve all {_cpus(nodes):g} CPUs and leave none for data tasks; "
            "lower --scaling.cpus-per-worker or --scaling.num-workers"
            if free <= 0
            else None
        )
        if misfit is None:
            break
    if misfit is not None:
        raise InputError(misfit)
    share = free / chosen
    takes_data = others if apart else nodes
    store = sum(node.resources.get("object_store_memory", 0) for node in takes_data)
    workers_only = frozenset(node.node_id for node in training) if apart else frozenset()
    # Not the ids of the others: nodes that join later take data tasks too.
    selector = {"ray.io/node-id": f"!in({','.join(sorted(workers_only))})"} if apart else None
    return Layout(
        num_workers=chosen,
        cpus_per_worker=each,
        worker_resources=worker_resources,
        per_worker=TaskPlacement(
            num_cpus=min(1.0, share),
            max_cpus=share,
            max_object_store_bytes=int(store * _OBJECT_STORE_SHARE / chosen) or None,
            label_selector=selector,
        ),
        driver=TaskPlacement(num_cpus=min(1.0, _cpus(takes_data)), label_selector=selector),
        workers_only=workers_only,
        num_nodes=len(nodes),
        idle_cpus=0.0 if apart else _cpus(others),
    )


def has_enough_cpus(others: float, *, all_cpus: float, workers: int, cpus_per_worker: float) -> bool:
    """Whether nodes without workers, with `others` CPUs in all, suffice for the data tasks of so many workers: each worker gets 4
    CPUs, or half of what it would get if data tasks ran on all nodes. Pure."""
    if others <= 0:
        return False
    shared = (all_cpus - cpus_per_worker * workers) / workers
    return others / workers >= min(_ENOUGH_CPUS, shared / 2)


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
