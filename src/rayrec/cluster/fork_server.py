"""A process that has imported large libraries, and forks the worker processes of one Ray node, so that none imports these again.

For each list of modules that a request names (`forked_worker.MODULES`) it forks a template, which imports them and forks the
processes that want them; it forks the others itself. Neither has imported Ray, whose random identifiers and settings must not be
shared. A server or template whose modules have changed on disk ends: what it has imported is old.

The server of a local Ray ends when its standard input does, that is with the process that started Ray; that of a node ends with
the node manager, and when it has been idle for long. Its templates end with it, and workers with Ray.
"""

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from rayrec.cluster.forked_worker import STARTED
from rayrec.storage import Scratch

LIBRARIES: Final = (
    "pandas", "pyarrow.dataset", "pyarrow.parquet", "fsspec", "pydantic", "requests", "jsonschema", "yaml", "psutil",
    "click", "tqdm", "msgpack", "uvloop", "colorama", "filelock", "google.protobuf.json_format",
    "google.protobuf.descriptor_pb2", "packaging.version", "multiprocessing.connection", "unittest.mock",
    "http.server", "rayrec.data.logs.text_parser",
)  # fmt: skip
"""What Ray, Ray Data and Ray Train import."""
_FILES: Final = 4
"""Of a request: what `forked_worker.ask` sends."""
_REQUEST_S: Final = 10.0
_LOOK_S: Final = 2.0
_WAITING: Final = 1024

_logger = logging.getLogger(__name__)

_Next = Callable[[], Any]
"""What a process does once it has left the frames of the one that it was forked from."""


class ForkServer:
    """The server of local Rays that this process starts. It ends with `close`, or with this process."""

    def __init__(self, ahead: Sequence[str] = (), *, libraries: Sequence[str] = LIBRARIES) -> None:
        """`ahead`: modules whose template is made at once. `libraries`: what every process has imported."""
        self._folder = Scratch("fork")
        self.address = os.path.join(self._folder.path, "fork")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(_WAITING)  # requests wait while the server imports
            command = [sys.executable, "-m", __name__, str(listener.fileno()), "0", "0", ",".join(ahead), *libraries]
            # Of this session, so that it is found with it; not of this process's group, to which Ctrl-C goes.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], process_group=0)
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
        self._folder.close()


def main() -> None:
    """The arguments: the number of the listening socket; that of a file that becomes readable when the server is to end; the
    seconds without a request after which it ends, and also ends when its socket's file is gone, 0 for neither; the modules of a
    template to be made ahead; libraries, by default `LIBRARIES`."""
    _, listening, watched, idle_s, ahead, *libraries = sys.argv
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave nothing
    # Since Python 3.12. The threads are those of OpenBLAS, which ends them before a fork and starts its own after it.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    with socket.socket(fileno=int(listening)) as listener:
        imported = _Imported(libraries or LIBRARIES)
        server = _Server(listener, imported, watched=int(watched), idle_s=float(idle_s) or None)
        following: _Next | None = server.run(ahead)
    while following is not None:
        following = following()


def import_all(modules: Iterable[str]) -> None:
    """Imports them. One that cannot be imported is left to the worker, whose error says more."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            _logger.info("%s is not imported ahead: %s", module, error)


class _Imported:
    """The modules that this process has imported."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Imports them. Ends this process if one imports Ray."""
        gc.disable()
        import_all(modules)
        if "ray" in sys.modules:
            raise SystemExit(f"rayrec: one of {', '.join(modules)} imports Ray, so workers import all modules themselves")
        files = {getattr(module, "__file__", None) for module in tuple(sys.modules.values())}
        self._versions = {file: _version(file) for file in files if isinstance(file, str)}
        gc.collect()
        gc.freeze()  # a collection writes to all that it visits, which would copy the memory that processes share
        gc.enable()

    def is_old(self) -> bool:
        """Whether a file was changed, replaced or removed since."""
        return any(_version(file) != then for file, then in self._versions.items())


