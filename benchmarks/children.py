"""Candidates of a benchmark as processes of their own, so that none inherits threads, memory or a Ray of another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run_child(script: Path, *arguments: str, **environment: str) -> Any:
    """Runs a script and returns what the JSON says that it prints last."""
    # One OpenMP thread by default, and then as many of torch's own as there are cores: what Ray gives its workers, and a
    # quarter faster than two pools that compete. It holds for all candidates alike.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    variables.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, check=False, timeout=1800, env=variables)
    if done.returncode:
        raise RuntimeError(f"{script.name} {arguments} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def child(script: str, task: str, **arguments: Any) -> Any:
    """What `task` of a benchmark's own file returns, in a fresh process; see `run_task`."""
    return run_child(Path(script), task, json.dumps(arguments))


def run_task(*tasks: Callable[..., Any]) -> None:
    """The other end of `child`: runs the task that the command line names and prints what it returns."""
    named = {task.__name__: task for task in tasks}
    print(json.dumps(named[sys.argv[1]](**json.loads(sys.argv[2]))))
