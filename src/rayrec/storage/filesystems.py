"""Filesystems of paths and URLs, opened once per store and process."""

import os
import socket
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar
from urllib.request import getproxies

from pyarrow import fs as arrow_fs

from rayrec.config import InputError
from rayrec.storage.retry import classify_error, outage_s, retry
from rayrec.storage.stores import AzureLocation, GcsLocation, S3Location
from rayrec.storage.urls import bucket_of, in_object_store, local_path, scheme_of

_Result = TypeVar("_Result")

_CONNECT_S: Final = 5.0
_OTHER_SCHEMES: Final = {"hdfs", "viewfs"}
"""Schemes opened by pyarrow's defaults."""


StoreLocation = S3Location | GcsLocation | AzureLocation
_LOCATIONS: Final[dict[str, Callable[[str], StoreLocation]]] = {
    "s3": S3Location.of,
    "gs": GcsLocation.of,
    "gcs": GcsLocation.of,
    "az": AzureLocation.of,
    "abfs": AzureLocation.of,
    "abfss": AzureLocation.of,
}
SENT_SETTINGS: Final = (
    S3Location.sent_settings + GcsLocation.sent_settings + AzureLocation.sent_settings
)
"""Environment variables for stores that are valid on other machines: none is a file path."""


def location_of(path: str) -> StoreLocation:
    """Parse an object store's URL. Raises InputError for an incomplete URL or credentials in it."""
    return _LOCATIONS[scheme_of(path)](path)


def resolve(path: str) -> tuple[arrow_fs.FileSystem, str]:
    """Return the filesystem of a path, and the path within it. Raises InputError for an unsupported
    URL. It retries with doubling delays while a store is unavailable: S3 and Google Cloud Storage
    for at least `OUTAGE_S`, Azure for about 6 s.
    """
    return retry(path, lambda: _resolve(path, patient=True), hint=lambda: endpoint_hint(path))


def with_retries(path: str, call: Callable[[arrow_fs.FileSystem, str], _Result]) -> _Result:
    """Call a function with the filesystem of a path and the path within it, and return its result.
    Retries while a URL's store is unavailable, so the function must be idempotent; see `retry`.
    """
    local = local_path(path)
    if local is not None:
        return call(arrow_fs.LocalFileSystem(), local)

    def once() -> _Result:
        filesystem, inner = _resolve(path, patient=False)
        try:
            return call(filesystem, inner)
        except OSError as error:
            if in_object_store(path) and classify_error(error) == "passing":
                _reached.discard(location_of(path).address())
            raise

    return retry(path, once, hint=lambda: endpoint_hint(path))


def endpoint_hint(path: str) -> str:
    """Describe the endpoint of a path and the setting for it."""
    return location_of(path).endpoint_hint() if in_object_store(path) else "see that it is up"


_opened: dict[tuple[Any, ...], arrow_fs.FileSystem] = {}
_reached: set[tuple[str, int] | None] = {None}
"""Addresses that accepted a connection and have not failed since."""
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have locked it


def _resolve(path: str, *, patient: bool) -> tuple[arrow_fs.FileSystem, str]:
    local = local_path(path)
    if local is not None:
        return arrow_fs.LocalFileSystem(), local
    if in_object_store(path):
        location = location_of(path)
        _reach(location.address())
        return _connected(location, patient=patient), location.inner
    if scheme_of(path) not in _OTHER_SCHEMES:
        supported = ", ".join(
            f"{scheme}://" for scheme in ("file", *_LOCATIONS, *sorted(_OTHER_SCHEMES))
        )
        raise InputError(
            f"{bucket_of(path)}: scheme is not supported ({supported}). Use a path or a URL such "
            "as s3://bucket/key"
        )
    try:
        return arrow_fs.FileSystem.from_uri(path)
    except (ValueError, OSError) as error:
        raise InputError(
            f"{path}: cannot be opened ({error}). Use a local path or a URL such as s3://bucket/key"
        ) from None


def _connected(location: StoreLocation, *, patient: bool) -> arrow_fs.FileSystem:
    """Return a filesystem, cached per process and store."""
    limit_s = outage_s() if patient else 0.0
    key = (os.getpid(), type(location), limit_s, *location.connection())
    with _lock:
        filesystem = _opened.get(key)
    if filesystem is None:
        filesystem = location.open(limit_s)
        with _lock:
            filesystem = _opened.setdefault(key, filesystem)
    return filesystem


def _reach(address: tuple[str, int] | None) -> None:
    """Check that an address accepts connections, unless it did before and has not failed since.
    Raises a transient OSError after a few seconds, because the libraries of some stores would wait
    for minutes.
    """
    if address is None or address in _reached or {"http", "https", "all"} & getproxies().keys():
        return
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except OSError as error:
        cause = (
            "no answer"
            if isinstance(error, TimeoutError)
            else (error.strerror or str(error)).lower()
        )
        raise OSError(f"cannot connect to {address[0]}:{address[1]}: {cause}") from None
    _reached.add(address)
