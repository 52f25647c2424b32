"""Locations in object stores, from their URLs and the standard settings of their tools:
s3://BUCKET/KEY (also compatible stores), gs://BUCKET/KEY and az://CONTAINER/KEY.
"""

from __future__ import annotations

import base64
import binascii
import configparser
import math
import os
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from pyarrow import fs as arrow_fs

from rayrec.config import InputError
from rayrec.storage.urls import options_of, scheme_of, split_options

_CONNECT_S: Final = 5.0
_SILENCE_S: Final = 10.0
"""Request timeout in seconds without a byte. A slow response may take seconds, but an outage is
noticed.
"""
_SDK_FIRST_WAIT_S: Final = 0.025
"""Delay before the second attempt of the AWS SDK, in seconds. It doubles for each later one."""
_S3_SETTINGS: Final = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_CA_BUNDLE",
)
_FLAGS: Final = ("allow_bucket_creation", "allow_bucket_deletion")
_S3_OPTIONS: Final = ("region", "scheme", "endpoint_override")


@dataclass(frozen=True)
class S3Location:
    """Location of an S3 URL and its endpoint."""

    inner: str
    """Has the form BUCKET/KEY."""
    endpoint: str | None
    """URL of the store. None for AWS."""
    region: str | None
    flags: tuple[str, ...] = ()

    sent_settings: ClassVar[tuple[str, ...]] = (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_ENDPOINT_URL_S3",
        "AWS_ENDPOINT_URL",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_EC2_METADATA_DISABLED",
    )
    """Environment variables that are valid on other machines: none is a file path."""

    @classmethod
    def of(cls, path: str) -> S3Location:
        """Parse s3://BUCKET/KEY[?region=, scheme=, endpoint_override=, allow_bucket_creation=]. KEY
        is not percent-decoded. Raises InputError for credentials in the URL, which would leak into
        configs and logs.
        """
        body = split_options(path)[0].removeprefix("s3://")
        bucket = body.partition("/")[0]
        if "@" in bucket:
            raise InputError(
                f"s3://...@{bucket.rpartition('@')[2]}: must not contain credentials. Set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
            )
        if not bucket:
            raise InputError(f"{path}: bucket not found. Use a URL such as s3://bucket/key")
        options = options_of(path, _S3_OPTIONS + _FLAGS)
        profile = _profile()
        set_endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        endpoint = options.get("endpoint_override") or set_endpoint or profile.get("endpoint_url")
        if endpoint and "://" not in endpoint:
            endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
        set_region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        region = options.get("region") or set_region or profile.get("region")
        return cls(
            body.rstrip("/"),
            endpoint,
            region,
            tuple(name for name in _FLAGS if options.get(name) == "true"),
        )

    def store(self) -> tuple[str, ...]:
        """Return a key that is equal for locations between which the store can copy."""
        return ("s3", self.endpoint or "")

    def connection(self) -> tuple[object, ...]:
        """Return everything that a connection to the store depends on."""
        bucket = self.inner.partition("/")[0]
        return (
            self.endpoint,
            self.region or bucket,
            self.flags,
            *(os.environ.get(name) for name in _S3_SETTINGS),
        )

    def address(self) -> tuple[str, int] | None:
        """Return None: the AWS SDK has its own connection timeout."""
        return None

    def endpoint_hint(self) -> str:
        if self.endpoint:
            return f"its endpoint is {self.endpoint} (AWS_ENDPOINT_URL)"
        return "it is looked for at AWS (no AWS_ENDPOINT_URL)"

    def open(self, limit_s: float) -> arrow_fs.FileSystem:
        """Create a filesystem that retries for about `limit_s` seconds."""
        endpoint = urlsplit(self.endpoint) if self.endpoint else None
        if endpoint and (
            endpoint.scheme not in {"http", "https"}
            or not endpoint.netloc
            or "@" in endpoint.netloc
        ):
            raise InputError("AWS_ENDPOINT_URL: must be an address such as https://host:port")
        bucket = self.inner.partition("/")[0]
        region = self.region or ("us-east-1" if endpoint else arrow_fs.resolve_s3_region(bucket))
        # Retries of the AWS SDK that take `limit_s` if each attempt fails at once.
        num_retries = math.ceil(math.log2(limit_s / _SDK_FIRST_WAIT_S + 1)) if limit_s > 0 else 0
        options: dict[str, Any] = {
            "region": region,
            "connect_timeout": _CONNECT_S,
            "request_timeout": _SILENCE_S,
            "allow_delayed_open": True,  # a small file is one request instead of three
            "retry_strategy": arrow_fs.AwsDefaultS3RetryStrategy(max_attempts=num_retries),
            **dict.fromkeys(self.flags, True),
        }
        if endpoint:
            options |= {
                "scheme": endpoint.scheme,
                "endpoint_override": endpoint.netloc + endpoint.path.rstrip("/"),
            }
        if os.environ.get("AWS_CA_BUNDLE"):
            options["tls_ca_file_path"] = os.environ["AWS_CA_BUNDLE"]
        return arrow_fs.S3FileSystem(**options)


