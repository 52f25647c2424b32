"""Resources of successive attempts on Ray."""

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from builders.faults import fails_with, raising, rejects, until
from ray.train import RunConfig, ScalingConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from rayrec import checkpoint, recipes
from rayrec.cluster import connection, layout, worker_pool

# the real one: tests/conftest.py replaces the module's
from rayrec.cluster.connection import is_connected
from rayrec.cluster.layout import Node
from rayrec.config import InputError
from rayrec.data.engine import TaskPlacement, ThreadEngine
from rayrec.ingest.ray_engine import RayEngine, RayShared
from rayrec.observe.console import Console
from rayrec.training.launchers import process_launcher, ray_launcher, ray_metrics
from rayrec.training.launchers.base import Driver, PreparedRun
from rayrec.training.launchers.process_launcher import ProcessLauncher
from rayrec.training.launchers.ray_launcher import RayLauncher
from rayrec.training.launchers.ray_metrics import ObjectStoreMonitor
from rayrec.training.stop_monitor import Signals
from rayrec.training.trainer import choose_launcher, trains_in_process
from rayrec.workloads.base import TrainConfig

DIED = WorkerGroupError("died", {0: ValueError("no")})
NO_ROOM = ControllerError(WorkerGroupStartupTimeoutError(2))
FINISHED = {"step": 9}
Outcome = Callable[[], dict[str, Any]]


class Cluster:
    """Nodes of `alive_nodes`, with slots and free slots."""

    def __init__(self, *slots: tuple[int, int]) -> None:
        self.slots = list(slots)

    def alive_nodes(self, *, probe: bool = False, free: bool = False) -> list[Node]:
        return [
            Node(str(number), {"CPU": 8.0, "slot": float(each[free])})
            for number, each in enumerate(self.slots)
        ]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster((1, 1), (1, 1))
    monkeypatch.setattr(connection, "alive_nodes", made.alive_nodes)
    monkeypatch.setattr(ray_launcher, "_placement_groups", set)
    monkeypatch.setattr(ray_launcher, "_NODES_S", 0.01)
    return made


def config(**failure: Any) -> TrainConfig:
    return recipes.criteo_demo("none").replace(
        scaling={
            "num_workers": (1, 4),
            "resources_per_worker": {"slot": 1.0},
            "cpus_per_worker": 0.5,
        },
        failure=failure,
    )


