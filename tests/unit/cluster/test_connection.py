"""Allocation of a cluster: number of workers, their resources, and the rest for data tasks."""

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import ray
from builders.faults import fails_with, raising, rejects
from ray._raylet import AuthenticationTokenLoader, Config
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from rayrec import cli, recipes
from rayrec.cluster import connection, node_storage
from rayrec.cluster.connection import alive_nodes, require_head, ship_code, user_modules
from rayrec.cluster.layout import Layout, Node, layout, nodes_for_tasks
from rayrec.cluster.node_storage import (
    RuntimeEnvConfig,
    first_error,
    job_environment,
    refusal,
    require_reachable,
    store_settings,
)
from rayrec.imports import function_in_file
from rayrec.models.base import ModelInputs
from rayrec.workloads.base import TrainConfig


def shared(*resources: dict[str, float], **changes: Any) -> Layout:
    nodes = [
        Node(str(number), {"object_store_memory": 1000.0, **each})
        for number, each in enumerate(resources)
    ]
    default = partial(
        layout,
        num_workers=2,
        use_gpu=False,
        cpus_per_worker=None,
        resources_per_worker={},
        data_nodes="auto",
    )
    return default(nodes, **changes)


def test_cpu_workers_reserve_half() -> None:
    shares = shared({"CPU": 2.0})
    assert (shares.num_workers, shares.cpus_per_worker, shares.worker_resources) == (
        2,
        0.5,
        {"CPU": 0.5},
    )
    assert (shares.per_worker.max_cpus, shares.per_worker.label_selector) == (0.5, None)


GPU_NODES = [{"CPU": 96.0, "GPU": 8.0}] * 4


def test_data_tasks_separate_if_other_nodes_suffice() -> None:
    for others, data_nodes, apart, cpus_each in (
        ([{"CPU": 8.0}], "auto", False, 11.25),  # a head of 8 CPUs would starve 32 GPUs
        ([{"CPU": 8.0}], "separate", True, 0.25),
        ([{"CPU": 64.0}] * 2, "auto", True, 4.0),
        ([{"CPU": 64.0}] * 2, "any", False, 15.0),
        ([{"CPU": 120.0}], "auto", False, 14.75),
        ([{"CPU": 0.0}], "auto", False, 11.0),
        ([], "auto", False, 11.0),
    ):
        shares = shared(*others, *GPU_NODES, num_workers=32, use_gpu=True, data_nodes=data_nodes)
        assert bool(shares.workers_only) is apart
        assert (shares.per_worker.label_selector is not None) is apart
        assert shares.per_worker.max_cpus == cpus_each
        assert f"{cpus_each:.3g} CPUs for each worker" in shares.text()


def test_fewer_workers_need_fewer_nodes_which_data_tasks_avoid() -> None:
    nodes: tuple[dict[str, float], ...] = ({"CPU": 16.0}, *GPU_NODES)
    assert not shared(*nodes, num_workers=(1, 32), use_gpu=True).workers_only
    assert shared(
        *nodes[:1], {"CPU": 96.0, "GPU": 4.0}, num_workers=(1, 32), use_gpu=True
    ).workers_only == {"1"}
    shares = shared({"CPU": 8.0}, *GPU_NODES, num_workers=32, use_gpu=True)
    assert shares.text() == (
        "32 workers, each with 1 CPU, 1 GPU; data tasks on all 5 nodes, 11.2 CPUs for each worker "
        "(nodes without workers have 0.25 for each; --cluster.data-nodes separate uses those alone)"
    )
    apart = shared({"CPU": 4.0}, {"CPU": 2.0, "GPU": 2.0}, use_gpu=True)
    assert apart.worker_resources == {"CPU": 1.0, "GPU": 1.0}
    assert (apart.per_worker.max_cpus, apart.per_worker.label_selector) == (
        2.0,
        {"ray.io/node-id": "!in(1)"},
    )
    text = (
        "2 workers, each with 1 CPU, 1 GPU; data tasks on 1 of 2 nodes, without workers, 2 CPUs "
        "for each worker"
    )
    assert apart.text() == text


