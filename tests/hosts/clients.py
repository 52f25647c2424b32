"""HTTP clients of servers that tests start."""

import http.client
import json
import threading
import time
from contextlib import closing
from typing import Any

from hosts.processes import EndsOnExit

TOKEN = "open sesame"
"""Sent with every request."""


def ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request(
            method,
            path,
            body=body,
            headers={
                "content-type": "text/tab-separated-values",
                "authorization": f"Bearer {TOKEN}",
            },
        )
        response = connection.getresponse()
        return response.status, response.read()


class Load(EndsOnExit):
    """Clients that score the same rows repeatedly."""

    def __init__(self, port: int, rows: bytes, *, num_clients: int = 4) -> None:
        """`answers` and `failed` contain start, status and body of answers. The status is 0 if none
        came.
        """
        self.port = port
        self.rows = rows
        self.answers = list[Any]()
        self.failed = list[Any]()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, daemon=True) for _ in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):  # leaves the machine to those that change over
            start = time.monotonic()
            try:
                status, body = ask(self.port, "POST", "/v1/score", self.rows)
            except (OSError, http.client.HTTPException) as error:
                status = 0
                body = repr(error).encode()
            for kept in (self.answers, self.failed) if status != 200 else (self.answers,):
                kept.append((start, status, body))

    def models(self) -> set[str]:
        return {
            json.loads(body)["model"] for _, status, body in list(self.answers) if status == 200
        }
