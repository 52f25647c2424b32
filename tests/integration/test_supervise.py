"""Supervised run on a real head: success, user errors, signals, and loss of the supervisor or
head.
"""

import json
import re
import shutil
import signal
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
from builders.faults import until
from builders.runs import check_same_run, small_run
from builders.scripts import ROOT
from hosts.ports import free_ports
from hosts.processes import (
    NO_PRESTART,
    RAYREC,
    Run,
    Session,
    environment_for,
    kill_all,
    pids,
    ray_start,
)

from rayrec.checkpoint import committed
from rayrec.workloads.base import TrainConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

MARK = "RAYREC_TEST_HEAD"
"""Variable in the environment of a head and its descendants, in any session or group."""


class Head:
    """Ray head with a dashboard that can be killed with its descendants and restarted."""

    def __init__(self, folder: Path, *, cache: Path) -> None:
        # Ray's sockets lie below, and their paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="rayrec-head-"))
        self._output = folder / "head"
        self._cache = cache
        self._port = free_ports(4)
        self.url = f"http://127.0.0.1:{self._port}"
        self.address = f"127.0.0.1:{self._port + 1}"

    def start(self) -> None:
        names = ("dashboard-port", "port", "ray-client-server-port", "dashboard-agent-listen-port")
        ports = [f"--{name}={self._port + offset}" for offset, name in enumerate(names)]
        others = (
            f"--dashboard-host=127.0.0.1 --temp-dir={self.folder}/ray --num-cpus=2 "
            "--object-store-memory=200000000"
        )
        environment = environment_for(
            self._cache, RAYREC_TEST_HEAD=str(self.folder), PYTHONUNBUFFERED="1", **NO_PRESTART
        )
        self._session = Session(
            ray_start("--head", *ports, *others.split()),
            environment=environment,
            output=self._output,
        )

    def wait(self) -> None:
        """Wait until the head answers. Restarts it if a busy machine exceeds the 30 s that Ray
        gives it.
        """

        def is_ready() -> bool:
            if self._session.process.poll() is not None:
                assert "timed out during startup" in self._session.err, (
                    self._session.out + self._session.err
                )
                self.kill()
                self.start()
            return "Ray runtime started" in self._session.out and self._answers()

        until(
            is_ready,
            timeout_s=300,
            pause_s=0.2,
            reported=lambda: self._session.out + self._session.err,
        )

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/api/version", timeout=5).close()
        except urllib.error.HTTPError as error:
            return error.code == 401  # it wants a token, so it is there
        except OSError:
            return False
        return True

    def kill(self) -> None:
        mark = f"{MARK}={self.folder}".encode()
        kill_all(
            lambda: pids(lambda pid: mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        )
        self._session.process.wait()


class Supervised(Run):
    def __init__(self, config: TrainConfig, head: Head, folder: Path, *, cache: Path) -> None:
        super().__init__(config, folder / f"{config.name}_commands", cache=cache)
        self.state = folder / f"{config.name}.json"
        self._head = head

    def start(self, *flags: str) -> Self:
        return self._start(
            "supervise",
            "--address",
            self._head.url,
            "--python",
            sys.executable,
            "--state",
            str(self.state),
            *flags,
            "--",
            "train",
            "--config",
            str(self._folder / "config.yaml"),
        )

    @property
    def log(self) -> str:
        return self.state.with_suffix(".log").read_text()

    def last_step(self) -> int:
        return max(event["step"] for event in self.events("step"))

    def result(self) -> dict[str, Any]:
        """Return what the command prints, which must succeed."""
        assert self.exit_status(timeout_s=480) == 0, self.session.err
        return json.loads(self.session.out)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Head]:
    head = Head(tmp_path_factory.mktemp("head"), cache=cache)
    try:
        head.start()
        head.wait()
        yield head
    finally:
        head.kill()
        shutil.rmtree(head.folder)


Begin = Callable[..., Supervised]


@pytest.fixture(scope="module")
def begin(
    head: Head, click_log: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Begin]:
    folder = tmp_path_factory.mktemp("supervised")
    with ExitStack() as runs:

        def start(name: str, **changes: Any) -> Supervised:
            config = small_run(click_log, folder, name=name, **changes)
            return runs.enter_context(Supervised(config, head, folder, cache=cache).start())

        yield start