class Attempts:
    """Attempts that end with the next of `outcomes`."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        outcomes: list[Outcome],
        desired: TrainConfig,
        folder: Path,
    ) -> None:
        self.num_workers: list[int] = []
        self.is_shared: list[bool] = []
        self.notes: list[str] = []
        self.written: list[tuple[str, dict[str, Any]]] = []
        self.events: Any = SimpleNamespace(
            write=lambda kind, **fields: self.written.append((kind, fields))
        )
        self.signals = Signals()
        monkeypatch.setattr(ray_launcher, "_attempt", self._attempt)
        self._outcomes = iter(outcomes)
        self._config = desired
        self._folder = str(folder)

    def _attempt(self, run: PreparedRun, signals: Signals, *, is_shared: bool) -> Any:
        self.num_workers.append(run.layout.num_workers)
        self.is_shared.append(is_shared)
        return next(self._outcomes)()

    def run(self) -> dict[str, Any] | None:
        shares = ray_launcher.allocate_resources(self._config)
        driver = Driver(self.events, self.signals, self.notes.append)
        return ray_launcher.run_attempts(
            PreparedRun(self._config, self._folder, None, shares, 0.0), driver
        )


def test_failures_with_progress_do_not_accumulate(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = iter(range(1, 100))

    def gets_on() -> dict[str, Any]:
        checkpoint.save(
            checkpoint.step_folder(str(tmp_path), next(saved)), {"a": torch.zeros(1)}, state={}
        )
        raise DIED

    monkeypatch.setattr(ray_launcher.time, "sleep", lambda seconds: None)
    run = Attempts(
        monkeypatch, [gets_on] * 5 + [lambda: FINISHED], config(max_failures=1), tmp_path
    )
    assert run.run() == FINISHED
    assert [kind for kind, _ in run.written] == ["attempt", "failure"] * 5 + ["attempt"]
    run = Attempts(
        monkeypatch, [gets_on, raising(DIED), lambda: FINISHED], config(max_failures=1), tmp_path
    )
    fails_with(WorkerGroupError, "", run.run)
    # That it starts again is told where it does.
    assert [kind for kind, _ in run.written] == ["attempt", "failure", "attempt"]


@pytest.mark.parametrize(
    ("outcome", "reported"),
    [
        pytest.param(
            raising(DIED),
            "worker 0: ValueError: no, before a last checkpoint was made",
            id="raising-DIED",
        ),
        pytest.param(
            lambda: None,
            "SIGTERM, and the last checkpoint made no progress for failure.grace_s (60 s) or took "
            "longer than failure.max_grace_s (600 s)",
            id="None",
        ),
    ],
)
def test_signal_without_last_save_ends_run(
    outcome: Any, reported: str, nodes: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Attempts(
        monkeypatch,
        [outcome],  # type: ignore[list-item]
        config(grace_s=60.0),
        tmp_path,
    )
    run.signals.cause = "SIGTERM"
    assert run.run() is None
    assert run.written[1:] == [("failure", {"cause": reported, "last": True})]


def callbacks_of(trainer_class: type[DataParallelTrainer], folder: Path) -> set[str]:
    """Return the names of the callbacks that a trainer of one worker gives to its controller."""
    scaling = ScalingConfig(num_workers=1)
    run = RunConfig(storage_path=str(folder))
    # Both are typed as Train V1's.
    trainer = trainer_class(
        lambda: None,
        scaling_config=scaling,  # type: ignore[arg-type]
        run_config=run,  # type: ignore[arg-type]
    )
    return {type(callback).__name__ for callback in trainer._create_default_callbacks()}


def test_trainer_leaves_out_two_callbacks(tmp_path: Path) -> None:
    expected = callbacks_of(DataParallelTrainer, tmp_path)
    remaining = callbacks_of(ray_launcher.RayrecTrainer, tmp_path)
    assert expected - remaining == {"PlacementGroupCleanerCallback", "DatasetsCallback"}
    assert remaining < expected
    assert callbacks_of(DataParallelTrainer, tmp_path) == expected


@pytest.mark.parametrize(
    "ending", [raising(KeyboardInterrupt()), raising(InputError("no such column")), lambda: None]
)
def test_abandoned_workers_are_ended(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: Any
) -> None:
    """Only the placement group that the attempt made is removed."""
    another = "00" * 18
    new = "11" * 18
    groups = Mock(side_effect=[{another}, {another, new}])
    monkeypatch.setattr(ray_launcher, "_placement_groups", groups)
    monkeypatch.setattr(ray_launcher, "remove_placement_group", remove := Mock())
    with contextlib.suppress(KeyboardInterrupt, InputError):
        assert Attempts(monkeypatch, [ending], config(), tmp_path).run() is None
    assert [group.args[0].id.hex() for group in remove.call_args_list] == [new]


def test_run_uses_or_waits_for_resources_of_other_jobs(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes.slots = [(1, 1), (1, 0)]
    run = Attempts(
        monkeypatch, [raising(NO_ROOM), lambda: FINISHED], config(max_failures=0), tmp_path
    )
    assert (run.run(), run.num_workers, run.is_shared) == (FINISHED, [2, 1], [False, True])
    # it did not fail: it never began
    assert [kind for kind, _ in run.written] == ["attempt", "attempt"]
    nodes.slots = [(1, 0), (1, 0)]
    run = Attempts(monkeypatch, [raising(NO_ROOM)], config(node_wait_s=0.1), tmp_path)
    rejects("waited 0 s for resources in use by other jobs; scaling: ", run.run)
    first, second = run.notes
    assert first == "Waiting for resources for 2 workers, in use by other jobs"
    assert second.startswith("Waiting for resources in use by other jobs: scaling: ")
    # Without limit, until another job ends years later.
    years = count(0, 10**8)
    monkeypatch.setattr(ray_launcher.time, "monotonic", lambda: next(years))
    monkeypatch.setattr(
        ray_launcher.time, "sleep", lambda seconds: nodes.slots.append((1, next(years) > 10**9))
    )
    run = Attempts(
        monkeypatch,
        [raising(NO_ROOM), lambda: FINISHED],
        config(node_wait_s=-1.0, max_failures=-1),
        tmp_path,
    )
    assert run.run() == FINISHED


def test_scale_up_counts_only_joined_nodes(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(ray_launcher.time, "monotonic", lambda: now_s)

    def looks(growth: Any) -> list[bool]:
        nonlocal now_s
        found = []
        for _ in range(2):
            now_s += 100
            found.append(growth.possible())
        return found

    # seen twice
    assert looks(ray_launcher._ScaleUpDetector(config(), 1, is_shared=False)) == [False, True]
    # the second slot is there, but another's
    crowded = ray_launcher._ScaleUpDetector(config(), 1, is_shared=True)
    assert looks(crowded) == [False, False]
    nodes.slots.append((1, 1))
    assert looks(crowded) == [False, True]
    nodes.slots.clear()
    assert looks(crowded) == [False, False]


def attempt(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    desired: Any,
    *,
    fit: Any,
    request: Mock,
    signals: Signals,
) -> Any:
    """Make an attempt with replaced workers and control channel."""
    monkeypatch.setattr(ray_launcher, "StopRequest", lambda: request)
    monkeypatch.setattr(ray_launcher, "_fit", fit)
    monkeypatch.setattr(ray_launcher, "watched_requests", lambda *_: contextlib.nullcontext())
    shares: Any = SimpleNamespace(per_worker=TaskPlacement(), num_workers=4)
    return ray_launcher._attempt(
        PreparedRun(desired, str(folder), None, shares, 0.0), signals, is_shared=False
    )


@pytest.mark.parametrize("bytes_written", [[0] * 1000, [0]])
def test_control_channel_ends_with_attempt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bytes_written: list[int]
) -> None:
    request = Mock()
    ended = threading.Event()
    signals = Signals()
    request.saved_bytes.side_effect = [*bytes_written, KeyboardInterrupt]  # a second signal
    monkeypatch.setattr("rayrec.training.launchers.base._POLL_S", 0.001)
    signals.cause = "SIGINT"
    desired = config(grace_s=0.05 if len(bytes_written) > 1 else 60.0)
    with contextlib.suppress(KeyboardInterrupt):
        assert not attempt(
            monkeypatch,
            tmp_path,
            desired,
            fit=lambda *_: ended.wait(60),
            request=request,
            signals=signals,
        )
    request.close.assert_called_once_with()
    ended.set()


@pytest.mark.parametrize(
    ("use_gpu", "is_local", "ahead"),
    [(False, True, True), (False, False, False), (True, True, False)],
)
def test_data_tasks_have_no_modules_of_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use_gpu: bool, is_local: bool, ahead: bool
) -> None:
    """Data tasks omit only the modules: a job's own hook may set their credentials."""
    monkeypatch.delenv(worker_pool.TOKENS, raising=False)
    if is_local:
        monkeypatch.setenv(worker_pool.TOKENS, str(tmp_path))
    run_config = config().replace(scaling={"use_gpu": use_gpu})
    attempt(
        monkeypatch,
        tmp_path,
        run_config,
        fit=(fit := Mock(return_value={})),
        request=Mock(),
        signals=Signals(),
    )
    assert (worker_pool.MODULES in ray_launcher.worker_environment(run_config)) is ahead
    assert fit.call_args.args[0].engine.environment == ({worker_pool.MODULES: ""} if ahead else {})


