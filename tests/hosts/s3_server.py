"""Server with moto's S3 on loopback: `python s3_server.py PORT KEY SECRET`, with signatures.
`python s3_server.py PORT` is Google's XML API, without credentials and with a bucket "logs". Lines
of standard input open and close it.
"""

import contextlib
import hmac
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler
from werkzeug.test import Client

_ANY_USER = (
    "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=any"
)
CONNECTIONS: set[socket.socket] = set()


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        CONNECTIONS.add(self.connection)

    def finish(self) -> None:
        CONNECTIONS.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log(self, *_: object) -> None: ...


class Signed:
    """An application that answers requests with the signature of its one user."""

    def __init__(self, application: Callable[..., Iterable[bytes]], key: str, secret: str) -> None:
        self._application = application
        self._user = Credentials(key, secret)

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if self._is_signed(environment):
            return self._application(environment, start)
        start("403 Forbidden", [("Content-Type", "application/xml")])
        return [
            b"<Error><Code>SignatureDoesNotMatch</Code><Message>it does not match</Message></Error>"
        ]

    def _is_signed(self, environment: dict[str, Any]) -> bool:
        kind, _, rest = environment.get("HTTP_AUTHORIZATION", "").partition(" ")
        if kind != "AWS4-HMAC-SHA256":
            return False
        reported = dict(part.strip().split("=", 1) for part in rest.split(","))
        key, _, region, service, _ = reported["Credential"].split("/")
        names = {"content-type": "CONTENT_TYPE", "content-length": "CONTENT_LENGTH"}
        headers = {
            name: environment.get(names.get(name, "HTTP_" + name.upper().replace("-", "_")), "")
            for name in reported["SignedHeaders"].split(";")
        }
        request = AWSRequest()
        request.context["timestamp"] = environment.get("HTTP_X_AMZ_DATE", "")
        signer = S3SigV4Auth(self._user, service, region)
        canonical = _canonical(environment["REQUEST_METHOD"], environment["REQUEST_URI"], headers)
        text = signer.string_to_sign(request, canonical)
        return key == self._user.access_key and hmac.compare_digest(
            reported["Signature"], signer.signature(text, request)
        )


def _canonical(method: str, uri: str, headers: dict[str, str]) -> str:
    """The request as it is signed."""
    path, _, query = uri.partition("?")
    pairs = sorted(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
        for name, value in parse_qsl(query, keep_blank_values=True)
    )
    lines = [f"{name}:{' '.join(headers[name].split())}" for name in sorted(headers)]
    return "\n".join(
        [
            method,
            quote(unquote(path), safe="/-_.~"),
            "&".join(pairs),
            *lines,
            "",
            ";".join(sorted(headers)),
            headers.get("x-amz-content-sha256", ""),
        ]
    )


class Google:
    """Google's XML API, which is S3's with other names of headers."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        Client(self).put("/logs", base_url="http://127.0.0.1")

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        for name in [name for name in environment if name.startswith("HTTP_X_GOOG_")]:
            environment[name.replace("GOOG", "AMZ")] = environment.pop(name)
        # moto answers strangers for public buckets only.
        environment["HTTP_AUTHORIZATION"] = _ANY_USER
        return self._application(environment, start)


def main(port: int, *user: str) -> None:
    backend = create_backend_app("s3")
    application = Signed(backend, *user) if user else Google(backend)
    server: ThreadedWSGIServer | None = None
    for line in sys.stdin:
        if line == "open\n":
            server = ThreadedWSGIServer("127.0.0.1", port, application, handler=_Handler)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        elif server is not None:
            TCPServer.shutdown(server)
            server.server_close()
            for connection in list(CONNECTIONS):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