def _profile() -> dict[str, str]:
    """Return the selected profile of AWS's configuration file."""
    name = os.environ.get("AWS_PROFILE") or "default"
    parser = configparser.RawConfigParser(strict=False)
    file = os.path.expanduser(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config")
    try:
        parser.read(file)
    except (configparser.Error, UnicodeDecodeError):
        raise InputError(
            f"{file}: must be an AWS config file. Fix it or set AWS_CONFIG_FILE to another"
        ) from None
    section = "default" if name == "default" else f"profile {name}"
    return dict(parser[section]) if parser.has_section(section) else {}


_GCS_OPTIONS: Final = ("anonymous", "scheme", "endpoint_override")
_GCS_SETTINGS: Final = (
    "STORAGE_EMULATOR_HOST",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_CLOUD_PROJECT",
)
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
        """Parse a URL gs://BUCKET/KEY[?anonymous=true, scheme=, endpoint_override=], given the
        environment. KEY is not percent-decoded. Raises InputError for credentials before an @ in
        it.
        """
        body = split_options(path)[0].partition("://")[2]
        bucket = body.partition("/")[0]
        user, at, _ = bucket.rpartition("@")
        if at and user != "anonymous":
            raise InputError(
                f"{scheme_of(path)}://...@{bucket.rpartition('@')[2]}: must not contain "
                "credentials. Set GOOGLE_APPLICATION_CREDENTIALS instead"
            )
        if not bucket.removeprefix("anonymous@"):
            raise InputError(f"{path}: bucket not found. Use a URL such as gs://bucket/key")
        options = options_of(path, _GCS_OPTIONS)
        scheme = options.get("scheme")
        endpoint = options.get("endpoint_override")
        default = "https"
        if not endpoint:
            endpoint = os.environ.get("STORAGE_EMULATOR_HOST")
            default = "http"
        if endpoint and "://" not in endpoint:
            endpoint = f"{scheme or default}://{endpoint}"
        # An emulator. Tokens must not be sent unencrypted.
        plain = endpoint is not None and endpoint.startswith("http://")
        anonymous = bool(at) or plain or options.get("anonymous") == "true"
        return cls(body.removeprefix("anonymous@").rstrip("/"), endpoint or None, anonymous)

    def store(self) -> tuple[str, ...]:
        return ("gs", self.endpoint or "")

    def connection(self) -> tuple[object, ...]:
        return self.endpoint, self.anonymous, *(os.environ.get(name) for name in _GCS_SETTINGS)

    def address(self) -> tuple[str, int] | None:
        """Return host and port for a connection test, because Google's library waits 2 minutes for
        a connection.
        """
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
            anonymous=self.anonymous,
            scheme=url.scheme,
            endpoint_override=url.netloc,
            retry_time_limit=limit,
        )


def first_level(infos: Sequence[arrow_fs.FileInfo], folder: str) -> list[arrow_fs.FileInfo]:
    """Return the direct children of a folder, given all its descendants. pyarrow's own single-level
    listing of a bucket lacks folders without an object, which uploads create.
    """
    children: dict[str, arrow_fs.FileInfo] = {}
    for info in infos:
        name, deeper, _ = posixpath.relpath(info.path, folder).partition("/")
        path = posixpath.join(folder, name)
        if not deeper:
            children[path] = info
        else:
            children.setdefault(path, arrow_fs.FileInfo(path, arrow_fs.FileType.Directory))
    return list(children.values())


_AZURE_SETTINGS: Final = (
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_ACCOUNT",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_TENANT_ID",
    "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET",
)
_DEVELOPMENT: Final = {  # published by Microsoft: the account of every Azurite
    "AccountName": "devstoreaccount1",
    "AccountKey": (
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    ),
    "BlobEndpoint": "http://127.0.0.1:10000/devstoreaccount1",
}
_ACCOUNT: Final = re.compile(r"([a-z0-9]{3,24})(?:\.(?:blob|dfs)\.([a-z0-9.-]+))?")


