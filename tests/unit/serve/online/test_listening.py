"""A process that listens itself: real connections, several at one port, and an end that answers what is in flight."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from ports import free_ports
from served_click_model import make_app, make_model, row_text

from rayrec.config import InputError
from rayrec.serve.online.listening import Listener


def _post(port: int, text: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", "/v1/score", body=text, headers={"content-type": "text/tab-separated-values"})
        return connection.getresponse().status
    finally:
        connection.close()


def _wait_until_refused(port: int) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
        except ConnectionRefusedError:
            return
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_two_share_a_port_and_the_last_answers_before_it_ends() -> None:
    port = free_ports(1)
    apps = [make_app(make_model()) for _ in range(2)]
    one, other = (Listener(app, host="127.0.0.1", port=port, max_body_bytes=1 << 20, end_s=60) for app in apps)
    assert {_post(port, row_text(1)) for _ in range(20)} == {200}
    one.close()
    assert not one.alive
    assert _post(port, row_text(1)) == 200

    go_on, taken = threading.Event(), threading.Event()
    score = apps[1]._batcher._score

    def slowly(bodies: Sequence[Any]) -> Any:
        taken.set()
        assert go_on.wait(60)
        return score(bodies)

    apps[1]._batcher._score = slowly
    statuses: list[int] = []
    asking = threading.Thread(target=lambda: statuses.append(_post(port, b"".join(map(row_text, range(100))))))
    asking.start()
    assert taken.wait(60)
    ending = threading.Thread(target=other.close)
    ending.start()
    _wait_until_refused(port)
    go_on.set()
    asking.join()
    ending.join()
    assert statuses == [200]


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: nonsense\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\nabc",
        b"POST /v1/score HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\ncut short",
    ],
    ids=range(6),
)
def test_no_http(sent: bytes) -> None:
    """Whatever comes, the next request is answered."""
    port = free_ports(1)
    listener = Listener(make_app(make_model()), host="127.0.0.1", port=port, max_body_bytes=1 << 20, end_s=1)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(65536)
    assert not answer.startswith(b"HTTP/1.1 5")
    assert _post(port, row_text(1)) == 200
    listener.close()


def _sent_until_closed(port: int, pieces: Iterable[bytes]) -> int:
    """Bytes sent before the server closed the connection."""
    sent = 0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                sent += len(piece)
            while connection.recv(65536):  # until it is closed
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass
    return sent


def test_nothing_is_taken_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before the application sees a request, or behind its body, has limits of its own."""
    monkeypatch.setattr("rayrec.serve.online.listening._HEAD_S", 0.5)
    port = free_ports(1)
    listener = Listener(make_app(make_model()), host="127.0.0.1", port=port, max_body_bytes=10_000, end_s=1)
    line = b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-type: text/tab-separated-values\r\n"
    endless = itertools.chain([line], itertools.repeat(b"a: " + b"b" * 1000 + b"\r\n", 100_000))
    assert _sent_until_closed(port, endless) < 20_000_000
    body = itertools.chain(
        [line + b"transfer-encoding: chunked\r\n\r\n0\r\n"], itertools.repeat(b"a: b\r\n" * 1000, 10_000)
    )
    assert _sent_until_closed(port, body) < 20_000_000
    _sent_until_closed(port, [])  # says nothing
    _sent_until_closed(port, [b"POST /v1/score HTTP"])  # and not enough
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    ) as connection:  # time between requests is another matter
        for wait_s in (0.0, 1.0):
            time.sleep(wait_s)
            connection.request("POST", "/v1/score", row_text(1), {"content-type": "text/tab-separated-values"})
            answer = connection.getresponse()
            assert answer.status == 200
            answer.read()
    listener.close()


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot listen there"):
            Listener(
                make_app(make_model()), host="127.0.0.1", port=taken.getsockname()[1], max_body_bytes=1 << 20, end_s=1
            )
