"""HTTP server for an ASGI application, in a thread of a replica."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import httptools
import psutil
import uvicorn
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rayrec.config import InputError
from rayrec.serve.requests import RequestError

if TYPE_CHECKING:
    from rayrec.serve.app import ScoringApp

_BACKLOG: Final = 2048
_START_S: Final = 30.0
MAX_HEAD_BYTES: Final = 64 << 10
"""Maximum bytes of a request line and headers."""
_WIRE_FACTOR: Final = 8
"""Maximum bytes received per byte of the body, because chunks may be small."""
_MAX_CONNECTIONS: Final = 8192
"""Maximum open connections. More are answered with 503."""
_KEEP_ALIVE_S: Final = 90.0
"""Maximum silence of a connection while no answer is due, in seconds."""
_ENDING_S: Final = 0.5
"""Grace period of idle connections when the listener ends, in seconds. Requests that arrive in it
are answered.
"""

_UNAVAILABLE: Final = Response(
    RequestError(503, "the server starts or ends").body(),
    503,
    {"retry-after": "1", "connection": "close"},
    "application/json",
)


@final
class Listener:
    """HTTP server in a separate thread. Several processes of a machine may share a port: the kernel
    distributes connections.
    """

    def __init__(
        self,
        app: ScoringApp,
        *,
        host: str,
        port: int,
        max_body_bytes: int,
        end_s: float,
        keep_alive_s: float = _KEEP_ALIVE_S,
    ) -> None:
        """Start to listen. Rejects a multiple of `max_body_bytes`, the application's own limit.
        `close` grants requests in flight `end_s` seconds. Raises InputError if it cannot listen at
        the address.
        """
        max_request_bytes = MAX_HEAD_BYTES + _WIRE_FACTOR * max_body_bytes
        self._end_s = end_s
        self._socket = bind(host, port, shared=True)
        self._socket.listen(_BACKLOG)
        bounded: Any = partial(
            _BoundedProtocol, max_request_bytes=max_request_bytes, keep_alive_s=keep_alive_s
        )
        settings = uvicorn.Config(
            app,
            http=bounded,
            ws="none",
            loop="uvloop",
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=max(1, int(end_s)),
            backlog=_BACKLOG,
            limit_concurrency=_MAX_CONNECTIONS,
        )
        self._server = uvicorn.Server(settings)
        # A thread with a separate event loop, so that requests do not wait for calls of Ray Serve
        # in the replica's loop. Daemon, because `close` limits the wait for clients.
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="http", daemon=True
        )
        self._thread.start()
        deadline_s = time.monotonic() + _START_S
        # uvicorn has no event for this.
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline_s:
                raise InputError(f"{host}:{port}: the HTTP server did not start. See its log.")
            time.sleep(0.01)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop accepting connections, answer the received requests, and end."""
        self._server.should_exit = True
        self._thread.join(self._end_s + 1)


@contextlib.contextmanager
def lock_port(host: str, port: int) -> Iterator[None]:
    """Lock a port of this machine for one server, whose replicas may share it. Raises InputError if
    the port is taken. The lock is an abstract Unix socket, which belongs to a network namespace, as
    ports do, and ends with its process.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        name = f"\0rayrec-serve-{port}"
        try:
            # The replicas share the port by SO_REUSEPORT, which a second server could join
            # unnoticed. So the lock, not the port, keeps it out.
            lock.bind(name)
        except OSError as error:
            raise _cannot_listen(host, port, error, _pid_at(name)) from None
        lock.listen(socket.SOMAXCONN)
        bind(host, port).close()
        yield


def _pid_at(name: str) -> int | None:
    """Return the process that listens at a Unix socket, None if it is not visible."""
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.setblocking(False)
        client.connect(name)
        pid: int = struct.unpack(
            "3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )[0]
        return pid or None
    return None


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bind a socket, which may share its address if `shared`. Raises InputError if the address is
    taken.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        connections = psutil.net_connections("tcp") if error.errno == errno.EADDRINUSE else ()
        listeners = (
            one.pid
            for one in connections
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port
        )
        raise _cannot_listen(host, port, error, next(filter(None, listeners), None)) from None
    return bound


def _cannot_listen(host: str, port: int, error: OSError, pid: int | None) -> InputError:
    owner = ""
    with contextlib.suppress(psutil.Error):
        owner = f", by process {pid} ({psutil.Process(pid).name()})" if pid else ""
    return InputError(
        f"{host}:{port}: cannot listen there ({error.strerror}{owner}). Choose another --port or "
        "--host."
    )


def bound_proxy() -> None:
    """Make `_BoundedProtocol` uvicorn's default. Ray Serve calls this in each HTTP proxy before the
    proxy listens.
    """
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:_BoundedProtocol"


def sole_proxy() -> list[Middleware]:
    """Set up a proxy whose only application is rayrec's, at /. A missing application is starting or
    ending.
    """
    bound_proxy()
    return [Middleware(_RetryLater)]


@final
class _RetryLater:
    """Middleware that turns a proxy's 404 without an application into 503, because clients do not
    retry after 404.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        replaced = False

        async def answer(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start" and message["status"] == 404:
                # rayrec's have it
                replaced = all(name != b"x-content-type-options" for name, _ in message["headers"])
                if replaced:
                    await _UNAVAILABLE(scope, receive, send)
            if not replaced:
                await send(message)

        await self._app(scope, receive, answer)


@final
class _BoundedProtocol(HttpToolsProtocol):
    """HTTP protocol that limits the bytes of a request, and silence while no answer is due.
    Declines upgrade offers: parses the request again without the offer, because the parser does not
    expect a body after it.
    """

    def __init__(
        self,
        *arguments: Any,
        max_request_bytes: int = sys.maxsize,
        keep_alive_s: float = _KEEP_ALIVE_S,
        **named: Any,
    ):
        super().__init__(*arguments, **named)
        # uvicorn adds it to the loop's time; its type is that of whole seconds.
        self.timeout_keep_alive = keep_alive_s  # type: ignore[assignment]
        self._max_request_bytes = max_request_bytes
        self._received = 0
        """Bytes received since the end of the last request."""
        self._in_body = False
        self._head_without_upgrade = b""
        """Head of a request with an upgrade offer, until it is parsed again."""
        self._ending = False

    @property
    def _answer_due(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_silence()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._decline_upgrade()
            return
        self._in_body = True
        super().on_headers_complete()
        if self._ending:
            self.cycle.keep_alive = False

    def _decline_upgrade(self) -> None:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise ValueError("no tunnels")  # Ends the parser
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self._head_without_upgrade = b"\r\n".join([*lines, b"", b""])

    def on_message_complete(self) -> None:
        if self._head_without_upgrade:  # The body follows
            return
        super().on_message_complete()
        self._received = 0
        self._in_body = False

    def data_received(self, data: bytes) -> None:
        if self._received > (self._max_request_bytes if self._in_body else MAX_HEAD_BYTES):
            self.transport.close()
            return
        self._received += len(data)
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as offer:
                data, self._head_without_upgrade = (
                    self._head_without_upgrade + data[offer.args[0] :],
                    b"",
                )
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
        self._limit_silence()

    def _limit_silence(self) -> None:
        """Close the connection after a silence, unless an answer is due. Uvicorn limits only the
        silence after an answer.
        """
        self._unset_keepalive_if_required()
        if not self._answer_due:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def shutdown(self) -> None:
        self._ending = True
        if self._answer_due:
            self.cycle.keep_alive = False
        else:
            self.loop.call_later(_ENDING_S, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if not self._answer_due:
            self.transport.close()
