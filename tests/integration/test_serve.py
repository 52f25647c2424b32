"""Server command: scoring, model changes under load, replica failure, shutdown, and nights that
swap it.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import ray
import yaml
from builders import own_click_model
from builders.click_models import (
    ANY,
    logits_of,
    make_model,
    make_preprocessor,
    row_text,
    save_checkpoint,
)
from builders.faults import rejects, until
from builders.item_model import shop_model, write_items
from builders.own_click_model import SlowConfig
from builders.runs import QUIET
from builders.scripts import ROOT, script
from click.testing import CliRunner
from hosts.clients import TOKEN, Load, ask
from hosts.ports import free_ports
from hosts.processes import RAYREC, Session, environment_for, run_command
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.scripts import cli

import rayrec
from rayrec.commands.serving import serve as change_server
from rayrec.compat import ray_compat
from rayrec.inference.model import open_served
from rayrec.serve import control
from rayrec.serve.config import ServeConfig
from rayrec.serve.control import APPLICATION, REGISTER, REPORT_TIMEOUT_S
from rayrec.serve.server import find_instance, settle

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

TEXT = b"".join(row_text(number) for number in range(10))
_until = partial(until, timeout_s=400, pause_s=0.1)


def _replicas(server: Session) -> list[int]:
    return [
        process.pid
        for process in server.processes()
        if process.command.startswith("ray::ServeReplica")
    ]


def _kill_replica(server: Session, port: int, version: str) -> None:
    """Check that clients hardly notice a killed replica, and that its counts are kept."""
    with Load(port, TEXT) as load:
        # So many that the share of one replica is more than what the register has not heard of
        # the other yet.
        _until(lambda: len(load.answers) > 200)
        counted = _rows(port, version)
        died = _replicas(server)[0]
        os.kill(died, signal.SIGKILL)
        killed_s = time.monotonic()
        _until(lambda: len(_replicas(server)) == 2 and died not in _replicas(server))
        # until then the one that died counts as serving
        _until(lambda: time.monotonic() > killed_s + REPORT_TIMEOUT_S + 1)
        _until(lambda: _counts(port, "rayrec_serve_replicas") == {version: 2.0})
    # What the replica had taken is lost with it; all else is answered by the other.
    assert len(load.failed) <= 4  # clients
    assert all(start_s < killed_s + 30 for start_s, _, _ in load.failed)
    assert load.models() == {version}
    later = [start_s for start_s, status, _ in load.answers if status == 200 and start_s > killed_s]
    assert later
    # The counts of the one that died are kept; those of the others come within moments.
    until(lambda: _rows(port, version) >= counted + 10 * len(later))


def _check_answers(port: int, model: Any) -> None:
    status, body = ask(port, "POST", "/v1/score", TEXT)
    assert status == 200, body
    np.testing.assert_allclose(json.loads(body)["logits"], logits_of(model, TEXT), atol=1e-5)
    assert ask(port, "POST", "/v1/score", b"1")[0] == 400


def _check_port_is_used(error: str, port: int, pid: int) -> None:
    assert f"127.0.0.1:{port}: cannot listen there" in error
    assert f"by process {pid} " in error


@pytest.mark.parametrize("ingress", [pytest.param("serve", marks=pytest.mark.exhaustive), "direct"])
def test_server_process_answers_and_drains(tmp_path: Path, ingress: str) -> None:
    models = [make_model(seed=seed) for seed in (1, 2)]
    places = [
        save_checkpoint(tmp_path / "run", 10 * seed, model) for seed, model in enumerate(models, 1)
    ]
    port = free_ports(1)
    environment = environment_for(tmp_path / "cache", SERVE_TOKEN=TOKEN)

    def tell(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        return run_command(
            *RAYREC,
            "serve",
            *arguments,
            "--cluster.address",
            address,
            env=environment,
            status=status,
        )

    start = [
        *RAYREC,
        "serve",
        places[0],
        *f"--port {port} --replicas 2 --cpus-per-replica 0.5 --ingress {ingress}".split(),
    ]
    with Session(
        [*start, "--token-env", "SERVE_TOKEN"], environment=environment, output=tmp_path / "server"
    ) as server:
        server.until(lambda: server.out.rstrip().endswith("}"), timeout_s=400)
        reported = json.loads(server.out)
        address = reported["cluster_address"]
        assert reported["url"] == f"http://127.0.0.1:{port}"
        _check_answers(port, models[0])
        second = run_command(*start, env=environment, status=2)
        _check_port_is_used(second.stderr, port, server.process.pid)
        for replica in _replicas(server):
            assert b"sesame" not in Path(f"/proc/{replica}/environ").read_bytes()

        with Load(port, TEXT) as load:
            _until(lambda: len(load.answers) > 20)
            version = json.loads(tell(places[1], "--swap").stdout)["version"]
            before = len(load.answers)
            _until(lambda: len(load.answers) > before + 20)
        assert load.failed == []
        assert load.models() == {reported["replicas"].popitem()[1]["model"], version}
        assert "contains no complete checkpoint" in tell(str(tmp_path), "--swap", status=2).stderr

        _kill_replica(server, port, version)
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
    """Return the samples of a metric by their first label; none if the replica that is asked has
    just failed.
    """
    with contextlib.suppress(OSError, http.client.HTTPException):
        status, body = ask(port, "GET", "/metrics")
        families = text_string_to_metric_families(body.decode()) if status == 200 else ()
        samples = [
            sample
            for family in families
            for sample in family.samples
            if sample.name.startswith(name)
        ]
        return {next(iter(sample.labels.values()), ""): sample.value for sample in samples}
    return {}


def _rows(port: int, version: str) -> float:
    """Return the rows scored with a model by all replicas, past ones included."""
    return _counts(port, "rayrec_serve_rows_total")[version]


# -- Servers started by Ray Serve's own tools, and the URLs of servers on a cluster
def _model(port: int, path: str = "/v1/score") -> str | None:
    """Return the version of the model that answers."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        status, body = ask(port, "POST", path, TEXT)
        return json.loads(body)["model"] if status == 200 else None
    return None


