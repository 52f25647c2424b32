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
class AzurePlace:
    """Where an az://, abfs:// or abfss:// URL points to, and how its store is reached. Holds no credentials."""

    inner: str
    """CONTAINER/KEY"""
    account: str
    blob_url: str
    """Where the account's Blob service answers, without the account's name in its path."""

    sent_settings: ClassVar[tuple[str, ...]] = _SETTINGS

    @classmethod
    def of(cls, path: str) -> AzurePlace:
        """From a URL az://CONTAINER[@ACCOUNT[.dfs.core.windows.net]]/KEY and the environment; KEY as it is, without
        percent-encoding. Raises InputError if neither names an account."""
        options_of(path, ())
        body = split_options(path)[0].partition("://")[2]
        authority, _, key = body.partition("/")
        container, at, host = authority.partition("@")
        found = _ACCOUNT.fullmatch(host) if at else None
        if ":" in authority or (at and not found):
            raise InputError(
                f"{scheme_of(path)}://...: is no container of Azure; give a URL such as az://container/key or "
                "az://container@account/key, without credentials"
            )
        if not container:
            raise InputError(f"{path}: names no container; give a URL such as az://container/key")
        known = _connection_string()
        named = found[1] if found else os.environ.get("AZURE_STORAGE_ACCOUNT") or known.get("AccountName")
        if not named:
            raise InputError(
                f"{path}: names no storage account; set AZURE_STORAGE_ACCOUNT, or give a URL such as az://container@account/key"
            )
        suffix = (found[2] if found else None) or known.get("EndpointSuffix") or "core.windows.net"
        url = f"https://{named}.blob.{suffix}"
        if named == known.get("AccountName") and known.get("BlobEndpoint"):
            url = _address(known["BlobEndpoint"])
        return cls(f"{container}/{key}".rstrip("/"), named, url)

    def store(self) -> tuple[str, ...]:
        """Equal for places in one store, which can copy between them."""
        return ("az", self.account, self.blob_url)

    def connection(self) -> tuple[object, ...]:
        """All that a connection to the store depends on."""
        return self.account, self.blob_url, *(os.environ.get(name) for name in _SETTINGS)

    def address(self) -> tuple[str, int] | None:
        """Host and port, to see that they are reachable: Azure's library waits for a connection for many minutes."""
        url = urlsplit(self.blob_url)
        return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)

    def remedy(self) -> str:
        return f"account {self.account} is looked for at {self.blob_url} (AZURE_STORAGE_CONNECTION_STRING)"

    def open(self, limit_s: float) -> arrow_fs.FileSystem:
        """A filesystem. Azure's library makes four attempts within about 6 s, and knows no other number."""
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
    """An account key or a SAS token, from their own variables or the connection string; without them Azure's library looks for
    AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, the machine's identity, and what `az login` left."""
    known = _connection_string()
    if known.get("AccountName") != account:
        known = {}
    own = os.environ.get("AZURE_STORAGE_ACCOUNT") in (None, "", account)  # else the variables belong to another account
    key = (os.environ.get("AZURE_STORAGE_KEY") if own else None) or known.get("AccountKey")
    if key:
        try:
            base64.b64decode(key, validate=True)
        except binascii.Error:
            raise InputError("AZURE_STORAGE_KEY: is no account key, which is Base64; copy it again") from None
        return {"account_key": key}
    token = (os.environ.get("AZURE_STORAGE_SAS_TOKEN") if own else None) or known.get("SharedAccessSignature")
    return {"sas_token": f"?{token.removeprefix('?')}"} if token else {}


def _connection_string() -> dict[str, str]:
    """AZURE_STORAGE_CONNECTION_STRING by name; empty without one."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").strip()
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    if not all(name and equals for name, equals, _ in pairs):
        raise InputError(
            "AZURE_STORAGE_CONNECTION_STRING: is no list of NAME=VALUE with ; between them; copy it from the account again"
        )
    known = {name.strip(): value.strip() for name, _, value in pairs}
    return _DEVELOPMENT if known.get("UseDevelopmentStorage") == "true" else known


def _address(endpoint: str) -> str:
    """A Blob endpoint without the account in its path, which pyarrow adds."""
    url = urlsplit(endpoint)
    if url.scheme not in {"http", "https"} or not url.hostname or "@" in url.netloc:
        raise InputError(
            "AZURE_STORAGE_CONNECTION_STRING: its BlobEndpoint is no address; give one such as http://host:port/account"
        )
    return f"{url.scheme}://{url.netloc}"
