"""Benchmark candidates as separate processes, which inherit no threads, memory or Ray."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rows import note

from rayrec.observe.event_json import redact_secrets

FOLDER = Path(__file__).parent


def run_child(script: Path, *arguments: str, **environment: str) -> Any:
    """Run a script and return the last JSON line that it prints."""
    # One OpenMP thread by default, and one torch thread per core, as in Ray's workers: a quarter
    # faster than two pools that compete. Applies to all candidates.
    variables = {"OMP_NUM_THREADS": "1", **environment}
    return run_command(script.name, [sys.executable, str(script), *arguments], **variables)


def run_command(title: str, command: list[str], **environment: str) -> Any:
    """Run a command and return the last JSON line that it prints. `title` is for errors."""
    variables = {**os.environ, **environment}
    variables.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=FOLDER,
        check=False,
        timeout=7200,
        env=variables,
    )
    check_ended(title, done.returncode, done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def check_ended(name: str, status: int, stderr: str) -> None:
    """Raise RuntimeError, with the last words that the process wrote, unless it ended with status
    0.
    """
    if not status:
        return
    lines = [" ".join(line.split()) for line in stderr.splitlines() if re.search(r"\w", line)]
    how = f"signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"status {status}"
    note(redact_secrets(stderr[-4000:]))
    raise RuntimeError(f"{name} ended with {how}: {lines[-1] if lines else 'no message'}")


def child(script: str, task: str, **arguments: Any) -> Any:
    """Run a task of a benchmark's file in a new process and return its result. See `run_task`."""
    return run_child(Path(script), task, json.dumps(arguments))


def run_task(*tasks: Callable[..., Any]) -> None:
    """Run the task named on the command line and print its result as JSON. Counterpart of
    `child`.
    """
    named = {task.__name__: task for task in tasks}
    print(json.dumps(named[sys.argv[1]](**json.loads(sys.argv[2]))))
