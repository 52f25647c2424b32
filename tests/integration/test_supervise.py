"""Supervised run on a real head: success, user errors, signals, and loss of the supervisor or head."""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders.faults import until
from hosts.ports import free_ports
from hosts.processes import Run, Session, environment_for, small_run

from rayrec.checkpoint import committed
from rayrec.workloads.base import TrainConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MARK = "RAYREC_TEST_HEAD"
"""Variable in the environment of a head and its descendants, in any session or group."""
STEPS = 480


class Head:
    """Ray head with a dashboard that can be killed with its descendants and restarted."""

    def __init__(self, folder: Path, *, cache: Path, first_port: int) -> None:
        # Ray's sockets lie below, and their paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="rayrec-head-"))
        self._output, self._cache, self._ports = folder / "head", cache, range(first_port, first_port + 4)
        self.url = f"http://127.0.0.1:{self._ports[1]}"

    def start(self) -> None:
        """Start the head without waiting for an answer."""
        names = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port")
        options: dict[str, object] = dict(zip(names, self._ports, strict=True))
        options |= {"dashboard-host": "127.0.0.1", "temp-dir": self.folder / "ray"}
        options |= {"num-cpus": 2, "object-store-memory": 200_000_000}
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, *["-u", "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]]
        environment = environment_for(self._cache, RAYREC_TEST_HEAD=str(self.folder))
        self._session = Session([*command, *flags], environment=environment, output=self._output)

    def wait(self, *, timeout_s: float = 300) -> None:
        """Wait until the head answers. Restarts it if a busy machine exceeds the 30 s that Ray gives it."""
        deadline_s = time.monotonic() + timeout_s
        while not ("Ray runtime started" in self._session.out and self._answers()):
            if self._session.process.poll() is not None:
                assert "timed out during startup" in self._session.err, self._session.out + self._session.err
                self.kill()
                self.start()
            assert time.monotonic() < deadline_s, self._session.out + self._session.err
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/api/version", timeout=5).close()
        except urllib.error.HTTPError as error:
            return error.code == 401  # it wants a token, so it is there
        except OSError:
            return False
        return True

    def processes(self) -> list[int]:
        mark, found = f"{MARK}={self.folder}".encode(), []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return found

    def kill(self) -> None:
        deadline_s = time.monotonic() + 120
        while found := self.processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline_s, found
            time.sleep(0.05)
        self._session.process.wait()


class Supervised(Run):
    """Run under `rayrec supervise`."""

    def __init__(self, config: TrainConfig, head: Head, folder: Path, *, cache: Path) -> None:
        super().__init__(config, folder / f"{config.name}_commands", cache=cache)
        self.state, self._head = folder / f"{config.name}.json", head

    def start(self, *flags: str) -> None:
        own = ["--address", self._head.url, "--python", sys.executable, "--state", str(self.state), *flags]
        train = ["train", "--config", str(self._folder / "config.yaml")]
        command = [sys.executable, "-m", "rayrec", "supervise", *own, "--", *train]
        output = self._folder / f"command_{len(self._sessions) + 1}"
        self._sessions.append(Session(command, environment=self._environment, output=output))

    @property
    def log(self) -> str:
        return self.state.with_suffix(".log").read_text()

    def steps(self) -> list[int]:
        return [event["step"] for event in self.events("step")]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Head]:
    head = Head(tmp_path_factory.mktemp("head"), cache=cache, first_port=free_ports(4))
    try:
        head.start()
        head.wait()
        yield head
    finally:
        head.kill()
        shutil.rmtree(head.folder)


Begin = Callable[..., Supervised]


@pytest.fixture(scope="module")
def begin(head: Head, click_log: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Begin]:
    folder = tmp_path_factory.mktemp("supervised")
    runs: list[Supervised] = []

    def start(name: str, **changes: Any) -> Supervised:
        config = small_run(click_log, str(folder), **{"name": name, "steps": STEPS, **changes})
        runs.append(Supervised(config, head, folder, cache=cache))
        runs[-1].start()
        return runs[-1]

    yield start
    for run in runs:
        run.end()


@pytest.fixture(scope="module")
def supervised(begin: Begin) -> Supervised:
    """Supervise an undisturbed run."""
    run = begin("supervised")
    assert run.exit_status(timeout_s=480) == 0, run.session.err
    return run


@pytest.mark.extended
@pytest.mark.exhaustive
def test_success_returns_summary_at_once(supervised: Supervised) -> None:
    summary = json.loads(supervised.session.out)
    assert summary == json.loads(Path(supervised.path, "summary.json").read_text())
    assert "criteo_demo: finished" in supervised.session.err  # what the job printed
    for line in ("submitted supervised-0001", "supervised-0001 is running", "finished, as supervised-0001"):
        assert line in supervised.log
        assert line in supervised.session.err
    supervised.start("-q")
    assert supervised.exit_status(timeout_s=240) == 0
    assert json.loads(supervised.session.out) == summary
    assert "rows/s" not in supervised.session.err
    assert "submitted supervised-0002" in supervised.session.err  # a job that compares the data and ends


def test_user_error_is_not_retried(begin: Begin) -> None:
    run = begin("wrong", train_data={"path": "/no/such/log.txt"})
    assert run.exit_status(timeout_s=480) == 2
    assert "/no/such/log.txt" in run.session.err.splitlines()[-1]
    assert run.session.err.splitlines()[-1].startswith("rayrec supervise: ")
    assert run.log.count("submitted") == 1
    assert "gave up" in run.log
    assert run.session.out == ""


@pytest.mark.exhaustive
@pytest.mark.extended
def test_ctrl_c_stops_job_after_save(begin: Begin) -> None:
    run = begin("interrupted", steps=100_000)
    run.wait_for_step(60)
    run.session.process.send_signal(signal.SIGINT)
    assert run.exit_status(timeout_s=480) == 130
    assert "interrupted-0001 has ended" in run.log
    newest = committed(run.path)[-1].step
    assert newest >= 60
    assert newest == max(run.steps())  # saved when it stopped, and not only every 40 steps


@pytest.mark.exhaustive
@pytest.mark.extended
def test_next_supervisor_follows_same_job(begin: Begin, undisturbed: dict[str, Any]) -> None:
    run = begin("orphan")
    run.wait_for_step(40)
    run.kill_driver()
    run.start()
    assert run.exit_status(timeout_s=480) == 0, run.session.err
    assert "following orphan-0001" in run.session.err
    assert run.log.count("submitted") == 1
    assert json.loads(run.session.out)["weights_sha256"] == undisturbed["weights_sha256"]
    assert json.loads(run.session.out)["restarts"] == 0


@pytest.mark.extended
def test_lost_head_loses_only_steps_since_checkpoint(begin: Begin, head: Head, undisturbed: dict[str, Any]) -> None:
    run = begin("lost")
    run.wait_for_step(60)
    until(lambda: any(saved.step >= 40 for saved in committed(run.path)), timeout_s=180)
    head.kill()
    assert max(run.steps()) < STEPS
    until(lambda: "head lost" in run.log, timeout_s=180)
    head.start()
    head.wait()
    assert run.exit_status(timeout_s=480) == 0, run.session.err
    assert json.loads(run.session.out)["weights_sha256"] == undisturbed["weights_sha256"]
    lines = run.log.splitlines()
    order = ["submitted lost-0001", "head lost", "head is back", "lost-0001 was lost with the head"]
    order += ["submitted lost-0002"]
    places = [next(place for place, line in enumerate(lines) if text in line) for text in order]
    assert places == sorted(places)
    assert run.log.count("submitted") == 2
    assert run.events("start")[-1]["step"] >= 40
