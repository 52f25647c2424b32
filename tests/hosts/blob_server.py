"""In-memory store of block blobs on loopback: answers rayrec's calls of Azure's Blob service,
others with 501; checks keys.
"""

import base64
import hashlib
import hmac
import re
import socket
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

ACCOUNT = "tester"
KEY = base64.b64encode(b"secret-word").decode()
_SIGNED = (
    "content-encoding",
    "content-language",
    "content-length",
    "content-md5",
    "content-type",
    "date",
    "if-modified-since",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
)
_DATE = "Mon, 23 Nov 2026 00:00:00 GMT"

_CONTAINER = {
    "x-ms-has-immutability-policy": "false",
    "x-ms-has-legal-hold": "false",
    "x-ms-default-encryption-scope": "$account-encryption-key",
    "x-ms-deny-encryption-scope-override": "false",
    "x-ms-immutable-storage-with-versioning-enabled": "false",
}


class BlobServer:
    """`start` makes it answer on `port`, `kill` breaks its connections off; its blobs outlast
    both.
    """

    def __init__(self, port: int, containers: tuple[str, ...] = ("logs",)) -> None:
        self.port = port
        self.blobs: dict[str, dict[str, bytes]] = {name: {} for name in containers}
        """By container and name."""
        self.blocks: dict[tuple[str, str], list[tuple[str, bytes]]] = {}
        """Of each blob, in order, with their base64 ids."""
        self.staged: dict[tuple[str, str, str], bytes] = {}
        """By container, name and id: blocks that no list of blocks has yet made visible."""
        self.connections: set[socket.socket] = set()
        self._http: ThreadingHTTPServer | None = None

    def start(self) -> None:
        self._http = ThreadingHTTPServer(
            ("127.0.0.1", self.port), type("Handler", (_Handler,), {"server_store": self})
        )
        threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def kill(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()
            for connection in list(self.connections):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer is sent at once
    server_store: BlobServer

    def setup(self) -> None:
        super().setup()
        self.server_store.connections.add(self.connection)

    def finish(self) -> None:
        self.server_store.connections.discard(self.connection)
        super().finish()

    def handle_expect_100(self) -> bool:
        # else the answer itself follows, and Azure's library mixes the two up
        if int(self.headers.get("Content-Length") or 0):
            super().handle_expect_100()
            self.wfile.flush()
        return True

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        _, _, container, name = (*url.path.split("/", 3), "", "")[:4]
        if not self._is_signed():
            return self._refuse(403, "AuthenticationFailed")
        return self._dispatch(
            container, unquote(name), dict(parse_qsl(url.query, keep_blank_values=True)), body
        )

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _dispatch(  # noqa: PLR0912
        self, container: str, name: str, query: dict[str, str], body: bytes
    ) -> None:
        store = self.server_store
        if "action" in query:  # of the Data Lake service: the account has no hierarchical namespace
            return self._refuse(400, "InvalidUri")
        if container not in store.blobs:
            return self._refuse(404, "ContainerNotFound")
        blobs = store.blobs[container]
        blob_key = (container, name)
        match self.command, query.get("comp"):
            case "POST", "batch":
                return self._delete_batch(body)
            case ("GET", "list"):
                return self._list(blobs, query)
            case ("GET" | "HEAD", None) if not name:
                return self._send(200, b"", _CONTAINER)
            case ("PUT", "block"):
                store.staged[container, name, query["blockid"]] = body
                return self._send(201, b"")
            case ("PUT", "blocklist"):
                return self._join_blocks(blob_key, body)
            case ("PUT", _) if self.headers.get("x-ms-copy-source"):
                return self._copy(blob_key)
            case ("PUT", _) if self.headers.get("x-ms-blob-type") == "BlockBlob":
                store.blocks.pop(blob_key, None)
                blobs[name] = body
                return self._send(201, b"")
        if name not in blobs:
            return self._refuse(404, "BlobNotFound")
        match self.command, query.get("comp"):
            case ("GET", "blocklist"):
                return self._list_blocks(blob_key)
            case (_, "lease"):
                return self._send(201, b"", {"x-ms-lease-id": str(uuid.UUID(int=1))})
            case ("DELETE", _):
                del blobs[name]
                store.blocks.pop(blob_key, None)
                return self._send(202, b"")
            case ("GET" | "HEAD", None):
                return self._send_blob(blobs[name])
        return self._refuse(501, "NotImplemented")

    def _join_blocks(self, blob_key: tuple[str, str], body: bytes) -> None:
        store = self.server_store
        container, name = blob_key
        known = dict(store.blocks.get(blob_key, ()))
        ids = re.findall(r"<(?:Latest|Committed|Uncommitted)>([^<]*)<", body.decode())
        blocks = [(one, store.staged.pop((*blob_key, one), None) or known[one]) for one in ids]
        store.blocks[blob_key] = blocks
        store.blobs[container][name] = b"".join(data for _, data in blocks)
        self._send(201, b"")

    def _copy(self, blob_key: tuple[str, str]) -> None:
        store = self.server_store
        container, name = blob_key
        source = urlsplit(self.headers["x-ms-copy-source"]).path.split("/", 3)
        store.blobs[container][name] = store.blobs[source[2]][unquote(source[3])]
        store.blocks.pop(blob_key, None)
        self._send(202, b"", {"x-ms-copy-id": "1", "x-ms-copy-status": "success"})

    def _list_blocks(self, blob_key: tuple[str, str]) -> None:
        container, name = blob_key
        listed = [
            f"<Block><Name>{one}</Name><Size>{len(data)}</Size></Block>"
            for one, data in self.server_store.blocks.get(blob_key, ())
        ]
        text = f"<BlockList><CommittedBlocks>{''.join(listed)}</CommittedBlocks></BlockList>"
        size = len(self.server_store.blobs[container][name])
        self._send(200, text.encode(), {"x-ms-blob-content-length": str(size)})

    def _send_blob(self, data: bytes) -> None:
        found = re.fullmatch(
            r"bytes=(\d+)-(\d*)", self.headers.get("x-ms-range") or self.headers.get("Range") or ""
        )
        if not found or self.command == "HEAD":
            return self._send(
                200,
                data,
                {"x-ms-blob-type": "BlockBlob", "x-ms-copy-id": "1", "x-ms-copy-status": "success"},
            )
        start = int(found[1])
        end = min(int(found[2] or len(data)), len(data) - 1)
        if start >= len(data):
            return self._refuse(416, "InvalidRange")
        span = {"x-ms-blob-type": "BlockBlob", "Content-Range": f"bytes {start}-{end}/{len(data)}"}
        return self._send(206, data[start : end + 1], span)

    def _list(self, blobs: dict[str, bytes], query: dict[str, str]) -> None:
        prefix = query.get("prefix", "")
        delimiter = query.get("delimiter", "")
        items = {}
        for name in sorted(name for name in blobs if name.startswith(prefix)):
            rest = name.removeprefix(prefix)
            if delimiter and delimiter in rest:
                folder = prefix + rest.partition(delimiter)[0] + delimiter
                items[folder] = f"<BlobPrefix><Name>{escape(folder)}</Name></BlobPrefix>"
            else:
                items[name] = (
                    f"<Blob><Name>{escape(name)}</Name><Properties>"
                    f"<Last-Modified>{_DATE}</Last-Modified><Etag>1</Etag>"
                    f"<Content-Length>{len(blobs[name])}</Content-Length>"
                    "<Content-Type>application/octet-stream</Content-Type>"
                    "<BlobType>BlockBlob</BlobType></Properties></Blob>"
                )
        if query.get("maxresults"):
            items = dict(list(items.items())[: int(query["maxresults"])])
        text = (
            '<?xml version="1.0" encoding="utf-8"?><EnumerationResults '
            f'ServiceEndpoint="http://127.0.0.1/{ACCOUNT}/" '
            f'ContainerName="logs"><Blobs>{"".join(items.values())}</Blobs>'
            "<NextMarker/></EnumerationResults>"
        )
        self._send(200, text.encode(), {"Content-Type": "application/xml"})

    def _delete_batch(self, body: bytes) -> None:
        boundary = f"batchresponse_{uuid.uuid4()}"
        parts = []
        for number, path in enumerate(re.findall(rb"DELETE (\S+) HTTP", body)):
            _, _, container, name = urlsplit(path.decode()).path.split("/", 3)
            found = self.server_store.blobs[container].pop(unquote(name), None) is not None
            line = "202 Accepted" if found else "404 The specified blob does not exist."
            code = "" if found else "x-ms-error-code: BlobNotFound\r\n"
            parts.append(
                f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: "
                f"{number}\r\n\r\nHTTP/1.1 {line}\r\n{code}"
                f"x-ms-request-id: 1\r\nx-ms-version: 2021-12-02\r\n\r\n"
            )
        text = "".join(parts) + f"--{boundary}--\r\n"
        self._send(202, text.encode(), {"Content-Type": f"multipart/mixed; boundary={boundary}"})

    def _refuse(self, status: int, code: str) -> None:
        text = (
            f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} it "
            "is.</Message></Error>"
        )
        if self.command == "HEAD":  # whose Content-Type would promise a body
            return self._send(status, b"", {"x-ms-error-code": code})
        return self._send(
            status, text.encode(), {"x-ms-error-code": code, "Content-Type": "application/xml"}
        )

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        common = {
            "Content-Length": str(len(body)),
            "Last-Modified": _DATE,
            "ETag": '"1"',
            "x-ms-request-id": "1",
            "x-ms-version": "2021-12-02",
            "x-ms-creation-time": _DATE,
            "x-ms-request-server-encrypted": "true",
            "x-ms-server-encrypted": "true",
            "x-ms-lease-status": "unlocked",
            "x-ms-lease-state": "available",
        }
        for name, value in (common | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _is_signed(self) -> bool:
        headers = {name.lower(): value for name, value in self.headers.items()}
        values = [headers.get(name, "") for name in _SIGNED]
        if values[2] == "0":
            values[2] = ""
        url = urlsplit(self.path)
        own = "".join(
            f"{name}:{headers[name]}\n" for name in sorted(headers) if name.startswith("x-ms-")
        )
        query = "".join(
            f"\n{name.lower()}:{value}"
            for name, value in sorted(parse_qsl(url.query, keep_blank_values=True))
        )
        text = "\n".join([self.command, *values]) + f"\n{own}/{ACCOUNT}{url.path}{query}"
        made = base64.b64encode(
            hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)
        ).decode()
        return headers.get("authorization") == f"SharedKey {ACCOUNT}:{made}"
