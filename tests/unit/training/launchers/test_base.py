"""Choice between training in this process and on Ray, without starting either."""

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from builders.faults import rejects

from rayrec import recipes
from rayrec.cluster import connection, layout
from rayrec.cluster.connection import is_connected  # the real one: tests/conftest.py replaces the module's
from rayrec.data.engine import TaskPlacement, ThreadEngine
from rayrec.ingest.ray_engine import RayEngine, RayShared
from rayrec.observe.console import Console
from rayrec.training.launchers import process_launcher, ray_launcher
from rayrec.training.launchers.process_launcher import ProcessLauncher
from rayrec.training.launchers.ray_launcher import RayLauncher
from rayrec.training.trainer import launcher_of, trains_in_process
from rayrec.workloads.base import TrainConfig

ONE = {"num_workers": 1}


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def config(scaling: dict[str, Any], **ray: Any) -> TrainConfig:
    return recipes.criteo_demo("none").replace(scaling=scaling, cluster=ray)


@pytest.mark.parametrize(
    ("scaling", "ray", "needs_ray"),
    [
        (ONE, {}, None),
        ({"num_workers": (1, 1)}, {}, None),
        ({"num_workers": 2}, {}, "scaling.num_workers 2"),
        ({"num_workers": (1, 4)}, {}, "scaling.num_workers 4"),  # may grow
        ({**ONE, "resources_per_worker": {"slot": 1.0}}, {}, "scaling.resources_per_worker"),
        (ONE, {"object_store_bytes": 100_000_000}, "cluster.object_store_bytes"),
        (ONE, {"num_cpus": 2}, None),
    ],
)
def test_one_worker_without_address_runs_in_process(scaling: dict[str, Any], ray: dict[str, Any], needs_ray: str | None) -> None:
    wanted, here = config(scaling, **ray), needs_ray is None
    assert trains_in_process(wanted) is here
    launcher = launcher_of(wanted)
    assert isinstance(launcher, ProcessLauncher if here else RayLauncher)
    assert ("Prometheus" in launcher.trackers()) is not here
    if not here:
        refusal = f"^{needs_ray}: needs Ray, but --cluster.address is none. Omit one of the two$"
        rejects(refusal, launcher_of, config(scaling, address="none", **ray))


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
    monkeypatch: pytest.MonkeyPatch, address: str | None, environment: str | None, connected: bool, expected: bool
) -> None:
    monkeypatch.setattr(connection, "is_connected", lambda: connected)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    assert connection.is_in_process(address) is expected
    assert trains_in_process(config(ONE, **({} if address is None else {"address": address}))) is expected


def test_is_connected_imports_no_ray_and_connect_rejects_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for connected in (True, False):
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda connected=connected: connected))
        assert is_connected() is connected
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # as it is while another thread imports it
    assert not is_connected()
    monkeypatch.delitem(sys.modules, "ray")
    assert not is_connected()
    assert "ray" not in sys.modules
    monkeypatch.setattr(connection, "is_connected", lambda: True)
    refusal = r"^address none: needs Ray here. Omit the address, or use local or HOST:PORT$"
    rejects(refusal, connection.connect, "none", num_cpus=None, object_store_bytes=None, log_to_driver=False)


def test_worker_modules_are_imported_and_threads_respect_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Mock(side_effect=[None, ImportError("which the worker reports")])
    monkeypatch.setattr(process_launcher.importlib, "import_module", load)
    ProcessLauncher(config(ONE)).connect("runs", Console(quiet=True))
    for thread in threading.enumerate():
        if thread.name == "imports":
            thread.join(60)
    modules = ["rayrec.training.launchers.process_worker", "rayrec.workloads.recsys.worker"]
    assert load.call_args_list == [call(module) for module in modules]
    # Container with a quota of 4 CPUs on a machine with 64.
    monkeypatch.setattr(layout.host_resources, "usable_cpus", lambda *, granted: 4)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert 0 < ProcessLauncher(config(ONE)).allocate_resources(resumes=False, note=print).per_worker.max_cpus <= 4


@pytest.mark.parametrize(("own", "num_nodes"), [(True, 1), (False, 1), (False, 2)])
def test_driver_engine_depends_on_cluster(monkeypatch: pytest.MonkeyPatch, own: bool, num_nodes: int) -> None:
    """Threads on a local Ray; on a single-node cluster a few tasks in a thread, others on Ray."""
    by_ray: list[list[int]] = []

    def on_cluster(engine: RayEngine, name: str, function: Any, items: list[int], *, block_bytes: int) -> Iterator[Any]:
        by_ray.append(items)
        return map(function, items)

    monkeypatch.setattr(connection, "is_local_ray", lambda: own)
    monkeypatch.setattr(RayEngine, "run", on_cluster)
    monkeypatch.setattr(ray_launcher.ray, "put", lambda value: ("in the object store", value))
    shares = SimpleNamespace(driver=TaskPlacement(num_cpus=1.0), num_nodes=num_nodes)
    engine = RayLauncher(config({"num_workers": 2}, num_cpus=1)).engine(shares, max_outage_s=3.0)  # type: ignore[arg-type]
    assert isinstance(engine, ThreadEngine if own else RayEngine)
    assert engine.cpus == 1
    few, many = list(range(8)), list(range(9))
    for items in (few, many):
        assert list(engine.run("double", lambda item: 2 * item, items, block_bytes=1)) == [2 * item for item in items]
    assert by_ray == ([] if own else [many] if num_nodes == 1 else [few, many])
    # Workers, which are processes, get what it shares all the same.
    assert isinstance(shared := engine.share("vocabulary"), RayShared)
    assert shared.reference == ("in the object store", "vocabulary")
