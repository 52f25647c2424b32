"""Allocation of a cluster: number of workers, their resources, and the rest for data tasks."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from builders.faults import rejects

from rayrec.cluster import connection
from rayrec.cluster.connection import alive_nodes, ship_code, user_modules
from rayrec.cluster.layout import Layout, Node, layout, nodes_for_tasks
from rayrec.imports import function_in_file
from rayrec.models.base import ModelInputs
from rayrec.workloads.base import TrainConfig


def shared(*resources: dict[str, float], **changes: Any) -> Layout:
    nodes = [Node(str(number), {"object_store_memory": 1000.0, **each}) for number, each in enumerate(resources)]
    default = partial(layout, num_workers=2, use_gpu=False, cpus_per_worker=None, resources_per_worker={}, data_nodes="auto")
    return default(nodes, **changes)


def test_cpu_workers_reserve_half() -> None:
    shares = shared({"CPU": 2.0})
    assert (shares.num_workers, shares.cpus_per_worker, shares.worker_resources) == (2, 0.5, {"CPU": 0.5})
    assert (shares.per_worker.max_cpus, shares.per_worker.label_selector) == (0.5, None)


GPU_NODES = [{"CPU": 96.0, "GPU": 8.0}] * 4


@pytest.mark.parametrize(
    ("others", "data_nodes", "apart", "cpus_each"),
    [
        ([{"CPU": 8.0}], "auto", False, 11.25),  # a head of 8 CPUs would starve 32 GPUs
        ([{"CPU": 8.0}], "separate", True, 0.25),
        ([{"CPU": 64.0}] * 2, "auto", True, 4.0),
        ([{"CPU": 64.0}] * 2, "any", False, 15.0),
        ([{"CPU": 120.0}], "auto", False, 14.75),
        ([{"CPU": 0.0}], "auto", False, 11.0),
        ([], "auto", False, 11.0),
    ],
)
def test_data_tasks_separate_if_other_nodes_suffice(others: list[Any], data_nodes: str, apart: bool, cpus_each: float) -> None:
    shares = shared(*others, *GPU_NODES, num_workers=32, use_gpu=True, data_nodes=data_nodes)
    assert bool(shares.workers_only) is apart
    assert (shares.per_worker.label_selector is not None) is apart
    assert shares.per_worker.max_cpus == cpus_each
    assert f"{cpus_each:.3g} CPUs for each worker" in shares.text()


def test_fewer_workers_need_fewer_other_nodes() -> None:
    """An elastic run decides by the number of workers that fit."""
    nodes: tuple[dict[str, float], ...] = ({"CPU": 16.0}, *GPU_NODES)
    assert not shared(*nodes, num_workers=(1, 32), use_gpu=True).workers_only
    assert shared(*nodes[:1], {"CPU": 96.0, "GPU": 4.0}, num_workers=(1, 32), use_gpu=True).workers_only == {"1"}


def test_data_tasks_avoid_worker_nodes() -> None:
    shares = shared({"CPU": 8.0}, *GPU_NODES, num_workers=32, use_gpu=True)
    assert shares.text() == (
        "32 workers, each with 1 CPU, 1 GPU; data tasks on all 5 nodes, 11.2 CPUs for each worker (nodes without workers have "
        "0.25 for each; --cluster.data-nodes separate uses those alone)"
    )
    apart = shared({"CPU": 4.0}, {"CPU": 2.0, "GPU": 2.0}, use_gpu=True)
    assert apart.worker_resources == {"CPU": 1.0, "GPU": 1.0}
    assert (apart.per_worker.max_cpus, apart.per_worker.label_selector) == (2.0, {"ray.io/node-id": "!in(1)"})
    text = "2 workers, each with 1 CPU, 1 GPU; data tasks on 1 of 2 nodes, without workers, 2 CPUs for each worker"
    assert apart.text() == text


SLOTS = {"resources_per_worker": {"slot": 1.0}, "cpus_per_worker": 0.5, "num_workers": (1, 3)}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([{"CPU": 1.0, "slot": 1.0}], 1),
        ([{"CPU": 1.0, "slot": 1.0}] * 2, 2),
        ([{"CPU": 4.0, "slot": 8.0}] * 2, 3),
        ([{"CPU": 4.0, "slot": 0.6}, {"CPU": 4.0, "slot": 2.6}], 2),
        ([{"CPU": 1.0, "slot": 4.0}], 1),  # a second would leave data tasks nothing
    ],
)
def test_layout_uses_as_many_workers_as_fit(nodes: list[dict[str, float]], expected: int) -> None:
    assert shared(*nodes, **SLOTS).num_workers == expected


@pytest.mark.parametrize(
    ("nodes", "changes", "message"),
    [
        ([{"CPU": 2.0}], {"use_gpu": True}, r"a worker needs \{'GPU': 1.0\}, but the cluster has \{'GPU': 0\}"),
        ([{"CPU": 2.0}], SLOTS, r"but the cluster has \{'slot': 0\}"),
        ([{"CPU": 2.0, "slot": 1.0}], {**SLOTS, "num_workers": 2}, "2 workers need 2 slot, but the cluster has 1 for them"),
        ([{"CPU": 2.0}], {"cpus_per_worker": 1.5}, "2 workers need 3 CPU, but the cluster has 2 for them"),
        ([{"CPU": 2.0}], {"cpus_per_worker": 1.0}, "reserve all 2 CPUs and leave none for data tasks"),
        ([{"CPU": 1.0}] * 3, {"cpus_per_worker": 0.6, "num_workers": 4}, "do not fit on the nodes, only 3 do"),
        ([{"CPU": 8.0}], {"num_workers": (1, 4)}, "Set --scaling.cpus-per-worker"),
        ([{"CPU": 8.0, "GPU": 2.0}], {"use_gpu": True, "data_nodes": "separate"}, "Add other nodes, or choose auto"),
        ([{"CPU": 1.0, "slot": 1.0}], {**SLOTS, "num_workers": (2, 3)}, "2 workers need 2 slot"),
    ],
)
def test_layout_rejects_unfit_workers(nodes: list[dict[str, float]], changes: dict[str, Any], message: str) -> None:
    rejects(message, shared, *nodes, **changes)


def test_draining_nodes_are_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray places nothing on draining nodes, although they are alive."""
    nodes = [{"NodeID": name, "Alive": name != "dead", "Resources": {"CPU": 4.0}} for name in ("one", "leaving", "dead", "two")]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    free, draining = {"one": {"CPU": 1.0}, "leaving": {"CPU": 4.0}}, SimpleNamespace(get_draining_nodes=lambda: {"leaving": 0})
    state = SimpleNamespace(state=draining, available_resources_per_node=lambda: free)
    monkeypatch.setattr("rayrec.compat.ray_compat.state", state)
    assert alive_nodes() == [Node("one", {"CPU": 4.0}), Node("two", {"CPU": 4.0})]
    assert alive_nodes(free=True) == [Node("one", {"CPU": 1.0}), Node("two", {})]