@pytest.mark.exhaustive
def test_success_returns_summary_at_once(begin: Begin) -> None:
    run = begin("supervised")
    summary = run.result()
    assert summary == json.loads(Path(run.path, "summary.json").read_text())
    assert "criteo_demo: finished" in run.session.err  # what the job printed
    for line in (
        "submitted supervised-0001",
        "supervised-0001 is running",
        "finished, as supervised-0001",
    ):
        assert line in run.log
        assert line in run.session.err
    assert run.start("-q").result() == summary
    assert "rows/s" not in run.session.err
    assert "submitted supervised-0002" in run.session.err  # a job that compares the data and ends


def test_user_error_is_not_retried(begin: Begin) -> None:
    run = begin("wrong", train_data={"path": "/no/such/log.txt"})
    assert run.exit_status(timeout_s=480) == 2
    assert re.match("rayrec supervise: .*/no/such/log.txt", run.session.err.splitlines()[-1])
    assert run.log.count("submitted") == 1
    assert "gave up" in run.log
    assert run.session.out == ""


@pytest.mark.exhaustive
def test_ctrl_c_stops_job_after_save(begin: Begin) -> None:
    run = begin("interrupted", steps=100_000)
    run.wait_for_step(60)
    run.session.process.send_signal(signal.SIGINT)
    assert run.exit_status(timeout_s=480) == 130
    assert "interrupted-0001 has ended" in run.log
    # saved when it stopped, and not only every 40 steps
    assert committed(run.path)[-1].step == run.last_step() >= 60


@pytest.mark.exhaustive
def test_next_supervisor_follows_same_job(begin: Begin, undisturbed: dict[str, Any]) -> None:
    run = begin("orphan")
    run.wait_for_step(40)
    run.kill_driver()
    check_same_run(run.start().result(), undisturbed, restarts=0)
    assert "following orphan-0001" in run.session.err
    assert run.log.count("submitted") == 1


def test_lost_head_loses_only_steps_since_checkpoint(
    begin: Begin, head: Head, undisturbed: dict[str, Any]
) -> None:
    run = begin("lost")
    run.wait_for_step(60)
    until(lambda: any(saved.step >= 40 for saved in committed(run.path)), timeout_s=180)
    head.kill()
    assert run.last_step() < undisturbed["steps"]
    until(lambda: "head lost" in run.log, timeout_s=180)
    head.start()
    head.wait()
    check_same_run(run.result(), undisturbed)
    assert re.search(
        ".*".join(
            (
                "submitted lost-0001",
                "head lost",
                "head is back",
                "lost-0001 was lost with the head",
                "submitted lost-0002",
            )
        ),
        run.log,
        re.DOTALL,
    )
    assert run.log.count("submitted") == 2
    assert run.events("start")[-1]["step"] >= 40


@pytest.mark.exhaustive
def test_loop_of_spot_guide_outlives_head(
    head: Head, undisturbed: dict[str, Any], click_log: Path, cache: Path, tmp_path: Path
) -> None:
    diff = (
        (ROOT / "docs" / "from-huggingface.md")
        .read_text()
        .partition("+import subprocess")[2]
        .partition("```")[0]
    )
    script = "\n".join(
        ["import subprocess", *(line[1:] for line in diff.splitlines() if not line.startswith("-"))]
    )
    script = script.replace('"rayrec", "train", "gpt2"', ", ".join(map(repr, [*RAYREC, "train"])))
    run = Run(small_run(click_log, tmp_path, name="loop"), tmp_path, cache=cache)
    command = [sys.executable, "-c", script.replace("run.yaml", str(tmp_path / "config.yaml"))]
    with Session(
        command,
        environment=environment_for(cache, RAY_ADDRESS=head.address),
        output=tmp_path / "loop",
    ) as loop:
        loop.until(lambda: any(event["step"] >= 60 for event in run.events("step")))
        head.kill()
        head.start()
        head.wait()
        assert loop.wait(timeout_s=480).status == 0, loop.err
    check_same_run(json.loads(Path(run.path, "summary.json").read_text()), undisturbed)
