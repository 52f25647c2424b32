"""Server command: scoring, model changes under load, replica failure, and shutdown."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from builders.click_models import logits_of, make_model, row_text, save_checkpoint
from builders.faults import until
from hosts.clients import TOKEN, Load, ask
from hosts.ports import free_ports
from hosts.processes import RAYREC, Session, environment_for, run_command
from prometheus_client.parser import text_string_to_metric_families

from rayrec.serve.control import REPORT_TIMEOUT_S

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

TEXT = b"".join(row_text(number) for number in range(10))
_until = partial(until, timeout_s=400, pause_s=0.1)


def _replicas(server: Session) -> list[int]:
    return [process.pid for process in server.processes() if process.command.startswith("ray::ServeReplica")]


@pytest.mark.parametrize("ingress", [pytest.param("serve", marks=pytest.mark.exhaustive), "direct"])
def test_server_process_answers_and_drains(tmp_path: Path, ingress: str) -> None:
    models = [make_model(seed=seed) for seed in (1, 2)]
    places = [save_checkpoint(tmp_path / "run", 10 * seed, model) for seed, model in enumerate(models, 1)]
    port = free_ports(1)
    environment = environment_for(tmp_path / "cache", SERVE_TOKEN=TOKEN)

    def tell(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        return run_command(*RAYREC, "serve", *arguments, "--cluster.address", address, env=environment, status=status)

    start = [*RAYREC, "serve", places[0], *f"--port {port} --replicas 2 --cpus-per-replica 0.5 --ingress {ingress}".split()]
    with Session([*start, "--token-env", "SERVE_TOKEN"], environment=environment, output=tmp_path / "server") as server:
        server.until(lambda: server.out.rstrip().endswith("}"), timeout_s=400)
        told = json.loads(server.out)
        address = told["cluster_address"]
        assert told["url"] == f"http://127.0.0.1:{port}"
        status, body = ask(port, "POST", "/v1/score", TEXT)
        assert status == 200, body
        np.testing.assert_allclose(json.loads(body)["logits"], logits_of(models[0], TEXT), atol=1e-5)
        assert ask(port, "POST", "/v1/score", b"1")[0] == 400
        second = run_command(*start, env=environment, status=2)
        assert f"127.0.0.1:{port}: cannot listen there" in second.stderr
        assert f"by process {server.process.pid} " in second.stderr
        for replica in _replicas(server):
            assert b"sesame" not in Path(f"/proc/{replica}/environ").read_bytes()

        with Load(port, TEXT) as load:
            _until(lambda: len(load.answers) > 20)
            version = json.loads(tell(places[1], "--swap").stdout)["version"]
            before = len(load.answers)
            _until(lambda: len(load.answers) > before + 20)
        assert load.failed == []
        assert load.models() == {told["replicas"].popitem()[1]["model"], version}
        assert "contains no complete checkpoint" in tell(str(tmp_path), "--swap", status=2).stderr

        with Load(port, TEXT) as load:
            # So many that the share of one replica is more than what the register has not heard of the other yet.
            _until(lambda: len(load.answers) > 200)
            counted = _rows(port, version)
            died = _replicas(server)[0]
            os.kill(died, signal.SIGKILL)
            killed_s = time.monotonic()
            _until(lambda: len(_replicas(server)) == 2 and died not in _replicas(server))
            _until(lambda: time.monotonic() > killed_s + REPORT_TIMEOUT_S + 1)  # until then the one that died counts as serving
            _until(lambda: _counts(port, "rayrec_serve_replicas") == {version: 2.0})
        # What the replica had taken is lost with it; all else is answered by the other.
        assert len(load.failed) <= 4  # clients
        assert all(start_s < killed_s + 30 for start_s, _, _ in load.failed)
        assert load.models() == {version}
        later = [start_s for start_s, status, _ in load.answers if status == 200 and start_s > killed_s]
        assert later
        # The counts of the one that died are kept; those of the others come within moments.
        until(lambda: _rows(port, version) >= counted + 10 * len(later))

        with Load(port, TEXT) as load:
            if ingress == "direct":
                server.process.send_signal(signal.SIGTERM)
            else:
                assert json.loads(tell("--stop").stdout)["model"] == places[1]
            assert server.wait().status == 0, server.err
        # Clients fail to connect (0) or receive 503. Balancers retry these, but not 404.
        assert {status for _, status, _ in load.answers} <= {200, 503, 0}
    assert "sesame" not in server.out + server.err


def _counts(port: int, name: str) -> dict[str, float]:
    """Return the samples of a metric by their first label; none if the replica that is asked has just failed."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        status, body = ask(port, "GET", "/metrics")
        families = text_string_to_metric_families(body.decode()) if status == 200 else ()
        samples = [sample for family in families for sample in family.samples if sample.name.startswith(name)]
        return {next(iter(sample.labels.values()), ""): sample.value for sample in samples}
    return {}


def _rows(port: int, version: str) -> float:
    """Return the rows scored with a model by all replicas, past ones included."""
    return _counts(port, "rayrec_serve_rows_total")[version]
