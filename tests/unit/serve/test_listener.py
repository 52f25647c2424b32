"""Listener with real connections: several listeners at one port, limits, and shutdown after pending
answers.
"""

import contextlib
import http.client
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvicorn
from builders.click_models import make_app, make_model, row_text
from builders.faults import rejects, until
from builders.requests import Reply, ask
from hosts.ports import free_ports
from ray._common.utils import import_attr
from ray.serve._private import constants
from ray.serve._private.http_util import validate_http_proxy_callback_return
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from rayrec.serve.listener import Listener, _BoundedProtocol, bound_proxy, sole_proxy
from rayrec.serve.server import PROXY_CALLBACK, PROXY_CALLBACK_VARIABLE


def _post(port: int, text: bytes = row_text(1), *, times: int = 1, wait_s: float = 0.0) -> int:
    """Score on one connection, with pauses. Returns the status that all answers have."""
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    ) as connection:
        statuses = set()
        for number in range(times):
            time.sleep(wait_s if number else 0.0)
            connection.request(
                "POST",
                "/v1/score",
                body=text,
                headers={"content-type": "text/tab-separated-values"},
            )
            answer = connection.getresponse()
            statuses.add(answer.status)
            answer.read()
    (status,) = statuses
    return status


def _connected(port: int, timeout_s: float = 20) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)


def _refuses(port: int) -> bool:
    try:
        _connected(port).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # the listener closed while this connection waited for it
        return False
    return False


def _listener(port: int, app: Any = None, *, end_s: float = 5, **limits: float) -> Listener:
    app = app or make_app(make_model())
    return Listener(
        app,
        host="127.0.0.1",
        port=port,
        max_body_bytes=10_000,
        end_s=end_s,
        **limits,
    )


@pytest.fixture
def listen() -> Iterator[Callable[..., int]]:
    with contextlib.ExitStack() as stack:

        def start(app: Any = None, **limits: float) -> int:
            port = free_ports(1)
            stack.callback(_listener(port, app, **limits).close)
            return port

        yield start


def test_listeners_use_one_port_and_drain_on_close() -> None:
    port = free_ports(1)
    apps = [make_app(make_model()) for _ in range(2)]
    one, other = (_listener(port, app, end_s=60) for app in apps)
    assert {_post(port) for _ in range(20)} == {200}
    one.close()
    assert not one.alive
    assert _post(port) == 200
    go_on = threading.Event()
    used = threading.Event()
    score = apps[1]._batcher._score

    def slowly(bodies: Sequence[Any]) -> Any:
        used.set()
        assert go_on.wait(60)
        return score(bodies)

    apps[1]._batcher._score = slowly
    with ThreadPoolExecutor(2) as pool:
        status = pool.submit(_post, port, b"".join(map(row_text, range(100))))
        assert used.wait(60)
        pool.submit(other.close)
        until(lambda: _refuses(port))
        go_on.set()
    assert status.result() == 200


LINE = row_text(1)
HEAD = b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/tab-separated-values\r\n"
REQUEST = HEAD + b"content-length: %d\r\n\r\n" % len(LINE) + LINE
LAST = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
REFUSED = b"PUT /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"
"""Answered before its body is read."""


