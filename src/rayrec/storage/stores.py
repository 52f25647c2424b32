"""Opens the file system that a path belongs to, once for each store and process, from the standard AWS settings."""

from __future__ import annotations

import configparser
import math
import os
import posixpath
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from pyarrow import fs as arrow_fs

from rayrec.config import InputError
from rayrec.storage.outages import outage_s, persist

_Result = TypeVar("_Result")

_URL: Final = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://")
_CONNECT_S: Final = 5.0
_SILENCE_S: Final = 10.0
"""A request is given up after so long without a byte: an answer from afar may take seconds, an outage shows within them."""
_SDK_FIRST_WAIT_S: Final = 0.025
"""The AWS SDK waits so long before its second attempt, and twice as long before each later one."""
_SETTINGS: Final = (
    "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE",
)  # fmt: skip
SENT_SETTINGS: Final = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION",
    "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED",
)  # fmt: skip
"""Environment variables that mean the same on another machine: none names a file."""
_FLAGS: Final = ("allow_bucket_creation", "allow_bucket_deletion")
_NAMES: Final = ("region", "scheme", "endpoint_override")


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def is_s3(path: str) -> bool:
    return path.startswith("s3://")


def absolute(path: str) -> str:
    """The path as any process of this machine (or, for a URL, of any machine) can use it."""
    return path if is_url(path) else os.path.abspath(os.path.expanduser(path))


def local_path(path: str) -> str | None:
    """The absolute path of what is on this machine's file systems, file:// too; None for other URLs."""
    if path.startswith("file:///"):
        return unquote(path.removeprefix("file://"))
    return None if is_url(path) else absolute(path)


def join(folder: str, *names: str) -> str:
    """The path of something below a folder; the options of an S3 URL (?region=...) stay at its end."""
    body, options = split_options(folder)
    return posixpath.join(body, *names) + options


def folder_of(path: str) -> str:
    """The folder that contains a path; the options of an S3 URL stay at its end."""
    body, options = split_options(path)
    return posixpath.dirname(body) + options


def name_of(path: str) -> str:
    """The last component of a path, without the options of an S3 URL."""
    return posixpath.basename(split_options(path)[0])


def split_options(path: str) -> tuple[str, str]:
    """An S3 URL without its options, and the options with their question mark; ("...", "") for every other path."""
    body, question, query = path.rpartition("?")
    if not is_s3(path) or not question or not re.match(r"\w+=", query):  # the ? belongs to a glob
        return path, ""
    return body, question + query


def resolve(path: str) -> tuple[arrow_fs.FileSystem, str]:
    """The filesystem a path belongs to, and the path within it. Raises InputError for a URL nobody can serve.

    The filesystem tries again by itself while an S3 store is out, with waits that double, for at least `OUTAGE_S`.
    """
    return persist(path, lambda: _resolve(path, patient=True), remedy=lambda: remedy(path))


def enduring(path: str, call: Callable[[arrow_fs.FileSystem, str], _Result]) -> _Result:
    """What `call` gives for the filesystem of a path and the path within it, made again while a URL's store is out (see
    `persist`: it may be made more than once)."""
    local = local_path(path)
    if local is not None:
        return call(arrow_fs.LocalFileSystem(), local)
    return persist(path, lambda: call(*_resolve(path, patient=False)), remedy=lambda: remedy(path))


def remedy(path: str) -> str:
    """Where a path's store was looked for, and what sets that."""
    if not is_s3(path):
        return "see that it is up"
    endpoint = S3Place.of(path).endpoint
    return (
        f"its endpoint is {endpoint} (AWS_ENDPOINT_URL)"
        if endpoint
        else "it is looked for at AWS (no AWS_ENDPOINT_URL)"
    )


