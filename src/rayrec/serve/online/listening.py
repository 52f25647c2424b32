"""An ASGI application that a process serves itself, beside whatever else it does."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rayrec.config import InputError

if TYPE_CHECKING:
    from rayrec.serve.online.app import ScoringApp

_BACKLOG: Final = 2048
_START_S: Final = 30.0
_KEEP_ALIVE_S: Final = 90
MAX_HEAD_BYTES: Final = 64 << 10
"""Of a request line and its headers."""
_HEAD_S: Final = 10.0
"""How long a connection may take for them."""
_WIRE_FACTOR: Final = 8
"""Bytes sent for a byte of the body, at most: chunks may be small."""
_MAX_CONNECTIONS: Final = 8192
"""Beyond them: 503."""


@final
class Listener:
    """Serves from a thread of its own. Several processes of a machine may listen at one port: the system deals connections out
    to them."""

    def __init__(self, app: ScoringApp, *, host: str, port: int, max_body_bytes: int, end_s: float) -> None:
        """`max_body_bytes`: the application's own limit, of which this is a multiple. `end_s`: what `close` grants requests in
        flight. Raises InputError where it cannot listen there."""
        self._end_s = end_s
        self._socket = _open(host, port)
        bounded: Any = partial(_BoundedProtocol, max_request_bytes=MAX_HEAD_BYTES + _WIRE_FACTOR * max_body_bytes)
        settings = uvicorn.Config(
            app,
            http=bounded,
            loop="uvloop",
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(end_s)),
            backlog=_BACKLOG,
            limit_concurrency=_MAX_CONNECTIONS,
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


@final
class _BoundedProtocol(HttpToolsProtocol):
    """HTTP of which no client can send without end what the application never sees: heads, trailers, the frames of chunks."""

    def __init__(self, *arguments: Any, max_request_bytes: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._max_request_bytes = max_request_bytes
        self._received = 0
        """Bytes of the request that is being read."""
        self._head_timer: asyncio.TimerHandle | None = None
        """Runs while a head is awaited or read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._received = 0
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._end_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        most = MAX_HEAD_BYTES if self._head_timer else self._max_request_bytes
        if self._received > most:
            self._end_timer()
            self.send_400_response("The request is too long.")
            return
        super().data_received(data)
        self._received += len(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_S, self.transport.close)

    def _end_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


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
