"""Unmodified driver of the run that benchmark observe trains, in a separate process with a
terminal.
"""

import contextlib
import ctypes
import json
import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, final

from subprocesses import run_task

_DIE_WITH_PARENT: Final = 1
"""PR_SET_PDEATHSIG of prctl(2): a stopped process notices nothing else."""


def drive(*, folder: str) -> dict[str, float]:
    """Follow a run's events for TensorBoard, Prometheus and a terminal, as its driver does, until
    standard input ends.

    Returns the CPU seconds since the first line of input.
    """
    from rayrec.observe.console import Console
    from rayrec.observe.events import follow
    from rayrec.observe.tracking.tensorboard import TensorBoardTracker
    from rayrec.observe.tracking.tracker import tracking
    from rayrec.training.launchers.ray_metrics import PrometheusTracker

    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    console = Console()
    path = os.path.join(folder, "events.jsonl")
    makers: dict[str, Any] = {
        "TensorBoard": partial(TensorBoardTracker, folder, config="recipe: criteo_demo\n"),
        "Prometheus": partial(PrometheusTracker, "observed", since_s=0.0),
    }
    with (
        tracking(makers, path, note=console.note),
        console.training(lambda stop: follow(path, stop=stop)),
    ):
        sys.stdin.readline()
        begin_s = _used_s()
        sys.stdin.read()
        return {"cpu_s": _used_s() - begin_s}


def _used_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@final
class Driver:
    """Handle of a `drive` process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.signal = process.send_signal

    def begin(self) -> None:
        """Start counting the process's CPU time."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> float:
        """Return the process's CPU seconds since `begin`. The process must be running, and the
        event writer closed.
        """
        output, _ = self._process.communicate()
        return json.loads(output.strip().splitlines()[-1])["cpu_s"]


@contextlib.contextmanager
def driver(folder: str) -> Iterator[Driver]:
    """Start the driver as a process whose standard error is a terminal."""
    terminal, its_end = pty.openpty()
    command = [sys.executable, __file__, "drive", json.dumps({"folder": folder})]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(
        ["cat"], stdin=terminal, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ):
        os.close(terminal)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=its_end,
            text=True,
            env=environment,
        )
        os.close(its_end)
        with process:
            try:
                yield Driver(process)
            finally:
                process.kill()


if __name__ == "__main__":
    run_task(drive)