@dataclass(frozen=True)
class AzureLocation:
    """Location of an az://, abfs:// or abfss:// URL and its endpoint. Contains no credentials."""

    inner: str
    """Has the form CONTAINER/KEY."""
    account: str
    blob_url: str
    """URL of the account's Blob service, without the account name in its path."""

    sent_settings: ClassVar[tuple[str, ...]] = _AZURE_SETTINGS

    @classmethod
    def of(cls, path: str) -> AzureLocation:
        """Parse a URL az://CONTAINER[@ACCOUNT[.dfs.core.windows.net]]/KEY, given the environment.
        KEY is not percent-decoded. Raises InputError if neither names an account.
        """
        options_of(path, ())
        authority, _, key = split_options(path)[0].partition("://")[2].partition("/")
        container, at, host = authority.partition("@")
        match = _ACCOUNT.fullmatch(host) if at else None
        if ":" in authority or (at and not match):
            raise InputError(
                f"{scheme_of(path)}://...: must name an Azure container, without credentials. Use "
                "a URL such as az://container/key or az://container@account/key"
            )
        if not container:
            raise InputError(f"{path}: container not found. Use a URL such as az://container/key")
        settings = _connection_string()
        named = (
            match[1]
            if match
            else os.environ.get("AZURE_STORAGE_ACCOUNT") or settings.get("AccountName")
        )
        if not named:
            raise InputError(
                f"{path}: storage account not found. Set AZURE_STORAGE_ACCOUNT, or use "
                "az://container@account/key"
            )
        suffix = (
            (match[2] if match else None) or settings.get("EndpointSuffix") or "core.windows.net"
        )
        url = f"https://{named}.blob.{suffix}"
        if named == settings.get("AccountName") and settings.get("BlobEndpoint"):
            url = _address(settings["BlobEndpoint"])
        return cls(f"{container}/{key}".rstrip("/"), named, url)

    def store(self) -> tuple[str, ...]:
        return ("az", self.account, self.blob_url)

    def connection(self) -> tuple[object, ...]:
        return self.account, self.blob_url, *(os.environ.get(name) for name in _AZURE_SETTINGS)

    def address(self) -> tuple[str, int] | None:
        """Return host and port for a connection test, because Azure's library waits many minutes
        for a connection.
        """
        url = urlsplit(self.blob_url)
        return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)

    def endpoint_hint(self) -> str:
        return (
            f"account {self.account} is looked for at {self.blob_url} "
            "(AZURE_STORAGE_CONNECTION_STRING)"
        )

    def open(self, limit_s: float) -> arrow_fs.FileSystem:
        """Create the filesystem. Azure's library makes four attempts within about 6 s, which cannot
        be configured.
        """
        scheme, _, host = self.blob_url.partition("://")
        options: dict[str, Any] = {"blob_storage_scheme": scheme, "dfs_storage_scheme": scheme}
        start = f"{self.account}.blob."
        if host.startswith(start):
            suffix = host.removeprefix(start)
            options |= {
                "blob_storage_authority": f".blob.{suffix}",
                "dfs_storage_authority": f".dfs.{suffix}",
            }
        else:
            options |= {"blob_storage_authority": host, "dfs_storage_authority": host}
        return arrow_fs.AzureFileSystem(self.account, **options, **_credentials(self.account))


def _credentials(account: str) -> dict[str, str]:
    """Return an account key or a SAS token, from its own variable or the connection string. Without
    them, Azure's library uses AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, the managed
    identity, or the login of `az login`.
    """
    settings = _connection_string()
    if settings.get("AccountName") != account:
        settings = {}
    # otherwise for another account
    is_default = os.environ.get("AZURE_STORAGE_ACCOUNT") in (None, "", account)
    key = (os.environ.get("AZURE_STORAGE_KEY") if is_default else None) or settings.get(
        "AccountKey"
    )
    if key:
        try:
            base64.b64decode(key, validate=True)
        except binascii.Error:
            raise InputError(
                "AZURE_STORAGE_KEY: must be an account key in Base64. Copy it again"
            ) from None
        return {"account_key": key}
    token = (os.environ.get("AZURE_STORAGE_SAS_TOKEN") if is_default else None) or settings.get(
        "SharedAccessSignature"
    )
    return {"sas_token": f"?{token.removeprefix('?')}"} if token else {}


def _connection_string() -> dict[str, str]:
    """Parse AZURE_STORAGE_CONNECTION_STRING into a dict, empty if it is not set."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").strip()
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    if not all(name and equals for name, equals, _ in pairs):
        raise InputError(
            "AZURE_STORAGE_CONNECTION_STRING: must be a list NAME=VALUE;NAME=VALUE. Copy it from "
            "the account again"
        )
    settings = {name.strip(): value.strip() for name, _, value in pairs}
    return _DEVELOPMENT if settings.get("UseDevelopmentStorage") == "true" else settings


def _address(endpoint: str) -> str:
    """Return a Blob endpoint without the account in its path, which pyarrow appends."""
    url = urlsplit(endpoint)
    if url.scheme not in {"http", "https"} or not url.hostname or "@" in url.netloc:
        raise InputError(
            "AZURE_STORAGE_CONNECTION_STRING: BlobEndpoint must be an address such as "
            "http://host:port/account"
        )
    return f"{url.scheme}://{url.netloc}"