def _version(file: str) -> tuple[int, int, int] | None:
    """Its time, size and inode, since packages may have a fixed time; None if it is not there."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class _Server:
    """Hands requests on to templates, or forks their processes itself."""

    def __init__(self, listener: socket.socket, imported: _Imported, *, watched: int, idle_s: float | None) -> None:
        self._listener, self._imported = listener, imported
        self._watched, self._idle_s = watched, idle_s
        self._templates: dict[str, socket.socket] = {}

    def run(self, ahead: str) -> _Next:
        """Serves until it is to end. Returns in a forked process, what it does."""
        with contextlib.suppress(OSError):  # then the first request for it makes it
            if ahead and (following := self._new_template(ahead)):
                return following
        asked_s = time.monotonic()
        while True:
            ready, _, _ = select.select([self._listener.fileno(), self._watched], [], [], self._idle_s and _LOOK_S)
            if self._watched in ready or (not ready and self._is_done(asked_s)) or self._imported.is_old():
                self._end()
            if not ready:
                continue
            asked_s = time.monotonic()
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(_REQUEST_S)
                try:
                    _, files, _, _ = socket.recv_fds(connection, 1, _FILES)
                except OSError:
                    continue
                following = None
                try:
                    if len(files) == _FILES:
                        following = self._answer(connection.fileno(), files)
                except OSError as error:
                    _decline(connection.fileno(), error)
            if following:
                return following
            _close(files)

    def _end(self) -> NoReturn:
        if self._idle_s is None:  # that of local Rays, whose owner may have been killed
            shutil.rmtree(os.path.dirname(self._listener.getsockname()), ignore_errors=True)
        os._exit(0)  # to take all libraries down would need seconds

    def _is_done(self, asked_s: float) -> bool:
        """Whether nobody asks any more, or can."""
        assert self._idle_s is not None
        return time.monotonic() - asked_s >= self._idle_s or not os.path.exists(self._listener.getsockname())

    def _answer(self, connection: int, files: list[int]) -> _Next | None:
        """Raises OSError if no process can be made."""
        modules = _request(files[0])["modules"]
        if not modules and os.fork() == 0:
            self._leave()
            return partial(_worker, os.dup(connection), *files)
        if modules and not self._handed_on(modules, [connection, *files]):
            if following := self._new_template(modules):
                _close(files)
                return following
            self._handed_on(modules, [connection, *files])
        return None

    def _handed_on(self, modules: str, files: Sequence[int]) -> bool:
        """Whether there is a template with these modules, to which a request goes."""
        if modules not in self._templates:
            return False
        try:
            socket.send_fds(self._templates[modules], [b"r"], files)
        except OSError:  # it ended
            self._templates.pop(modules).close()
            return False
        return True

    def _new_template(self, modules: str) -> _Next | None:
        """None in this process, in the new one what it does. Raises OSError if no process can be made."""
        self._templates[modules], theirs = socket.socketpair()
        try:
            if os.fork() == 0:
                self._leave()
                return partial(_template, theirs, modules)
        except OSError:
            theirs.close()  # so the next request finds that the template ended
            raise
        theirs.close()
        return None

    def _leave(self) -> None:
        """Closes what only the server has."""
        for each in (self._listener, *self._templates.values()):
            each.close()
        if self._watched:
            os.close(self._watched)


def _template(requests: socket.socket, modules: str) -> _Next:
    """Forks a process for each request until the server ends. Returns in a forked process, what it does."""
    _raise_oom_score(os.environ)
    imported = _Imported(modules.split(","))
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1, 1 + _FILES)
        if not message or imported.is_old():
            os._exit(0)
        try:
            if os.fork() == 0:
                requests.close()
                return partial(_worker, *files)
        except OSError as error:
            _decline(files[0], error)
        _close(files)


def _decline(connection: int, error: OSError) -> None:
    """Let the process that waits start without a copy."""
    with contextlib.suppress(OSError):  # it does not wait any more
        os.write(connection, f"the fork server cannot fork: {error}".encode())


def _raise_oom_score(environment: Mapping[str, str]) -> None:
    """Set the score that Ray's node manager gives to processes that it starts itself, so that Linux, if memory is short, kills
    workers before Ray's own processes. Like the node manager, do nothing where it cannot be set."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        score = max(int(file.read()), min(int(environment.get("RAY_worker_oom_score_adjustment", 1000)), 1000))
        file.seek(0)
        file.write(str(score))


def _worker(connection: int, request: int, *standard: int) -> None:
    """Becomes the process of a request."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    wanted = _request(request)
    if wanted["leads_group"]:
        os.setpgid(0, 0)
    os.setpriority(os.PRIO_PROCESS, 0, wanted["niceness"])
    _raise_oom_score(wanted["environment"])
    for number, file in enumerate(standard):
        os.dup2(file, number)
    _close((request, *standard))
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.environ.update(expanded(wanted["added"], os.environ))
    time.tzset()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # not as its siblings
    os.write(connection, STARTED)  # it stays open until this process ends
    program, *_ = sys.argv = wanted["arguments"]
    sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")


def expanded(added: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a runtime environment adds, with `${NAME}` replaced as Ray does: one after the other, and an unknown
    name by nothing. Pure."""
    known = dict(environment)
    for name, value in added.items():
        known[name] = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: known.get(found[1] or found[2], _kept(found)), value)
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
