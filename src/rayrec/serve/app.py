"""HTTP application on Starlette: an ASGI callable that depends neither on Ray nor on the HTTP
server.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import orjson
from prometheus_client.exposition import generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from rayrec.schema import BRACKETS
from rayrec.serve.batcher import Batcher, Body
from rayrec.serve.config import ServeConfig
from rayrec.serve.counters import CONTENT_TYPE, Counters, Snapshot
from rayrec.serve.openapi import document
from rayrec.serve.recommendations import open_recommendation
from rayrec.serve.replica_models import ReplicaModels
from rayrec.serve.requests import FORMATS, RequestError, count_byte, open_body, shorten

if TYPE_CHECKING:
    from rayrec.inference.model import ServedModel
    from rayrec.schema import Schema

_log = logging.getLogger(__name__)
_Body = TypeVar("_Body", bound=Body)
_Answer = TypeVar("_Answer")

SCORE: Final = "/v1/score"
RECOMMEND: Final = "/v1/recommend"


def _response(
    content: bytes,
    status: int = 200,
    *,
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Response:
    return Response(
        content,
        status,
        {"x-content-type-options": "nosniff", **(headers or {})},
        media_type,
    )


# Way of a scoring request, and where it may end:
#
#   Host, path, method     421, 404, 405
#   token                  401
#   body, chunk by chunk   413 too large, 408 too slow, 503 too much memory in use
#   parsing                400, 415
#   queue                  503 full, 504 not scored in time
#   scores                 422 not finite; 200
#
# Memory is reserved by estimate while the body is read, and given back with the answer.
@final
class ScoringApp:
    """ASGI application that scores rows. docs/serve.md lists its paths."""

    def __init__(
        self,
        models: ReplicaModels,
        counters: Counters,
        *,
        config: ServeConfig,
        token_digest: bytes | None = None,
        collect: Callable[[], Awaitable[Snapshot]] | None = None,
    ) -> None:
        """`token_digest` is the SHA-256 of the bearer token. `collect` returns the counters of all
        replicas, if several.
        """
        self._models = models
        self._counters = counters
        self._request_counter = functools.cache(counters.requests.labels)
        self._config = config
        self._token_digest = token_digest
        self._collect = collect
        self.held_bytes = 0
        """Estimated memory of unanswered requests."""
        self.max_held_bytes = config.max_held_bytes
        self._document: tuple[ServedModel | None, bytes] = (None, b"")
        self._batcher = Batcher(models.answer, config)
        # A search reads all candidates, which takes longer than the way to a thread.
        self._recommendations = Batcher(models.recommend, config, inline=False)
        self._routes = (
            Route(SCORE, self._score, methods=["POST"]),
            Route(RECOMMEND, self._recommend, methods=["POST"]),
            Route("/", self._page),
            Route("/healthz", self._health),
            Route("/readyz", self._ready),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
        )
        self._router = Router(self._routes, redirect_slashes=False)
        self._app = ExceptionMiddleware(
            self._route,
            handlers={
                RequestError: _error_response,
                HTTPException: self._unrouted,
                ClientDisconnect: _disconnected,
                Exception: _failed,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Starlette accepts neither a root path with a trailing slash nor a path equal to the root.
        if root_path := scope.get("root_path"):
            root = root_path.rstrip("/")
            path = scope["path"]
            scope = {**scope, "root_path": root, "path": root + "/" if path == root else path}
        scope["app"] = self  # Starlette then raises HTTPException if no route matches
        # Ray Serve's proxies parse the body of a request with an upgrade offer as the next request.
        offers_upgrade = b"upgrade" in dict(scope["headers"])

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                if offers_upgrade:
                    message = {
                        **message,
                        "headers": [*message["headers"], (b"connection", b"close")],
                    }
                route = scope.get("route")
                path = route.path if route else "other"
                self._request_counter(path, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counted)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the header Host, and call the handler of the path."""
        if scope["type"] == "http":
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0"):
                raise RequestError(
                    400,
                    f"a request must have one header Host, got {len(hosts)}",
                    headers=_CLOSE,
                )
            if hosts and not self._config.is_allowed_host(hosts[0]):
                message = (
                    f"host {shorten(hosts[0])} is not allowed; add it to the server's "
                    "--allowed-hosts (allowed_hosts)"
                )
                raise RequestError(421, message)
        await self._router(scope, receive, send)

    def _check_token(self, request: Request) -> None:
        """Check the bearer token. Paths that show only the model version do not need it."""
        if self._token_digest is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        # Compares digests, so that neither timing nor memory leaks the token.
        digest = hashlib.sha256(token.encode("latin-1").strip()).digest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, self._token_digest):
            challenge = {"www-authenticate": "Bearer"}
            raise RequestError(
                401,
                "a bearer token is needed: Authorization: Bearer TOKEN",
                headers=challenge,
            )

    async def _unrouted(self, request: Request, error: Exception) -> Response:
        """Return the error for an unknown path or a wrong method."""
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            route = request.scope["route"]
            allowed = sorted(route.methods)
            error = RequestError(
                405,
                f"{route.path} accepts only {' and '.join(allowed)}",
                headers={"allow": ", ".join(allowed)},
            )
        else:
            error = RequestError(
                404,
                f"path not found; paths are {', '.join(route.path for route in self._routes)}",
            )
        return await _error_response(request, error)

    # -- paths

    async def _score(self, request: Request) -> Response:
        self._check_token(request)
        with_columns = _with_columns(request)
        form = _form(request)
        if not self._models.ready:
            raise _NOT_READY
        schema = self._models.model.preprocessor.schema
        answer = await self._answered(
            request,
            partial(_MEMORY[form["format"]], schema=schema),
            partial(open_body, **form, schema=schema, max_rows=self._config.max_rows),
            self._batcher,
        )
        return _response(answer.to_json(columns=with_columns))

    async def _recommend(self, request: Request) -> Response:
        self._check_token(request)
        _reject_parameters(request)
        _form(request, accepted=("application/json",))
        if not self._models.ready:
            raise _NOT_READY
        no_items = self._models.scorer.no_items
        if no_items:
            raise RequestError(404, no_items)
        opened = partial(open_recommendation, config=self._config)
        answer = await self._answered(request, ids_memory, opened, self._recommendations)
        return _response(answer.to_json())

    async def _answered(
        self,
        request: Request,
        weigh: Callable[[bytes], int],
        opened: Callable[[bytes], _Body],
        batcher: Batcher[_Body, _Answer],
    ) -> _Answer:
        """Read a request's body, open it, and return its answer. `weigh` estimates the memory of a
        part of the body.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.time_limit_s
        with self._memory() as take:
            content = await self._read(request, deadline_s, take=lambda chunk: take(weigh(chunk)))
            start = time.perf_counter()
            try:
                # Parsing a large body would block the event loop.
                body = (
                    await loop.run_in_executor(None, opened, content)
                    if len(content) > _INLINE_BYTES
                    else opened(content)
                )
                async with asyncio.timeout_at(deadline_s):
                    return await batcher.submit(body)
            except TimeoutError:
                raise RequestError(
                    504,
                    f"not scored within {self._config.time_limit_s:g} s; send fewer rows",
                ) from None
            finally:
                self._counters.request_seconds.observe(time.perf_counter() - start)

    @contextlib.contextmanager
    def _memory(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves memory for one request until the context ends. It raises
        RequestError at a limit.
        """
        reserved = 0

        def take(num_bytes: int) -> None:
            nonlocal reserved
            if reserved + num_bytes > self.max_held_bytes:
                message = (
                    f"the rows take more than {self.max_held_bytes} bytes of memory; send them in "
                    "several requests"
                )
                raise RequestError(413, message, headers=_CLOSE)
            if self.held_bytes + num_bytes > self.max_held_bytes:
                raise RequestError(503, "too much memory is in use; retry later", headers=_LATER)
            # No lock: the event loop's thread is the only one that changes these.
            reserved += num_bytes
            self.held_bytes += num_bytes

        try:
            yield take
        finally:
            self.held_bytes -= reserved

    async def _read(
        self,
        request: Request,
        deadline_s: float,
        *,
        take: Callable[[bytes], None],
    ) -> bytes:
        """Read the request body, limited by received bytes, regardless of the announced length.
        Calls `take` with each chunk.
        """
        max_bytes = self._config.max_body_bytes
        too_large = RequestError(
            413,
            f"more than {max_bytes} bytes; send the rows in several requests",
            headers=_CLOSE,
        )
        announced = request.headers.get("content-length", "")
        chunks = request.stream()
        if announced.isdecimal() and int(announced[:20]) > max_bytes:
            # Reads on for a while, or many clients would see a broken connection instead of the
            # answer.
            await _drain(chunks, _DRAIN_FACTOR * max_bytes)
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout_at(deadline_s):
                async for chunk in chunks:
                    parts.append(chunk)
                    size += len(chunk)
                    if size > max_bytes:
                        parts.clear()
                        await _drain(chunks, _DRAIN_FACTOR * max_bytes - size)
                        raise too_large
                    take(chunk)
            return b"".join(parts)
        except TimeoutError:
            raise RequestError(
                408,
                "the request was not complete in time",
                headers=_CLOSE,
            ) from None

    async def _health(self, request: Request) -> Response:
        version = self._models.model.version if self._models.ready else None
        return _response(orjson.dumps({"status": "alive", "model": version}))

    async def _ready(self, request: Request) -> Response:
        if not self._models.ready:
            raise _NOT_READY
        await self._announcement()
        model = self._models.model
        state: dict[str, Any] = {
            "status": "ready",
            "model": model.version,
            "preprocessor": model.preprocessor_hash,
        }
        if model.tables:
            state["tables"] = model.tables
        return _response(orjson.dumps(state))

    async def _announcement(self) -> None:
        """Wait until the command has printed the server's address: a moment for a client that has
        read it. No other client finds the server ready before.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _ANNOUNCEMENT_S
        # Polls, because the state comes with the answer to a report.
        while not self._models.announced:
            if loop.time() > end_s:
                raise RequestError(503, "the server starts", headers={"retry-after": "1"})
            await asyncio.sleep(_ANNOUNCEMENT_POLL_S)

    async def _metrics(self, request: Request) -> Response:
        self._check_token(request)
        snapshot = await self._collect() if self._collect else self.snapshot()
        return _response(generate_latest(snapshot), media_type=CONTENT_TYPE)

    async def _openapi(self, request: Request) -> Response:
        self._check_token(request)
        if not self._models.ready:
            raise _NOT_READY
        scorer = self._models.scorer
        model = scorer.model
        if self._document[0] is not model:
            described = document(
                model,
                config=self._config,
                with_token=self._token_digest is not None,
                recommender=None if scorer.no_items else model.recommender,
            )
            content = orjson.dumps(described)
            self._document = (model, content)
        return _response(self._document[1])

    async def _page(self, request: Request) -> Response:
        content, headers = _read_page()
        return _response(content, media_type="text/html", headers=headers)

    def snapshot(self) -> Snapshot:
        """Return the counters of this replica."""
        batchers = (self._batcher, self._recommendations)
        self._counters.waiting_rows.set(sum(each.waiting_rows for each in batchers))
        self._counters.waiting_requests.set(sum(each.waiting_requests for each in batchers))
        return self._counters.snapshot()

    def close(self) -> None:
        self._batcher.close()
        self._recommendations.close()
        self._models.close()


@functools.cache
def _read_page() -> tuple[bytes, Mapping[str, str]]:
    """Return the page at /, which needs no other file, and headers that allow only its inline style
    and script.
    """
    content = resources.files(__package__).joinpath("try.html").read_bytes()
    hashes = {
        tag: base64.b64encode(hashlib.sha256(text).digest()).decode()
        for tag, text in re.findall(rb"<(style|script)>(.*?)</\1>", content, re.DOTALL)
    }
    policy = (
        f"default-src 'none'; style-src 'sha256-{hashes[b'style']}'; script-src "
        f"'sha256-{hashes[b'script']}'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return content, {"content-security-policy": policy, "referrer-policy": "no-referrer"}


_CLOSE: Final = {"connection": "close"}  # The rest of the request is not read
_LATER: Final = {**_CLOSE, "retry-after": "1"}
_INLINE_BYTES: Final = 1 << 20
_DRAIN_S: Final = 1.0
_DRAIN_FACTOR: Final = 4
"""Maximum bytes read of a body that is too large, relative to the largest body. The listener ends
at twice that.
"""
_ANNOUNCEMENT_S: Final = 2.0
_ANNOUNCEMENT_POLL_S: Final = 0.01
_NOT_READY: Final = RequestError(503, "no model is loaded yet", headers={"retry-after": "1"})


def json_memory(text: bytes, *, schema: Schema) -> int:
    """Estimate the maximum memory of JSON text until it is answered, in bytes. Parsed by CPython,
    an object with one member takes 232 bytes, a list with one item 80, a short string or number up
    to 16 per byte. A category in a list takes up to 64 more when it becomes a token and an id. The
    row limit bounds all other memory.
    """
    num_bytes = ids_memory(text)
    return num_bytes if schema.lists else num_bytes - 64 * count_byte(text, ord(","))


def ids_memory(text: bytes) -> int:
    """Estimate the maximum memory of JSON with lists of ids, like `json_memory`."""
    num_bytes = 16 * len(text) + 232 * count_byte(text, ord("{")) + 80 * count_byte(text, ord("["))
    return num_bytes + 64 * count_byte(text, ord(","))


def text_memory(text: bytes, *, schema: Schema) -> int:
    """Estimate the maximum memory of TSV or CSV: 8 bytes per byte, and 40 more per category in a
    list.
    """
    num_bytes = 8 * len(text)
    marks = set("".join(schema.list_mark(name).replace(BRACKETS, ", ") for name in schema.lists))
    return num_bytes + 40 * sum(text.count(mark.encode()) for mark in marks)


def line_memory(text: bytes, *, schema: Schema) -> int:
    """Estimate the maximum memory of lines of any format. Each token between blanks has a text, a
    row and a place, and its parts behind colons too.
    """
    tokens = count_byte(text, ord(" ")) + count_byte(text, ord(":"))
    return json_memory(text, schema=schema) + text_memory(text, schema=schema) + 160 * tokens


_MEMORY: Final = {
    "json": json_memory,
    "tsv": text_memory,
    "csv": text_memory,
    "lines": line_memory,
}
"""Estimate of the memory of a body, by its format."""


async def _drain(chunks: AsyncIterator[bytes], max_bytes: int) -> None:
    """Read and drop more for a moment: closing a connection with unread bytes loses its answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            async for chunk in chunks:
                max_bytes -= len(chunk)
                if max_bytes <= 0:
                    return


