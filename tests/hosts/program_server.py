"""Runs small programs for tests, each in a process of its own that is forked from this one, which has imported what they need.

Standard input: a JSON list of programs a line, each with its text, arguments and the file for its output; they run at the same
time. Standard output: the exit status of each, as a JSON list.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hosts.page_server import end_after


class Program(NamedTuple):
    text: str
    arguments: tuple[str, ...] = ()


class Ended(NamedTuple):
    status: int
    """Negative: of the signal that ended it."""
    output: str


class ProgramServer:
    """A process that has imported the module that programs need."""

    def __init__(self, preload: str, folder: Path) -> None:
        """`folder`: for outputs."""
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hosts.program_server", preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )

    def run(self, *programs: Program) -> Sequence[Ended]:
        """Runs programs at the same time; returns when all have ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        outputs = [self._folder / str(number) for number in range(len(programs))]
        asked = [{**program._asdict(), "output": str(output)} for program, output in zip(programs, outputs, strict=True)]
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        statuses = json.loads(self._process.stdout.readline())
        return [Ended(status, output.read_text()) for status, output in zip(statuses, outputs, strict=True)]

    def close(self) -> None:
        self._process.communicate(timeout=60)


def _main(preload: str) -> None:
    importlib.import_module(preload)
    for line in sys.stdin:
        children = []
        for program in json.loads(line):
            child = os.fork()
            if child == 0:
                end_after(functools.partial(_run, **program))
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), flush=True)


def _run(text: str, arguments: list[str], output: str) -> None:
    sys.argv = ["-c", *arguments]
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.close(file)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(text, names)


if __name__ == "__main__":
    _main(sys.argv[1])
