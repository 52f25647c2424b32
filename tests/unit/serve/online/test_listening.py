"""A process that listens itself: real connections, several at one port, and an end that answers what is in flight."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Sequence
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


def test_two_share_a_port_and_the_last_answers_before_it_ends() -> None:
    port = free_ports(1)
    apps = [make_app(make_model()) for _ in range(2)]
    one, other = (Listener(app, host="127.0.0.1", port=port, end_s=10) for app in apps)
    assert {_post(port, row_text(1)) for _ in range(20)} == {200}
    one.close()
    assert not one.alive
    assert _post(port, row_text(1)) == 200

    go_on, taken = threading.Event(), threading.Event()
    score = apps[1]._batcher._score

    def slowly(bodies: Sequence[Any]) -> Any:
        taken.set()
        assert go_on.wait(10)
        return score(bodies)

    apps[1]._batcher._score = slowly
    statuses: list[int] = []
    asking = threading.Thread(target=lambda: statuses.append(_post(port, b"".join(map(row_text, range(100))))))
    asking.start()
    assert taken.wait(10)
    ending = threading.Thread(target=other.close)
    ending.start()
    time.sleep(0.3)
    with pytest.raises(ConnectionRefusedError):
        _post(port, row_text(1))
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
    listener = Listener(make_app(make_model()), host="127.0.0.1", port=port, end_s=1)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(65536)
    assert not answer.startswith(b"HTTP/1.1 5")
    assert _post(port, row_text(1)) == 200
    listener.close()


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot listen there"):
            Listener(make_app(make_model()), host="127.0.0.1", port=taken.getsockname()[1], end_s=1)
