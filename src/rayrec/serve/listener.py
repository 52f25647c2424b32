"""An HTTP server for an ASGI application in a thread of a replica."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
"""Of a request line and its headers."""
_WIRE_FACTOR: Final = 8
"""Bytes sent for a byte of the body, at most: chunks may be small."""
_MAX_CONNECTIONS: Final = 8192
"""Beyond them: 503."""
_MAX_PIPELINED: Final = 64
"""Requests that may wait on one connection for the answer to the one before; a connection with more is closed."""
_SETTLE_S: Final = 0.2
"""How long connections whose handshake has begun may take to be accepted before the socket closes."""
_SO_ATTACH_FILTER: Final = 26
"""Linux; Python's socket module has no name for it."""
_DROP_NEW_CONNECTIONS: Final = (
    (0x30, 0, 0, 13),  # load the byte of TCP's flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone opens a connection
    (0x06, 0, 0, 0),  # drop it
    (0x06, 0, 0, 0xFFFFFFFF),  # keep everything else
)
"""A classic BPF program for a listening socket."""


_NOT_THERE: Final = Response(
    RequestError(503, "the server starts or ends").body(), 503, {"retry-after": "1", "connection": "close"}, "application/json"
)


@dataclass(frozen=True)
class Limits:
    """Times, in seconds, after which the listener closes a connection on which too little happens."""

    head_s: float = 10.0
    """For a request's line and headers, from their first byte (a bare line end counts) or from the connection's start; also for
    the rest of a body whose request is already answered."""
    keep_alive_s: float = 90.0
    """Between two requests, if nothing is sent."""
    answer_s: float = 90.0
    """For a client to take in an answer."""
    ending_s: float = 0.5
    """For a connection without a request when the listener ends; a request that arrives in this time is answered."""


@final
class Listener:
    """Serves from a thread of its own. Several processes of a machine may listen at one port: the system distributes connections
    among them."""

    def __init__(
        self, app: ScoringApp, *, host: str, port: int, max_body_bytes: int, end_s: float, limits: Limits | None = None
    ) -> None:
        """`max_body_bytes`: the application's own limit, of which this is a multiple. `end_s`: what `close` grants requests in
        flight. Raises InputError if it cannot listen there."""
        self._end_s = end_s
        self._socket = bind(host, port, shared=True)
        self._socket.listen(_BACKLOG)
        bounded: Any = partial(_BoundedProtocol, limits=limits, max_request_bytes=MAX_HEAD_BYTES + _WIRE_FACTOR * max_body_bytes)
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
        """Takes no more connections, answers every request that arrived, and ends.

        Closing a listening socket resets connections that the kernel has set up and nobody has accepted. So the socket first
        drops packets that open connections (a client sends them again after a second, and another process or nobody answers),
        and closes when all others have been accepted."""
        if self._thread.is_alive():
            _drop_new_connections(self._socket)
            time.sleep(_SETTLE_S)
        self._server.should_exit = True
        self._thread.join(self._end_s + 1)


@contextlib.contextmanager
def held_port(host: str, port: int) -> Iterator[None]:
    """Hold a port of this machine for one server, whose replicas may share it. Raises InputError if the port is taken.

    The lock is a Unix socket with an abstract name: these belong to a network namespace, as ports do, and end with their
    process."""
    with socket.socket(socket.AF_UNIX) as lock:
        name = f"\0rayrec-serve-{port}"
        try:
            lock.bind(name)
        except OSError as error:
            raise _cannot_listen(host, port, error, _pid_at(name)) from None
        lock.listen(socket.SOMAXCONN)
        bind(host, port).close()
        yield


def _pid_at(name: str) -> int | None:
    """The process that listens at a Unix socket, if it can be seen from here."""
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.setblocking(False)
        client.connect(name)
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        return pid or None
    return None


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket bound to an address, with `shared` also if others share it. Raises InputError if it is taken."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        connections = psutil.net_connections("tcp") if error.errno == errno.EADDRINUSE else ()
        listeners = (one.pid for one in connections if one.status == psutil.CONN_LISTEN and one.laddr.port == port)
        raise _cannot_listen(host, port, error, next(filter(None, listeners), None)) from None
    return bound


def _cannot_listen(host: str, port: int, error: OSError, pid: int | None) -> InputError:
    owner = ""
    with contextlib.suppress(psutil.Error):
        owner = f", by process {pid} ({psutil.Process(pid).name()})" if pid else ""
    return InputError(f"{host}:{port}: cannot listen there ({error.strerror}{owner}); choose another --port or --host")


def bound_proxy() -> None:
    """Make uvicorn use the protocol below by default. Ray Serve calls it in each HTTP proxy before the proxy listens."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:_BoundedProtocol"


def sole_proxy() -> list[Middleware]:
    """Do the same in a proxy whose only application is rayrec's, at /. If it is not there, it starts or ends."""
    bound_proxy()
    return [Middleware(_RetryLater)]