def first_missing_s(monkeypatch: pytest.MonkeyPatch, *parts: Any) -> int | None:
    """Return the first second of a minute at which data nodes are missing."""
    clock = [0.0]
    monkeypatch.setattr(ray_launcher.time, "monotonic", lambda: clock[0])
    watch = ray_launcher._DataNodes(*parts)
    for now_s in range(60):
        clock[0] = float(now_s)
        if watch.are_missing():
            return now_s
    return None


@pytest.mark.parametrize(
    ("nodes_left", "changed", "missing"),
    [(False, True, True), (True, True, False), (False, False, False)],
)
def test_missing_data_nodes_end_attempt(
    monkeypatch: Any, nodes_left: bool, changed: bool, missing: bool
) -> None:
    here = [Node("data", {"CPU": 8.0}), Node("worker", {"CPU": 8.0, "slot": 2.0})]
    monkeypatch.setattr(connection, "alive_nodes", lambda **_: here)
    desired = config().replace(scaling={"num_workers": 2}, cluster={"data_nodes": "separate"})
    shares = ray_launcher.allocate_resources(desired)
    monkeypatch.setattr(
        connection, "data_nodes", lambda shares, **_: here[:1] if nodes_left else []
    )
    monkeypatch.setattr(connection, "alive_nodes", lambda **_: here[1:])
    later = desired.replace(cluster={"data_nodes": "auto" if changed else "separate"})
    assert first_missing_s(monkeypatch, later, shares) == (25 if missing else None)


