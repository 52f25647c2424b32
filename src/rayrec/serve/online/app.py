"""The HTTP application: an ASGI callable that knows nothing of Ray or of who runs it (https://asgi.readthedocs.io, HTTP 2.3)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final
from urllib.parse import parse_qsl

import orjson

from rayrec.serve.online import page
from rayrec.serve.online.batcher import Batcher
from rayrec.serve.online.counters import CONTENT_TYPE, Counters, Snapshot
from rayrec.serve.online.hosting import Hosting
from rayrec.serve.online.openapi import document
from rayrec.serve.online.requests import FORMATS, Body, Format, RequestError, open_body
from rayrec.serve.online.settings import ServeConfig

if TYPE_CHECKING:
    from rayrec.schema import Schema
    from rayrec.serve.served import ServedModel

_log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

SCORE: Final = "/v1/score"
OPEN_PATHS: Final = ("/", "/healthz", "/readyz")
"""Answered without a token: of the model they tell its version, and nothing of its rows."""
_JSON: Final = b"application/json"


@dataclass(frozen=True)
class Response:
    body: bytes
    status: int = 200
    media_type: bytes = _JSON
    headers: Headers = ()


class _DisconnectedError(Exception):
    """Who asked has gone."""


@final
class ScoringApp:
    """Scores rows by the model that `hosting` holds; see docs/serve.md for its paths."""

    def __init__(
        self,
        hosting: Hosting,
        counters: Counters,
        *,
        config: ServeConfig,
        token_digest: bytes | None = None,
        collect: Callable[[], Awaitable[Snapshot]] | None = None,
    ) -> None:
        """`token_digest`: SHA-256 of the token that requests must bear. `collect` gives what all replicas have counted; None:
        this one is all there is."""
        self._hosting, self._counters, self._config = hosting, counters, config
        self._token_digest, self._collect = token_digest, collect
        self.held_bytes = 0
        """Of memory that requests hold which are being read, wait, or are scored."""
        self.max_held_bytes = config.max_held_bytes
        self._document: tuple[ServedModel | None, bytes] = (None, b"")
        self._batcher = Batcher(
            hosting.answer,
            max_batch_rows=config.max_batch_rows,
            max_batch_bytes=config.max_batch_bytes,
            max_waiting_rows=config.max_waiting_rows,
            max_waiting_requests=config.max_waiting_requests,
        )
        self._routes: dict[str, tuple[str, Callable[[Message, Receive], Awaitable[Response]]]] = {
            SCORE: ("POST", self._score),
            "/": ("GET", self._page),
            "/healthz": ("GET", self._health),
            "/readyz": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
            "/openapi.json": ("GET", self._openapi),
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")) or "/"
        try:
            response = await self._respond(path, scope, receive)
        except _DisconnectedError:
            return
        except RequestError as error:
            response = Response(error.body(), error.status, headers=error.headers)
        except Exception:  # a server goes on; what happened is in its log, not in the answer
            _log.exception("a request failed")
            response = Response(RequestError(500, "the server failed at this request; its log says why").body(), 500)
        known = path if path in self._routes else "other"
        self._counters.requests.labels(known, response.status).inc()
        await _send(send, response, with_body=scope["method"] != "HEAD")

    async def _respond(self, path: str, scope: Message, receive: Receive) -> Response:
        if path not in self._routes:
            raise RequestError(404, f"nothing is here; there are {', '.join(self._routes)}")
        method, answer = self._routes[path]
        allowed = ("GET", "HEAD") if method == "GET" else (method,)
        if scope["method"] not in allowed:
            allow = ((b"allow", ", ".join(allowed).encode()),)
            raise RequestError(405, f"{path} takes {' and '.join(allowed)}", headers=allow)
        if path not in OPEN_PATHS:
            self._require_token(scope)
        return await answer(scope, receive)

    def _require_token(self, scope: Message) -> None:
        if self._token_digest is None:
            return
        scheme, _, token = _header(scope, b"authorization").partition(b" ")
        # Digests are compared, so that neither time nor memory tells anything of the token.
        given = hashlib.sha256(token.strip()).digest()
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given, self._token_digest):
            challenge = ((b"www-authenticate", b"Bearer"),)
            raise RequestError(401, "a bearer token is needed: Authorization: Bearer TOKEN", headers=challenge)

    # -- paths

    async def _score(self, scope: Message, receive: Receive) -> Response:
        deadline_s = time.monotonic() + self._config.time_limit_s
        with_columns = _with_columns(scope)
        format, header = _format(scope)
        if not self._hosting.ready:
            raise _NOT_READY
        schema = self._hosting.model.preprocessor.schema
        weigh = partial(held_by_json if format == "json" else held_by_text, schema=schema)
        with _HeldMemory(self) as held:
            content = await self._read(scope, receive, deadline_s, weigh=weigh, held=held)
            start = time.perf_counter()
            try:
                body = await self._open(content, format, header)
                async with asyncio.timeout_at(_loop_time(deadline_s)):
                    answer = await self._batcher.submit(body)
                return Response(answer.to_json(columns=with_columns))
            except TimeoutError:
                raise RequestError(504, f"not scored within {self._config.time_limit_s:g} s; send fewer rows") from None
            finally:
                self._counters.request_seconds.observe(time.perf_counter() - start)

    async def _open(self, content: bytes, format: Format, header: bool | None) -> Body:
        """A large body is not parsed in the event loop, which others wait for."""
        single = len(self._hosting.model.preprocessor.schema.unlabelled().columns) == 1
        opened = partial(
            open_body, content, format, max_rows=self._config.max_rows, header=header, single_column=single
        )
        if len(content) <= _INLINE_BYTES:
            return opened()
        return await asyncio.get_running_loop().run_in_executor(None, opened)

    async def _read(
        self, scope: Message, receive: Receive, deadline_s: float, *, weigh: Callable[[bytes], int], held: _HeldMemory
    ) -> bytes:
        """The request's body; as it comes, whatever length was announced. A piece of it holds `weigh(piece)` bytes of memory."""
        most = self._config.max_body_bytes
        too_large = RequestError(413, f"more than {most} bytes; send the rows in several requests", headers=_CLOSE)
        announced = _header(scope, b"content-length")
        if announced.isdigit() and int(announced[:20]) > most:
            await _drain(receive, most)
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout_at(_loop_time(deadline_s)):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _DisconnectedError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        parts.clear()
                        await _drain(receive, most)
                        raise too_large
                    held.take(weigh(parts[-1]))
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise RequestError(408, "the request did not end in time", headers=_CLOSE) from None

    async def _health(self, scope: Message, receive: Receive) -> Response:
        return Response(b'{"status":"alive"}')

    async def _ready(self, scope: Message, receive: Receive) -> Response:
        if not self._hosting.ready:
            raise _NOT_READY
        model = self._hosting.model
        return Response(
            orjson.dumps({"status": "ready", "model": model.version, "preprocessor": model.preprocessor_hash})
        )

    async def _metrics(self, scope: Message, receive: Receive) -> Response:
        snapshot = await self._collect() if self._collect else self.snapshot()
        return Response(snapshot.to_text(), media_type=CONTENT_TYPE.encode())

    async def _openapi(self, scope: Message, receive: Receive) -> Response:
        model = self._hosting.model
        if self._document[0] is not model:
            content = orjson.dumps(document(model, config=self._config, with_token=self._token_digest is not None))
            self._document = (model, content)
        return Response(self._document[1])

    async def _page(self, scope: Message, receive: Receive) -> Response:
        return Response(page.HTML, media_type=b"text/html; charset=utf-8", headers=page.HEADERS)

    # --

    def snapshot(self) -> Snapshot:
        """What this replica has counted."""
        self._counters.waiting_rows.set(self._batcher.waiting_rows)
        self._counters.waiting_requests.set(self._batcher.waiting_requests)
        return self._counters.snapshot()

    def close(self) -> None:
        self._batcher.close()
        self._hosting.close()


