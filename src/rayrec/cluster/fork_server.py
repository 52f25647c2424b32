"""Fork server: forks worker processes of one Ray node from a process that has already imported the
large libraries. For each list of modules in a request (`forked_worker.MODULES`), the server forks a
template process. It imports the modules and forks the workers that need them. Other workers are
forked from the server itself. Neither process imports Ray, whose random identifiers and settings
must not be shared. A server or template ends when its imported modules change on disk. The server
of a local Ray ends when its standard input closes, with the process that started Ray. The server of
a cluster node ends with the node manager, or after a long idle time. Templates end with their
server, and workers with Ray.
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
    "rayrec.data.logs.text_parser",
)
"""Modules that Ray, Ray Data and Ray Train import."""
_FILES: Final = 4
"""Number of file descriptors that `forked_worker.send_request` sends with a request."""
_MAX_FOLDER_BYTES: Final = 37
"""Maximum length of the path below which a local Ray can have its folder. Linux allows 107 bytes
for the path of a socket, and Ray's longest is
ray/session_YYYY-MM-DD_hh-mm-ss_uuuuuu_PROCESS/sockets/plasma_store.
"""
_REQUEST_S: Final = 10.0
_POLL_S: Final = 2.0
_WAITING: Final = 1024

_logger = logging.getLogger(__name__)

_Next = Callable[[], Any]
"""Continuation of a forked process, called after it has left its parent's stack frames."""


def socket_folder() -> str:
    """Return the folder for the folders of local Rays and their fork servers: RAY_TMPDIR, else
    TMPDIR unless its path is too long for sockets, else /tmp.
    """
    if ray_folder := os.environ.get("RAY_TMPDIR"):
        return ray_folder
    folder = os.environ.get("TMPDIR") or "/tmp"
    return folder if len(os.fsencode(folder)) <= _MAX_FOLDER_BYTES else "/tmp"


class ForkServer:
    """Fork server of the local Rays that this process starts. Ends with `close` or with this
    process.
    """

    def __init__(
        self, preload: Sequence[str] = (), *, libraries: Sequence[str] = LIBRARIES
    ) -> None:
        """Start the server. `preload`: modules of a template to create at once. `libraries`:
        modules of every process.
        """
        parent = socket_folder()
        os.makedirs(parent, exist_ok=True)  # As Ray does
        self._folder = Scratch("fork", parent=parent)
        self.address = os.path.join(self._folder.path, "fork")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(_WAITING)  # requests wait while the server imports
            command = [
                sys.executable,
                "-m",
                __name__,
                str(listener.fileno()),
                "0",
                "0",
                ",".join(preload),
                *libraries,
            ]
            # In this session, but not in this process's group, which receives Ctrl-C.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], process_group=0
            )
        self._owner = os.getpid()
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        if os.getpid() != self._owner:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.close()


def main() -> None:
    """Run a server. Arguments: file descriptor of the listening socket; file descriptor that
    becomes readable when the server must end; idle seconds after which it ends, and ends also if
    its socket file is gone (0 disables both); modules of a template to create at once; libraries,
    by default `LIBRARIES`.
    """
    _, listening, watched, idle_s, preload, *libraries = sys.argv
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    # Python 3.12 warns of OpenBLAS threads, which OpenBLAS stops before a fork and restarts after
    # it.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    with socket.socket(fileno=int(listening)) as listener:
        server = _Server(
            listener,
            _Imported(libraries or LIBRARIES),
            watched=int(watched),
            idle_s=float(idle_s) or None,
        )
        following: _Next | None = server.run(preload)
    while following is not None:
        following = following()


def import_all(modules: Iterable[str]) -> None:
    """Import modules. Failures are only logged: the worker imports the module again and reports its
    error.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            _logger.info("Cannot preload %s: %s", module, error)


class _Imported:
    """Modules imported by this process, with the versions of their files."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Import the modules. Exits this process if one of them imports Ray."""
        gc.disable()
        import_all(modules)
        if "ray" in sys.modules:
            raise SystemExit(
                f"rayrec: one of {', '.join(modules)} imports Ray, so that workers import all "
                "modules themselves"
            )
        files = {getattr(module, "__file__", None) for module in tuple(sys.modules.values())}
        self._versions = {file: _version(file) for file in files if isinstance(file, str)}
        gc.collect()
        gc.freeze()  # a collection would write to, and so copy, the memory shared by processes
        gc.enable()

    def is_old(self) -> bool:
        """Return whether a module file was changed, replaced or removed after the import."""
        return any(_version(file) != then for file, then in self._versions.items())


