"""Azure Blob Storage and Data Lake Storage: az://CONTAINER/KEY, with the standard settings of Azure's tools."""

from __future__ import annotations

import base64
import binascii
import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from pyarrow import fs as arrow_fs

from rayrec.config import InputError
from rayrec.storage.urls import options_of, scheme_of, split_options

_SETTINGS: Final = (
    "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_TENANT_ID",
    "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET",
)  # fmt: skip
_DEVELOPMENT: Final = {  # published by Microsoft: the account of every Azurite
    "AccountName": "devstoreaccount1",
    "AccountKey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
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

    sent_settings: ClassVar[tuple[str, ...]] = _SETTINGS

    @classmethod
    def of(cls, path: str) -> AzureLocation:
        """Parse a URL az://CONTAINER[@ACCOUNT[.dfs.core.windows.net]]/KEY, given the environment. KEY is not percent-decoded.
        Raises InputError if neither names an account."""
        options_of(path, ())
        authority, _, key = split_options(path)[0].partition("://")[2].partition("/")
        container, at, host = authority.partition("@")
        match = _ACCOUNT.fullmatch(host) if at else None
        if ":" in authority or (at and not match):
            raise InputError(
                f"{scheme_of(path)}://...: must name an Azure container, without credentials. Use a URL such as "
                "az://container/key or az://container@account/key"
            )
        if not container:
            raise InputError(f"{path}: container not found. Use a URL such as az://container/key")
        settings = _connection_string()
        named = match[1] if match else os.environ.get("AZURE_STORAGE_ACCOUNT") or settings.get("AccountName")
        if not named:
            raise InputError(f"{path}: storage account not found. Set AZURE_STORAGE_ACCOUNT, or use az://container@account/key")
        suffix = (match[2] if match else None) or settings.get("EndpointSuffix") or "core.windows.net"
        url = f"https://{named}.blob.{suffix}"
        if named == settings.get("AccountName") and settings.get("BlobEndpoint"):
            url = _address(settings["BlobEndpoint"])
        return cls(f"{container}/{key}".rstrip("/"), named, url)

    def store(self) -> tuple[str, ...]:
        return ("az", self.account, self.blob_url)

    def connection(self) -> tuple[object, ...]:
        return self.account, self.blob_url, *(os.environ.get(name) for name in _SETTINGS)

    def address(self) -> tuple[str, int] | None:
        """Return host and port for a connection test, because Azure's library waits many minutes for a connection."""
        url = urlsplit(self.blob_url)
        return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)

    def endpoint_hint(self) -> str:
        return f"account {self.account} is looked for at {self.blob_url} (AZURE_STORAGE_CONNECTION_STRING)"

    def open(self, limit_s: float) -> arrow_fs.FileSystem:
        """Create the filesystem. Azure's library makes four attempts within about 6 s, which cannot be configured."""
        scheme, _, host = self.blob_url.partition("://")
        options: dict[str, Any] = {"blob_storage_scheme": scheme, "dfs_storage_scheme": scheme}
        start = f"{self.account}.blob."
        if host.startswith(start):
            suffix = host.removeprefix(start)
            options |= {"blob_storage_authority": f".blob.{suffix}", "dfs_storage_authority": f".dfs.{suffix}"}
        else:
            options |= {"blob_storage_authority": host, "dfs_storage_authority": host}
        return arrow_fs.AzureFileSystem(self.account, **options, **_credentials(self.account))


def _credentials(account: str) -> dict[str, str]:
    """Return an account key or a SAS token, from its own variable or the connection string. Without them, Azure's library uses
    AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, the managed identity, or the login of `az login`."""
    settings = _connection_string()
    if settings.get("AccountName") != account:
        settings = {}
    is_default = os.environ.get("AZURE_STORAGE_ACCOUNT") in (None, "", account)  # otherwise for another account
    key = (os.environ.get("AZURE_STORAGE_KEY") if is_default else None) or settings.get("AccountKey")
    if key:
        try:
            base64.b64decode(key, validate=True)
        except binascii.Error:
            raise InputError("AZURE_STORAGE_KEY: must be an account key in Base64. Copy it again") from None
        return {"account_key": key}
    token = (os.environ.get("AZURE_STORAGE_SAS_TOKEN") if is_default else None) or settings.get("SharedAccessSignature")
    return {"sas_token": f"?{token.removeprefix('?')}"} if token else {}


def _connection_string() -> dict[str, str]:
    """Parse AZURE_STORAGE_CONNECTION_STRING into a dict, empty if it is not set."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").strip()
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    if not all(name and equals for name, equals, _ in pairs):
        raise InputError("AZURE_STORAGE_CONNECTION_STRING: must be a list NAME=VALUE;NAME=VALUE. Copy it from the account again")
    settings = {name.strip(): value.strip() for name, _, value in pairs}
    return _DEVELOPMENT if settings.get("UseDevelopmentStorage") == "true" else settings


def _address(endpoint: str) -> str:
    """Return a Blob endpoint without the account in its path, which pyarrow appends."""
    url = urlsplit(endpoint)
    if url.scheme not in {"http", "https"} or not url.hostname or "@" in url.netloc:
        raise InputError("AZURE_STORAGE_CONNECTION_STRING: BlobEndpoint must be an address such as http://host:port/account")
    return f"{url.scheme}://{url.netloc}"
