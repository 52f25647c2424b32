"""Locations in object stores, from their URLs and the standard settings of their tools:
s3://BUCKET/KEY (also compatible stores), gs://BUCKET/KEY and az://CONTAINER/KEY.
"""

from __future__ import annotations

import abc
import configparser
import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self
from urllib.parse import urlsplit

from rayrec.config import InputError
from rayrec.storage.retry import BACKOFF, UnavailableError
from rayrec.storage.urls import split_options, url_options, url_scheme

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_CONNECT_S: Final = 5.0
_SILENCE_S: Final = 30.0
"""Longest wait for a response, in seconds."""
_PART_S: Final = 60.0
"""Longest wait of a store that retries, whose requests include the parts of uploads."""
_NO_LIMIT: Final = timedelta(days=1)
_NO_LIMIT_RETRIES: Final = 1_000_000


@dataclass(frozen=True)
class StoreLocation(abc.ABC):
    """Location in an object store and its endpoint. Contains no credentials."""

    inner: str
    """Has the form BUCKET/KEY."""
    endpoint: str | None
    """URL of the store. None for the vendor's."""

    sent_settings: ClassVar[tuple[str, ...]]
    """Environment variables that are valid on other machines: none is a file path."""
    scheme: ClassVar[str]
    _noun: ClassVar[str] = "bucket"
    _credentials: ClassVar[str]
    _endpoint_setting: ClassVar[str]
    _vendor: ClassVar[str] = ""

    @classmethod
    @abc.abstractmethod
    def parse(cls, path: str) -> Self:
        """Parse a URL, given the environment. Its key is not percent-decoded. Raises InputError for
        credentials in the URL, which would leak into configs and logs.
        """

    @abc.abstractmethod
    def open(self, limit_s: float) -> ObjectStore:
        """Open the bucket with obstore, which retries requests for `limit_s` seconds."""

    @abc.abstractmethod
    def delta_options(self) -> dict[str, str]:
        """Return the options of the package deltalake for the endpoint and the credentials."""

    @property
    def bucket(self) -> str:
        return self.inner.partition("/")[0]

    def root(self) -> Self:
        """Return the location of the bucket itself."""
        return replace(self, inner=self.bucket)

    def bucket_url(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    def endpoint_hint(self) -> str:
        """Describe the endpoint and the setting for it."""
        if self.endpoint:
            return f"its endpoint is {self.endpoint} ({self._endpoint_setting})"
        return f"it is looked for at {self._vendor} (no {self._endpoint_setting})"

    def no_bucket(self) -> InputError:
        return InputError(
            f"{self.bucket_url()}: {self._noun} not found; create it or fix its name "
            f"({self.endpoint_hint()})"
        )

    def denied(self, cause: str) -> InputError:
        return InputError(
            f"{self.bucket_url()}: access denied ({cause}); {self._credentials} "
            f"({self.endpoint_hint()})"
        )

    def untrusted(self, cause: str) -> InputError:
        setting = "AWS_CA_BUNDLE" if self.scheme == "s3" else "SSL_CERT_FILE"
        return InputError(
            f"{self.bucket_url()}: the store's certificate is not trusted ({cause}); name its "
            f"authority in {setting} (a certificate without one must have CA:FALSE)"
        )

    def other_region(self) -> InputError:
        return InputError(
            f"{self.bucket_url()}: is in another region; set AWS_REGION to it "
            f"({self.endpoint_hint()})"
        )


def _check_address(endpoint: str, setting: str) -> None:
    """Check an endpoint. Raises InputError, without the endpoint's text for credentials in it."""
    url = urlsplit(endpoint)
    if url.scheme not in {"http", "https"} or not url.hostname or "@" in url.netloc:
        raise InputError(f"{setting}: must be an address such as https://host:port")


def _client(limit_s: float, **options: Any) -> dict[str, Any]:
    """Return obstore's options for connections, and for retries until `limit_s` seconds."""
    return {
        "client_options": {
            "allow_http": True,
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "read_timeout": timedelta(seconds=_PART_S if limit_s else _SILENCE_S),
            "timeout": _NO_LIMIT,
            **options,
        },
        "retry_config": {
            "max_retries": _NO_LIMIT_RETRIES if limit_s else 0,
            "retry_timeout": timedelta(seconds=limit_s),
            "backoff": {
                "init_backoff": timedelta(seconds=BACKOFF.first_s),
                "max_backoff": timedelta(seconds=BACKOFF.longest_s),
            },
        },
    }


@dataclass(frozen=True)
class S3Location(StoreLocation):
    """Location of an s3:// URL and its endpoint."""

    region: str | None

    sent_settings = (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_ENDPOINT_URL_S3",
        "AWS_ENDPOINT_URL",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_EC2_METADATA_DISABLED",
    )
    scheme = "s3"
    _credentials = (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to credentials that may "
        "use it"
    )
    _endpoint_setting = "AWS_ENDPOINT_URL"
    _vendor = "AWS"

    @classmethod
    def parse(cls, path: str) -> S3Location:
        """Parse s3://BUCKET/KEY[?region=, scheme=, endpoint_override=] as `StoreLocation.parse`."""
        body = split_options(path)[0].removeprefix("s3://")
        bucket = body.partition("/")[0]
        if "@" in bucket:
            raise InputError(
                f"s3://...@{bucket.rpartition('@')[2]}: must not contain credentials. Set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
            )
        if not bucket:
            raise InputError(f"{path}: bucket not found. Use a URL such as s3://bucket/key")
        options = url_options(path, ("region", "scheme", "endpoint_override"))
        profile = _profile()
        set_endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        endpoint = options.get("endpoint_override") or set_endpoint or profile.get("endpoint_url")
        if endpoint and "://" not in endpoint:
            endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
        set_region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        region = options.get("region") or set_region or profile.get("region")
        return cls(body.rstrip("/"), endpoint, region)

    def open(self, limit_s: float) -> ObjectStore:
        from obstore.store import S3Store

        options: dict[str, Any] = {"region": self.region}
        if self.endpoint:
            _check_address(self.endpoint, "AWS_ENDPOINT_URL")
            # Also replaces AWS_ENDPOINT_URL_S3, unlike `endpoint`.
            options["aws_endpoint_url_s3"] = self.endpoint
        elif not self.region:
            options["region"] = self._find_region()
        if not os.environ.get("AWS_ACCESS_KEY_ID"):
            options["credential_provider"] = self._other_credentials()
        options = {name: value for name, value in options.items() if value}
        return S3Store(self.bucket, **options, **_client(limit_s, **_certificates()))

    def delta_options(self) -> dict[str, str]:
        options = {"aws_allow_http": "true"}
        if self.endpoint:
            _check_address(self.endpoint, "AWS_ENDPOINT_URL")
            options["aws_endpoint_url"] = self.endpoint
        region = self.region or ("us-east-1" if self.endpoint else self._find_region())
        options["aws_region"] = region
        if not os.environ.get("AWS_ACCESS_KEY_ID"):
            credentials = self._other_credentials()()
            options["aws_access_key_id"] = credentials["access_key_id"]
            options["aws_secret_access_key"] = credentials["secret_access_key"]
            options["aws_session_token"] = credentials.get("token") or ""
        return {name: value for name, value in options.items() if value}

    def _find_region(self) -> str:
        """Return the region of a bucket at AWS. obstore cannot look it up."""
        from pyarrow.fs import resolve_s3_region

        try:
            return str(resolve_s3_region(self.bucket))
        except OSError as error:
            if "not found" in str(error):
                raise self.no_bucket() from None
            raise UnavailableError("its region is unknown", self.endpoint_hint()) from None

    def _other_credentials(self) -> Any:
        """Return credentials of a profile, a login or the machine's role, which obstore knows in
        part. Raises InputError without them.
        """
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider

        try:
            provider = Boto3CredentialProvider()
            provider()
        except (BotoCoreError, ValueError) as error:
            cause = "no credentials found" if isinstance(error, ValueError) else str(error)
            raise self.denied(cause) from None
        return provider


def _certificates() -> dict[str, bytes]:
    """Read the file in AWS_CA_BUNDLE into obstore's option for authorities. Raises InputError."""
    path = os.environ.get("AWS_CA_BUNDLE")
    if not path:
        return {}
    with suppress(OSError), open(path, "rb") as file:
        certificates = file.read()
        if b"-----BEGIN CERTIFICATE" in certificates:
            return {"root_certificate": certificates}
    raise InputError(f"AWS_CA_BUNDLE: must be a file with PEM certificates, got {path}")


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


@dataclass(frozen=True)
class GcsLocation(StoreLocation):
    """Location of a gs:// URL and its endpoint, such as an emulator of the XML API."""

    anonymous: bool
    """Whether to send no credentials, for public buckets and emulators."""

    sent_settings = ("STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT")
    scheme = "gs"
    _credentials = (
        "set GOOGLE_APPLICATION_CREDENTIALS to the key file of an account that may use it, or run "
        "gcloud auth application-default login"
    )
    _endpoint_setting = "STORAGE_EMULATOR_HOST"
    _vendor = "Google"

    @classmethod
    def parse(cls, path: str) -> GcsLocation:
        """Parse a URL gs://BUCKET/KEY[?anonymous=true, scheme=, endpoint_override=]; see
        `StoreLocation.parse`.
        """
        body = split_options(path)[0].partition("://")[2]
        bucket = body.partition("/")[0]
        user, at, _ = bucket.rpartition("@")
        if at and user != "anonymous":
            raise InputError(
                f"{url_scheme(path)}://...@{bucket.rpartition('@')[2]}: must not contain "
                "credentials. Set GOOGLE_APPLICATION_CREDENTIALS instead"
            )
        if not bucket.removeprefix("anonymous@"):
            raise InputError(f"{path}: bucket not found. Use a URL such as gs://bucket/key")
        options = url_options(path, ("anonymous", "scheme", "endpoint_override"))
        endpoint = options.get("endpoint_override") or os.environ.get("STORAGE_EMULATOR_HOST")
        if endpoint and "://" not in endpoint:
            default = "https" if options.get("endpoint_override") else "http"
            endpoint = f"{options.get('scheme', default)}://{endpoint}"
        # An emulator. Tokens must not be sent unencrypted.
        plain = endpoint is not None and endpoint.startswith("http://")
        anonymous = bool(at) or plain or options.get("anonymous") == "true"
        return cls(body.removeprefix("anonymous@").rstrip("/"), endpoint or None, anonymous)

    def open(self, limit_s: float) -> ObjectStore:
        from obstore.store import GCSStore

        options: dict[str, Any] = {}
        if self.anonymous:
            # obstore looks for credentials nevertheless when it writes.
            options = {"skip_signature": True, "bearer_token": "anonymous"}
        if self.endpoint:
            _check_address(self.endpoint, "STORAGE_EMULATOR_HOST")
            options["base_url"] = self.endpoint.rstrip("/")
        return GCSStore(self.bucket, **options, **_client(limit_s))

    def delta_options(self) -> dict[str, str]:
        options = {}
        if self.anonymous:
            options["google_skip_signature"] = "true"
        if self.endpoint:
            _check_address(self.endpoint, "STORAGE_EMULATOR_HOST")
            options["google_base_url"] = self.endpoint.rstrip("/")
            options["allow_http"] = "true"
        return options


_DEVELOPMENT: Final = {  # published by Microsoft: the account of every Azurite
    "AccountName": "devstoreaccount1",
    "AccountKey": (
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    ),
    "BlobEndpoint": "http://127.0.0.1:10000/devstoreaccount1",
}
_ACCOUNT: Final = re.compile(r"([a-z0-9]{3,24})(?:\.(?:blob|dfs)\.([a-z0-9.-]+))?")


@dataclass(frozen=True)
class AzureLocation(StoreLocation):
    """Location of an az://, abfs:// or abfss:// URL and its Blob endpoint."""

    account: str

    sent_settings = (
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_ACCOUNT",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_TENANT_ID",
        "AZURE_CLIENT_ID",
        "AZURE_CLIENT_SECRET",
    )
    scheme = "az"
    _noun = "container"
    _credentials = (
        "set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING to "
        "credentials that may use it"
    )

    @classmethod
    def parse(cls, path: str) -> AzureLocation:
        """Parse az://CONTAINER[@ACCOUNT[.dfs.core.windows.net]]/KEY; see `StoreLocation.parse`.
        Raises InputError if neither the URL nor the environment names an account.
        """
        url_options(path, ())
        authority, _, key = split_options(path)[0].partition("://")[2].partition("/")
        container, at, host = authority.partition("@")
        match = _ACCOUNT.fullmatch(host) if at else None
        if ":" in authority or (at and not match):
            raise InputError(
                f"{url_scheme(path)}://...: must name an Azure container, without credentials. Use "
                "a URL such as az://container/key or az://container@account/key"
            )
        if not container:
            raise InputError(f"{path}: container not found. Use a URL such as az://container/key")
        settings = _connection_string()
        named = os.environ.get("AZURE_STORAGE_ACCOUNT") or settings.get("AccountName")
        suffix = settings.get("EndpointSuffix") or "core.windows.net"
        if match:
            named = match[1]
            suffix = match[2] or suffix
        if not named:
            raise InputError(
                f"{path}: storage account not found. Set AZURE_STORAGE_ACCOUNT, or use "
                "az://container@account/key"
            )
        url = f"https://{named}.blob.{suffix}"
        if named == settings.get("AccountName") and settings.get("BlobEndpoint"):
            url = settings["BlobEndpoint"].rstrip("/")
        return cls(f"{container}/{key}".rstrip("/"), url, named)

    def endpoint_hint(self) -> str:
        return (
            f"account {self.account} is looked for at {self.endpoint} "
            "(AZURE_STORAGE_CONNECTION_STRING)"
        )

    def open(self, limit_s: float) -> ObjectStore:
        from obstore.store import AzureStore

        assert self.endpoint is not None
        _check_address(self.endpoint, "AZURE_STORAGE_CONNECTION_STRING: BlobEndpoint")
        return AzureStore(
            self.bucket,
            account_name=self.account,
            endpoint=self.endpoint,
            **_azure_credentials(self.account),
            **_client(limit_s),
        )

    def delta_options(self) -> dict[str, str]:
        assert self.endpoint is not None
        _check_address(self.endpoint, "AZURE_STORAGE_CONNECTION_STRING: BlobEndpoint")
        options = {
            "azure_storage_account_name": self.account,
            "azure_storage_endpoint": self.endpoint,
            "allow_http": "true",
        }
        credentials = _azure_credentials(self.account)
        for name in ("account_key", "sas_key"):
            if name in credentials:
                options[f"azure_storage_{name}"] = credentials[name]
        if credentials["credential_type"] == "azure_cli":
            options["azure_use_azure_cli"] = "true"
        return options


def _azure_credentials(account: str) -> dict[str, Any]:
    """Return an account key or a SAS token, from its own variable or the connection string. Without
    them, obstore uses AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, the login of `az
    login` if there is one, or the machine's identity.
    """
    settings = _connection_string()
    if settings.get("AccountName") != account:
        settings = {}
    key = settings.get("AccountKey")
    token = settings.get("SharedAccessSignature")
    # Otherwise the variables are for another account.
    if os.environ.get("AZURE_STORAGE_ACCOUNT") in (None, "", account):
        key = os.environ.get("AZURE_STORAGE_KEY") or key
        token = os.environ.get("AZURE_STORAGE_SAS_TOKEN") or token
    if key:
        return {"credential_type": "access_key", "account_key": key}
    if token:
        return {"credential_type": "sas_token", "sas_key": token.removeprefix("?")}
    # Named, because obstore would send a token from its variable to other accounts too.
    folder = os.environ.get("AZURE_CONFIG_DIR") or os.path.expanduser("~/.azure")
    if os.environ.get("AZURE_CLIENT_SECRET"):
        kind = "client_secret"
    elif os.environ.get("AZURE_FEDERATED_TOKEN_FILE"):
        kind = "workload_identity"
    elif os.path.exists(os.path.join(folder, "azureProfile.json")):
        kind = "azure_cli"
    else:
        kind = "managed_identity"
    return {"credential_type": kind}


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
