"""Signals to a server's command at any moment from its start on: exit status, time, output, and no
process left.
"""

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders.click_models import make_model, row_text, save_checkpoint
from builders.faults import until
from hosts.clients import ask
from hosts.ports import free_ports
from hosts.processes import RAYREC, RayHead, Session, environment_for, run_command, wait_for_ray

from rayrec.serve.shutdown import STOPPED

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

TEXT = b"".join(row_text(number) for number in range(10))
LIMIT_S = 20.0
"""A quiet machine needs 5 s at most."""
EVERY_S = 0.5
"""Distance of the complete drill's moments."""
CALM = re.compile(
    r"(rayrec serve: stopped by SIG\w+ before it was ready\n|Stopping the server after answering "
    r"requests in flight\n)?"
    r"(\x1b\[33m\(raylet\)\x1b\[0m Task ServeController\.\w+ failed\..*\n|\n)*"
)
"""Standard error of a stopped server: no traceback, and no stack of Ray's C++ code. Ray tells all
programs connected to a cluster that an actor of Ray Serve has ended.
"""


def _to_process(server: Session, number: signal.Signals) -> None:
    server.process.send_signal(number)


def _to_group(server: Session, number: signal.Signals) -> None:
    """Send a signal like `timeout`, supervisord with stopasgroup, or a terminal."""
    os.killpg(server.process.pid, number)


def _to_all(server: Session, number: signal.Signals) -> None:
    """Send a signal like systemd, by default, to a control group."""
    for process in server.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