def _sent_until_closed(port: int, pieces: Iterable[bytes]) -> int:
    sent = 0
    with (
        _connected(port, 60) as connection,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        for chunk in pieces:
            connection.sendall(chunk)
            sent += len(chunk)
        while connection.recv(65536):  # until it is closed
            pass
    return sent


def test_endless_requests_are_cut(listen: Callable[..., int]) -> None:
    """Bytes before the application sees a request, or after its body, have separate limits."""
    port = listen(keep_alive_s=0.5)
    endless = itertools.chain([HEAD], itertools.repeat(b"a: " + b"b" * 1000 + b"\r\n", 100_000))
    assert _sent_until_closed(port, endless) < 20_000_000
    body = itertools.chain(
        [HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n"],
        itertools.repeat(b"a: b\r\n" * 1000, 10_000),
    )
    assert _sent_until_closed(port, body) < 20_000_000
    _sent_until_closed(port, [])  # says nothing
    _sent_until_closed(port, [b"POST /v1/score HTTP"])  # and not enough
    assert _post(port) == 200


@pytest.mark.parametrize(
    ("length", "chunk"),
    [
        pytest.param("content-length: 40000", b"1" * 5000, id="announced"),
        pytest.param(
            "transfer-encoding: chunked", b"1388\r\n" + b"1" * 5000 + b"\r\n", id="chunked"
        ),
    ],
)
def test_too_large_body_is_answered(listen: Callable[..., int], length: str, chunk: bytes) -> None:
    """The client gets the reason although it reads nothing until it has sent everything."""
    port = listen(make_app(make_model(), max_body_bytes=10_000))
    with _connected(port) as connection:
        connection.sendall(HEAD + length.encode() + b"\r\n\r\n")
        for _ in range(8):
            time.sleep(0.03)
            connection.sendall(chunk)
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"more than 10000 bytes" in answer


def test_idle_connection_is_closed(listen: Callable[..., int]) -> None:
    port = listen(keep_alive_s=0.6)
    cases = list(itertools.product([b"", REQUEST, REQUEST * 3, REFUSED], [b"", b"\r\n", b"P"]))
    with ThreadPoolExecutor(len(cases)) as clients:
        list(clients.map(lambda case: _sent_until_closed(port, case), cases))
    assert _post(port, times=2, wait_s=0.3) == 200


def test_line_ends_are_ignored_and_pipelined_requests_answered(listen: Callable[..., int]) -> None:
    answers = _answers(listen(), *[b"\r\n" + REQUEST + b"\r\n"] * 3, LAST)
    assert answers == [(200, None)] * 3 + [(200, "close")]
    with _connected(listen()) as connection:
        connection.sendall(REQUEST * 50)
        answers = b""
        while answers.count(b"HTTP/1.1 200 ") < 50:
            answers += connection.recv(65536)


def test_open_connection_receives_last_answer() -> None:
    port = free_ports(1)
    ending = _listener(port)
    with _connected(port) as connection:
        until(lambda: ending._server.server_state.connections)
        closing = threading.Thread(target=ending.close)
        closing.start()
        until(lambda: _refuses(port))
        connection.sendall(REQUEST)
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer
        closing.join()


def test_used_port_is_rejected() -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        rejects("cannot listen there", _listener, used.getsockname()[1])


def _answers(port: int, *pieces: bytes, half_close: bool = False) -> list[tuple[int, str | None]]:
    """Return status and Connection of each answer on one connection, until the server closes it."""
    with _connected(port) as connection:
        for number, chunk in enumerate(pieces):
            time.sleep(0.05 if number else 0)
            connection.sendall(chunk)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                received += chunk
    result = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        result.append((int(head.split()[1]), fields.get(b"connection", b"").decode() or None))
        received = rest[int(fields[b"content-length"]) :]
    return result


OFFERS = [
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n",
    b"upgrade: h2c, foo/2\r\nconnection: keep-alive, upgrade\r\n",
]


@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket", "others"])
def test_upgrade_offer_with_body_is_answered(listen: Callable[..., int], offer: bytes) -> None:
    """A late or chunked body, or one that looks like a request, still belongs to its request."""
    port = listen()
    head, body = REQUEST.split(b"\r\n\r\n", 1)
    offering = head + b"\r\n" + offer + b"\r\n"
    last = (200, "close")
    assert _answers(port, offering + body + LAST) == [(200, None), last]
    assert _answers(port, offering, body, LAST) == [(200, None), last]
    assert _answers(port, offering + body + REQUEST + offering + body + LAST) == [
        (200, None)
    ] * 3 + [last]
    chunked = HEAD + offer + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(LINE)
    assert _answers(port, chunked[:50], chunked[50:], LINE + b"\r\n0\r\n\r\n", LAST) == [
        (200, None),
        last,
    ]
    smuggling = HEAD + offer + b"content-length: %d\r\n\r\n" % len(REQUEST)
    for pieces in ([smuggling, REQUEST], [smuggling + REQUEST]):
        assert _answers(port, *pieces, LAST) == [(400, None), last]
    assert _answers(
        port, b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n" + offer + b"\r\n" + LAST
    ) == [(200, None), last]


MALFORMED = [HEAD + b"content-length: %s\r\n\r\n" % length for length in (b"nonsense", b"-5")]
MALFORMED += [
    HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]
MALFORMED += [b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n\r\n"]


@pytest.mark.parametrize(
    "malformed",
    MALFORMED,
    ids=[
        "length",
        "negative",
        "chunk",
        "tls",
        "connect",
    ],
)
def test_malformed_request_is_answered(listen: Callable[..., int], malformed: bytes) -> None:
    assert _answers(listen(), malformed) == [(400, "close")]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
        HEAD + b"content-length: 50\r\n\r\ncut short",
    ],
    ids=["long", "short"],
)
def test_invalid_http_is_rejected(sent: bytes, listen: Callable[..., int]) -> None:
    port = listen()
    assert [status for status, _ in _answers(port, sent, half_close=True) if status >= 500] == []
    assert _post(port) == 200


def test_half_closed_connection_ends_and_host_header_is_checked(listen: Callable[..., int]) -> None:
    with _connected(listen()) as connection:
        connection.sendall(REQUEST)
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" not in answer
        connection.sendall(b"\r\n")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    port = listen()
    path = b"GET /openapi.json HTTP/1.%d\r\nconnection: close\r\n%s\r\n"
    for hosts, status in (
        ([], 400),
        ([b"localhost"] * 2, 400),
        ([b""], 421),
        ([b"localhost"], 200),
        ([b"evil"], 421),
    ):
        assert (
            _answers(port, path % (1, b"".join(b"host: %s\r\n" % host for host in hosts)))[0][0]
            == status
        )
    assert _answers(port, path % (0, b"")) == [(200, "close")]


def test_proxies_use_bounded_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    sole: Callable[[], list[Middleware]] = import_attr(PROXY_CALLBACK)
    for callback, middlewares in ((bound_proxy, 0), (sole, 1)):
        uvicorn.config.HTTP_PROTOCOLS.clear()
        assert len(validate_http_proxy_callback_return(callback())) == middlewares
        config = uvicorn.Config(make_app(make_model()))
        config.load()
        assert config.http_protocol_class is _BoundedProtocol
    assert hasattr(constants, PROXY_CALLBACK_VARIABLE), "Ray knows it"


def test_proxy_without_application_answers_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    (middleware,) = sole_proxy()

    def answer(app: Any, method: str = "POST", path: str = "/v1/score") -> Reply:
        return ask(
            middleware.cls(app, *middleware.args, **middleware.kwargs), method, path, parts=[b"1"]
        )

    assert answer(PlainTextResponse("Path '/' not found.", 200)).status == 200
    reply = answer(PlainTextResponse("Path '/' not found.", 404))
    assert (reply.status, reply.headers["retry-after"], reply.headers["connection"]) == (
        503,
        "1",
        "close",
    )
    assert reply.json()["error"]["message"]
    assert answer(make_app(make_model()), "GET", "/nowhere").status == 404
