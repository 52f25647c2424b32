"""An ASGI application that a process serves itself, beside whatever else it does."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Final, final

import uvicorn

from rayrec.config import InputError

if TYPE_CHECKING:
    from rayrec.serve.online.app import ScoringApp

_BACKLOG: Final = 2048
_START_S: Final = 30.0
_KEEP_ALIVE_S: Final = 90


@final
class Listener:
    """Serves from a thread of its own. Several processes of a machine may listen at one port: the system deals connections out
    to them."""

    def __init__(self, app: ScoringApp, *, host: str, port: int, end_s: float) -> None:
        """`end_s`: what `close` grants requests in flight. Raises InputError where it cannot listen there."""
        self._end_s = end_s
        self._socket = _open(host, port)
        settings = uvicorn.Config(
            app,
            http="httptools",
            loop="uvloop",
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(end_s)),
            backlog=_BACKLOG,
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)
        self._thread.start()
        deadline_s = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline_s:
                raise InputError(f"{host}:{port}: the HTTP server did not start; its log says why")
            time.sleep(0.01)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Takes no more connections, answers requests in flight, and ends."""
        self._server.should_exit = True
        self._thread.join(self._end_s + 1)


def _open(host: str, port: int) -> socket.socket:
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise InputError(
            f"{host}:{port}: cannot listen there ({error.strerror}); choose another --port or --host"
        ) from None
    opened.listen(_BACKLOG)
    return opened
