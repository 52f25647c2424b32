"""Worker process of Ray that is forked from a process with the large libraries imported
(`fork_server.py`), and lives as long as its fork. Workers in languages other than Python start as
without rayrec. On a local Ray, the node manager runs this program instead of Ray's
`setup_worker.py`, and it asks the fork server of the command that started Ray. On a running Ray it
is the job's Python (`python_of_a_job`) and asks the node's fork server, started on demand. Run by
its path, with the worker's command as arguments. Imports very little, since it runs once per
process.
"""

import json
import os
import shlex
import socket
import stat
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

SOCKET = "RAYREC_FORK_SERVER"
"""Variable with the Unix socket of a local Ray's fork server."""
MODULES = "RAYREC_TEMPLATE_MODULES"
"""Variable with the modules of a worker's template, separated by commas. They must not import
Ray.
"""
STARTED = b"s"
"""First answer of a fork, before it runs the worker's program; any other answer is the reason for a
failure.
"""
IDLE_S = 600
"""Idle time after which a node's fork server ends."""
MAX_SERVERS = 3
"""Maximum number of fork servers per node manager. Jobs with different variables, e.g. with
uploaded code, have one each.
"""
_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "KINETO_",
    "TORCH_",
    "PYTORCH_",
)
"""Prefixes of variables that a process reads when it starts or imports libraries."""
_COMMAND = r"""if [ -x {python} ] && [ -r {program} ]; then exec {python} -S {program} "$@"; fi
rays=$(tr '\0' '\n' </proc/$PPID/cmdline | sed -n 's/^--python_worker_command=//p')
case $rays in '"'*) rays=${{rays#?}} rays=${{rays%%'"'*}} ;; *) rays=${{rays%% *}} ;; esac
exec "$rays" "$@" """
"""Bash command that runs this program, or the Python that its parent, the node manager, would
run.
"""


def main() -> None:
    if any(each.startswith(_LANGUAGE) and each != f"{_LANGUAGE}PYTHON" for each in sys.argv):
        _become(sys.argv[1:])
    # Ray passes these flags to Python
    arguments = [argument for argument in sys.argv[1:] if argument not in ("-s", "-S")]
    context: dict[str, Any] = next(
        (json.loads(each[len(_CONTEXT) :]) for each in arguments if each.startswith(_CONTEXT)), {}
    )
    reason = unsupported_reason(context, os.environ)
    if not reason:
        try:
            with _server(arguments) as server:
                send_request(
                    server,
                    [each for each in arguments if not each.startswith((_CONTEXT, _LANGUAGE))],
                    context,
                )
                answer = server.recv(500)
                if answer == STARTED:
                    server.recv(1)  # returns when the process has ended
                    return
                reason = answer.decode(errors="replace") or "the fork server ended"
        except OSError as error:
            reason = f"the fork server does not answer: {error}"
    print(f"rayrec: this worker imports its modules itself: {reason}", file=sys.stderr, flush=True)
    _become(arguments)


def python_of_a_job() -> str:
    """Return the `py_executable` of a runtime environment whose workers start through this program.
    Ray's agent passes it to bash. Nodes without this Python or program use Ray's own Python.
    """
    python, program = (shlex.quote(path) for path in (sys.executable, os.path.abspath(__file__)))
    return f"bash -c {shlex.quote(_COMMAND.format(python=python, program=program))} rayrec"


def unsupported_reason(context: dict[str, Any], environment: Mapping[str, str]) -> str:
    """Return why a process with this runtime environment cannot be forked, or "" if it can. Pure.
    `context` is the runtime environment, as resolved by Ray's agent. A running Ray has added its
    variables to `environment`.
    """
    if any(
        context.get(name) for name in ("command_prefix", "override_worker_entrypoint", "java_jars")
    ):
        return "its runtime environment has a custom command"
    if context.get("py_executable", sys.executable) not in (sys.executable, python_of_a_job()):
        return "its runtime environment has a custom Python"
    if names := [name for name in context.get("env_vars", {}) if name.startswith(_READ_AT_START)]:
        return f"its runtime environment sets {names[0]}"
    if "KINETO_USE_DAEMON" in environment and _modules(context, environment):
        return "KINETO_USE_DAEMON makes torch start a thread when imported, which a fork would lose"
    return ""


