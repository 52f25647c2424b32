"""A cluster of machines that share nothing but what is said: each an address, a host name, files
and memory of its own.
"""

import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.faults import until
from builders.runs import check_no_rows_lost
from builders.scripts import ROOT, script
from hosts import nodes
from hosts.nodes import Network, Node
from hosts.processes import Session, events_so_far, run_command

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

TOKEN = "0123456789abcdef" * 4
SECRET = "swordfish-4711"
STORE = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

class Empty(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        known = "Credential=AKID/" in self.headers.get("Authorization", "")
        listing = urlsplit(self.path).query != ""
        empty = b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"
        body = empty if known and listing else b""
        self.send_response(403 if not known else 200 if listing else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

ThreadingHTTPServer(("0.0.0.0", 9000), Empty).serve_forever()
"""
"""An S3 store with nothing in it, for one access key."""


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if lacking := nodes.missing():
        (pytest.fail if os.environ.get("RAYREC_REQUIRE_NODES") else pytest.skip)(lacking)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that each machine has for itself."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(own: Path, _namespaces: None) -> Iterator[list[Node]]:
    """Three machines: the head, one with two accelerators, one with one; only the head's user has
    the cluster's token.
    """
    with Network(unshared=[own]) as network:
        yield network.cluster(
            {"cpus": 3, "whole": 3},
            {"cpus": 2, "accelerator": 2},
            {"cpus": 2, "accelerator": 1},
            token=TOKEN,
        )


def train_flags(
    log: Path, storage: Path, name: str, resource: str = "accelerator", **flags: Any
) -> list[str]:
    given = {
        "train-data.path": log / "train.txt",
        "storage-path": storage,
        "name": name,
        "steps": 6,
        "batch-size": 64,
        "evaluate-every": 6,
        "scaling.num-workers": 3,
        "scaling.cpus-per-worker": 0.5,
        "scaling.threads-per-worker": 1,
        **flags,
    }
    settings = [f"--{key}={value}" for key, value in given.items()]
    return ["train", "criteo_demo", "--scaling.resources-per-worker", resource, "1", *settings]


def summary(done: Session) -> dict[str, Any]:
    assert done.status == 0, done.err[-4000:]
    return json.loads(done.out)


def refusal(done: Session) -> str:
    """The one line that a command was refused with."""
    assert (done.status, done.out) == (2, ""), (done.out, done.err[-4000:])
    return done.err.strip().splitlines()[-1]


@pytest.mark.exhaustive
def test_uneven_workers_match_three_on_one_machine(
    cluster: list[Node], click_log: Path, shared: Path
) -> None:
    head = cluster[0]
    spread = summary(head.rayrec(*train_flags(click_log, shared, "spread")))
    whole = summary(head.rayrec(*train_flags(click_log, shared, "whole", "whole")))
    assert (spread["weights_sha256"], spread["restarts"]) == (whole["weights_sha256"], 0)


def test_user_without_cluster_token_is_rejected(
    cluster: list[Node], click_log: Path, shared: Path
) -> None:
    flags = train_flags(click_log, shared, "refused")
    said = refusal(cluster[1].rayrec(*flags))
    assert (
        "RAY_ADDRESS=10.77.0.1:6379: the Ray cluster requires a token, but this user has no token"
        in said
    )
    assert "the Ray cluster rejects the token from RAY_AUTH_TOKEN" in refusal(
        cluster[1].rayrec(*flags, RAY_AUTH_TOKEN="f" * 64)
    )


@pytest.mark.exhaustive
def test_unreachable_machine_ends_command_in_one_line(
    cluster: list[Node], click_log: Path, shared: Path
) -> None:
    nobody = {"RAY_ADDRESS": "10.77.0.77:6379"}  # no such machine: packets to it are lost
    done = cluster[0].rayrec(*train_flags(click_log, shared, "nobody"), timeout_s=60, **nobody)
    assert "RAY_ADDRESS=10.77.0.77:6379: no Ray cluster answers there" in refusal(done)


@pytest.mark.exhaustive
def test_unshared_storage_is_rejected(cluster: list[Node], click_log: Path, own: Path) -> None:
    assert str(own) in refusal(
        cluster[0].rayrec(*train_flags(click_log, own, "scattered", **{"scaling.num-workers": 1}))
    )


@pytest.mark.exhaustive
def test_credentials_only_in_command_reach_workers(cluster: list[Node], tmp_path: Path) -> None:
    """They are asked for before anything starts, and sent on request, where no log shows them."""
    head = cluster[0]
    store = head.start(sys.executable, "-c", STORE)
    listens = f"import socket; socket.create_connection(('{head.address}', 9000), timeout=1)"
    until(lambda: not head.run(sys.executable, "-c", listens).status)
    settings = {
        "AWS_ACCESS_KEY_ID": "AKID",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{head.address}:9000",
    }
    command = ("vocabulary", "s3://logs/train.txt", "--out", str(tmp_path / "vocabulary"))
    said = refusal(head.rayrec(*command, timeout_s=60, **settings))
    assert "does not reach the store, which this machine does" in said
    assert "RAYREC_SEND_CREDENTIALS=1" in said
    sent = head.rayrec(*command, **settings, RAYREC_SEND_CREDENTIALS="1")
    # each node was let in, and there is no log
    assert "s3://logs/train.txt: no such file or folder" in refusal(sent)
    assert all(node.address in store.err for node in cluster)
    # none has it
    run_command("grep", "-r", "-l", "-a", "--devices=skip", SECRET, head.folder / "ray", status=1)


def wait_for_step(run: Path, step: int) -> None:
    until(
        lambda: any(event["step"] >= step for event in events_so_far(run, "step")),
        timeout_s=240,
        pause_s=0.2,
    )


LONG = {
    "steps": 200,
    "evaluate-every": 200,
    "checkpoint.every": 40,
    "log-every": 10,
    "scaling.num-workers": 2,
}


@pytest.fixture(scope="module")
def undisturbed(cluster: list[Node], click_log: Path, shared: Path) -> str:
    """The hash of the weights of a `LONG` run on one machine that nothing happened to."""
    done = cluster[0].rayrec(
        *train_flags(click_log, shared, "undisturbed", "whole", **LONG), timeout_s=500
    )
    return summary(done)["weights_sha256"]


HOG = """
import ray, sys, time
ray.init(address="auto", log_to_driver=False)
hold = ray.remote(num_cpus=1)(lambda seconds: time.sleep(seconds))  # Ray takes no builtin function
held = [hold.remote(float(sys.argv[1])) for _ in range(int(ray.cluster_resources()["CPU"]))]
print("held", flush=True)
ray.get(held)
"""


@pytest.mark.exhaustive
def test_busy_cluster_prints_only_result_to_stdout(
    cluster: list[Node], click_log: Path, shared: Path
) -> None:
    head = cluster[0]
    summary(head.rayrec(*train_flags(click_log, shared, "measured", "whole")))
    hog = head.start(
        sys.executable, "-c", HOG, "60", RAY_ADDRESS="10.77.0.1:6379", RAY_AUTH_MODE="token"
    )
    hog.until(lambda: "held" in hog.out)
    time.sleep(3)
    found = summary(
        head.rayrec(
            "evaluate", str(shared / "measured"), str(click_log / "train.txt"), timeout_s=400
        )
    )
    assert found["rows"] == 20_000
    hog.process.kill()


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", ["killed", "unplugged"])
def test_loss_of_worker_machine_resumes(
    loss: str, undisturbed: str, click_log: Path, shared: Path
) -> None:
    """The run takes the machine that is left, and ends with the weights of a run that nothing
    happened to.
    """
    with Network() as network:
        head, *workers = network.cluster(
            {"cpus": 2}, *[{"cpus": 1, "accelerator": 1}] * 3, token=TOKEN
        )
        flags = {**LONG, "scaling.placement-strategy": "SPREAD"}
        command = head.start_rayrec(*train_flags(click_log, shared, f"lost-{loss}", **flags))
        wait_for_step(shared / f"lost-{loss}", 60)
        lost = next(worker for worker in workers if worker.processes("ray::RayTrainWorker"))
        lost.end() if loss == "killed" else lost.unplug()
        found = summary(command.wait(timeout_s=500))
    check_no_rows_lost(found, restarts=1)
    assert found["weights_sha256"] == undisturbed


@pytest.mark.exhaustive
def test_killed_worker_and_stopped_driver_resume(
    undisturbed: str, click_log: Path, shared: Path
) -> None:
    with Network() as network:
        head, *workers = network.cluster(
            {"cpus": 2}, *[{"cpus": 1, "accelerator": 1}] * 2, token=TOKEN
        )
        flags = train_flags(click_log, shared, "resumed", **LONG)
        command = head.start_rayrec(*flags)
        wait_for_step(shared / "resumed", 60)
        os.kill(workers[0].processes("ray::RayTrainWorker")[0], signal.SIGKILL)
        wait_for_step(shared / "resumed", 110)
        os.kill(head.processes("-m rayrec train")[0], signal.SIGTERM)
        assert command.wait().status == 128 + signal.SIGTERM
        found = summary(head.rayrec(*flags, timeout_s=500))
    assert found["weights_sha256"] == undisturbed
    assert found["restarts"] >= 1


@pytest.mark.exhaustive
def test_loss_of_only_data_machine_resumes(click_log: Path, shared: Path) -> None:
    """Its data tasks go to the machines of the workers, or to one that joins: the run ends in any
    case.
    """
    with Network() as network:
        workers = [{"cpus": 2, "accelerator": 1}] * 2
        head, data, *_ = network.cluster({"cpus": 0}, {"cpus": 4}, *workers, token=TOKEN)
        command = head.start_rayrec(*train_flags(click_log, shared, "dataless", **LONG))
        wait_for_step(shared / "dataless", 60)
        data.end()
        found = summary(command.wait(timeout_s=300))
    assert (found["steps"], found["rows_lost"]) == (LONG["steps"], 0)


@pytest.mark.exhaustive
def test_links_with_delay_and_loss_change_no_weights(click_log: Path, shared: Path) -> None:
    if lacking := nodes.missing_netem():
        pytest.skip(lacking)
    with Network() as network:
        head, *workers = network.cluster(
            {"cpus": 2}, {"cpus": 1, "accelerator": 2}, {"cpus": 1, "accelerator": 1}, token=TOKEN
        )
        plain = summary(head.rayrec(*train_flags(click_log, shared, "clear")))
        for worker in workers:
            worker.disturb(delay_ms=20, loss_percent=2)
        found = summary(head.rayrec(*train_flags(click_log, shared, "disturbed"), timeout_s=500))
    assert found["weights_sha256"] == plain["weights_sha256"]


def left(machines: list[Node]) -> list[bytes]:
    return [
        Path(f"/proc/{pid}/cmdline").read_bytes()
        for node in machines
        for pid in node.started_processes()
    ]


SSH = ROOT / "deploy" / "ssh" / "run.sh"
NOTEBOOKS = script("tools", "run_notebook")
LOSSES_BY_STEP = r"\b\d+: (\d\.\d{4})\b"
FIGURES = {
    "dlrm_nodes": r"([\d,]+) rows counted|([\d,]+) ids in 26 tables|"
    r"'(?:auroc|logloss|rows)': ([\d.]+)",
    "gpt2_nodes": rf"'(?:blocks|tokens|loss)': ([\d.]+)|{LOSSES_BY_STEP}",
}
"""Results that do not depend on the machine's speed."""
WORKERS = {
    "dlrm_nodes": [["worker 0", "worker 1"]],
    "gpt2_nodes": [["worker 0", "worker 1"], ["workers 0 to 3", "workers 4 to 7"]],  # 2x1 and 2x4
}
"""Workers of the two nodes in each run of a notebook."""


def text_of(notebook: dict[str, Any]) -> str:
    """Return the text that the cells of a notebook show."""
    outputs = itertools.chain(*(cell.get("outputs", ()) for cell in notebook["cells"]))
    return "\n".join(
        "".join(output.get("text") or output["data"]["text/plain"]) for output in outputs
    )


def numbers_in(text: str, pattern: str) -> list[float]:
    """Return the numbers in the groups of a pattern, in order."""
    groups = itertools.chain(*(match.groups() for match in re.finditer(pattern, text)))
    return [float(number.replace(",", "")) for number in groups if number]


@pytest.mark.exhaustive
@pytest.mark.parametrize("stopped", [False, True])
def test_ssh_script_trains_on_two_machines(
    click_log: Path, shared: Path, tmp_path: Path, stopped: bool
) -> None:
    """It ends all that it started, also at SIGTERM, after which the same command resumes."""
    with Network() as network:
        machines = [network.add(), network.add()]
        variables = {
            "RAYREC_BIN": f"{sys.prefix}/bin",
            "RAYREC_HEAD": machines[0].address,
            "RAY_AUTH_MODE": "disabled",
            "RAYREC_SSH": str(network.ssh()),
            "RAYREC_START": "--num-cpus=1 --object-store-memory=80000000",
        }
        flags = train_flags(
            click_log, shared, f"by-ssh-{stopped}", **{**LONG, "scaling.cpus-per-worker": 0.6}
        )
        words = [
            word
            for word in flags
            if word not in ("--scaling.resources-per-worker", "accelerator", "1")
        ]
        command = [
            str(SSH),
            ",".join(machine.name for machine in machines),
            *words,
        ]
        session = Session(
            command, environment={**os.environ, **variables}, output=tmp_path / "first"
        )
        if stopped:
            wait_for_step(shared / "by-ssh-True", 60)
            os.kill(session.process.pid, signal.SIGTERM)
            assert session.wait().status == 128 + signal.SIGTERM
            until(
                lambda: not any(node.started_processes() for node in machines),
                timeout_s=30,
                reported=lambda: left(machines),
            )
            session = Session(
                command, environment={**os.environ, **variables}, output=tmp_path / "second"
            )
        result = summary(session.wait(timeout_s=500))
        until(
            lambda: not any(node.started_processes() for node in machines),
            timeout_s=30,
            reported=lambda: left(machines),
        )
    check_no_rows_lost(result)
    assert result["steps"] == LONG["steps"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dlrm_nodes", "gpt2_nodes"])
def test_notebooks_run_on_nodes(name: str) -> None:
    path = ROOT / "examples" / f"{name}.ipynb"
    stored = json.loads(path.read_text())
    made = NOTEBOOKS.run(path)
    assert [len(cell.get("outputs", ())) for cell in made["cells"]] == [
        len(cell.get("outputs", ())) for cell in stored["cells"]
    ]
    shown = text_of(made)
    expected = text_of(stored)
    assert numbers_in(shown, FIGURES[name]) == pytest.approx(
        numbers_in(expected, FIGURES[name]), rel=1e-2
    )
    runs = WORKERS[name]
    placed = re.findall(r"(node\d+)'?:? \['(workers? [^']+)'", shown)
    assert sorted(workers for _, workers in placed) == sorted(itertools.chain(*runs))
    assert len({node for node, _ in placed}) == 2
    if name == "dlrm_nodes":
        (reader,) = re.findall(r"(node\d+) \['data tasks'\]", shown)
        assert reader not in {node for node, _ in placed}
    else:
        by_one, by_four = np.array_split(numbers_in(shown, LOSSES_BY_STEP), 2)
        assert by_one.tolist() == pytest.approx(by_four.tolist(), abs=2e-4)