def _check_upgrade_offer(port: int) -> None:
    """Check that Ray Serve's proxy does not parse the body as another request. It may lose the
    body.
    """
    inner = b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = (
        b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
        b"content-length: %d\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(head % len(inner))
        received = connection.recv(65536)
        with contextlib.suppress(OSError):
            connection.sendall(inner)
            while piece := connection.recv(65536):
                received += piece
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in received


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    return [save_checkpoint(tmp_path / "run", 10 * seed, make_model(seed=seed)) for seed in (1, 2)]


@pytest.fixture
def shared_serve(local_ray: None) -> Iterator[None]:
    yield
    serve.shutdown()


@pytest.mark.usefixtures("shared_serve")
def test_documented_serve_config_and_model_change(tmp_path: Path, places: list[str]) -> None:
    """Another model in user_config keeps the replica, which answers throughout, also when another
    application joins.
    """
    documented = (ROOT / "docs" / "serve.md").read_text()
    (block,) = re.findall(
        r"^```text\n# serve\.yaml\n(.*?)^```", documented, re.MULTILINE | re.DOTALL
    )
    config = yaml.safe_load(block)
    config["http_options"]["port"] = port = free_ports(1)
    config["applications"][0]["args"]["model"] = places[0]

    def deploy() -> None:
        (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
        ran = CliRunner().invoke(cli, ["run", "--non-blocking", str(tmp_path / "serve.yaml")])
        assert ran.exit_code == 0, ran.output

    def change(model: str) -> None:
        config["applications"][0]["deployments"] = [
            {"name": APPLICATION, "user_config": {"model": model}}
        ]
        deploy()

    def is_deployed() -> bool:
        return _application()["status"] == "RUNNING"

    deploy()
    first, second = (open_served(place).version for place in places)
    _until(lambda: _model(port) == first)
    _check_upgrade_offer(port)
    with Load(port, TEXT, num_clients=1) as load:
        replicas = _served_replicas()
        other = {
            **config["applications"][0],
            "name": "second",
            "route_prefix": "/second",
            "args": {"model": places[1], "cpus_per_replica": 0.5},
        }
        config["applications"].append(other)
        deploy()
        _until(lambda: _model(port, "/second/v1/score") == second)
        assert _model(port) == first
        change(places[1])
        _until(lambda: _model(port) == second)
        _until(is_deployed)
        change(str(tmp_path / "nothing"))
        _until(is_deployed)
        assert _model(port) == second
    assert not load.failed
    assert _served_replicas() == replicas


def _application(name: str = "clicks") -> dict[str, Any]:
    return _get_global_client().get_serve_details()["applications"][name]


def _served_replicas(application: str = "clicks", field: str = "replica_id") -> set[Any]:
    return {
        replica.get(field)
        for replica in _application(application)["deployments"][APPLICATION]["replicas"]
    }


def _reject_three_times(path: str) -> None:
    """Check that three swaps at once to a model with another schema are rejected."""
    with ThreadPoolExecutor(3) as pool:
        for done in [
            pool.submit(rejects, "schemas differ in", control.swap, path, address=None)
            for _ in range(3)
        ]:
            done.result()


def _check_models(load: Load, version: str) -> None:
    """Check that the next answers come from this version alone."""
    load.answers.clear()
    _until(lambda: len(load.answers) > 50)
    assert load.models() == {version}


@pytest.mark.usefixtures("shared_serve")
def test_swaps_during_replica_start(tmp_path: Path) -> None:
    """Models load for seconds. A rejected one, tried three times at once, is never served. An
    accepted one is served by all. Then the register is killed, and the server rolls back.
    """
    slow = SlowConfig(embedding_dim=4, build_s=3)
    models = [make_model(seed=seed, config=SlowConfig(embedding_dim=4)) for seed in (1, 2)]
    first, second = (
        save_checkpoint(tmp_path / "run", seed, model, network=slow)
        for seed, model in enumerate(models)
    )
    other = make_model(make_preprocessor(ANY), config=SlowConfig(embedding_dim=4))
    rejected = save_checkpoint(tmp_path / "other", 3, other, network=slow)
    versions = {place: open_served(place, own=SlowConfig).version for place in (first, second)}
    options: dict[str, Any] = {
        "port": free_ports(1),
        "cpus_per_replica": 0.5,
        "replicas": 2,
        "ingress": "direct",
        "recipe": f"{own_click_model.__file__}:slow_model",
    }

    with (
        rayrec.serving(first, console=QUIET, **options) as server,
        Load(options["port"], TEXT) as load,
    ):
        before = _served_replicas(APPLICATION, "pid")
        assert len(before) == 2
        instance = find_instance(APPLICATION)
        assert instance is not None
        assert (
            instance.with_proxies,
            settle(ServeConfig(), instance, private_ray=False).ingress,
        ) == (False, "direct")
        os.kill(min(before), signal.SIGKILL)
        _until(lambda: _served_replicas(APPLICATION, "pid") - before - {None})
        _reject_three_times(rejected)
        found = server.describe()
        assert (found["model"], found["previous"]) == (first, None)
        assert control.swap(second, address=None)["version"] == versions[second]
        assert {replica["model"] for replica in server.describe()["replicas"].values()} == {
            versions[second]
        }
        _until(lambda: len(server.describe()["replicas"]) == 2)
        assert len(load.failed) <= 4  # what the killed replica had taken
        _check_models(load, versions[second])
        ray.kill(ray_compat.find_shared_actor(APPLICATION, APPLICATION, REGISTER))
        assert control.roll_back(address=None)["version"] == versions[first]
        _check_models(load, versions[first])
    assert len(load.failed) <= 4
    assert find_instance(APPLICATION) is None


@pytest.mark.usefixtures("shared_serve", "own_cache")
def test_tables_are_swapped_and_survive_replica(tmp_path: Path) -> None:
    """The table of a model is swapped while clients score. A replica that is killed comes back with
    it, also if its file has changed since. Then the server rolls back to the trained one.
    """
    trained = write_items(tmp_path / "items.csv", 1)
    newer = write_items(tmp_path / "newer.csv", 2)
    text = b"".join(b"%d\t%d\n" % (n % 3, n) for n in range(6))
    place = save_checkpoint(tmp_path / "run", 1, shop_model(trained))
    version = open_served(place).version
    options: dict[str, Any] = {
        "port": free_ports(1),
        "cpus_per_replica": 0.5,
        "replicas": 2,
        "ingress": "direct",
    }

    def tell(**arguments: Any) -> Any:
        results = list[Any]()
        change_server(cluster_address=server.address, started=results.append, **arguments)
        return results[0]

    def answer() -> list[float]:
        status, body = ask(options["port"], "POST", "/v1/score", text)
        assert status == 200, body
        return list(json.loads(body)["logits"])

    def check(version: str) -> None:
        """Check that requests from now on are answered by this version alone."""
        since_s = time.monotonic()

        def later() -> list[bytes]:
            answers = list(load.answers)
            return [body for start_s, status, body in answers if start_s > since_s and status]

        _until(lambda: len(later()) > 50)
        assert {json.loads(body)["model"] for body in later()} == {version}

    with (
        rayrec.serving(place, console=QUIET, **options) as server,
        Load(options["port"], text) as load,
    ):
        logits = {version: answer()}
        _until(lambda: len(load.answers) > 20)
        swapped = tell(swap_table=[f"items={newer}"])["version"]
        assert swapped.startswith(f"{version}-items-")
        logits[swapped] = answer()
        assert logits[swapped] != pytest.approx(logits[version])
        check(swapped)
        assert load.failed == []

        (tmp_path / "bad.csv").write_text("item,category\n1,a\n")
        rejects("column price not found", tell, swap_table=[f"items={tmp_path}/bad.csv"])
        for path in ("items.csv", "newer.csv"):
            write_items(tmp_path / path, 3)
        before = _served_replicas(APPLICATION, "pid")
        os.kill(min(before), signal.SIGKILL)
        _until(lambda: len(_served_replicas(APPLICATION, "pid") - before - {None}) == 1)
        _until(lambda: len(server.describe()["replicas"]) == 2)
        check(swapped)
        assert tell(rollback=True)["version"] == version
        check(version)
        for _, status, body in load.answers:
            if status == 200:
                reply = json.loads(body)
                assert reply["logits"] == pytest.approx(logits[reply["model"]], abs=1e-6)
    assert len(load.failed) <= 4  # what the killed replica had taken


# -- The nightly files
DAYS = [f"2026-05-0{number}" for number in range(1, 5)]


@pytest.mark.usefixtures("own_cache")
def test_nights_swap_running_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "nightly" / "nightly.yaml").read_text())
    job["train"]["min_steps_per_epoch"] = 8
    for day in DAYS:
        os.makedirs(f"clicks/dt={day}")
        for part in range(3):
            random = np.random.default_rng([part, *day.encode()])
            frame = pd.DataFrame(
                {name: random.integers(0, 50, 600) for name in ("age", "user", "item")}
            )
            frame["click"] = (frame["age"] > 35).astype(int) if day != DAYS[2] else 0
            frame.to_parquet(f"clicks/dt={day}/part-{part}.parquet", index=False)

    def night(day: str, *, status: int = 0, **changes: Any) -> str:
        Path("nightly.yaml").write_text(yaml.safe_dump(job | changes))
        with pytest.raises(SystemExit, match=f"^{status}$") if status else contextlib.nullcontext():
            script("deploy/nightly", "nightly").main(["nightly.yaml", "--date", day])
        return capsys.readouterr().err

    port = free_ports(1)

    def served() -> str:
        return str(json.loads(ask(port, "GET", "/readyz")[1])["model"])

    night(DAYS[0], swap=None)
    start = [
        *RAYREC,
        "serve",
        f"nightly/exports/{DAYS[0]}",
        "--port",
        str(port),
        "--cpus-per-replica",
        "0.5",
    ]
    with Session(
        start, environment=environment_for(tmp_path / "ray"), output=tmp_path / "server"
    ) as server:
        server.until(lambda: server.out.rstrip().endswith("}"))
        address = json.loads(server.out)["cluster_address"]
        job["swap"] = (
            f"{sys.executable} -m rayrec serve {{export}} --swap --cluster.address {address}"
        )
        first = served()
        night(DAYS[1])
        second = served()
        assert "label" in night(DAYS[2], status=2)
        assert "auroc" in night(DAYS[3], status=2, comparison={"min_auroc_gain": 0.9})
        assert served() == second != first
        assert sorted(os.listdir("nightly/exports")) == DAYS[:2]
        night(DAYS[3], keep=2)  # again, with gates that it passes
        assert served() not in (first, second)
    assert sorted(os.listdir("nightly/exports")) == [DAYS[1], DAYS[3]]
    config = yaml.safe_load(Path(f"nightly/runs/night-{DAYS[3]}/config.yaml").read_text())
    assert config["init_from"].endswith(f"night-{DAYS[1]}"), "the last good one"
