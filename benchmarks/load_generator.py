"""Load generator that repeats one HTTP request over N connections and prints the seconds of each
answer.

Runs in a separate process, as lean as Python allows. Without a rate, each connection sends as soon
as it has its answer. With a rate, requests are due at even times, and their seconds count from the
due time, so that late answers are included.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection that is kept."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._answer: asyncio.Future[int] | None = None
        self._transport: Any = None
        self.closed = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._received[:end]).lower()
        position = head.find(b"content-length:")
        if position < 0:
            # in chunks, the last of which is empty
            complete = self._received.endswith(b"\r\n0\r\n\r\n")
        else:
            value = head[position + len(b"content-length:") :].split(b"\r\n", 1)[0]
            complete = len(self._received) >= end + 4 + int(value)
        if complete and self._answer and not self._answer.done():
            self._answer.set_result(int(head[9:12]))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._answer and not self._answer.done():
            self._answer.set_exception(ConnectionError("closed"))

    async def send(self, request: bytes) -> int:
        """Send a request and return the status of its complete answer."""
        self._received.clear()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer


async def run(
    *,
    port: int,
    path: str,
    body: str,
    connections: int,
    seconds: float,
    warm_s: float,
    rate: float | None,
) -> dict[str, Any]:
    content = await asyncio.to_thread(Path(body).read_bytes)
    content_type = "application/json" if body.endswith(".json") else "text/tab-separated-values"
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {content_type}\r\n"
    request = head.encode() + f"content-length: {len(content)}\r\n\r\n".encode() + content
    loop = asyncio.get_running_loop()
    opened = [
        await loop.create_connection(Connection, "127.0.0.1", port) for _ in range(connections)
    ]
    start = time.perf_counter() + warm_s
    end = start + seconds
    latencies_s: list[float] = []
    failures: dict[str, int] = {}
    failed: list[tuple[float, str]] = []
    due = start - warm_s

    async def client(connection: Connection) -> None:
        nonlocal due
        while True:
            began = time.perf_counter()
            if rate:
                began, due = due, due + 1 / rate
                await asyncio.sleep(began - time.perf_counter())
            if began > end:
                return
            try:
                if connection.closed:  # between two requests; nothing was lost
                    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
                status = await asyncio.wait_for(connection.send(request), 60)
                kind = "" if status == 200 else str(status)
            except (OSError, TimeoutError) as error:
                kind = type(error).__name__
                connection.closed = True
            if began >= start:
                if kind:
                    failures[kind] = failures.get(kind, 0) + 1
                    failed.append((time.time(), kind))
                else:
                    latencies_s.append(time.perf_counter() - began)

    await asyncio.gather(*(client(connection) for _, connection in opened))
    return {
        "seconds": time.perf_counter() - start,
        "taken_s": latencies_s,
        "failures": failures,
        "failed": failed,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(**json.loads(sys.argv[1])))))
