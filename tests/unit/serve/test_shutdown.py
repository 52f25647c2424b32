"""Signals of a server's command: states, and the end of a process with all processes that it has
started.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from builders.faults import until
from hosts.processes import read_process

from rayrec.cluster.process_end import stop_signals
from rayrec.serve import server, shutdown
from rayrec.serve.shutdown import STOPPED, StopRequest

TERM = signal.SIGTERM
INT = signal.SIGINT
HUP = signal.SIGHUP


@pytest.fixture(autouse=True)
def default_hangup() -> Iterator[None]:
    """Let hangups end processes that are started here, also if the tests run under nohup."""
    before = signal.signal(HUP, signal.SIG_DFL)
    yield
    signal.signal(HUP, before)


class Ended(Exception):
    """End of the command at once."""


def _end(reason: str) -> None:
    raise Ended(reason)


@pytest.fixture
def stop() -> StopRequest:
    return StopRequest(_end)


@pytest.mark.parametrize("number", [TERM, INT, HUP])
def test_signal_before_server_is_ready_ends_command(
    number: signal.Signals, stop: StopRequest
) -> None:
    with pytest.raises(Ended, match=f"stopped by {number.name} before it was ready"):
        stop.receive(number)
    assert not stop.requested.is_set()


@pytest.mark.parametrize("number", [TERM, INT, HUP])
def test_signal_lets_server_answer_requests(number: signal.Signals, stop: StopRequest) -> None:
    stop.begin_serving()
    assert not stop.requested.is_set()
    stop.receive(number)
    assert stop.requested.is_set()


def test_second_signal_ends_command(stop: StopRequest) -> None:
    stop.begin_serving()
    stop.receive(TERM)
    with pytest.raises(Ended, match="second signal"):
        stop.receive(INT)


def test_late_answers_end_command(stop: StopRequest) -> None:
    stop.begin_serving()
    stop.receive(TERM)
    with pytest.raises(Ended, match="more than 4 s"):
        stop.expire()


def test_program_gets_interrupt_at_second_signal() -> None:
    before = signal.getsignal(TERM)
    with server._stop_request() as stop:
        stop.begin_serving()
        os.kill(os.getpid(), TERM)
        assert stop.requested.wait(10)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), INT)
    assert signal.getsignal(TERM) == before


def test_hangup_is_ignored_only_with_nohup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    assert stop_signals() == {TERM, INT, HUP}
    monkeypatch.setattr(
        signal, "getsignal", lambda number: signal.SIG_IGN if number == HUP else signal.SIG_DFL
    )
    assert stop_signals() == {TERM, INT}


def test_function_leaves_signals_of_process_unchanged() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    masks = []
    assert (
        shutdown.run_until_signal(
            lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())) or 7
        )
        == 7
    )
    assert masks == [before | {TERM, INT, HUP}]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert shutdown.command_end() is None


# -- A process that runs a command, which starts processes as Ray does
COMMAND = """
import subprocess, sys, threading, time
from rayrec.serve import shutdown

def start(code, **options):
    return subprocess.Popen([sys.executable, "-S", "-c", code], **options)

sleep = "import time; time.sleep(600)"
grandchild = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {sleep!r}], "
    f"start_new_session=True); {sleep}"
)

def run():
    command = shutdown.command_end()
    command.owns_ray = True
    start(grandchild)
    start(sleep, start_new_session=True)
    print("begun", flush=True)
    BODY
    return 0

sys.exit(shutdown.run_until_signal(run))
"""
SERVE = "command.stop.begin_serving(); print('serving', flush=True)"

IMPORTING = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "rayrec.cli":
            os.kill(os.getpid(), NUMBER)

sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["serve", "missing"]
from rayrec.__main__ import main
main()
"""
"""A command that gets a signal while modules are imported."""


class Result(NamedTuple):
    status: int
    out: str
    err: str
    took_s: float
    """Seconds from the last signal to the end."""


def _descendants(pid: int) -> set[int]:
    """Return the running processes that a process started, directly or not."""
    running = [
        process
        for name in os.listdir("/proc")
        if name.isdigit() and (process := read_process(int(name)))
    ]
    result = {pid}
    for _ in range(4):  # generations
        result |= {process.pid for process in running if process.parent in result}
    return result - {pid}