def _form(request: Request, accepted: Collection[str] = FORMATS) -> dict[str, Any]:
    """Return the body format, whose media type must be accepted, and, if specified by the client,
    whether CSV has a header (RFC 4180) and lines have a label.
    """
    media_type, *parameters = (
        part.strip() for part in request.headers.get("content-type", "").lower().split(";")
    )
    if media_type not in accepted:
        types = ("one of " if len(accepted) > 1 else "") + ", ".join(accepted)
        message = f"the content type must be {types}"
        if media_type == "application/x-www-form-urlencoded":
            message += "; with curl, add -H 'Content-Type: application/json'"
        raise RequestError(415, message)
    form: dict[str, Any] = {"format": FORMATS[media_type]}
    valid_parameters = {
        "json": (),
        "lines": (),
        "tsv": ("label",),
        "csv": ("header", "label"),
    }[FORMATS[media_type]]
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        value = value.strip('"')
        if name in valid_parameters:
            if value not in ("present", "absent"):
                raise RequestError(
                    415,
                    f"the parameter {name} of {media_type} must be present or absent",
                )
            form[name] = value == "present"
        if name == "charset" and value not in ("utf-8", "utf8", "us-ascii"):
            raise RequestError(415, "the charset must be utf-8")
    if request.headers.get("content-encoding", "").lower() not in ("", "identity"):
        raise RequestError(415, "the body must not be compressed")
    return form


def _with_columns(request: Request) -> bool:
    """Parse the only query parameter, columns=true or false."""
    for name, value in request.query_params.multi_items():
        if name != "columns":
            raise RequestError(400, "the query's only parameter is columns", field=name[:64])
        if value not in ("true", "false"):
            raise RequestError(400, "columns must be true or false", field="columns")
    return request.query_params.get("columns") == "true"


def _reject_parameters(request: Request) -> None:
    """Raise RequestError if the query has parameters."""
    for name, _ in request.query_params.multi_items():
        raise RequestError(400, "the query has no parameters", field=name[:64])


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _response(error.body(), error.status, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """Log the cause of an unexpected error, which the answer does not show. The server
    continues.
    """
    _log.error("Request failed", exc_info=error)
    return await _error_response(
        request,
        RequestError(500, "the request failed; the server's log has the cause"),
    )


async def _disconnected(request: Request, error: Exception) -> Any:
    async def no_response(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    return no_response