SLOTS = {"resources_per_worker": {"slot": 1.0}, "cpus_per_worker": 0.5, "num_workers": (1, 3)}


def test_layout_uses_as_many_workers_as_fit() -> None:
    for nodes, expected in (
        ([{"CPU": 1.0, "slot": 1.0}], 1),
        ([{"CPU": 1.0, "slot": 1.0}] * 2, 2),
        ([{"CPU": 4.0, "slot": 8.0}] * 2, 3),
        ([{"CPU": 4.0, "slot": 0.6}, {"CPU": 4.0, "slot": 2.6}], 2),
        ([{"CPU": 1.0, "slot": 4.0}], 1),  # a second would leave data tasks nothing
    ):
        assert shared(*nodes, **SLOTS).num_workers == expected


def test_layout_rejects_unfit_workers() -> None:
    for nodes, changes, message in (
        (
            [{"CPU": 2.0}],
            {"use_gpu": True},
            "a worker needs 1 GPU on one machine, and all machines together have 0 GPU",
        ),
        ([{"CPU": 2.0}], SLOTS, "have 0 slot. Change scaling.resources_per_worker"),
        (
            [{"CPU": 2.0, "slot": 1.0}],
            {**SLOTS, "num_workers": 2},
            "2 workers need 2 slot, but the cluster has 1 for them",
        ),
        (
            [{"CPU": 2.0}],
            {"cpus_per_worker": 1.5},
            "2 workers need 3 CPU, but the cluster has 2 for them",
        ),
        (
            [{"CPU": 2.0}],
            {"cpus_per_worker": 1.0},
            "reserve all 2 CPUs and leave none for data tasks",
        ),
        (
            [{"CPU": 1.0}] * 3,
            {"cpus_per_worker": 0.6, "num_workers": 4},
            "do not fit on the nodes, only 3 do",
        ),
        ([{"CPU": 8.0}], {"num_workers": (1, 4)}, "Set --scaling.cpus-per-worker"),
        (
            [{"CPU": 8.0, "GPU": 2.0}],
            {"use_gpu": True, "data_nodes": "separate"},
            "Add other nodes, or choose auto",
        ),
        ([{"CPU": 1.0, "slot": 1.0}], {**SLOTS, "num_workers": (2, 3)}, "2 workers need 2 slot"),
        (
            [{"CPU": 2, "memory": 4e9}],
            {"task_memory_bytes": 5 * 10**9},
            "a data task needs 5 GB, but .* at most 4 GB. Lower it",
        ),
    ):
        rejects(message, shared, *nodes, **changes)


def test_draining_nodes_are_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": name, "Alive": name != "dead", "Resources": {"CPU": 4.0}}
        for name in ("one", "leaving", "dead", "two")
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    free = {"one": {"CPU": 1.0}, "leaving": {"CPU": 4.0}}
    draining = SimpleNamespace(get_draining_nodes=lambda: {"leaving": 0})
    state = SimpleNamespace(state=draining, available_resources_per_node=lambda: free)
    monkeypatch.setattr("rayrec.compat.ray_compat.state", state)
    assert alive_nodes() == [Node("one", {"CPU": 4.0}), Node("two", {"CPU": 4.0})]
    assert alive_nodes(free=True) == [Node("one", {"CPU": 1.0}), Node("two", {})]


WORKERS = {
    "state": "CREATED",
    "bundles": {0: {"CPU": 2.0}, 1: {"CPU": 2.0}},
    "bundles_to_node_id": {0: "0", 1: "1"},
}


