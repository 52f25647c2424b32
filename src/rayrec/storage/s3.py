"""S3 and compatible stores: s3://BUCKET/KEY, with the standard AWS settings."""

from __future__ import annotations

import configparser
import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from pyarrow import fs as arrow_fs

from rayrec.config import InputError
from rayrec.storage.urls import options_of, split_options

_CONNECT_S: Final = 5.0
_SILENCE_S: Final = 10.0
"""Request timeout in seconds without a byte. A slow response may take seconds, but an outage is noticed."""
_SDK_FIRST_WAIT_S: Final = 0.025
"""Delay before the second attempt of the AWS SDK, in seconds. It doubles for each later one."""
_SETTINGS: Final = (
    "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE",
)  # fmt: skip
_FLAGS: Final = ("allow_bucket_creation", "allow_bucket_deletion")
_NAMES: Final = ("region", "scheme", "endpoint_override")


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
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL",
        "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED",
    )  # fmt: skip
    """Environment variables that are valid on other machines: none is a file path."""

    @classmethod
    def of(cls, path: str) -> S3Location:
        """Parse s3://BUCKET/KEY[?region=, scheme=, endpoint_override=, allow_bucket_creation=]. KEY is not percent-decoded.
        Raises InputError for credentials in the URL, which would leak into configs and logs."""
        body = split_options(path)[0].removeprefix("s3://")
        bucket = body.partition("/")[0]
        if "@" in bucket:
            raise InputError(
                f"s3://...@{bucket.rpartition('@')[2]}: must not contain credentials. Set AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY instead"
            )
        if not bucket:
            raise InputError(f"{path}: bucket not found. Use a URL such as s3://bucket/key")
        options = options_of(path, _NAMES + _FLAGS)
        profile = _profile()
        set_endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        endpoint = options.get("endpoint_override") or set_endpoint or profile.get("endpoint_url")
        if endpoint and "://" not in endpoint:
            endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
        set_region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        region = options.get("region") or set_region or profile.get("region")
        return cls(body.rstrip("/"), endpoint, region, tuple(name for name in _FLAGS if options.get(name) == "true"))

    def store(self) -> tuple[str, ...]:
        """Return a key that is equal for locations between which the store can copy."""
        return ("s3", self.endpoint or "")

    def connection(self) -> tuple[object, ...]:
        """Return everything that a connection to the store depends on."""
        bucket = self.inner.partition("/")[0]
        return self.endpoint, self.region or bucket, self.flags, *(os.environ.get(name) for name in _SETTINGS)

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
        if endpoint and (endpoint.scheme not in {"http", "https"} or not endpoint.netloc or "@" in endpoint.netloc):
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
            options |= {"scheme": endpoint.scheme, "endpoint_override": endpoint.netloc + endpoint.path.rstrip("/")}
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
        raise InputError(f"{file}: must be an AWS config file. Fix it or set AWS_CONFIG_FILE to another") from None
    section = "default" if name == "default" else f"profile {name}"
    return dict(parser[section]) if parser.has_section(section) else {}