def _modules(context: dict[str, Any], environment: Mapping[str, str]) -> str:
    return {**environment, **context.get("env_vars", {})}.get(MODULES, "")


def send_request(server: socket.socket, arguments: list[str], context: dict[str, Any]) -> None:
    """Send the state that the fork must copy from this process: a file with JSON, and the three
    standard files.
    """
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "added": context.get("env_vars", {}),
        "modules": _modules(context, os.environ),
        "folder": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "leads_group": os.getpgrp() == os.getpid(),
    }
    with open(os.memfd_create("request"), "w+") as file:
        json.dump(request, file)
        file.flush()
        socket.send_fds(server, [b"r"], [file.fileno(), 0, 1, 2])


def _server(arguments: list[str]) -> socket.socket:
    """Connect to the fork server. Raises OSError without a server, or if other users could read the
    request.
    """
    if address := os.environ.get(SOCKET):
        return _connection(address)
    import fcntl

    address = os.path.join(_private_folder(arguments), _name_of_server(os.getppid()))
    try:
        return _connection(address)
    except OSError:
        with open(f"{address}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # only one of the starting processes starts the server
            try:
                return _connection(address)
            except OSError:
                _start_server(address, raylet=os.getppid())
        return _connection(address)


def _connection(address: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address)
    except OSError:
        server.close()
        raise
    return server


def _private_folder(arguments: list[str]) -> str:
    """Return a private folder in the folder of Ray's session, which the worker's arguments name."""
    named = dict(
        each[2:].split("=", 1) for each in arguments if each.startswith("--") and "=" in each
    )
    if not named.keys() >= {"temp-dir", "session-name"}:
        raise FileNotFoundError("its arguments do not name the folder of Ray's session")
    folder = os.path.join(named["temp-dir"], named["session-name"], "rayrec")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} must be accessible to this user only")
    return folder


def _name_of_server(raylet: int) -> str:
    """Return the server name, unique per node manager (process id `raylet`) and variables that are
    read at start.
    """
    import hashlib

    with open(f"/proc/{raylet}/stat") as file:
        began = file.read().rpartition(")")[2].split()[19]
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(_READ_AT_START)
    }
    key = json.dumps([began, sys.executable, __file__, variables], sort_keys=True)
    return f"{raylet}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def _start_server(address: str, *, raylet: int) -> None:
    """Start a server that ends with the node manager, when idle for `IDLE_S`, or without its
    socket. Logs to `address`.log.
    """
    import subprocess

    leave_newest(address, raylet=raylet)
    watched = os.pidfd_open(raylet)
    with socket.socket(socket.AF_UNIX) as listener, open(f"{address}.log", "ab") as log:
        listener.bind(address)
        listener.listen(1024)  # requests wait while the server imports
        files = (listener.fileno(), watched)
        command = [
            sys.executable,
            "-m",
            "rayrec.cluster.fork_server",
            *map(str, files),
            str(IDLE_S),
        ]
        subprocess.Popen(
            [*command, os.environ.get(MODULES, "")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=files,
            process_group=0,
            cwd="/",
        )
    os.close(watched)


def leave_newest(address: str, *, raylet: int) -> None:
    """Remove the sockets of the node manager's oldest servers, and any at `address`, so that one
    more makes `MAX_SERVERS`.
    """
    import glob

    if os.path.lexists(address):
        os.unlink(address)
    sockets = glob.glob(os.path.join(glob.escape(os.path.dirname(address)), f"{raylet}-????????"))
    for file in sorted(sockets, key=os.path.getmtime)[: max(0, len(sockets) + 1 - MAX_SERVERS)]:
        os.unlink(file)


def _become(arguments: list[str]) -> NoReturn:
    through = []
    if any(argument.startswith((_CONTEXT, _LANGUAGE)) for argument in arguments):
        import ray

        through = [
            os.path.join(os.path.dirname(ray.__file__), "_private", "workers", "setup_worker.py")
        ]
    os.execv(sys.executable, [sys.executable, *through, *arguments])


if __name__ == "__main__":
    main()