Send = Callable[[Session, signal.Signals], None]
TARGETS = {"process": _to_process, "group": _to_group, "all": _to_all}
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Servers:
    """Starts of a server of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self.place = save_checkpoint(folder / "run", 10, make_model(seed=1))
        self.port = 0

    def start(self, *options: str, ingress: str = "direct") -> Session:
        self._number += 1
        self.port = free_ports(1)
        settings = f"--port {self.port} --cpus-per-replica 0.5 --ingress {ingress}".split()
        environment = environment_for(self._folder / "cache")
        output = self._folder / f"server-{self._number}"
        return Session(
            [*RAYREC, "serve", self.place, *settings, *options],
            environment=environment,
            output=output,
        )


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    # Servers inherit it, also if the tests run under nohup
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield Servers(tmp_path)
    signal.signal(signal.SIGHUP, before)


def _is_ready(server: Session) -> bool:
    return server.out.rstrip().endswith("}")


def _waits_for_signals(pid: int) -> bool:
    """Whether a command has blocked signals, for the thread that waits for them."""
    blocked = re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(blocked[0], 16) >> (signal.SIGTERM - 1) & 1)


def _stop(server: Session, send: Send, number: signal.Signals) -> int:
    """Send a signal and return the exit status, once the server has ended as it must."""
    start_s = time.monotonic()
    send(server, number)
    status = server.wait(timeout_s=LIMIT_S).status
    took_s = time.monotonic() - start_s
    assert took_s < LIMIT_S
    # Ray's agents, which got the signal too, may need a moment more.
    until(lambda: server.processes() == [], reported=server.processes)
    assert CALM.fullmatch(server.err), server.err
    return status


@pytest.mark.parametrize(
    ("role", "target", "number"),
    [
        pytest.param("gcs", "group", signal.SIGTERM, id="ray-starts"),
        pytest.param(
            "raylet", "all", signal.SIGHUP, id="ray-connects", marks=pytest.mark.exhaustive
        ),
        pytest.param("replica", "process", signal.SIGINT, id="model-loads"),
    ],
)
def test_signal_ends_starting_server(
    servers: Servers, role: str, target: str, number: signal.Signals
) -> None:
    with servers.start() as server:
        server.until(lambda: server.find(role))
        assert _stop(server, TARGETS[target], number) == STOPPED


def test_signal_to_all_processes_lets_server_answer(servers: Servers) -> None:
    """A request that is half sent when all processes of the server get SIGTERM is answered."""
    with servers.start() as server:
        server.until(lambda: _is_ready(server))
        with socket.create_connection(("127.0.0.1", servers.port), timeout=60) as client:
            head = (
                "POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
                "text/tab-separated-values\r\n"
            )
            client.sendall(f"{head}content-length: {len(TEXT)}\r\n\r\n".encode() + TEXT[:100])
            time.sleep(0.3)
            answer: list[bytes] = []

            def send_rest() -> None:
                time.sleep(0.7)
                client.sendall(TEXT[100:])
                answer.append(client.recv(1 << 16))

            rest = threading.Thread(target=send_rest)
            rest.start()
            assert _stop(server, _to_all, signal.SIGTERM) == 0
            rest.join()
    assert answer[0].startswith(b"HTTP/1.1 200")


def test_readiness_follows_printed_address(servers: Servers) -> None:
    with servers.start() as server:
        early: list[str] = []
        is_over = threading.Event()

        def poll() -> None:
            while not is_over.wait(0.01):
                with contextlib.suppress(OSError, http.client.HTTPException):
                    if ask(servers.port, "GET", "/readyz")[0] == 200 and not early:
                        early.append(server.out)

        poller = threading.Thread(target=poll)
        poller.start()
        server.until(lambda: _is_ready(server), pause_s=0.001)
        assert ask(servers.port, "GET", "/readyz")[0] == 200
        until(lambda: early)
        is_over.set()
        poller.join()
        assert json.loads(early[0])["url"].endswith(f":{servers.port}")


@pytest.fixture
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RayHead(
        tmp_path_factory.mktemp("h"), cache=tmp_path_factory.mktemp("cache"), num_cpus=2
    ) as head:
        wait_for_ray(head)
        yield head.address


@pytest.mark.exhaustive
def test_signal_withdraws_starting_server_from_cluster(
    servers: Servers, running_cluster: str
) -> None:
    """A cluster keeps nothing of a server that was not ready, and takes the next one."""
    with servers.start("--cluster.address", running_cluster) as server:
        until(lambda: _replicas(running_cluster))
        assert _stop(server, _to_process, signal.SIGTERM) == STOPPED
    with servers.start("--cluster.address", running_cluster) as server:
        server.until(lambda: _is_ready(server))
        assert _stop(server, _to_process, signal.SIGTERM) == 0


def _replicas(address: str) -> bool:
    listed = run_command(
        *RAYREC[:1], "-c", _LIST, address, env={**os.environ, "RAY_AUTH_MODE": "token"}
    )
    return "ServeReplica" in listed.stdout


_LIST = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
from ray._private.state import actors  # ray.util.state needs a dashboard
print(*(actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD"))
"""


# Each signal to each target. A drill takes minutes, so the ingresses take turns.
DRILLS = [
    pytest.param(number, target, ("direct", "serve")[count % 2], id=f"{number.name}-{target}")
    for count, (number, target) in enumerate(itertools.product(STOP_SIGNALS, TARGETS))
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("number", "target", "ingress"), DRILLS)
def test_signal_ends_server_at_any_moment(
    servers: Servers, number: signal.Signals, target: str, ingress: str
) -> None:
    """Send a signal each half second from the start on, until a second after the address was
    printed.
    """
    moment_s = 0.0
    ready_s = float("inf")
    while moment_s < ready_s + 1:
        with servers.start(ingress=ingress) as server:
            start_s = time.monotonic()
            is_ready = False
            while (elapsed_s := time.monotonic() - start_s) < moment_s:
                if not is_ready and _is_ready(server):
                    is_ready = True
                    ready_s = min(ready_s, elapsed_s)
                time.sleep(0.01)
            valid = {STOPPED}
            if is_ready:
                valid.add(0)
            elif not _waits_for_signals(server.process.pid):
                # Before Python runs the command's code, signals end the process as any.
                valid.add(-number)
            assert _stop(server, TARGETS[target], number) in valid
        moment_s += EVERY_S
