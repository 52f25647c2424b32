"""A process that has imported large libraries, and forks the worker processes of a local Ray, so that none imports these again.

For each list of modules that a runtime environment names (`MODULES`) it forks a template, which imports them and forks the
processes that want them; it forks the others itself. Neither has imported Ray, whose random identifiers and settings must not be
shared. The server ends when its standard input does, that is with the process that started Ray; its templates end with it, and
workers with Ray.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

MODULES: Final = "RAYREC_TEMPLATE_MODULES"
"""The variable that names the modules a template imports, with commas between them. They must not import Ray."""
LIBRARIES: Final = (
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "fsspec",
    "pydantic",
    "requests",
    "jsonschema",
    "yaml",
    "psutil",
    "click",
    "tqdm",
    "msgpack",
    "uvloop",
    "colorama",
    "filelock",
    "google.protobuf.json_format",
    "google.protobuf.descriptor_pb2",
    "packaging.version",
    "multiprocessing.connection",
    "unittest.mock",
    "http.server",
    "rayrec.data.parsing",
)
"""What Ray, Ray Data and Ray Train import."""
_FILES: Final = 4
"""Of a request: what `forked_worker.ask` sends."""
_REQUEST_S: Final = 10.0
_WAITING: Final = 1024

_Next = Callable[[], Any]
"""What a process does once it has left the frames of the one that it was forked from."""


class ForkServer:
    """The server of local Rays that this process starts. It ends with `close`, or with this process."""

    def __init__(self, ahead: Sequence[str] = (), *, libraries: Sequence[str] = LIBRARIES) -> None:
        """`ahead`: modules whose template is made at once. `libraries`: what every process has imported."""
        folder = tempfile.mkdtemp(prefix="rayrec-")  # for this user alone
        self.address = os.path.join(folder, "fork")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(_WAITING)  # requests wait while the server imports
            command = [sys.executable, "-m", __name__, str(listener.fileno()), ",".join(ahead), *libraries]
            # Of this session, so that it is found with it; not of this process's group, to which Ctrl-C goes.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], process_group=0
            )
        self._owner = os.getpid()
        atexit.register(self.close)

    def close(self) -> None:
        """Does nothing in a process that was forked from the one that started it."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(os.path.dirname(self.address), ignore_errors=True)


def main() -> None:
    """Serves the listening socket whose number is the first argument; then come the modules of a template, and libraries."""
    _, number, ahead, *libraries = sys.argv
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave nothing
    # Since Python 3.12. The threads are those of OpenBLAS, which ends them before a fork and starts its own after it.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    with socket.socket(fileno=int(number)) as listener:
        import_modules(libraries)
        following: _Next | None = _Server(listener).run(ahead)
    while following is not None:
        following = following()


def import_modules(modules: Sequence[str]) -> None:
    """A module that cannot be imported is left to the worker, whose error says more. Ends this process if one imports Ray."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    if "ray" in sys.modules:
        raise SystemExit(f"rayrec: one of {', '.join(modules)} imports Ray, so workers import all modules themselves")
    gc.collect()
    gc.freeze()  # a collection writes to all that it visits, which would copy the memory that processes share


class _Server:
    """Hands requests on to templates, or forks their processes itself."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._templates: dict[str, socket.socket] = {}

    def run(self, ahead: str) -> _Next:
        """Ends with standard input. Returns in a forked process, what it does."""
        if ahead and (following := self._new_template(ahead)):
            return following
        while True:
            ready, _, _ = select.select([self._listener.fileno(), 0], [], [])
            if 0 in ready:
                os._exit(0)  # to take all libraries down would need seconds
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(_REQUEST_S)
                try:
                    _, files, _, _ = socket.recv_fds(connection, 1, _FILES)
                except OSError:
                    continue
                following = self._answer(os.dup(connection.fileno()), files) if len(files) == _FILES else None
            if following:
                return following
            _close(files)

    def _answer(self, connection: int, files: list[int]) -> _Next | None:
        modules = _request(files[0])["added"].get(MODULES, "")
        if modules and modules not in self._templates and (following := self._new_template(modules)):
            _close((connection, *files))
            return following
        if modules:
            try:
                socket.send_fds(self._templates[modules], [b"r"], [connection, *files])
            except OSError:  # it ended: this process starts by itself, the next has a new template
                self._templates.pop(modules).close()
        elif os.fork() == 0:
            self._leave()
            return partial(_worker, connection, *files)
        os.close(connection)
        return None

    def _new_template(self, modules: str) -> _Next | None:
        """None in this process, in the new one what it does."""
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            self._leave()
            return partial(_template, theirs, modules)
        theirs.close()
        self._templates[modules] = ours
        return None

    def _leave(self) -> None:
        """Closes what only the server has."""
        for each in (self._listener, *self._templates.values()):
            each.close()


def _template(requests: socket.socket, modules: str) -> _Next:
    """Forks a process for each request until the server ends. Returns in a forked process, what it does."""
    import_modules(modules.split(","))
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1, 1 + _FILES)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            return partial(_worker, *files)
        _close(files)


def _worker(connection: int, request: int, *standard: int) -> None:
    """Becomes the process of a request."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    wanted = _request(request)
    if wanted["leads_group"]:
        os.setpgid(0, 0)
    os.setpriority(os.PRIO_PROCESS, 0, wanted["niceness"])
    for number, file in enumerate(standard):
        os.dup2(file, number)
    _close((request, *standard))
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.environ.update(expanded(wanted["added"], os.environ))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # not as its siblings
    os.write(connection, b"s")  # it stays open until this process ends
    program, *_ = sys.argv = wanted["arguments"]
    sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")


def expanded(added: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a runtime environment adds, with `${NAME}` replaced as Ray does: one after the other, and an unknown
    name by nothing. Pure."""
    known = dict(environment)
    for name, value in added.items():
        known[name] = re.sub(
            r"\$(?:\{(\w+)\}|(\w+))", lambda found: known.get(found[1] or found[2], _kept(found)), value
        )
    return {name: known[name] for name in added}


def _kept(found: re.Match[str]) -> str:
    return "" if found[1] and re.fullmatch("[A-Z0-9_]+", found[1]) else found[0]


def _request(file: int) -> dict[str, Any]:
    with open(file, closefd=False) as opened:
        opened.seek(0)
        return json.load(opened)


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


if __name__ == "__main__":
    main()
