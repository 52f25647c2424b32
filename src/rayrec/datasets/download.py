"""Resumable HTTP download with retries, which never joins two versions of a file. Bytes go to
NAME.partial. NAME.partial.json identifies their file version (RFC 9110: `Range` with `If-Range`),
so that a later process can resume or restart.
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
_RETRY_STATUSES = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses of temporary failures."""
_PROGRESS_BYTES = 64 << 20
"""Number of bytes after which an attempt resets the failure count, because a long download may be
cut off many times.
"""


@dataclass(frozen=True, kw_only=True)
class RetryConfig(Config):
    """Retry policy of downloads."""

    attempts: int = 4
    """Maximum number of consecutive attempts."""
    first_wait_s: float = 1.0
    """Wait before the second attempt, in seconds, doubled before each further attempt."""
    longest_wait_s: float = 60.0
    """Maximum wait, in seconds, including a wait requested by the server."""
    timeout_s: float = 60.0
    """Maximum time without a byte, in seconds, before a connection counts as broken."""


class Failed(Exception):
    """Failed download attempt. `final`: further attempts at this URL would fail too."""

    def __init__(self, why: str, *, final: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.final = final
        self.wait_s = wait_s


class Stopped(Exception):
    """Download stopped by another failure or by the user. The partial file stays."""


@dataclass(frozen=True)
class Version:
    """File version, as far as the server identifies it."""

    url: str
    validator: str | None
    """Strong ETag, else Last-Modified."""
    size_bytes: int | None
    md5: str | None
    """Checksum of the whole file from the server (Google Cloud Storage)."""


class Digests:
    """Incremental byte count and checksums."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._sha256 = hashlib.sha256()
        self._md5 = hashlib.md5(usedforsecurity=False)

    def add_file(self, path: str) -> None:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                self.add(chunk)

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
    """Partial file NAME.partial, with digests updated while writing."""

    def __init__(self, path: str) -> None:
        """Open the partial file and resume it if its version is known."""
        self.path = f"{path}.partial"
        self._state_path = f"{path}.partial.json"
        self.version: Version | None = None
        self.resumed = False
        """Whether the bytes come from several requests."""
        self.digests = Digests()
        with contextlib.suppress(OSError, ValueError, TypeError):
            with open(self._state_path, encoding="utf-8") as file:
                version = Version(**json.load(file))
            self.digests.add_file(self.path)
            self.version = version
            self.resumed = True
        if self.version is None:
            self.digests = Digests()

    @property
    def size_bytes(self) -> int:
        return self.digests.size_bytes

    @property
    def complete(self) -> bool:
        return self.version is not None and self.size_bytes == self.version.size_bytes

    def restart(self, version: Version | None) -> None:
        """Empty the file for a version, or for an unknown one."""
        self.digests = Digests()
        self.version = version
        self.resumed = False
        with writing_to(self.path):
            # The data is emptied first, so that a version is never paired with bytes of another.
            with open(self.path, "wb"):
                pass
            with open(self._state_path, "w", encoding="utf-8") as file:
                json.dump(asdict(version) if version else None, file)

    def append(self, chunk: bytes) -> None:
        with writing_to(self.path), open(self.path, "ab") as file:
            file.write(chunk)
        self.digests.add(chunk)

    def finish(self, target: str | None) -> None:
        """Rename the complete file to `target`, or remove it if `target` is None."""
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
    """Convert disk errors to InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}). Free space, allow writing or change "
            "--out."
        ) from None