def _run_command(
    folder: Path,
    body: str,
    *numbers: signal.Signals,
    prefix: Sequence[str] = (),
    to_group: bool = False,
) -> Result:
    """Run a command, send signals once it has started, and check that no process of it is left."""
    command = [*prefix, sys.executable, "-c", COMMAND.replace("BODY", body)]
    out = folder / "out"
    err = folder / "err"
    with out.open("wb") as to_out, err.open("wb") as to_err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=to_out, stderr=to_err, process_group=0
        )
    try:
        line = "serving" if "begin_serving" in body else "begun"
        until(lambda: line in out.read_text(), reported=err.read_text)
        until(lambda: len(_descendants(process.pid)) == 3)
        started = _descendants(process.pid)
        start_s = time.monotonic()
        for number in numbers:
            start_s = time.monotonic()
            (os.killpg if to_group else os.kill)(process.pid, number)
            time.sleep(0.1)
        status = process.wait(60)
        took_s = time.monotonic() - start_s
        assert [pid for pid in started if read_process(pid)] == []
    finally:
        process.kill()
        process.wait()
    return Result(status, out.read_text(), err.read_text(), took_s)


@pytest.mark.parametrize("number", [TERM, INT, HUP])
def test_signal_during_imports_ends_command(number: signal.Signals) -> None:
    code = IMPORTING.replace("NUMBER", str(int(number)))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (
        STOPPED,
        f"rayrec serve: stopped by {number.name} before it was ready\n",
    )


@pytest.mark.parametrize("number", [TERM, INT, HUP])
def test_signal_ends_starting_command_and_processes(tmp_path: Path, number: signal.Signals) -> None:
    result = _run_command(tmp_path, "time.sleep(600)", number)
    assert (result.status, result.err) == (
        STOPPED,
        f"rayrec serve: stopped by {number.name} before it was ready\n",
    )


def test_command_in_blocking_call_ends(tmp_path: Path) -> None:
    """Ray's calls may not return to Python, where a signal handler would run."""
    assert (
        _run_command(
            tmp_path, "lock = threading.Lock(); lock.acquire(); lock.acquire()", TERM
        ).status
        == STOPPED
    )


def test_processes_outlive_signal_to_group_until_server_ends(tmp_path: Path) -> None:
    result = _run_command(
        tmp_path,
        f"{SERVE}; command.stop.requested.wait(); time.sleep(0.3); "
        "print(len(shutdown.child_processes()), flush=True)",
        TERM,
        to_group=True,
    )
    assert (result.status, result.err) == (0, "")
    assert result.out.split()[-1] == "2"


def test_second_signal_ends_process_at_once(tmp_path: Path) -> None:
    result = _run_command(tmp_path, f"{SERVE}; time.sleep(600)", TERM, TERM)
    assert (result.status, result.err.count("\n")) == (STOPPED, 1)
    assert "second signal" in result.err


def test_unanswered_requests_end_process_after_limit(tmp_path: Path) -> None:
    result = _run_command(tmp_path, f"shutdown.DRAIN_S = 0.4; {SERVE}; time.sleep(600)", TERM)
    assert result.status == STOPPED
    assert "took more than 0.4 s" in result.err


def test_hangup_after_nohup_is_ignored(tmp_path: Path) -> None:
    result = _run_command(
        tmp_path,
        f"{SERVE}; time.sleep(0.6); print(command.stop.requested.is_set(), flush=True)",
        HUP,
        prefix=["nohup"],
    )
    assert (result.status, result.out.split()[-1]) == (0, "False")


def test_unfinished_server_is_withdrawn_from_cluster(tmp_path: Path) -> None:
    """The deployment then fails in the main thread, which neither prints that nor ends the
    process.
    """
    result = _run_command(
        tmp_path,
        "gone = threading.Event(); command.withdraw = lambda: (print('withdrawn', flush=True), "
        "gone.set(), time.sleep(0.3)); gone.wait(); return 1",
        TERM,
    )
    assert (result.status, result.out.split()[-1]) == (STOPPED, "withdrawn")


def test_silent_cluster_does_not_delay_end(tmp_path: Path) -> None:
    assert (
        _run_command(
            tmp_path,
            "shutdown._WITHDRAW_S = 0.2; command.withdraw = lambda: time.sleep(600); "
            "time.sleep(600)",
            TERM,
        ).status
        == STOPPED
    )


def test_end_spares_earlier_children(tmp_path: Path) -> None:
    """A shell with a background job becomes the command by `exec`."""
    code = COMMAND.replace("BODY", "")
    shell = f'sleep 600 & echo $!; exec {sys.executable} -c "$CODE"'
    done = subprocess.Popen(
        ["sh", "-c", shell], stdout=subprocess.PIPE, text=True, env={**os.environ, "CODE": code}
    )
    assert done.stdout is not None
    background = int(done.stdout.readline())
    try:
        assert done.wait(60) == 0
        assert read_process(background) is not None
    finally:
        os.kill(background, signal.SIGKILL)
        done.stdout.close()
