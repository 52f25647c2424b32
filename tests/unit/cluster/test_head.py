"""Checks of a Ray head and its token, against a server with the protocol of Ray's head."""

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
from builders.faults import raising, rejects
from hosts.ports import free_ports
from ray._raylet import AuthenticationTokenLoader, Config
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from rayrec import cli
from rayrec.cluster import connection
from rayrec.cluster.connection import require_head

TOKEN = "0123456789abcdef" * 4


class Head(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
    """Stand-in for Ray's head, which requires a token if it has one."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.version, self.address = ray.__version__, ""
        self.presented: list[str | None] = []

    def CheckAlive(
        self, request: gcs_service_pb2.CheckAliveRequest, context: grpc.ServicerContext
    ) -> gcs_service_pb2.CheckAliveReply:
        presented = dict(context.invocation_metadata()).get("authorization")
        self.presented.append(presented)
        if self.token is not None and presented != f"Bearer {self.token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: the token is missing or incorrect")
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
    service, server = Head(), grpc.server(ThreadPoolExecutor(2))
    gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('0.0.0.0:0')}"
    server.start()
    yield service
    server.stop(None)


@pytest.mark.parametrize(("token", "presented"), [(None, [None]), (TOKEN, [None, f"Bearer {TOKEN}"])])
def test_token_is_sent_only_to_cluster_with_token(user: Path, head: Head, token: str | None, presented: list[str | None]) -> None:
    head.token = token
    user.write_text(TOKEN)
    require_head(head.address, source="")
    assert head.presented == presented
    assert os.environ.get("RAY_AUTH_MODE") == (token and "token")  # from here on Ray presents it too


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
    user: Path, head: Head, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], token: str | None, message: str
) -> None:
    head.token = TOKEN
    if token is not None:
        user.write_text(token)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    forget_tokens()
    line = rejects(f"^RAY_ADDRESS=there: .*{message}", require_head, head.address, source="RAY_ADDRESS=there")
    assert (token or "f" * 64) not in line


def test_other_ray_version_is_rejected(user: Path, head: Head) -> None:
    head.version = "2.9.0"
    rejects(r"runs Ray 2\.9\.0, but this environment has Ray 2\.", require_head, head.address, source="")


@pytest.mark.usefixtures("user")
def test_address_without_listener_is_rejected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_ports(1)}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests of this process share a Ray
    begin_s = time.monotonic()
    refused = rf"RAY_ADDRESS={address}: no Ray cluster answers there \(Connection refused\)"
    rejects(refused, connection.connect, None, num_cpus=None, object_store_bytes=None, log_to_driver=False)
    assert time.monotonic() - begin_s < 10


@pytest.mark.usefixtures("user")
def test_invalid_address_is_rejected() -> None:
    for address, message in (
        ("127.0.0.1:70000", "no Ray cluster answers there"),
        ("6379", "must be the address of a Ray cluster"),
        ("host:port", "must be the address of a Ray cluster|host not found"),
    ):
        rejects(message, require_head, address, source=address)


@pytest.mark.usefixtures("user")
def test_commands_reject_ray_client_server(click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Even if the server is reachable, before anything is read or started."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    log, out = str(click_log / "train.txt"), str(tmp_path / "out")
    (tmp_path / "search.yaml").write_text("workload.dense_optimizer.learning_rate: {choice: [0.1, 0.2]}\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        run = ["criteo_demo", "--train-data.path", log, "--storage-path", out, "--cluster.address", address]
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
            assert f"{address}: must be reached directly, got Ray's client server (ray://)." in said, command
            assert said.count("\n") == 1, command
    assert not os.path.exists(out)


def test_connection_through_client_server_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "is_connected", lambda: True)
    monkeypatch.setattr("ray.util.client.ray.is_connected", lambda: True)
    told = r"^ray\.init: must be reached directly, got Ray's client server \(ray://\)\."
    rejects(told, connection.connect, None, num_cpus=None, object_store_bytes=None, log_to_driver=False)


def test_listener_without_ray_head_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_ANSWER_S", 0.3)
    with socket.create_server(("0.0.0.0", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        rejects("does not answer as the head of a Ray cluster", require_head, address, source=address)


@pytest.mark.usefixtures("user")
def test_failed_local_ray_raises_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_out = Exception("The current node timed out during startup.\nThis could happen because")  # Ray's own class
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", raising(timed_out))
    with pytest.raises(OSError, match=r"cannot start a local Ray \(The current node timed out.*\. The machine may") as raised:
        connection.connect("local", num_cpus=1, object_store_bytes=None, log_to_driver=False)
    assert "\n" not in str(raised.value)
