"""Downloads a file over HTTP: resumes where it stopped, tries again, and never joins two versions of a file.

The bytes go to NAME.partial. NAME.partial.json beside it says which version of the file they are of (RFC 9110: `Range`
with `If-Range`), so that a later process can go on, and a file that changed meanwhile starts again.
"""

import base64
import binascii
import contextlib
import email.message
import hashlib
import http.client
import json
import os
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rayrec.config import Config, InputError

CHUNK_BYTES = 1 << 20
_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses that pass."""
_PROGRESS_BYTES = 64 << 20
"""An attempt that brought this much starts the count of failures again: a long download may be cut off many times."""


@dataclass(frozen=True, kw_only=True)
class RetryConfig(Config):
    """What to do when a download fails."""

    attempts: int = 4
    """Maximum number of attempts in a row."""
    first_wait_s: float = 1.0
    """Before the second attempt; doubled before each further one."""
    longest_wait_s: float = 60.0
    """Also of a wait the server asks for."""
    timeout_s: float = 60.0
    """Without a byte, after which a connection counts as broken."""


class Failed(Exception):
    """One attempt did not bring the file; `final`: another at the same URL would not either."""

    def __init__(self, why: str, *, final: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.final = final
        self.wait_s = wait_s


class Stopped(Exception):
    """Another download failed, or the user interrupted; the partial file stays."""


@dataclass(frozen=True)
class Version:
    """Which version of a file a server sent, as far as it says."""

    url: str
    validator: str | None
    """A strong ETag, else Last-Modified."""
    size_bytes: int | None
    md5: str | None
    """Of the whole file, from the server (Google Cloud Storage)."""


class Digests:
    """Number and checksums of bytes that come in pieces."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._sha256, self._md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)

    def add(self, chunk: bytes) -> None:
        self.size_bytes += len(chunk)
        self._sha256.update(chunk)
        self._md5.update(chunk)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def md5(self) -> str:
        return self._md5.hexdigest()