def test_nodes_for_tasks_subtracts_placement_groups() -> None:
    for nodes, group, expected in (
        ([{"CPU": 4.0}, {"CPU": 4.0}], WORKERS, {"0": 2.0, "1": 2.0}),
        ([{"CPU": 2.0}, {"CPU": 4.0}], WORKERS, {"1": 2.0}),  # the workers reserve all of the first
        ([{"CPU": 2.0}, {"CPU": 2.0}], WORKERS, {}),
        ([{"CPU": 2.0}, {"CPU": 2.0}], {**WORKERS, "state": "REMOVED"}, {"0": 2.0, "1": 2.0}),
        # not placed yet
        ([{"CPU": 2.0}, {"CPU": 4.0}], {**WORKERS, "bundles_to_node_id": {}}, {"0": 2.0, "1": 4.0}),
    ):
        found = [Node(str(number), each) for number, each in enumerate(nodes)]
        left = nodes_for_tasks(found, [group], shared(*nodes, cpus_per_worker=0.5))
        assert {node.node_id: node.resources["CPU"] for node in left} == expected
        with_memory = [
            Node(node.node_id, {**node.resources, "memory": 1e9 * number})
            for number, node in enumerate(found)
        ]
        for_memory = shared(*nodes, cpus_per_worker=0.5, task_memory_bytes=10**9)
        assert {
            node.node_id for node in nodes_for_tasks(with_memory, [group], for_memory)
        } == expected.keys() - {"0"}