@dataclass(frozen=True)
class Download:
    """Download of one file to `partial`. `accept` checks the offered version and `verify` the
    complete file. Both raise Failed to reject it. `advance` is called with the number of bytes
    received.
    """

    url: str
    partial: Partial
    retries: RetryConfig
    accept: Callable[[Version], None]
    verify: Callable[[], None]
    advance: Callable[[int], None]
    stop: threading.Event

    def run(self) -> None:
        """Complete the partial file. Raises Failed, or Stopped soon after `stop` is set."""
        partial = self.partial
        failures = 0
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
                    single_request = not partial.resumed
                    partial.restart(None)
                    # A file from several requests may be joined wrongly. One from a single request
                    # is the server's content.
                    raise Failed(str(error), final=single_request) from None
            except Failed as error:
                failures = 1 if partial.size_bytes - before >= _PROGRESS_BYTES else failures + 1
                if error.final or failures >= self.retries.attempts:
                    raise
                wait_s = max(self.retries.first_wait_s * 2 ** (failures - 1), error.wait_s)
                if self.stop.wait(min(wait_s, self.retries.longest_wait_s)):
                    raise Stopped from None

    def _attempt(self, usable: bool) -> None:
        """Send one request. Raises Failed."""
        # With compressed transfer, lengths, ranges and checksums would not be those of the file.
        headers = {"User-Agent": "rayrec", "Accept-Encoding": "identity"}
        old = self.partial.version
        if (
            usable
            and old
            and self.partial.size_bytes
            and old.size_bytes is not None
            and old.validator
        ):
            headers |= {"Range": f"bytes={self.partial.size_bytes}-", "If-Range": old.validator}
        try:
            request = urllib.request.Request(self.url, headers=headers)
            with urllib.request.urlopen(request, timeout=self.retries.timeout_s) as response:
                self._receive(response)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # The file became shorter.
                self.partial.restart(None)
                raise Failed("file size changed") from None
            wait = error.headers.get("Retry-After", "")
            wait_s = float(wait) if wait.isdecimal() else 0.0
            raise Failed(
                f"{error.code} {error.reason}",
                final=error.code not in _RETRY_STATUSES,
                wait_s=wait_s,
            ) from None
        except urllib.error.URLError as error:
            raise _failed(error.reason) from None
        except (http.client.HTTPException, OSError) as error:
            raise _failed(error) from None

    def _receive(self, response: http.client.HTTPResponse) -> None:
        partial = self.partial
        version = _version(self.url, response.headers, full=response.status == 200)
        if encoding := response.headers.get("Content-Encoding", "").replace("identity", ""):
            raise Failed(
                f"response is {encoding}-encoded, although identity was requested", final=True
            )
        if response.status == 206:
            old = partial.version
            content_range = re.fullmatch(
                r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", "").strip()
            )
            if old is None or content_range is None or int(content_range[1]) != partial.size_bytes:
                partial.restart(None)
                raise Failed("response is not the requested byte range")
            # Some servers ignore If-Range. Another version must not be joined.
            changed = version.validator is not None and version.validator != old.validator
            if changed or int(content_range[2]) != old.size_bytes:
                partial.restart(None)
                raise Failed("file changed during the download")
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
        return Failed(f"certificate rejected ({reason.verify_message})", final=True)
    if isinstance(reason, TimeoutError):
        return Failed("no answer in time")
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return Failed(
        f"the connection failed ({text})", final=isinstance(reason, http.client.InvalidURL)
    )


def _version(url: str, headers: email.message.Message, *, full: bool) -> Version:
    etag = headers.get("ETag")
    modified = headers.get("Last-Modified")
    if etag and etag.startswith("W/"):  # Weak ETag: equivalent content, but not equal bytes.
        etag = None
    length = headers.get("Content-Length", "")
    size = int(length) if full and length.isdecimal() else None
    return Version(url, etag or modified, size, _google_md5(headers))


def _google_md5(headers: email.message.Message) -> str | None:
    """Parse `x-goog-hash: crc32c=…,md5=…` from one header or several. Composite objects have no
    md5.
    """
    if headers.get("x-goog-stored-content-encoding", "identity") != "identity":
        return None  # The hash is of the stored bytes, which are unpacked in transfer.
    for hashes in headers.get_all("x-goog-hash", []):
        for one in hashes.split(","):
            kind, _, value = one.strip().partition("=")
            if kind == "md5":
                with contextlib.suppress(binascii.Error):
                    return base64.b64decode(value, validate=True).hex()
    return None