_CLOSE: Headers = ((b"connection", b"close"),)  # what is left of the request is not read
_INLINE_BYTES: Final = 1 << 20
_DRAIN_S: Final = 1.0


_NOT_READY: Final = RequestError(503, "no model is loaded yet", headers=((b"retry-after", b"1"),))


def held_by_json(text: bytes, *, schema: Schema) -> int:
    """Bytes of memory that JSON takes at most, about, until it is answered.

    Parsed by CPython an object of one member takes 232, a list of one 80, a string or number of few characters up to 16 for each
    byte of it; a category in a list up to 64 more when it becomes a token and an id. What any row takes besides is bounded by
    the number of rows."""
    held = 16 * len(text) + 232 * text.count(b"{") + 80 * text.count(b"[")
    return held + 64 * text.count(b",") if schema.lists else held


def held_by_text(text: bytes, *, schema: Schema) -> int:
    """The same of TSV and CSV, whose lists are joined by the schema's delimiter: up to 8 for each byte, 40 more for each category
    in a list."""
    held = 8 * len(text)
    return held + 40 * text.count(schema.list_delimiter.encode()) if schema.lists else held


@final
class _HeldMemory:
    """The memory that one request holds, from its first byte to its answer, as part of what all of them may hold."""

    def __init__(self, app: ScoringApp) -> None:
        self._app = app
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises RequestError if there is no room now, or never would be."""
        app = self._app
        if self._num_bytes + num_bytes > app.max_held_bytes:
            message = f"the rows take more than {app.max_held_bytes} bytes of memory; send them in several requests"
            raise RequestError(413, message, headers=_CLOSE)
        if app.held_bytes + num_bytes > app.max_held_bytes:
            raise RequestError(503, "too many bytes are held already; send them again a little later", headers=_LATER)
        self._num_bytes += num_bytes
        app.held_bytes += num_bytes

    def __enter__(self) -> _HeldMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self._app.held_bytes -= self._num_bytes


_LATER: Headers = (*_CLOSE, (b"retry-after", b"1"))


async def _drain(receive: Receive, most: int) -> None:
    """Reads on for a little, and drops it: a connection closed with bytes unread loses the answer on its way."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _loop_time(deadline_s: float) -> float:
    return asyncio.get_running_loop().time() + deadline_s - time.monotonic()


