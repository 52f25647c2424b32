"""Server command: scoring, model changes under load, replica failure, and shutdown."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from builders.click_models import logits_of, make_model, row_text, save_checkpoint
from builders.faults import until
from hosts.ports import free_ports
from hosts.processes import Session, environment_for
from prometheus_client.parser import text_string_to_metric_families

from rayrec.serve.control import REPORT_TIMEOUT_S

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

TEXT = b"".join(row_text(number) for number in range(10))
CLIENTS = 4
_until = partial(until, timeout_s=400, pause_s=0.1)


def _ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        headers = {"content-type": "text/tab-separated-values", "authorization": "Bearer open sesame"}
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class Load:
    """Clients that send the same rows repeatedly."""

    def __init__(self, port: int) -> None:
        self.port, self.answers = port, list[tuple[float, int, bytes]]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            start = time.monotonic()
            try:
                status, body = _ask(self.port, "POST", "/v1/score", TEXT)
            except (OSError, http.client.HTTPException) as error:
                status, body = 0, repr(error).encode()
            self.answers.append((start, status, body))
            time.sleep(0.02)  # leaves the machine to those that change over

    def failed(self) -> list[tuple[float, int, bytes]]:
        return [answer for answer in self.answers if answer[1] != 200]

    def models(self) -> set[str]:
        return {json.loads(body)["model"] for _, status, body in self.answers if status == 200}


def _replicas(server: Session) -> list[int]:
    return [process.pid for process in server.processes() if process.command.startswith("ray::ServeReplica")]


def _end(server: Session, ingress: str, tell: Callable[..., subprocess.CompletedProcess[str]], *, served: str) -> None:
    """Stop the server by a signal or from another process."""
    if ingress == "direct":
        server.process.send_signal(signal.SIGTERM)
    else:
        stopped = tell("--stop")
        assert stopped.returncode == 0, stopped.stderr
        assert json.loads(stopped.stdout)["model"] == served
    assert server.process.wait(timeout=240) == 0, server.err


def _check_ending(port: int, end: Callable[[], None]) -> None:
    """Check that clients of a stopping server fail to connect (0) or receive 503. Balancers retry these, but not 404."""
    with Load(port) as load:
        end()
    assert {status for _, status, _ in load.answers} <= {200, 503, 0}


def _check_second_server(command: list[str], environment: dict[str, str], port: int, *, owner: int) -> None:
    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert second.returncode == 2
    assert f"127.0.0.1:{port}: cannot listen there" in second.stderr
    assert f"by process {owner} " in second.stderr


@pytest.mark.parametrize("ingress", [pytest.param("serve", marks=pytest.mark.exhaustive), "direct"])
def test_server_process_answers_and_drains(tmp_path: Path, ingress: str) -> None:
    models = [make_model(seed=seed) for seed in (1, 2)]
    places = [save_checkpoint(tmp_path / "run", 10 * seed, model) for seed, model in zip((1, 2), models, strict=True)]
    port = free_ports(1)
    environment = environment_for(tmp_path / "cache", SERVE_TOKEN="open sesame")
    rayrec = [sys.executable, "-m", "rayrec", "serve"]

    def tell(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*rayrec, *arguments, "--cluster.address", address]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)

    start = [*rayrec, places[0], "--port", str(port), "--replicas", "2", "--cpus-per-replica", "0.5", "--ingress", ingress]
    with Session([*start, "--token-env", "SERVE_TOKEN"], environment=environment, output=tmp_path / "server") as server:
        _until(lambda: server.out.rstrip().endswith("}") or server.process.poll() is not None)
        assert server.process.poll() is None, server.err
        told = json.loads(server.out)
        address = told["cluster_address"]
        assert told["url"] == f"http://127.0.0.1:{port}"
        status, body = _ask(port, "POST", "/v1/score", TEXT)
        assert status == 200, body
        logits = np.array(json.loads(body)["logits"], np.float32)
        np.testing.assert_allclose(logits, logits_of(models[0], TEXT), atol=1e-5)
        assert _ask(port, "POST", "/v1/score", b"1")[0] == 400
        _check_second_server(start, environment, port, owner=server.process.pid)
        for replica in _replicas(server):
            assert b"sesame" not in Path(f"/proc/{replica}/environ").read_bytes()

        with Load(port) as load:
            _until(lambda: len(load.answers) > 20)
            swapped = tell(places[1], "--swap")
            assert swapped.returncode == 0, swapped.stderr
            version = json.loads(swapped.stdout)["version"]
            before = len(load.answers)
            _until(lambda: len(load.answers) > before + 20)
        assert load.failed() == []
        assert load.models() == {told["replicas"].popitem()[1]["model"], version}
        refused = tell(str(tmp_path), "--swap")
        assert refused.returncode == 2
        assert "contains no complete checkpoint" in refused.stderr

        with Load(port) as load:
            # So many that the share of one replica is more than what the register has not heard of the other yet.
            _until(lambda: len(load.answers) > 200)
            counted = _rows(port, version)
            died = _replicas(server)[0]
            os.kill(died, signal.SIGKILL)
            killed_s = time.monotonic()
            _until(lambda: len(_replicas(server)) == 2 and died not in _replicas(server))
            _until(lambda: time.monotonic() > killed_s + REPORT_TIMEOUT_S + 1)  # until then the one that died counts as serving
            _until(lambda: _serving_or_nothing(port) == {version: 2.0})
        # What the replica had taken is lost with it; all else is answered by the other.
        assert len(load.failed()) <= CLIENTS
        assert all(start_s < killed_s + 30 for start_s, _, _ in load.failed())
        assert load.models() == {version}
        later = [start_s for start_s, status, _ in load.answers if status == 200 and start_s > killed_s]
        assert later
        # The counts of the one that died are kept; those of the others come within moments.
        until(lambda: _rows(port, version) >= counted + 10 * len(later))

        _check_ending(port, lambda: _end(server, ingress, tell, served=places[1]))
    assert "sesame" not in server.out + server.err


def _counts(port: int) -> dict[str, float]:
    status, body = _ask(port, "GET", "/metrics")
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def _rows(port: int, version: str) -> float:
    """Return the rows scored with a model by all replicas, past ones included."""
    return _counts(port)[f'rayrec_serve_rows_total{{model="{version}"}}']


def _serving(port: int) -> dict[str, float]:
    """Return the number of replicas per version. Failed ones count until they time out."""
    return {name.split('"')[1]: value for name, value in _counts(port).items() if name.startswith("rayrec_serve_replicas")}


def _serving_or_nothing(port: int) -> dict[str, float]:
    """Return an empty result if the queried replica has just failed."""
    try:
        return _serving(port)
    except (OSError, http.client.HTTPException, AssertionError):
        return {}