def test_unreachable_head_and_store_outage_are_waited_for(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        connection, "data_nodes", raising(ray_launcher.ray.exceptions.RaySystemError("gone"))
    )
    assert first_missing_s(monkeypatch, config(), ray_launcher.allocate_resources(config())) is None
    plain = recipes.criteo_demo("log")
    assert (
        ray_launcher.process_group(plain).timeout_s,
        ray_launcher.process_group(plain).backend,
    ) == (2400, "gloo")
    changed = plain.replace(
        failure={"max_outage_s": 7200.0, "collective_timeout_s": 60.5}, scaling={"use_gpu": True}
    )
    assert (
        ray_launcher.process_group(changed).timeout_s,
        ray_launcher.process_group(changed).backend,
    ) == (7261, "nccl")
    rejects(
        r"collective_timeout_s: must be above 0, got 0\.0",
        plain.replace,
        failure={"collective_timeout_s": 0.0},
    )


# -- Object store monitor during short and permanent outages
@pytest.fixture
def watch(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Callable[[int], Any]], ObjectStoreMonitor]]:
    """Return a function that starts a monitor whose n-th poll (from 0) returns `answer(n)`."""
    monkeypatch.setattr(ray_metrics, "_POLL_S", 0.002)
    started: list[ObjectStoreMonitor] = []

    def start(answer: Callable[[int], Any]) -> ObjectStoreMonitor:
        asked = iter(range(10**9))
        monkeypatch.setattr(ray_metrics, "_store_stats", lambda: answer(next(asked)))
        started.append(ObjectStoreMonitor())
        return started[-1]

    yield start
    for one in started:
        one.close()
        one._thread.join(timeout=60)


def store_stats(number: int) -> Any:
    return SimpleNamespace(
        object_store_bytes_used=number,
        object_store_bytes_avail=1000,
        spilled_bytes_total=7 + number,
    )


def test_object_store_monitor_returns_usage_and_spills(
    watch: Callable[..., ObjectStoreMonitor],
) -> None:
    watched = watch(lambda number: store_stats(min(number, 5)))
    until(lambda: watched.latest().get("object_store_bytes") == 5)
    assert watched.latest() == {
        "object_store_bytes": 5,
        "object_store_limit_bytes": 1000,
        "spilled_bytes": 5,
    }


def test_object_store_monitor_survives_nine_failures(
    watch: Callable[..., ObjectStoreMonitor],
) -> None:
    seen: list[dict[str, int]] = []

    def answer(number: int) -> Any:
        if number:
            seen.append(watched.latest())
        if number % 10:
            raise TimeoutError("the control store does not answer")
        return store_stats(number)

    ready: list[ObjectStoreMonitor] = []
    watched: Any = SimpleNamespace(latest=lambda: ready[0].latest() if ready else {})
    ready.append(watch(answer))
    until(lambda: len(seen) > 60)
    assert ready[0]._thread.is_alive()
    after_failures = [fields for place, fields in enumerate(seen, start=1) if (place - 1) % 10]
    assert all(fields == {} for fields in after_failures[:50])  # nothing rather than what was once
    until(lambda: bool(ready[0].latest()))


