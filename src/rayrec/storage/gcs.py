"""Google Cloud Storage: gs://BUCKET/KEY, with the default credentials of Google's tools."""

from __future__ import annotations

import math
import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final
from urllib.parse import urlsplit

from pyarrow import fs as arrow_fs

from rayrec.config import InputError
from rayrec.storage.urls import options_of, scheme_of, split_options

_OPTIONS: Final = ("anonymous", "scheme", "endpoint_override")
_SETTINGS: Final = ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT")
_SHORTEST_RETRY_S: Final = 1.0
"""Google's library accepts whole seconds only, and sends nothing for 0."""


@dataclass(frozen=True)
class GcsLocation:
    """Location of a gs:// URL and its endpoint."""

    inner: str
    """Has the form BUCKET/KEY."""
    endpoint: str | None
    """URL of another store, such as an emulator. None for Google."""
    anonymous: bool
    """Whether to send no credentials, for public buckets and emulators."""

    sent_settings: ClassVar[tuple[str, ...]] = ("STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT")

    @classmethod
    def of(cls, path: str) -> GcsLocation:
        """Parse a URL gs://BUCKET/KEY[?anonymous=true, scheme=, endpoint_override=], given the environment. KEY is not
        percent-decoded. Raises InputError for credentials before an @ in it."""
        body = split_options(path)[0].partition("://")[2]
        bucket = body.partition("/")[0]
        user, at, _ = bucket.rpartition("@")
        if at and user != "anonymous":
            raise InputError(
                f"{scheme_of(path)}://...@{bucket.rpartition('@')[2]}: must not contain credentials. Set "
                "GOOGLE_APPLICATION_CREDENTIALS instead"
            )
        if not bucket.removeprefix("anonymous@"):
            raise InputError(f"{path}: bucket not found. Use a URL such as gs://bucket/key")
        options = options_of(path, _OPTIONS)
        scheme = options.get("scheme")
        endpoint, default = options.get("endpoint_override"), "https"
        if not endpoint:
            endpoint, default = os.environ.get("STORAGE_EMULATOR_HOST"), "http"
        if endpoint and "://" not in endpoint:
            endpoint = f"{scheme or default}://{endpoint}"
        # An emulator. Tokens must not be sent unencrypted.
        plain = endpoint is not None and endpoint.startswith("http://")
        anonymous = bool(at) or plain or options.get("anonymous") == "true"
        return cls(body.removeprefix("anonymous@").rstrip("/"), endpoint or None, anonymous)

    def store(self) -> tuple[str, ...]:
        return ("gs", self.endpoint or "")

    def connection(self) -> tuple[object, ...]:
        return self.endpoint, self.anonymous, *(os.environ.get(name) for name in _SETTINGS)

    def address(self) -> tuple[str, int] | None:
        """Return host and port for a connection test, because Google's library waits 2 minutes for a connection."""
        url = urlsplit(self.endpoint or "https://storage.googleapis.com")
        return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)

    def endpoint_hint(self) -> str:
        if self.endpoint:
            return f"its endpoint is {self.endpoint} (STORAGE_EMULATOR_HOST)"
        return "it is looked for at Google (no STORAGE_EMULATOR_HOST)"

    def open(self, limit_s: float) -> arrow_fs.FileSystem:
        """Create a filesystem that retries for about `limit_s` seconds, at least one."""
        limit = timedelta(seconds=math.ceil(max(limit_s, _SHORTEST_RETRY_S)))
        if self.endpoint is None:
            return arrow_fs.GcsFileSystem(anonymous=self.anonymous, retry_time_limit=limit)
        url = urlsplit(self.endpoint)
        if url.scheme not in {"http", "https"} or not url.hostname or "@" in url.netloc:
            raise InputError("STORAGE_EMULATOR_HOST: must be an address such as http://host:port")
        return arrow_fs.GcsFileSystem(
            anonymous=self.anonymous, scheme=url.scheme, endpoint_override=url.netloc, retry_time_limit=limit
        )


def first_level(infos: Sequence[arrow_fs.FileInfo], folder: str) -> list[arrow_fs.FileInfo]:
    """Return the direct children of a folder, given all its descendants. pyarrow's own single-level listing of a bucket lacks
    folders without an object, which uploads create."""
    children: dict[str, arrow_fs.FileInfo] = {}
    for info in infos:
        name, deeper, _ = posixpath.relpath(info.path, folder).partition("/")
        path = posixpath.join(folder, name)
        if not deeper:
            children[path] = info
        else:
            children.setdefault(path, arrow_fs.FileInfo(path, arrow_fs.FileType.Directory))
    return list(children.values())