@dataclass(frozen=True)
class S3Place:
    """Where an S3 URL points to, and how its store is reached."""

    inner: str
    """BUCKET/KEY"""
    endpoint: str | None
    """URL of the store, None for AWS."""
    region: str | None
    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: str) -> S3Place:
        """From a URL s3://BUCKET/KEY[?region=, scheme=, endpoint_override=, allow_bucket_creation=] and the environment; KEY
        as it is, without percent-encoding.

        Raises InputError for credentials in the URL: they would end up in configurations and logs.
        """
        url, query = split_options(path)
        body = url.removeprefix("s3://")
        bucket = body.partition("/")[0]
        if "@" in bucket:
            raise InputError(
                f"s3://...@{bucket.rpartition('@')[2]}: holds credentials; leave them out of URLs and set AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY"
            )
        if not bucket:
            raise InputError(f"{path}: names no bucket; give a URL such as s3://bucket/key")
        options = dict(parse_qsl(query.removeprefix("?")))
        unknown = sorted(options.keys() - {*_FLAGS, *_NAMES})
        if unknown:
            raise InputError(f"{path}: {unknown[0]} is no option of an S3 URL; there are {', '.join(_NAMES + _FLAGS)}")
        profile = _profile()
        endpoint = (
            options.get("endpoint_override")
            or os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
            or profile.get("endpoint_url")
        )
        if endpoint and "://" not in endpoint:
            endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
        region = (
            options.get("region")
            or os.environ.get("AWS_REGION")
            or os.environ.get("AWS_DEFAULT_REGION")
            or profile.get("region")
        )
        flags = tuple(name for name in _FLAGS if options.get(name) == "true")
        return cls(body.rstrip("/"), endpoint, region, flags)


def _profile() -> dict[str, str]:
    """What AWS's configuration file says of the chosen profile."""
    name = os.environ.get("AWS_PROFILE") or "default"
    parser = configparser.RawConfigParser(strict=False)
    file = os.path.expanduser(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config")
    try:
        parser.read(file)
    except (configparser.Error, UnicodeDecodeError):
        raise InputError(f"{file}: not a configuration of AWS; fix it or name another in AWS_CONFIG_FILE") from None
    section = "default" if name == "default" else f"profile {name}"
    return dict(parser[section]) if parser.has_section(section) else {}


_opened: dict[tuple[Any, ...], arrow_fs.FileSystem] = {}
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have held it


def _resolve(path: str, *, patient: bool) -> tuple[arrow_fs.FileSystem, str]:
    local = local_path(path)
    if local is not None:
        return arrow_fs.LocalFileSystem(), local
    if is_s3(path):
        place = S3Place.of(path)
        return _s3(place, patient=patient), place.inner
    try:
        return arrow_fs.FileSystem.from_uri(path)
    except (ValueError, OSError) as error:
        raise InputError(
            f"{path}: cannot be opened ({error}); give a local path or a URL such as s3://bucket/key"
        ) from None


def _s3(place: S3Place, *, patient: bool) -> arrow_fs.FileSystem:
    """A connected filesystem, the same for each store, since its connections are its own."""
    bucket = place.inner.partition("/")[0]
    limit_s = outage_s() if patient else 0.0
    settings = tuple(os.environ.get(name) for name in _SETTINGS)
    key = (os.getpid(), place.endpoint, place.region or bucket, place.flags, limit_s, settings)
    with _lock:
        found = _opened.get(key)
    if found is None:
        found = _open_s3(place, bucket, limit_s)
        with _lock:
            found = _opened.setdefault(key, found)
    return found


def _open_s3(place: S3Place, bucket: str, limit_s: float) -> arrow_fs.FileSystem:
    endpoint = urlsplit(place.endpoint) if place.endpoint else None
    if endpoint and (endpoint.scheme not in {"http", "https"} or not endpoint.netloc or "@" in endpoint.netloc):
        raise InputError("AWS_ENDPOINT_URL: is no address of a store; give one such as https://host:port")
    region = place.region or ("us-east-1" if endpoint else arrow_fs.resolve_s3_region(bucket))
    options: dict[str, Any] = {
        "region": region,
        "connect_timeout": _CONNECT_S,
        "request_timeout": _SILENCE_S,
        "allow_delayed_open": True,  # a small file is one request instead of three
        "retry_strategy": arrow_fs.AwsDefaultS3RetryStrategy(max_attempts=_sdk_retries(limit_s)),
        **dict.fromkeys(place.flags, True),
    }
    if endpoint:
        options |= {"scheme": endpoint.scheme, "endpoint_override": endpoint.netloc + endpoint.path.rstrip("/")}
    if os.environ.get("AWS_CA_BUNDLE"):
        options["tls_ca_file_path"] = os.environ["AWS_CA_BUNDLE"]
    return arrow_fs.S3FileSystem(**options)


def _sdk_retries(limit_s: float) -> int:
    """How many retries of the AWS SDK last `limit_s` where each attempt fails at once; 0 for none."""
    return math.ceil(math.log2(limit_s / _SDK_FIRST_WAIT_S + 1)) if limit_s > 0 else 0
