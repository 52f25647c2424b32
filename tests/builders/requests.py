"""Requests to an ASGI application in this process."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rayrec.serve.counters import Snapshot


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def request(
    app: Callable[..., Awaitable[None]],
    method: str,
    path: str,
    *,
    parts: Iterable[bytes | float] = (b"",),
    headers: Mapping[str, str | bytes] | None = None,
    query: str = "",
    root_path: str = "",
    disconnect: bool = False,
) -> Reply | None:
    """Send a request. `parts` are bytes of the body or pauses in seconds. `disconnect` drops the
    client before the body ends. Returns None if the application sends nothing.
    """
    left = list(parts)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        while left and isinstance(left[0], float):
            await asyncio.sleep(left.pop(0))
        if not left:
            return {"type": "http.disconnect"}
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left) or disconnect}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    given = {"host": "localhost", **(headers or {})}.items()
    encoded = [
        (name.lower().encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in given
    ]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": root_path,
        "query_string": query.encode(),
        "headers": encoded,
    }
    await app(scope, receive, send)
    if not sent:
        return None
    start, *bodies = sent
    assert start["type"] == "http.response.start"
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    body = b"".join(message.get("body", b"") for message in bodies)
    assert method == "HEAD" or found["content-length"] == str(len(body))
    return Reply(start["status"], found, body)


def ask(app: Callable[..., Awaitable[None]], method: str, path: str, **arguments: Any) -> Reply:
    reply = asyncio.run(request(app, method, path, **arguments))
    assert reply is not None
    return reply


def post(app: Callable[..., Awaitable[None]], content: bytes | Any, **arguments: Any) -> Reply:
    """Score bytes as lines of text, other content as JSON."""
    return asyncio.run(post_async(app, content, **arguments))


def score(app: Callable[..., Awaitable[None]], content: bytes | Any) -> dict[str, Any]:
    reply = post(app, content)
    assert reply.status == 200, reply.body
    return reply.json()


async def post_async(
    app: Callable[..., Awaitable[None]],
    content: bytes | Any,
    *,
    media_type: str | None = None,
    headers: Mapping[str, str | bytes] | None = None,
    **arguments: Any,
) -> Reply:
    is_text = isinstance(content, bytes)
    if media_type is None:
        media_type = "text/tab-separated-values" if is_text else "application/json"
    body = content if is_text else json.dumps(content).encode()
    all_headers = {"content-type": media_type, **(headers or {})}
    reply = await request(
        app,
        "POST",
        "/v1/score",
        parts=[body],
        headers=all_headers,
        **arguments,
    )
    assert reply is not None
    return reply


def sample_values(snapshot: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the values of counters by (sample name, labels)."""
    samples = [sample for family in snapshot.families for sample in family.samples]
    return {(sample.name, tuple(sample.labels.items())): sample.value for sample in samples}
