"""Filesystems of paths and URLs, opened once per store and process."""

import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

from pyarrow import fs as arrow_fs

from rayrec.config import InputError
from rayrec.storage.object_store import ObjectStore
from rayrec.storage.retry import outage_s, retry
from rayrec.storage.stores import AzureLocation, GcsLocation, S3Location, StoreLocation
from rayrec.storage.urls import bucket_url, in_object_store, local_path, url_scheme

_Result = TypeVar("_Result")

_OTHER_SCHEMES: Final = {"hdfs", "viewfs"}
"""Schemes opened by pyarrow's defaults."""
_LOCATIONS: Final[dict[str, type[StoreLocation]]] = {
    "s3": S3Location,
    "gs": GcsLocation,
    "gcs": GcsLocation,
    "az": AzureLocation,
    "abfs": AzureLocation,
    "abfss": AzureLocation,
}
SENT_SETTINGS: Final = (
    S3Location.sent_settings + GcsLocation.sent_settings + AzureLocation.sent_settings
)
"""Environment variables for stores that are valid on other machines: none is a file path."""


def parse_location(path: str) -> StoreLocation:
    """Parse an object store's URL. Raises InputError for an incomplete URL or credentials in it."""
    return _LOCATIONS[url_scheme(path)].parse(path)


def delta_options(path: str) -> tuple[str, dict[str, str]]:
    """Return the URL of a folder and the options with which the package deltalake, which has
    connections of its own, reaches the same store as `resolve`. They may contain credentials.
    Raises InputError for a store that it does not know.
    """
    local = local_path(path)
    if local is not None:
        return local, {}
    if not in_object_store(path):
        raise InputError(
            f"{path}: Delta tables are read from local folders, s3://, gs:// and az://. Copy it "
            "there"
        )
    location = parse_location(path)
    return f"{location.scheme}://{location.inner}", location.delta_options()


def resolve(path: str) -> tuple[arrow_fs.FileSystem, str]:
    """Return the filesystem of a path, and the path within it. Raises InputError for an unsupported
    URL. While a store is unavailable, its requests are retried for `outage_s`.
    """
    return retry(path, lambda: _resolve(path, patient=True))


def with_retries(path: str, call: Callable[[arrow_fs.FileSystem, str], _Result]) -> _Result:
    """Call a function with the filesystem of a path and the path within it, and return its result.
    Retries while a URL's store is unavailable, so the function must be idempotent; see `retry`.
    """
    return retry(path, lambda: call(*_resolve(path, patient=False)))


_SETTINGS: Final = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "SSL_CERT_")
"""Starts of the names of environment variables that a connection may depend on."""
_opened: dict[tuple[Any, ...], arrow_fs.FileSystem] = {}
_user: int | None = None
"""ID of the process that has opened a store."""


def _resolve(path: str, *, patient: bool) -> tuple[arrow_fs.FileSystem, str]:
    local = local_path(path)
    if local is not None:
        return arrow_fs.LocalFileSystem(), local
    if in_object_store(path):
        location = parse_location(path)
        return _connected(location, outage_s() if patient else 0.0), location.inner
    if url_scheme(path) not in _OTHER_SCHEMES:
        supported = ", ".join(
            f"{scheme}://" for scheme in ("file", *_LOCATIONS, *sorted(_OTHER_SCHEMES))
        )
        raise InputError(
            f"{bucket_url(path)}: scheme is not supported ({supported}). Use a path or a URL such "
            "as s3://bucket/key"
        )
    try:
        return arrow_fs.FileSystem.from_uri(path)
    except (ValueError, OSError) as error:
        raise InputError(
            f"{path}: cannot be opened ({error}). Use a local path or a URL such as s3://bucket/key"
        ) from None


def _connected(location: StoreLocation, limit_s: float) -> arrow_fs.FileSystem:
    """Return a filesystem that retries for `limit_s` seconds, cached per store. Raises InputError
    in a forked process: it lacks the threads of its parent, in which obstore's requests run, and
    they would never end.
    """
    global _user
    if _user not in (None, os.getpid()):
        raise InputError(
            f"{location.bucket_url()}: not available in a process that was forked from one that "
            "has used a store. Start it by the method spawn"
        )
    _user = os.getpid()
    settings = [item for item in os.environ.items() if item[0].startswith(_SETTINGS)]
    key = (limit_s, location.root(), *settings)
    if key not in _opened:
        _opened[key] = arrow_fs.PyFileSystem(ObjectStore(location.root(), limit_s))
    return _opened[key]