def _header(scope: Message, name: bytes) -> bytes:
    """The value of a request's header, b"" where it has none."""
    return next((value for found, value in scope["headers"] if found.lower() == name), b"")


def _format(scope: Message) -> tuple[Format, bool | None]:
    """The format of a body, and whether CSV has a header (RFC 4180's parameter), None if the client does not say."""
    media_type, *parameters = _header(scope, b"content-type").decode("latin-1").lower().split(";")
    taken = ", ".join(FORMATS)
    if media_type.strip() not in FORMATS:
        raise RequestError(415, f"the content type must be one of {taken}")
    format, header = FORMATS[media_type.strip()], None
    for parameter in parameters:
        name, _, value = parameter.strip().partition("=")
        if name == "header" and format == "csv":
            if value.strip('"') not in ("present", "absent"):
                raise RequestError(415, "the parameter header of text/csv must be present or absent")
            header = value.strip('"') == "present"
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8", "us-ascii"):
            raise RequestError(415, "the charset must be utf-8")
    if _header(scope, b"content-encoding").lower() not in (b"", b"identity"):
        raise RequestError(415, "the body must not be compressed")
    return format, header


def _with_columns(scope: Message) -> bool:
    """The query's only parameter, columns=true or false."""
    with_columns = False
    for name, value in parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True):
        if name != "columns":
            raise RequestError(400, "the query's only parameter is columns", field=name[:64])
        if value not in ("true", "false"):
            raise RequestError(400, "columns must be true or false", field="columns")
        with_columns = value == "true"
    return with_columns


async def _send(send: Send, response: Response, *, with_body: bool) -> None:
    headers = [
        (b"content-type", response.media_type),
        (b"content-length", str(len(response.body)).encode()),
        (b"x-content-type-options", b"nosniff"),
        *response.headers,
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body if with_body else b""})


async def _lifespan(receive: Receive, send: Send) -> None:
    """Whoever runs the application makes and closes it; here it is only agreed to."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return