def test_store_monitor_stops_after_ten_failures(
    watch: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def answer(number: int) -> Any:
        asked.append(number)
        if number:
            raise TimeoutError("the control store is gone")
        return store_stats(number)

    with caplog.at_level(logging.WARNING):
        watched = watch(answer)
        watched._thread.join(timeout=60)
    assert (len(asked), watched.latest()) == (11, {})
    assert caplog.text.count("Stopped polling the object store (the control store is gone)") == 1


# -- Choice between training in this process and on Ray, without starting either
ONE = {"num_workers": 1}


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def config_for(scaling: dict[str, Any], **ray: Any) -> TrainConfig:
    return recipes.criteo_demo("none").replace(scaling=scaling, cluster=ray)


def test_one_worker_without_address_runs_in_process() -> None:
    for scaling, cluster, needs_ray in (
        (ONE, {}, None),
        ({"num_workers": (1, 1)}, {}, None),
        ({"num_workers": 2}, {}, "scaling.num_workers 2"),
        ({"num_workers": (1, 4)}, {}, "scaling.num_workers 4"),  # may grow
        ({**ONE, "resources_per_worker": {"slot": 1.0}}, {}, "scaling.resources_per_worker"),
        (ONE, {"object_store_bytes": 100_000_000}, "cluster.object_store_bytes"),
        (ONE, {"data_task_memory_bytes": 100_000_000}, "cluster.data_task_memory_bytes"),
        (ONE, {"env": ("NCCL_DEBUG=INFO",)}, "cluster.env"),
        (ONE, {"runtime_env": "env.yaml"}, "cluster.runtime_env"),
        (ONE, {"num_cpus": 2}, None),
    ):
        desired = config_for(scaling, **cluster)
        here = needs_ray is None
        assert trains_in_process(desired) is here
        launcher = choose_launcher(desired)
        assert isinstance(launcher, ProcessLauncher if here else RayLauncher)
        assert ("Prometheus" in launcher.trackers()) is not here
        if not here:
            refusal = (
                f"^{needs_ray}: needs Ray, but --cluster.address is none. Omit one of the two$"
            )
            rejects(refusal, choose_launcher, config_for(scaling, address="none", **cluster))


@pytest.mark.parametrize(
    ("address", "environment", "connected", "expected"),
    [
        (None, None, False, True),
        (None, "", False, True),
        (None, "head:6379", False, False),
        (None, None, True, False),
        ("none", "head:6379", True, True),
        ("local", None, False, False),
        ("head:6379", None, False, False),
        ("auto", None, False, False),
    ],
)
def test_address_or_environment_selects_ray(
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    environment: str | None,
    connected: bool,
    expected: bool,
) -> None:
    monkeypatch.setattr(connection, "is_connected", lambda: connected)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    assert connection.is_in_process(address) is expected
    assert (
        trains_in_process(config_for(ONE, **({} if address is None else {"address": address})))
        is expected
    )


def test_is_connected_imports_no_ray_and_connect_rejects_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for connected in (True, False):
        monkeypatch.setitem(
            sys.modules,
            "ray",
            SimpleNamespace(is_initialized=lambda connected=connected: connected),
        )
        assert is_connected() is connected
    # as it is while another thread imports it
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    assert not is_connected()
    monkeypatch.delitem(sys.modules, "ray")
    assert not is_connected()
    assert "ray" not in sys.modules
    monkeypatch.setattr(connection, "is_connected", lambda: True)
    rejects(
        r"^address none: needs Ray here. Omit the address, or use local or HOST:PORT$",
        connection.connect,
        "none",
    )


def test_worker_modules_are_imported_and_threads_respect_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = Mock(side_effect=[None, ImportError("which the worker reports")])
    with monkeypatch.context() as patch:
        patch.setattr(process_launcher.importlib, "import_module", load)
        ProcessLauncher(config_for(ONE)).connect("runs", Console(quiet=True))
        for thread in threading.enumerate():
            if thread.name == "imports":
                thread.join(60)
    modules = ["rayrec.training.launchers.process_worker", "rayrec.workloads.recsys.worker"]
    assert load.call_args_list == [call(module) for module in modules]
    # Container with a quota of 4 CPUs on a machine with 64.
    monkeypatch.setattr(layout.host_resources, "usable_cpus", lambda *, granted: 4)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert (
        0
        < ProcessLauncher(config_for(ONE))
        .allocate_resources(resumes=False, note=print)
        .per_worker.max_cpus
        <= 4
    )


@pytest.mark.parametrize(
    ("own", "num_nodes", "sizes"),
    [
        pytest.param(True, 1, [], id="own"),
        pytest.param(False, 1, [9], id="one node"),
        pytest.param(False, 2, [8, 9], id="two nodes"),
    ],
)
def test_driver_engine_depends_on_cluster(
    monkeypatch: pytest.MonkeyPatch, own: bool, num_nodes: int, sizes: list[int]
) -> None:
    """Threads on a local Ray; on a single-node cluster a few tasks in a thread, others on Ray."""
    by_ray: list[list[int]] = []

    def on_cluster(
        engine: RayEngine, name: str, function: Any, items: list[int], *, block_bytes: int
    ) -> Iterator[Any]:
        by_ray.append(items)
        return map(function, items)

    monkeypatch.setattr(connection, "is_local_ray", lambda: own)
    monkeypatch.setattr(RayEngine, "run", on_cluster)
    monkeypatch.setattr(ray_launcher.ray, "put", lambda value: ("in the object store", value))
    shares = SimpleNamespace(driver=TaskPlacement(num_cpus=1.0), num_nodes=num_nodes)
    launcher = RayLauncher(config_for({"num_workers": 2}, num_cpus=1))
    engine = launcher.engine(shares, max_outage_s=3.0)  # type: ignore[arg-type]
    assert isinstance(engine, ThreadEngine if own else RayEngine)
    assert engine.cpus == 1
    for items in (list(range(8)), list(range(9))):
        assert list(engine.run("double", lambda item: 2 * item, items, block_bytes=1)) == [
            2 * item for item in items
        ]
    assert list(map(len, by_ray)) == sizes
    # Workers, which are processes, get what it shares all the same.
    assert isinstance(shared := engine.share("vocabulary"), RayShared)
    assert shared.reference == ("in the object store", "vocabulary")