class Partial:
    """NAME.partial and the digests of its bytes, which are counted while they are written."""

    def __init__(self, path: str) -> None:
        """Takes up what an earlier process left at path.partial, if it is known which version that is of."""
        self.path = f"{path}.partial"
        self.version: Version | None = None
        self.resumed = False
        """Whether the bytes came in more than one piece."""
        self.digests = Digests()
        with contextlib.suppress(OSError, ValueError, TypeError):
            with open(self._state_path, encoding="utf-8") as file:
                version = Version(**json.load(file))
            with open(self.path, "rb") as data:
                while chunk := data.read(CHUNK_BYTES):
                    self.digests.add(chunk)
            self.version, self.resumed = version, True
        if self.version is None:
            self.digests = Digests()

    @property
    def _state_path(self) -> str:
        return f"{self.path}.json"

    @property
    def size_bytes(self) -> int:
        return self.digests.size_bytes

    @property
    def complete(self) -> bool:
        return self.version is not None and self.size_bytes == self.version.size_bytes

    def restart(self, version: Version | None) -> None:
        """Empties the file, for the bytes of `version` or of one not known yet."""
        self.digests = Digests()
        self.version, self.resumed = version, False
        with writing_to(self.path):
            # The data is emptied first: at no time does a version stand beside bytes of another.
            with open(self.path, "wb"):
                pass
            with open(self._state_path, "w", encoding="utf-8") as file:
                json.dump(asdict(version) if version else None, file)

    def append(self, chunk: bytes) -> None:
        with writing_to(self.path), open(self.path, "ab") as file:
            file.write(chunk)
        self.digests.add(chunk)

    def finish(self, target: str | None) -> None:
        """Renames the complete file to `target`; without one, removes it."""
        with writing_to(target or self.path):
            if target is None:
                os.remove(self.path)
            else:
                with open(self.path, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(self.path, target)
            os.remove(self._state_path)


@contextlib.contextmanager
def writing_to(path: str) -> Iterator[None]:
    """Errors of the disk become the user's to fix."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); free space there or choose another --out") from None


@dataclass(frozen=True)
class Download:
    """One file on its way to `partial`.

    `accept` looks at what the server is about to send and `verify` at all that came; either raises Failed to reject it.
    `advance` receives the number of bytes that are there.
    """

    url: str
    partial: Partial
    retries: RetryConfig
    accept: Callable[[Version], None]
    verify: Callable[[], None]
    advance: Callable[[int], None]
    stop: threading.Event

    def run(self) -> None:
        """Bring the partial file to its end. Raises Failed, and Stopped soon after `stop` is set."""
        partial, failures = self.partial, 0
        while True:
            before = partial.size_bytes
            try:
                usable = partial.version is not None and partial.version.url == self.url
                if not (usable and partial.complete):
                    self._attempt(usable)
                try:
                    self.verify()
                    return
                except Failed as error:
                    whole = not partial.resumed
                    partial.restart(None)
                    # What came in pieces may have been joined wrongly; what came in one is what the server has.
                    raise Failed(str(error), final=whole) from None
            except Failed as error:
                failures = 1 if partial.size_bytes - before >= _PROGRESS_BYTES else failures + 1
                if error.final or failures >= self.retries.attempts:
                    raise
                wait_s = max(self.retries.first_wait_s * 2 ** (failures - 1), error.wait_s)
                if self.stop.wait(min(wait_s, self.retries.longest_wait_s)):
                    raise Stopped from None

    def _attempt(self, usable: bool) -> None:
        """Send one request. Raises Failed."""
        # identity: a server that compressed on the way would make lengths, ranges and checksums those of something else.
        headers = {"User-Agent": "rayrec", "Accept-Encoding": "identity"}
        old = self.partial.version
        if usable and old and self.partial.size_bytes and old.size_bytes is not None and old.validator:
            headers |= {"Range": f"bytes={self.partial.size_bytes}-", "If-Range": old.validator}
        try:
            request = urllib.request.Request(self.url, headers=headers)
            with urllib.request.urlopen(request, timeout=self.retries.timeout_s) as response:
                self._receive(response)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the file is shorter than it was
                self.partial.restart(None)
                raise Failed("its size changed") from None
            wait = error.headers.get("Retry-After", "")
            wait_s = float(wait) if wait.isdecimal() else 0.0
            raise Failed(f"{error.code} {error.reason}", final=error.code not in _TRY_AGAIN, wait_s=wait_s) from None
        except urllib.error.URLError as error:
            raise _failed(error.reason) from None
        except (http.client.HTTPException, OSError) as error:
            raise _failed(error) from None

    def _receive(self, response: http.client.HTTPResponse) -> None:
        partial = self.partial
        version = _version(self.url, response.headers, whole=response.status == 200)
        if encoding := response.headers.get("Content-Encoding", "").replace("identity", ""):
            raise Failed(f"sends it {encoding}-encoded, though asked not to", final=True)
        if response.status == 206:
            old = partial.version
            place = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", "").strip())
            if old is None or place is None or int(place[1]) != partial.size_bytes:
                partial.restart(None)
                raise Failed("sends another part than asked for")
            # Not every server heeds If-Range; a version that is not the one begun must not be joined to it.
            changed = version.validator is not None and version.validator != old.validator
            if changed or int(place[2]) != old.size_bytes:
                partial.restart(None)
                raise Failed("it changed while it was fetched")
            partial.resumed = True
        elif response.status == 200:
            self.accept(version)
            partial.restart(version)
        else:
            raise Failed(f"{response.status} {response.reason}", final=True)
        self.advance(partial.size_bytes)
        while chunk := response.read(CHUNK_BYTES):
            partial.append(chunk)
            self.advance(partial.size_bytes)
            if self.stop.is_set():
                raise Stopped
        size = partial.version.size_bytes if partial.version else None
        if size is not None and partial.size_bytes != size:
            raise Failed(f"the connection broke after {partial.size_bytes:,} of {size:,} bytes")


def _failed(reason: Any) -> Failed:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return Failed(f"its certificate is refused ({reason.verify_message})", final=True)
    if isinstance(reason, TimeoutError):
        return Failed("no answer in time")
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return Failed(f"the connection failed ({text})", final=isinstance(reason, http.client.InvalidURL))


def _version(url: str, headers: email.message.Message, *, whole: bool) -> Version:
    etag, modified = headers.get("ETag"), headers.get("Last-Modified")
    if etag and etag.startswith("W/"):  # only says that it means the same
        etag = None
    length = headers.get("Content-Length", "")
    size = int(length) if whole and length.isdecimal() else None
    return Version(url, etag or modified, size, _google_md5(headers))


def _google_md5(headers: email.message.Message) -> str | None:
    """`x-goog-hash: crc32c=…,md5=…` in one header or several; composite objects have no md5."""
    if headers.get("x-goog-stored-content-encoding", "identity") != "identity":
        return None  # the hash is of what is stored, which is unpacked on the way
    for hashes in headers.get_all("x-goog-hash", []):
        for one in hashes.split(","):
            kind, _, value = one.strip().partition("=")
            if kind == "md5":
                with contextlib.suppress(binascii.Error):
                    return base64.b64decode(value, validate=True).hex()
    return None