def _version(file: str) -> tuple[int, int, int] | None:
    """Return a file's modification time, size and inode (packages may have fixed times), or None if
    it does not exist.
    """
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class _Server:
    """Server loop: passes requests to templates, or forks processes itself."""

    def __init__(
        self, listener: socket.socket, imported: _Imported, *, watched: int, idle_s: float | None
    ) -> None:
        self._listener = listener
        self._imported = imported
        self._watched = watched
        self._idle_s = idle_s
        self._templates: dict[str, socket.socket] = {}

    def run(self, preload: str) -> _Next:
        """Serve requests until the server must end. Returns only in a forked process, with its
        continuation.
        """
        with contextlib.suppress(OSError):  # the first request for the template then creates it
            if preload and (following := self._new_template(preload)):
                return following
        request_s = time.monotonic()
        while True:
            ready, _, _ = select.select(
                [self._listener.fileno(), self._watched], [], [], self._idle_s and _POLL_S
            )
            if (
                self._watched in ready
                or (not ready and self._is_done(request_s))
                or self._imported.is_old()
            ):
                self._end()
            if not ready:
                continue
            request_s = time.monotonic()
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
        if self._idle_s is None:  # a local Ray's server, whose owner may have been killed
            shutil.rmtree(os.path.dirname(self._listener.getsockname()), ignore_errors=True)
        os._exit(0)  # an orderly exit of all libraries takes seconds

    def _is_done(self, request_s: float) -> bool:
        """Return whether the server has been idle for too long or its socket file is gone."""
        assert self._idle_s is not None
        return time.monotonic() - request_s >= self._idle_s or not os.path.exists(
            self._listener.getsockname()
        )

    def _answer(self, connection: int, files: list[int]) -> _Next | None:
        """Fork a process or pass on a request. Raises OSError if no process can be forked."""
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
        """Pass a request to the template with these modules. Returns False without such a
        template.
        """
        if modules not in self._templates:
            return False
        try:
            socket.send_fds(self._templates[modules], [b"r"], files)
        except OSError:  # the template ended
            self._templates.pop(modules).close()
            return False
        return True

    def _new_template(self, modules: str) -> _Next | None:
        """Fork a template; return None in this process and its continuation in the new one. Raises
        OSError on failure.
        """
        self._templates[modules], theirs = socket.socketpair()
        try:
            if os.fork() == 0:
                self._leave()
                return partial(_template, theirs, modules)
        except OSError:
            theirs.close()  # so that the next request notices that the template ended
            raise
        theirs.close()
        return None

    def _leave(self) -> None:
        for each in (self._listener, *self._templates.values()):
            each.close()
        if self._watched:
            os.close(self._watched)


def _template(requests: socket.socket, modules: str) -> _Next:
    """Fork a process for each request until the server ends. Returns only in a forked process, with
    its continuation.
    """
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
    with contextlib.suppress(OSError):  # the requester no longer waits
        os.write(connection, f"the fork server cannot fork: {error}".encode())


def _raise_oom_score(environment: Mapping[str, str]) -> None:
    """Set the OOM score of workers started by Ray's node manager: Linux kills them before Ray's
    processes. Ignores errors.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        score = max(
            int(file.read()),
            min(int(environment.get("RAY_worker_oom_score_adjustment", 1000)), 1000),
        )
        file.seek(0)
        file.write(str(score))


def _worker(connection: int, request: int, *standard: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request_fields = _request(request)
    if request_fields["leads_group"]:
        os.setpgid(0, 0)
    os.setpriority(os.PRIO_PROCESS, 0, request_fields["niceness"])
    _raise_oom_score(request_fields["environment"])
    for number, file in enumerate(standard):
        os.dup2(file, number)
    _close((request, *standard))
    os.chdir(request_fields["folder"])
    os.environ.clear()
    os.environ.update(request_fields["environment"])
    os.environ.update(expanded(request_fields["added"], os.environ))
    time.tzset()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # differs from its siblings
    os.write(connection, STARTED)  # the connection stays open until this process ends
    program, *_ = sys.argv = request_fields["arguments"]
    sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")


def expanded(added: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return a runtime environment's variables with `${NAME}` expanded like Ray: sequentially,
    unknown names to nothing. Pure.
    """
    values = dict(environment)

    def value_of(match: re.Match[str]) -> str:
        unknown = "" if match[1] and re.fullmatch("[A-Z0-9_]+", match[1]) else match[0]
        return values.get(match[1] or match[2], unknown)

    for name, value in added.items():
        values[name] = re.sub(r"\$(?:\{(\w+)\}|(\w+))", value_of, value)
    return {name: values[name] for name in added}


def _request(file: int) -> dict[str, Any]:
    with open(file, closefd=False) as opened:
        opened.seek(0)
        return json.load(opened)


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


if __name__ == "__main__":
    main()
