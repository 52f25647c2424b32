"""The fork server of a local Ray: what a process that it forks has, and what happens without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayrec.launch import forked_worker
from rayrec.launch.fork_server import MODULES, ForkServer

PROGRAM = """
import contextlib, json, os, sys
def is_open(number):
    with contextlib.suppress(OSError):
        return bool(os.fstat(number))
print(json.dumps({
    "arguments": sys.argv, "read": sys.stdin.read(), "folder": os.getcwd(), "niceness": os.nice(0), "path": sys.path[0],
    "leads": os.getpgrp() == os.getpid(), "parent": os.getppid(), "name": __name__, "threads": len(os.listdir("/proc/self/task")),
    "files": [os.readlink(f"/proc/self/fd/{each}").partition(":")[0] for each in range(3, 100) if is_open(each)],
    "variables": [os.environ.get(name) for name in ("HERE", "FROM_HERE", "AWAY")],
    "imported": [name for name in ("chunk", "colorsys", "sndhdr") if name in sys.modules],
}))
sys.exit(len(sys.argv))
"""
CONTEXT = "--serialized-runtime-env-context="


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(["sndhdr", "no_such_module"], libraries=["colorsys"])
    yield server
    server.close()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def started(program: Path, address: str, *, added: dict[str, str] | None = None) -> tuple[dict[str, Any], str]:
    """What the program says of its process, and what is written to standard error."""
    context = [] if added is None else ["--language=PYTHON", CONTEXT + json.dumps({"env_vars": added})]
    done = subprocess.run(
        [sys.executable, forked_worker.__file__, "-s", str(program), "--one", *context],
        input="a line",
        capture_output=True,
        text=True,
        cwd=program.parent,
        env={**os.environ, forked_worker.SOCKET: address, "HERE": "here"},
        preexec_fn=lambda: (os.setpgid(0, 0), os.nice(3)),  # type: ignore[arg-type, return-value]
        timeout=120,
        check=False,  # the program ends with 2
    )
    return json.loads(done.stdout), done.stderr


def test_a_forked_process_is_as_one_that_was_started(server: ForkServer, program: Path) -> None:
    found, said = started(program, server.address)
    assert not said
    assert found["arguments"] == [str(program), "--one"]
    assert (found["name"], found["path"], found["folder"]) == ("__main__", str(program.parent), str(program.parent))
    assert (found["read"], found["niceness"], found["leads"]) == ("a line", os.nice(0) + 3, True)
    assert found["threads"] == 1
    assert found["variables"] == ["here", None, None]
    assert found["imported"] == ["colorsys"]
    assert found["files"] == ["socket"], "beside the standard ones: what the process that asked waits for"


def test_processes_that_name_the_same_modules_share_them(server: ForkServer, program: Path) -> None:
    names = {"FROM_HERE": "from ${HERE}${NOWHERE}", MODULES: "sndhdr,no_such_module"}
    (one, _), (again, _), (other, _), (plain, _) = (
        started(program, server.address, added=each)
        for each in (names, {**names, "FROM_HERE": "x"}, {MODULES: "chunk"}, {"FROM_HERE": "${AWAY}"})
    )
    assert one["imported"] == again["imported"] == ["colorsys", "sndhdr"]
    assert [found["variables"] for found in (one, again, plain)] == [
        ["here", "from here", None],
        ["here", "x", None],
        ["here", "", None],
    ]
    assert other["imported"] == ["chunk", "colorsys"]
    assert plain["imported"] == ["colorsys"]
    assert one["parent"] == again["parent"]
    assert len({found["parent"] for found in (one, other, plain)}) == 3


def test_without_a_server_ray_starts_a_process_as_ever(program: Path, tmp_path: Path) -> None:
    found, said = started(program, str(tmp_path / "none"))
    assert "rayrec: this worker imports what it needs itself: the fork server does not answer" in said
    assert (found["arguments"], found["imported"]) == ([str(program), "--one"], [])


def test_a_closed_server_ends_with_its_templates(program: Path) -> None:
    server = ForkServer(libraries=["colorsys"])
    found, _ = started(program, server.address, added={MODULES: "chunk"})
    server.close()
    assert not os.path.exists(os.path.dirname(server.address))
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{found['parent']}").exists():  # until the template reads the end of its requests
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        ({}, ""),
        ({"py_executable": sys.executable, "env_vars": {"RAYREC": "1"}, "command_prefix": []}, ""),
        ({"py_executable": "uv run python"}, "its runtime environment has a Python of its own"),
        ({"command_prefix": ["cd", "x"]}, "its runtime environment has a command of its own"),
        ({"env_vars": {"A": "b", "PYTHONPATH": "x"}}, "its runtime environment sets PYTHONPATH"),
        ({"env_vars": {"OMP_NUM_THREADS": "1"}}, "its runtime environment sets OMP_NUM_THREADS"),
    ],
)
def test_which_runtime_environments_need_a_new_process(context: dict[str, Any], reason: str) -> None:
    assert forked_worker.misfit(context) == reason
