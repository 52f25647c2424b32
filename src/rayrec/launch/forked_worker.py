"""What the node manager of a local Ray runs, in place of Ray's `setup_worker.py`, to start a worker process: it asks the fork
server (`fork_server.py`) for a copy of a process that has imported the large libraries, and lives as long as that copy.

Run by its path, with the worker's command as arguments. Imports next to nothing, since it runs once for every process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

SOCKET = "RAYREC_FORK_SERVER"
"""The variable that names the fork server's Unix socket."""
_CONTEXT = "--serialized-runtime-env-context="
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "KMP_", "MKL_", "KINETO_", "TORCH_", "PYTORCH_")
"""Beginnings of the names of variables that a process reads when it starts or imports libraries."""


def main() -> None:
    arguments = [
        argument for argument in sys.argv[1:] if argument not in ("-s", "-S")
    ]  # flags that Ray means for Python
    context: dict[str, Any] = next(
        (json.loads(each[len(_CONTEXT) :]) for each in arguments if each.startswith(_CONTEXT)), {}
    )
    reason = misfit(context)
    if not reason:
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.connect(os.environ[SOCKET])
                ask(server, [each for each in arguments if not each.startswith((_CONTEXT, "--language="))], context)
                if server.recv(1):
                    server.recv(1)  # nothing, when the process has ended
                    return
                reason = "the fork server ended"
        except OSError as error:
            reason = f"the fork server does not answer: {error}"
    start_alone(arguments, reason)


def misfit(context: dict[str, Any]) -> str:
    """Why a process with this runtime environment, as Ray's agent resolved it, cannot be a copy; empty where it can. Pure."""
    if any(context.get(name) for name in ("command_prefix", "override_worker_entrypoint", "java_jars")):
        return "its runtime environment has a command of its own"
    if context.get("py_executable", sys.executable) != sys.executable:
        return "its runtime environment has a Python of its own"
    if names := [name for name in context.get("env_vars", {}) if name.startswith(_READ_AT_START)]:
        return f"its runtime environment sets {names[0]}"
    return ""


def ask(server: socket.socket, arguments: list[str], context: dict[str, Any]) -> None:
    """Sends what the copy must have of this process: a file that holds it as JSON, and the three standard files."""
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "added": context.get("env_vars", {}),
        "folder": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "leads_group": os.getpgrp() == os.getpid(),
    }
    with open(os.memfd_create("request"), "w+") as file:
        json.dump(request, file)
        file.flush()
        socket.send_fds(server, [b"r"], [file.fileno(), 0, 1, 2])


def start_alone(arguments: list[str], reason: str) -> None:
    """Becomes the process that Ray would have started."""
    import ray

    print(f"rayrec: this worker imports what it needs itself: {reason}", file=sys.stderr, flush=True)
    setup = os.path.join(os.path.dirname(ray.__file__), "_private", "workers", "setup_worker.py")
    through = [setup] if any(argument.startswith(_CONTEXT) for argument in arguments) else []
    os.execv(sys.executable, [sys.executable, *through, *arguments])


if __name__ == "__main__":
    main()