WORKERS = {"state": "CREATED", "bundles": {0: {"CPU": 2.0}, 1: {"CPU": 2.0}}, "bundles_to_node_id": {0: "0", 1: "1"}}


@pytest.mark.parametrize(
    ("nodes", "group", "expected"),
    [
        ([{"CPU": 4.0}, {"CPU": 4.0}], WORKERS, {"0": 2.0, "1": 2.0}),
        ([{"CPU": 2.0}, {"CPU": 4.0}], WORKERS, {"1": 2.0}),  # the workers reserve all of the first
        ([{"CPU": 2.0}, {"CPU": 2.0}], WORKERS, {}),
        ([{"CPU": 2.0}, {"CPU": 2.0}], {**WORKERS, "state": "REMOVED"}, {"0": 2.0, "1": 2.0}),
        ([{"CPU": 2.0}, {"CPU": 4.0}], {**WORKERS, "bundles_to_node_id": {}}, {"0": 2.0, "1": 4.0}),  # not placed yet
    ],
)
def test_nodes_for_tasks_subtracts_placement_groups(nodes: list[Any], group: dict[str, Any], expected: dict[str, float]) -> None:
    found = [Node(str(number), each) for number, each in enumerate(nodes)]
    left = nodes_for_tasks(found, [group], shared(*nodes, cpus_per_worker=0.5))
    assert {node.node_id: node.resources["CPU"] for node in left} == expected


def test_nodes_for_tasks_excludes_worker_nodes() -> None:
    workers, data, joined = (Node(name, {"CPU": 8.0}) for name in "012")
    shares = shared({"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0}, use_gpu=True)
    assert nodes_for_tasks([workers, data, joined], [], shares) == [data, joined]
    assert nodes_for_tasks([workers], [], shares) == []  # the data node is gone


def test_user_model_reaches_processes_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only a nested configuration, here the model's, comes from the user's file."""
    shutil.copy(Path(__file__).parents[2] / "builders" / "own_click_model.py", file := tmp_path / "their_model.py")
    config = function_in_file(f"{file}:own_model", returns=TrainConfig)()
    assert (user_modules(config), user_modules(config.workload)) == ({"their_model"}, {"their_model"})
    ship_code(config)
    packed = ray.cloudpickle.dumps(config)
    ray.cloudpickle.unregister_pickle_by_value(sys.modules["their_model"])
    by_reference = ray.cloudpickle.dumps(config)
    monkeypatch.delitem(sys.modules, "their_model")
    received = ray.cloudpickle.loads(packed)
    assert received.to_dict() == config.to_dict()
    assert received.workload.model.build(ModelInputs(1, ("a",))) is not None
    with pytest.raises(ModuleNotFoundError):  # what would happen if the module were not registered
        ray.cloudpickle.loads(by_reference)


@pytest.mark.parametrize(("submitted", "forked"), [(None, True), ({"env_vars": {"A": "b"}}, True), ({"pip": ["x"]}, False)])
def test_python_of_workers_depends_on_job(submitted: dict[str, object] | None, *, forked: bool) -> None:
    environment = {} if submitted is None else {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": submitted})}
    assert bool(connection._python_of_workers(environment)) is forked


def test_train_environment_matches_ray_train_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Ray would not assign prestarted processes to workers."""
    monkeypatch.setattr(connection, "is_local_ray", lambda: True)
    assert connection.train_environment() == {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
    monkeypatch.setattr(connection, "is_local_ray", lambda: False)
    assert connection.train_environment() == {}