def test_nodes_for_tasks_exclude_workers_and_user_models_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, data, joined = (Node(name, {"CPU": 8.0}) for name in "012")
    shares = shared({"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0}, use_gpu=True)
    assert nodes_for_tasks([workers, data, joined], [], shares) == [data, joined]
    assert nodes_for_tasks([workers], [], shares) == []  # the data node is gone
    # Also if only a nested configuration, here the model's, comes from the user's file.
    shutil.copy(
        Path(__file__).parents[2] / "builders" / "own_click_model.py",
        file := tmp_path / "their_model.py",
    )
    config = function_in_file(f"{file}:own_model", returns=TrainConfig)()
    assert (user_modules(config), user_modules(config.workload)) == (
        {"their_model"},
        {"their_model"},
    )
    ship_code(config)
    packed = ray.cloudpickle.dumps(config)
    ray.cloudpickle.unregister_pickle_by_value(sys.modules["their_model"])
    by_reference = ray.cloudpickle.dumps(config)
    monkeypatch.delitem(sys.modules, "their_model")
    received = ray.cloudpickle.loads(packed)
    assert received.to_dict() == config.to_dict()
    assert received.workload.model.build(ModelInputs(1, ("a",))) is not None
    # as if the module were not registered
    fails_with(ModuleNotFoundError, "", ray.cloudpickle.loads, by_reference)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "/tmp"),
        ({"TMPDIR": "/" + "t" * 36}, "/" + "t" * 36),
        ({"TMPDIR": "/" + "t" * 37}, "/tmp"),
        ({"TMPDIR": "/" + "t" * 37, "RAY_TMPDIR": "/r"}, "/r"),
    ],
)
def test_sockets_are_not_in_folders_with_long_paths(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert connection.socket_folder() == folder


# -- Access of cluster nodes to stores, and their credentials
SECRET = "swordfish-4711"
S3 = {
    "AWS_ACCESS_KEY_ID": "AKID",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_ENDPOINT_URL": "http://10.0.0.9:9000",
}


def test_credentials_are_sent_on_request_and_only_in_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RuntimeEnvConfig(env=("MY_TOKEN=a=b", "PATH"))
    assert job_environment(RuntimeEnvConfig(), S3) == {}
    assert job_environment(RuntimeEnvConfig(), {**S3, "RAYREC_SEND_CREDENTIALS": "0"}) == {}
    # Ray pickles the hook and keeps it with the job's functions, but logs and shows the rest of a
    # runtime environment.
    sent = job_environment(
        config, {**S3, "PATH": "/bin", "AWS_CA_BUNDLE": "/here.pem", "RAYREC_SEND_CREDENTIALS": "1"}
    )
    assert list(sent) == ["worker_process_setup_hook"]
    assert SECRET not in repr(sent)
    for name in (*S3, "AWS_CA_BUNDLE", "MY_TOKEN"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    pickled = ray.cloudpickle.dumps(sent["worker_process_setup_hook"])
    monkeypatch.setitem(sys.modules, "rayrec.cluster.node_storage", None)  # a node need not have it
    ray.cloudpickle.loads(pickled)()
    assert {name: os.environ.get(name) for name in (*S3, "AWS_CA_BUNDLE")} == {
        **S3,
        "AWS_CA_BUNDLE": None,
    }
    assert (os.environ["MY_TOKEN"], os.environ["PATH"]) == ("a=b", "/bin")


def test_stored_settings_have_only_names_of_variables() -> None:
    config = recipes.criteo_demo("log").replace(cluster={"env": (f"MY_TOKEN={SECRET}", "HOME")})
    assert config.to_dict()["cluster"]["env"] == ["MY_TOKEN", "HOME"]
    assert SECRET not in config.to_yaml() + repr(config) + repr(config.cluster.without_values().env)
    assert (
        config.config_hash()
        == config.replace(cluster=config.cluster.without_values()).config_hash()
    )
    for wrong in (f"MY_TOKEN={SECRET}", (f"MY-TOKEN={SECRET}",), (SECRET, 1)):
        assert SECRET not in rejects(
            "ClusterConfig.env: must be a list of NAME=VALUE",
            config.replace,
            cluster={"env": wrong},
        )
    missing = RuntimeEnvConfig(env=("MISSING",))
    rejects(
        "^env MISSING: not set in this environment. Set it, or use MISSING=VALUE$",
        missing.variables,
        {},
    )


def test_runtime_env_file_is_checked(tmp_path: Path) -> None:
    config = RuntimeEnvConfig(env=("A=secret",), runtime_env=str(file := tmp_path / "env.yaml"))
    for text, message in (
        ("{env_vars: {A: '1'}, working_dir: ., config: {eager_install: false}}", None),
        ("{pips: [a]}", "must have Ray's fields .*pip, .*got pips"),
        ("[pip]", "got no mapping"),
        ("{env_vars: {A: 4711}}", "env_vars must map names to texts. Put numbers in quotes"),
        ("{working_dir: /none}", "ValueError: .*/none"),
        ("{pip: [a], conda: b}", "ValueError"),
        (
            "{worker_process_setup_hook: a.b}",
            "worker_process_setup_hook also sends variables. Omit one of the two",
        ),
        ("}", "cannot be read"),
    ):
        file.write_text(text)
        if message is None:
            assert job_environment(config, {}).keys() == {
                "env_vars",
                "working_dir",
                "config",
                "worker_process_setup_hook",
            }
        else:
            line = rejects(f"^runtime_env {file}: .*{message}", job_environment, config, {})
            assert "secret" not in line
            assert "4711" not in line


def test_connection_without_environment_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    context = SimpleNamespace(gcs_address="head:6379", get_job_id=lambda: "01000000")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    requested = RuntimeEnvConfig(env=("A=b",))
    connect = partial(connection.connect, None)
    assert connect() == "head:6379"
    rejects(
        "connected to Ray without them. Use those of ray.init instead",
        connect,
        environment=requested,
    )
    monkeypatch.setattr(connection, "_environment", (("head:6379", "01000000"), ("A=b",), None))
    assert connect(environment=requested) == connect() == "head:6379"
    rejects("connected to Ray without them", connect, environment=RuntimeEnvConfig(env=("A=c",)))


def test_store_settings_reject_invalid_request() -> None:
    for environment, message in (
        (
            {**S3, "RAYREC_SEND_CREDENTIALS": "yes"},
            "must be 1, to send the store settings to the cluster, or 0, got 'yes'",
        ),
        (
            {"RAYREC_SEND_CREDENTIALS": "1"},
            "no store settings found in the environment. Set AWS_ACCESS_KEY_ID",
        ),
    ):
        rejects(message, store_settings, environment)


def test_refusal_contains_node_and_settings_without_values() -> None:
    line = refusal("10.0.0.2", "s3://logs: access denied (HTTP status 403); set AWS_PROFILE", S3)
    assert line == (
        "node 10.0.0.2 does not reach the store, which this machine does: s3://logs: access denied "
        "(HTTP status 403); set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL as here "
        "when you start Ray there, or have this command send them: RAYREC_SEND_CREDENTIALS=1"
    )
    assert "give the nodes credentials" in refusal("10.0.0.2", "denied", {})
    assert "RAYREC_SEND" not in refusal(
        "10.0.0.2", "denied", {**S3, "RAYREC_SEND_CREDENTIALS": "1"}
    )


def answering(
    monkeypatch: pytest.MonkeyPatch, *answers: tuple[str, str | None], here: str | None = None
) -> Mock:
    """Replace the check of the nodes by their answers, and of this machine by `here`."""
    monkeypatch.setattr(node_storage, "_check_nodes", check := Mock(return_value=list(answers)))
    monkeypatch.setattr(node_storage, "first_error", lambda urls, patience_s: here)
    return check


def test_require_reachable_rejects_only_nodes_without_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = answering(monkeypatch, ("10.0.0.1", None), ("10.0.0.2", "s3://b: access denied"))
    paths = ("s3://b/log/day_*/x.tsv?region=eu", None, "/local", "s3://a/runs/")
    rejects(r"node 10\.0\.0\.2 does not reach the store", require_reachable, paths)
    check.assert_called_once_with(["s3://a/runs/", "s3://b/log?region=eu"])
    check = answering(monkeypatch, ("10.0.0.2", "s3://b: access denied"))
    require_reachable(("/local", None))
    check.assert_not_called()
    check = answering(monkeypatch, ("10.0.0.2", "the store was out"), here="the store was out")
    require_reachable(("s3://b/log",))
    check.assert_not_called()


def test_first_error_describes_unreachable_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    trouble = first_error(["s3://b/log"], patience_s=0.0)
    assert "127.0.0.1:9" in trouble
    assert SECRET not in trouble


# -- A Ray head and its token, against a server with the protocol of Ray's head
TOKEN = "0123456789abcdef" * 4


class Head(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
    """Stand-in for Ray's head, which requires a token if it has one."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.version = ray.__version__
        self.address = ""
        self.presented: list[str | None] = []

    def CheckAlive(
        self, request: Any, context: grpc.ServicerContext
    ) -> gcs_service_pb2.CheckAliveReply:
        presented = dict(context.invocation_metadata()).get("authorization")
        self.presented.append(presented)
        if self.token is not None and presented != f"Bearer {self.token}":
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "InvalidAuthToken: the token is missing or incorrect",
            )
        return gcs_service_pb2.CheckAliveReply(ray_version=self.version)


def forget_tokens() -> None:
    """Make Ray read this process's settings and token again."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Set up a user without a token; yield the path of the token file of a local Ray."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    forget_tokens()
    (tmp_path / ".ray").mkdir()
    yield tmp_path / ".ray" / "auth_token"
    os.environ.pop("RAY_AUTH_MODE", None)
    monkeypatch.undo()
    forget_tokens()


@pytest.fixture
def head() -> Iterator[Head]:
    service = Head()
    server = grpc.server(ThreadPoolExecutor(2))
    gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('0.0.0.0:0')}"
    server.start()
    yield service
    server.stop(None)


@pytest.mark.parametrize(
    ("token", "presented"), [(None, [None]), (TOKEN, [None, f"Bearer {TOKEN}"])]
)
def test_token_is_sent_only_to_cluster_with_token(
    user: Path, head: Head, token: str | None, presented: list[str | None]
) -> None:
    head.token = token
    user.write_text(TOKEN)
    require_head(head.address, source="")
    assert head.presented == presented
    # from here on Ray presents it too
    assert os.environ.get("RAY_AUTH_MODE") == (token and "token")


@pytest.mark.parametrize(
    ("environment", "token", "message"),
    [
        ({}, None, "requires a token, but this user has no token. Copy"),
        ({}, "f" * 64, r"rejects the token from ~/.ray/auth_token. Copy"),
        ({"RAY_AUTH_TOKEN": "f" * 64}, None, "rejects the token from RAY_AUTH_TOKEN. Copy"),
        ({"RAY_AUTH_MODE": "disabled"}, TOKEN, "requires a token. Unset RAY_AUTH_MODE=disabled"),
        ({"RAY_AUTH_MODE": "token"}, None, "Set RAY_AUTH_TOKEN_PATH to its file"),
    ],
)
def test_rejected_token_is_reported(
    user: Path,
    head: Head,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    token: str | None,
    message: str,
) -> None:
    head.token = TOKEN
    if token is not None:
        user.write_text(token)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    forget_tokens()
    line = rejects(
        f"^RAY_ADDRESS=there: .*{message}", require_head, head.address, source="RAY_ADDRESS=there"
    )
    assert (token or "f" * 64) not in line


def test_other_ray_version_is_rejected(user: Path, head: Head) -> None:
    head.version = "2.9.0"
    rejects(
        r"runs Ray 2\.9\.0, but this environment has Ray 2\.", require_head, head.address, source=""
    )


@pytest.mark.usefixtures("user")
def test_commands_reject_ray_client_server(
    click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    log = str(click_log / "train.txt")
    out = str(tmp_path / "out")
    (tmp_path / "search.yaml").write_text(
        "workload.dense_optimizer.learning_rate: {choice: [0.1, 0.2]}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        run = [
            "criteo_demo",
            "--train-data.path",
            log,
            "--storage-path",
            out,
            "--cluster.address",
            address,
        ]
        commands = [
            ["train", *run],
            ["tune", *run, "--search", str(tmp_path / "search.yaml")],
            ["vocabulary", log, "--out", out, "--address", address],
            ["vocabulary", log, "--out", out, "--engine", "spark-on-ray", "--address", address],
            ["preprocess", log, "--out", out, "--format", "npy", "--address", address],
            ["split", log, "--out", out, "--by", "rows", "--address", address],
            ["validate", log, "--address", address],
            ["serve", "--rollback", "--cluster.address", address],
        ]
        for command in commands:
            assert cli.run(command) == 2, command
            said = capsys.readouterr().err
            assert (
                f"{address}: must be reached directly, got Ray's client server (ray://)" in said
            ), command
            assert "use `rayrec supervise --address http://HEAD:8265 -- train ...`" in said, command
            assert said.count("\n") == 1, command
    assert not os.path.exists(out)


def test_connection_through_client_server_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "is_connected", lambda: True)
    monkeypatch.setattr("ray.util.client.ray.is_connected", lambda: True)
    reported = (
        r"^ray\.init: must be reached directly, got Ray's client server \(ray://\).*rayrec "
        r"supervise"
    )
    rejects(reported, connection.connect, None)


def test_listener_without_ray_head_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_ANSWER_S", 0.3)
    with socket.create_server(("0.0.0.0", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        rejects(
            "does not answer as the head of a Ray cluster", require_head, address, source=address
        )


@pytest.mark.usefixtures("user")
def test_failed_local_ray_raises_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray's own class
    timed_out = Exception("The current node timed out during startup.\nThis could happen because")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", raising(timed_out))
    reported = r"cannot start a local Ray \(The current node timed out.*\. The machine may"
    assert "\n" not in fails_with(OSError, reported, connection.connect, "local", num_cpus=1)


@pytest.mark.usefixtures("user")
def test_long_ray_folder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("a" * 100)
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    line = rejects(
        rf"^RAY_TMPDIR={folder}: too long for .* \(.*AF_UNIX path",
        connection.connect,
        "local",
        num_cpus=1,
    )
    assert line.endswith("Set it to a folder with a shorter path, such as /tmp")