@final
class _RetryLater:
    """Middleware that answers 503 in place of the 404 of a proxy that has no application, which clients do not send again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        replaced = False

        async def answer(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start" and message["status"] == 404:
                replaced = all(name != b"x-content-type-options" for name, _ in message["headers"])  # rayrec's have it
                if replaced:
                    await _NOT_THERE(scope, receive, send)
            if not replaced:
                await send(message)

        await self._app(scope, receive, answer)


@final
class _BoundedProtocol(HttpToolsProtocol):
    """HTTP with a bound on everything the application does not see: heads, trailers, chunk frames, and time without a request.

    An offer to upgrade is declined: the request is parsed again without it, since the parser takes what follows the head of such
    a request for another protocol, not for a body. Answers keep the order of the requests, also if a later one is malformed or
    the client closes its side.

    While no answer is due, a timer always runs: uvicorn's own for keep-alive, which any byte ends, or `_timer`, which only a
    complete head ends."""

    def __init__(self, *arguments: Any, limits: Limits | None = None, max_request_bytes: int = sys.maxsize, **named: Any) -> None:
        limits = limits or Limits()
        super().__init__(*arguments, **named)
        self.timeout_keep_alive = limits.keep_alive_s  # type: ignore[assignment]  # uvicorn adds it to the loop's time
        self._limits, self._max_request_bytes = limits, max_request_bytes
        self._received = 0
        """Bytes since the end of the last request."""
        self._completed = False
        """Whether the bytes at hand ended a request."""
        self._in_body = False
        self._head_without_upgrade = b""
        """Of a request that offers an upgrade, until it is parsed again."""
        self._refusal = ""
        """Message to the client whose bytes are no longer parsed, sent behind the answers that are due."""
        self._ending = False
        self._timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None
        """Runs while an answer waits for its client."""

    @property
    def _answer_due(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            self.transport.abort()
            raise ValueError("too many requests wait on one connection")  # ends the parser
        if self.parser.should_upgrade():
            self._decline_upgrade()
            return
        self._end_timer()
        self._in_body = True
        super().on_headers_complete()
        if self._ending:
            self.cycle.keep_alive = False

    def _decline_upgrade(self) -> None:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise ValueError("no tunnels")  # ends the parser
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self._head_without_upgrade = b"\r\n".join([*lines, b"", b""])

    def on_message_complete(self) -> None:
        if self._head_without_upgrade:  # the body is still to come
            return
        super().on_message_complete()
        self._received, self._completed, self._in_body = 0, True, False
        if not self._answer_due:  # answered before its body ended
            self._end_timer()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            return
        most = self._max_request_bytes if self._in_body else MAX_HEAD_BYTES
        if self._received > most:
            self._end_timer()
            self.send_400_response("The request is too long.")
            return
        self._completed = False
        self._parse(data)
        if not self._completed:
            self._received += len(data)
        if not (self._answer_due or self._timer or self.timeout_keep_alive_task or self.transport.is_closing()):
            self._start_timer()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data, self._head_without_upgrade = self._head_without_upgrade + data[offer.args[0] :], b""
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection open until the answers that are due are sent."""
        if not self._answer_due:
            return False
        if self._in_body:
            self.send_400_response("The request ends within its body.")
        else:
            self.cycle.keep_alive = False
        return True

    def on_response_complete(self) -> None:
        malformed_is_next = len(self.pipeline) == (self._in_body and self._answer_due)
        if self._refusal and malformed_is_next and not self.transport.is_closing():
            self._refuse()
        super().on_response_complete()
        if self.pipeline and not self.transport.is_closing():  # uvicorn reads on, and more requests would wait
            self.flow.pause_reading()
        if self.transport.is_closing():  # with bytes of the answer unsent, perhaps for ever
            self._wait_for_client()

    def send_400_response(self, msg: str) -> None:
        self._refusal = msg
        if self.pipeline or (self._answer_due and not self._in_body):
            return  # on_response_complete does
        if self._in_body and not self._answer_due:
            self.transport.close()  # answered before its body ended
        else:
            self._refuse()

    def _refuse(self) -> None:
        super().send_400_response(self._refusal)
        self._wait_for_client()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_client()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._end_answer_timer()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # `close` would wait for a client that does not read

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        self._end_answer_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self._ending = True
        if self._answer_due:
            self.cycle.keep_alive = False
        else:
            self.loop.call_later(self._limits.ending_s, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if not self._answer_due:
            self.transport.close()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._limits.head_s, self._time_out)

    def _time_out(self) -> None:
        self._timer = None
        if self._answer_due:  # the next request is late; the answers before it are not
            self.cycle.keep_alive = False
        else:
            self.transport.abort()

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait_for_client(self) -> None:
        if self._answer_timer is None:
            self._answer_timer = self.loop.call_later(self._limits.answer_s, self.transport.abort)

    def _end_answer_timer(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None


def _drop_new_connections(listening: socket.socket) -> None:
    """Drops packets that open a connection. Not every system has such filters; without one a connection that opens in the moment
    of closing may be reset."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _DROP_NEW_CONNECTIONS))
    with contextlib.suppress(OSError):
        listening.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(_DROP_NEW_CONNECTIONS), ctypes.addressof(program))
        )
