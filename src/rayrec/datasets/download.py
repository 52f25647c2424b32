"""HTTP downloads by pooch, which starts over when an attempt fails."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rayrec.config import InputError
from rayrec.humanize import one_line

CHUNK_BYTES: Final = 1 << 20
_RETRY_STATUSES: Final = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses of temporary failures."""
_TIMEOUT_S: Final = 60.0
"""Maximum time without a byte before a connection counts as broken."""


class Failed(Exception):
    """Failed download or check. Not a ValueError, because pooch would try again."""


class Stopped(Exception):
    """Download stopped by another failure or by the user."""


@dataclass(frozen=True)
class Offer:
    """File that a server offers, as far as it describes it."""

    size_bytes: int | None
    md5: str | None = None
    """Checksum of the whole file (Google Cloud Storage)."""


class Digests:
    """Incremental byte count and checksums."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._sha256 = hashlib.sha256()
        self._md5 = hashlib.md5(usedforsecurity=False)

    @classmethod
    def from_file(cls, path: str) -> Digests:
        digests = cls()
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digests.add(chunk)
        return digests

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


class Download:
    """Download of a URL, also the progress bar that pooch updates. `accept` checks an offer before
    its bytes are read and raises Failed or InputError to reject it. `advance` is called with the
    number of bytes received.
    """

    def __init__(
        self,
        url: str,
        *,
        accept: Callable[[Offer], None],
        advance: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        self.offer = Offer(None)
        self.total = 0
        """Number of bytes expected, set by pooch. 0 if unknown."""
        self._url = url
        self._accept = accept
        self._advance = advance
        self._stop = stop
        self._done = 0

    def run(self, path: str, *, attempts: int) -> None:
        """Write the file to `path`. Raises Failed, InputError if `accept` does, Stopped soon after
        `stop` is set, and OSError if the disk fails.
        """
        import pooch
        from requests.exceptions import RequestException

        pooch.get_logger().setLevel("ERROR")
        certificates = ssl.get_default_verify_paths()
        folder, name = os.path.split(path)
        files = pooch.Pooch(
            folder, "", registry={name: None}, urls={name: self._url}, retry_if_failed=attempts - 1
        )
        downloader = pooch.HTTPDownloader(
            progressbar=self,
            chunk_size=CHUNK_BYTES,
            timeout=_TIMEOUT_S,
            # With compressed transfer, lengths and checksums would not be those of the file.
            headers={"User-Agent": "rayrec", "Accept-Encoding": "identity"},
            hooks={"response": self._check},
            # The system's, which may include a proxy's, instead of those that requests brings.
            verify=certificates.cafile or certificates.capath or True,
        )
        try:
            files.fetch(name, downloader=downloader)
        except RequestException as error:
            raise Failed(one_line(error)) from None
        except Failed as error:
            raise error.__cause__ or error from None

    def update(self, count: int) -> None:
        """Add received bytes. pooch counts whole chunks, and all bytes again at the end."""
        if self._stop.is_set():
            raise Stopped
        self._done += count
        self._advance(min(self._done, self.total) if self.total else self._done)

    def reset(self) -> None:
        """Do nothing: pooch calls this at the end, before it adds all bytes."""

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _check(self, response: Any, **_: Any) -> None:
        """Check the headers of a response."""
        if response.is_redirect or response.status_code in _RETRY_STATUSES:
            return  # requests follows the first, and pooch retries the second.
        if response.status_code != 200:
            raise Failed(f"{response.status_code} {response.reason}")
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise Failed(f"response is {encoding}-encoded, although identity was requested")
        length = response.headers.get("Content-Length", "")
        self.offer = Offer(int(length) if length.isdecimal() else None, _md5(response.headers))
        self._done = 0
        try:
            self._accept(self.offer)
        except InputError as error:
            raise Failed from error  # An InputError is a ValueError.


def _md5(headers: Mapping[str, str]) -> str | None:
    """Parse `x-goog-hash: crc32c=…, md5=…`. Composite objects have no md5."""
    if headers.get("x-goog-stored-content-encoding", "identity") != "identity":
        return None  # The hash is of the stored bytes, which are unpacked in transfer.
    match = re.search(r"\bmd5=([\w+/]{22}==)", headers.get("x-goog-hash", ""), re.ASCII)
    return base64.b64decode(match[1]).hex() if match else None
