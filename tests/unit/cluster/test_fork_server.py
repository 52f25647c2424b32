"""Fork servers of a local Ray and of a node, and processes forked with and without them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders.faults import until

from rayrec.cluster import fork_server, forked_worker
from rayrec.cluster.fork_server import ForkServer
from rayrec.cluster.forked_worker import MODULES

PROGRAM = """
import contextlib, json, os, sys, time
def is_open(number):
    with contextlib.suppress(OSError):
        return bool(os.fstat(number))
print(json.dumps({
    "arguments": sys.argv, "read": sys.stdin.read(), "folder": os.getcwd(),
    "niceness": os.nice(0), "path": sys.path[0],
    "leads": os.getpgrp() == os.getpid(), "parent": os.getppid(), "name": __name__,
    "threads": len(os.listdir("/proc/self/task")),
    "files": [
        os.readlink(f"/proc/self/fd/{each}").partition(":")[0]
        for each in range(3, 100)
        if is_open(each)
    ],
    "variables": [os.environ.get(name) for name in ("HERE", "FROM_HERE", "AWAY")],
    "imported": [name for name in ("chunk", "colorsys", "sndhdr") if name in sys.modules],
    "oom_score": int(open("/proc/self/oom_score_adj").read()), "zone": time.tzname[0],
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


def started(
    program: Path, address: str, *, added: dict[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """Run the program; return its report of its process, and its standard error."""
    context = (
        [] if added is None else ["--language=PYTHON", CONTEXT + json.dumps({"env_vars": added})]
    )
    command = [sys.executable, forked_worker.__file__, "-s", str(program), "--one", *context]
    options: Any = {
        "env": {**os.environ, forked_worker.SOCKET: address, "HERE": "here"},
        "cwd": program.parent,
        "timeout": 120,
    }
    options |= {"preexec_fn": lambda: (os.setpgid(0, 0), os.nice(3)), "capture_output": True}
    # not forked, the program ends with 2
    done = subprocess.run(command, input="a line", text=True, check=False, **options)
    return json.loads(done.stdout), done.stderr


def test_forked_process_matches_started_process_but_for_time_zone(
    server: ForkServer, program: Path
) -> None:
    found, said = started(program, server.address)
    assert not said
    assert found["arguments"] == [str(program), "--one"]
    assert (found["name"], found["path"], found["folder"]) == (
        "__main__",
        str(program.parent),
        str(program.parent),
    )
    assert (found["read"], found["niceness"], found["leads"]) == (
        "a line",
        min(os.nice(0) + 3, 19),
        True,
    )
    assert (found["threads"], found["variables"]) == (1, ["here", None, None])
    assert found["imported"] == ["colorsys"]
    assert found["files"] == ["socket"], (
        "beside the standard ones: what the process that asked waits for"
    )
    found, _ = started(program, server.address, added={"TZ": "ABC-3"})
    assert found["zone"] == "ABC"


def test_processes_with_same_modules_share_template(server: ForkServer, program: Path) -> None:
    names = {"FROM_HERE": "from ${HERE}${NOWHERE}", MODULES: "sndhdr,no_such_module"}
    (one, _), (again, _), (other, _), (plain, _) = (
        started(program, server.address, added=each)
        for each in (
            names,
            {**names, "FROM_HERE": "x"},
            {MODULES: "chunk"},
            {"FROM_HERE": "${AWAY}"},
        )
    )
    assert one["imported"] == again["imported"] == ["colorsys", "sndhdr"]
    variables = [found["variables"] for found in (one, again, plain)]
    assert variables == [["here", "from here", None], ["here", "x", None], ["here", "", None]]
    assert other["imported"] == ["chunk", "colorsys"]
    assert plain["imported"] == ["colorsys"]
    assert one["parent"] == again["parent"]
    assert len({found["parent"] for found in (one, other, plain)}) == 3


@pytest.mark.parametrize("added", [{}, {MODULES: "sndhdr,no_such_module"}])
def test_forked_processes_have_high_oom_score(
    server: ForkServer, program: Path, added: dict[str, str], monkeypatch: Any
) -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text())
    found, _ = started(program, server.address, added=added)
    assert found["oom_score"] == 1000
    assert int(Path(f"/proc/{found['parent']}/oom_score_adj").read_text()) == (
        1000 if added else own
    ), "the template's"
    monkeypatch.setenv("RAY_worker_oom_score_adjustment", str(own - 1 if added else own + 1))
    found, _ = started(program, server.address, added=added)
    assert found["oom_score"] == (1000 if added else own + 1), "never below its own"


FAILING_FORK = """
import os, pathlib
fork = os.fork
def failing_fork():
    if pathlib.Path(__file__).with_name("full").exists():
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = failing_fork
"""


@pytest.mark.parametrize("added", [{}, {MODULES: "chunk"}])
def test_fork_server_survives_failed_fork(
    program: Path, tmp_path: Path, added: dict[str, str], monkeypatch: Any
) -> None:
    (tmp_path / "failing_fork.py").write_text(FAILING_FORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    full = tmp_path / "full"
    full.touch()
    server = ForkServer(["sndhdr"], libraries=["failing_fork", "colorsys"])
    imported = []
    for fails in (True, False, True, False):
        full.touch() if fails else full.unlink()
        found, said = started(program, server.address, added=added)
        imported.append(found["imported"])
        assert (
            "the fork server cannot fork: [Errno 11] Resource temporarily unavailable" in said
        ) == fails
    server.close()
    assert imported == [[], ["chunk", "colorsys"] if added else ["colorsys"]] * 2


def test_replaced_modules_with_same_time_are_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "replaced_module.py"
    file.write_text("A = 1")
    os.utime(file, (0, 0))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fork_server.gc, "freeze", lambda: None)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    imported = fork_server._Imported(["replaced_module"])
    assert not imported.is_old()
    (tmp_path / "new").write_text("A = 2")
    os.utime(tmp_path / "new", (0, 0))
    os.replace(tmp_path / "new", file)
    assert imported.is_old()


def test_workers_start_alone_and_closed_servers_leave_nothing(
    program: Path, tmp_path: Path
) -> None:
    found, said = started(program, str(tmp_path / "none"))
    assert "rayrec: this worker imports its modules itself: the fork server does not answer" in said
    assert (found["arguments"], found["imported"]) == ([str(program), "--one"], [])
    server = ForkServer(libraries=["colorsys"])
    found, _ = started(program, server.address, added={MODULES: "chunk"})
    server.close()
    assert not os.path.exists(os.path.dirname(server.address))
    wait_until_gone(found["parent"])  # when the template has read the end of its requests
    server = ForkServer(libraries=["colorsys"])
    server._process.stdin.close()  # as the kernel does for a process that is killed
    server._process.wait(60)
    assert not os.path.exists(os.path.dirname(server.address))
    server.close()


NODE_MANAGER = """
import json, subprocess, sys
for line in sys.stdin:
    command, environment = json.loads(line)
    subprocess.run(["bash", "-c", f"exec {command}"], env=environment, stdin=subprocess.DEVNULL)
    print("done", flush=True)
"""
"""Stand-in for a running Ray's node manager, which runs commands like Ray's agent."""
SMALL = """
import json, os, sys
said = getattr(sys.modules.get("changes"), "SAID", None)
print(json.dumps([os.getppid(), said, "pandas" in sys.modules]))
"""


class NodeManager:
    """Node manager that starts programs with the Python of a job, in a Ray session in `folder`."""

    def __init__(self, folder: Path, command: str = "/bin/echo setup_worker.py") -> None:
        (folder / "session_1").mkdir()
        # The paths of sockets have at most 107 bytes, which temporary folders may exceed.
        self._short = tempfile.mkdtemp(prefix="rn", dir="/tmp")
        self._folder = Path(self._short, "ray")
        self._folder.symlink_to(folder)
        self._errors = folder / "errors"
        arguments = [sys.executable, "-c", NODE_MANAGER, f"--python_worker_command={command}"]
        with open(self._errors, "wb") as errors:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                arguments, stdin=pipe, stdout=pipe, stderr=errors, text=True
            )

    def start(self, program: Path, python: str, **added: str) -> str:
        command = f"{python} {program} --temp-dir={self._folder} --session-name=session_1"
        variables = {
            name: value for name, value in os.environ.items() if name != forked_worker.SOCKET
        }
        print(json.dumps([command, {**variables, **added}]), file=self._process.stdin, flush=True)
        return "".join(iter(self._process.stdout.readline, "done\n"))

    def errors(self) -> str:
        return self._errors.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._short, ignore_errors=True)


@pytest.fixture
def node_manager(tmp_path: Path) -> Iterator[NodeManager]:
    manager = NodeManager(tmp_path)
    yield manager
    manager.kill()


def wait_until_gone(process: int) -> None:
    until(lambda: not Path(f"/proc/{process}").exists())


@pytest.mark.extended
def test_node_has_one_fork_server_until_ray_ends(node_manager: NodeManager, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    module = tmp_path / "changes.py"
    program.write_text(SMALL)
    module.write_text("SAID = 'old'")

    def started(**added: str) -> list[Any]:
        return json.loads(
            node_manager.start(
                program, forked_worker.python_of_a_job(), PYTHONPATH=str(tmp_path), **added
            )
        )

    server, *found = started()
    assert (found, started()) == ([None, True], [server, None, True])
    template, *found = started(**{MODULES: "changes"})
    assert found == ["old", True]
    assert started(**{MODULES: "changes"}) == [template, "old", True]
    assert not node_manager.errors()
    module.write_text("SAID = 'not old'")
    assert started(**{MODULES: "changes"})[1:] == [None, False], "its template ends"
    assert (
        "rayrec: this worker imports its modules itself: the fork server ended"
        in node_manager.errors()
    )
    assert started(**{MODULES: "changes"})[1:] == ["not old", True]
    other, *_ = started(OMP_NUM_THREADS="3")
    assert other != server, "it has what a process reads when it starts"
    oldest, newest = sorted(
        (tmp_path / "session_1" / "rayrec").glob("*-????????"), key=os.path.getmtime
    )
    oldest.unlink()
    wait_until_gone(server)
    assert newest.exists()
    node_manager.kill()
    wait_until_gone(other)


def test_node_keeps_newest_servers_or_uses_python_of_ray(
    tmp_path: Path, node_manager: NodeManager, program: Path
) -> None:
    files = [f"7-{number:08x}" for number in range(4)]
    folder = tmp_path / "servers"
    folder.mkdir()
    for age_s, name in enumerate([*files, "7-00000000.lock", "7-00000000.log", "8-00000000"]):
        (folder / name).touch()
        os.utime(folder / name, (1e9 - age_s, 1e9 - age_s))
    forked_worker.leave_newest(str(folder / files[1]), raylet=7)
    assert {path.name for path in folder.iterdir()} == {
        files[0],
        files[2],
        "7-00000000.lock",
        "7-00000000.log",
        "8-00000000",
    }
    elsewhere = forked_worker.python_of_a_job().replace(sys.executable, "/nowhere/python")
    assert node_manager.start(program, elsewhere).startswith(str(program)), (
        "the echo of its arguments"
    )


def test_python_paths_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b $(touch ran) 'c'"
    folder.mkdir()
    own = folder / "python"
    rays = folder / "echo"
    own.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    own.chmod(0o755)
    rays.symlink_to("/bin/echo")
    program = tmp_path / "program.py"
    program.write_text(SMALL)
    manager = NodeManager(tmp_path, f'"{rays}" setup_worker.py')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(own))
    assert json.loads(manager.start(program, forked_worker.python_of_a_job()))[1:] == [
        None,
        True,
    ], "a copy"
    monkeypatch.setattr(sys, "executable", "/nowhere/a b/python")
    assert manager.start(program, forked_worker.python_of_a_job()).startswith(
        f"{program} --temp-dir"
    ), "Ray's"
    manager.kill()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "/tmp"),
        ({"TMPDIR": "/" + "t" * 36}, "/" + "t" * 36),
        ({"TMPDIR": "/" + "t" * 37}, "/tmp"),
        ({"TMPDIR": "/" + "t" * 37, "RAY_TMPDIR": "/r"}, "/r"),
    ],
)
def test_sockets_are_not_in_folders_with_long_paths(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert fork_server.socket_folder() == folder


def test_insecure_fork_server_folder_is_rejected(node_manager: NodeManager, tmp_path: Path) -> None:
    (tmp_path / "session_1" / "rayrec").mkdir(mode=0o755)
    (tmp_path / "program.py").write_text(SMALL)
    assert json.loads(node_manager.start(tmp_path / "program.py", forked_worker.python_of_a_job()))[
        1:
    ] == [None, False]
    assert "rayrec must be accessible to this user only" in node_manager.errors()


def test_workers_in_other_languages_start_normally(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "java"
    java.write_text('#!/bin/sh\necho "$A $@"\n')
    java.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ours = ["-Dray.address=1", "-s", "a.Worker"]
    context = CONTEXT + json.dumps({"env_vars": {"A": "added"}})
    for language, command in (("JAVA", ours), ("CPP", [str(java), *ours])):
        arguments = [
            sys.executable,
            forked_worker.__file__,
            *command,
            f"--language={language}",
            context,
        ]
        environment = {**os.environ, forked_worker.SOCKET: server.address}
        done = subprocess.run(
            arguments, capture_output=True, text=True, env=environment, check=True
        )
        assert done.stdout.startswith("added ")
        assert done.stdout.endswith(" ".join(ours) + "\n")
        assert "rayrec" not in done.stderr


def test_unsupported_reason_of_runtime_environments() -> None:
    for context, reason in (
        ({}, ""),
        ({"py_executable": sys.executable, "env_vars": {"RAYREC": "1"}, "command_prefix": []}, ""),
        ({"py_executable": "uv run python"}, "its runtime environment has a custom Python"),
        ({"py_executable": forked_worker.python_of_a_job()}, ""),
        ({"command_prefix": ["cd", "x"]}, "its runtime environment has a custom command"),
        ({"env_vars": {"A": "b", "PYTHONPATH": "x"}}, "its runtime environment sets PYTHONPATH"),
        ({"env_vars": {"OMP_NUM_THREADS": "1"}}, "its runtime environment sets OMP_NUM_THREADS"),
        ({"env_vars": {"GOMP_SPINCOUNT": "100"}}, "its runtime environment sets GOMP_SPINCOUNT"),
    ):
        assert forked_worker.unsupported_reason(context, {MODULES: "torch"}) == reason


@pytest.mark.parametrize("modules", ["", "torch"])
def test_kineto_daemon_requires_unforked_process(modules: str) -> None:
    """The import starts its thread. A running Ray has already added the runtime environment's
    variables.
    """
    reason = (
        "KINETO_USE_DAEMON makes torch start a thread when imported, which a fork would lose"
        if modules
        else ""
    )
    assert (
        forked_worker.unsupported_reason({}, {"KINETO_USE_DAEMON": "1", MODULES: modules}) == reason
    )
    assert (
        forked_worker.unsupported_reason(
            {"env_vars": {MODULES: modules}}, {"KINETO_USE_DAEMON": "1"}
        )
        == reason
    )
