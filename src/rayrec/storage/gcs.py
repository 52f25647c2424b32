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
"""Google's library knows whole seconds, and with 0 sends nothing."""


@dataclass(frozen=True)
class GcsPlace:
    """Where a gs:// URL points to, and how its store is reached."""

    inner: str
    """BUCKET/KEY"""
    endpoint: str | None
    """URL of another store than Google's, such as an emulator's."""
    anonymous: bool
    """Sends no credentials: for public buckets, and to an emulator."""

    sent_settings: ClassVar[tuple[str, ...]] = ("STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT")

    @classmethod
    def of(cls, path: str) -> GcsPlace:
        """From a URL gs://BUCKET/KEY[?anonymous=true, scheme=, endpoint_override=] and the environment; KEY as it is, without
        percent-encoding. Raises InputError for anything before an @ in it but `anonymous`."""
        body = split_options(path)[0].partition("://")[2]
        bucket = body.partition("/")[0]
        user, at, _ = bucket.rpartition("@")
        if at and user != "anonymous":
            raise InputError(
                f"{scheme_of(path)}://...@{bucket.rpartition('@')[2]}: holds credentials; leave them out of URLs and set "
                "GOOGLE_APPLICATION_CREDENTIALS"
            )
        if not bucket.removeprefix("anonymous@"):
            raise InputError(f"{path}: names no bucket; give a URL such as gs://bucket/key")
        options = options_of(path, _OPTIONS)
        scheme = options.get("scheme")
        endpoint, default = options.get("endpoint_override"), "https"
        if not endpoint:
            endpoint, default = os.environ.get("STORAGE_EMULATOR_HOST"), "http"
        if endpoint and "://" not in endpoint:
            endpoint = f"{scheme or default}://{endpoint}"
        # An emulator; a token must not travel unencrypted
        plain = endpoint is not None and endpoint.startswith("http://")
        anonymous = bool(at) or plain or options.get("anonymous") == "true"
        return cls(body.removeprefix("anonymous@").rstrip("/"), endpoint or None, anonymous)

    def store(self) -> tuple[str, ...]:
        """Equal for places in one store, which can copy between them."""
        return ("gs", self.endpoint or "")

    def connection(self) -> tuple[object, ...]:
        """All that a connection to the store depends on."""
        return self.endpoint, self.anonymous, *(os.environ.get(name) for name in _SETTINGS)

    def address(self) -> tuple[str, int] | None:
        """Host and port, to see that they are reachable: Google's library waits for a connection for 2 minutes."""
        url = urlsplit(self.endpoint or "https://storage.googleapis.com")
        return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)

    def remedy(self) -> str:
        return (
            f"its endpoint is {self.endpoint} (STORAGE_EMULATOR_HOST)"
            if self.endpoint
            else "it is looked for at Google (no STORAGE_EMULATOR_HOST)"
        )

    def open(self, limit_s: float) -> arrow_fs.FileSystem:
        """A filesystem that tries again by itself for about `limit_s` seconds, but at least for one."""
        limit = timedelta(seconds=math.ceil(max(limit_s, _SHORTEST_RETRY_S)))
        if self.endpoint is None:
            return arrow_fs.GcsFileSystem(anonymous=self.anonymous, retry_time_limit=limit)
        url = urlsplit(self.endpoint)
        if url.scheme not in {"http", "https"} or not url.hostname or "@" in url.netloc:
            raise InputError("STORAGE_EMULATOR_HOST: is no address of a store; give one such as http://host:port")
        return arrow_fs.GcsFileSystem(
            anonymous=self.anonymous, scheme=url.scheme, endpoint_override=url.netloc, retry_time_limit=limit
        )


def first_level(infos: Sequence[arrow_fs.FileInfo], folder: str) -> list[arrow_fs.FileInfo]:
    """What is directly in a folder, of all that is in it at any depth.

    pyarrow's own list of one level of a bucket lacks the folders for which there is no object of their own, which are those that
    uploads make.
    """
    found: dict[str, arrow_fs.FileInfo] = {}
    for info in infos:
        name, deeper, _ = posixpath.relpath(info.path, folder).partition("/")
        path = posixpath.join(folder, name)
        if not deeper:
            found[path] = info
        else:
            found.setdefault(path, arrow_fs.FileInfo(path, arrow_fs.FileType.Directory))
    return list(found.values())
