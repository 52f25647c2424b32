"""Whether a file is the published one, told by its length and checksums."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable
from typing import Any

from rayrec.config import InputError
from rayrec.datasets.download import CHUNK_BYTES, Failed, Version
from rayrec.datasets.remote import RemoteFile

LENGTH_TOLERANCE = 0.25
"""Share by which a length may differ from one known roughly: other compression, not a file cut short."""

UNCHECKED = {
    "length": "only its length could be checked: neither its publisher nor the server gives a checksum",
    "nothing": "nothing could be checked: neither a length nor a checksum is published or sent",
}


def check_offer(file: RemoteFile, version: Version) -> None:
    """Refuses before a byte is fetched what cannot be the published file. Raises Failed."""
    size, about = version.size_bytes, file.expected_bytes
    if size is not None and about is not None:
        slack = 0.0 if file.size_bytes is not None else LENGTH_TOLERANCE * about
        if abs(size - about) > slack:
            raise Failed(f"has {size:,} bytes, {'about ' if slack else ''}{about:,} are published", final=True)
    if version.md5 and file.md5 and version.md5 != file.md5 and not file.unpacked_md5:
        raise Failed(f"has md5 {version.md5}, published is {file.md5}", final=True)


def check_bytes(file: RemoteFile, path: str, size: int, sha256: str, md5: str, version: Version | None) -> str:
    """What a whole file was checked by, the best there is. Raises Failed where it is not the published one."""
    if file.size_bytes is not None and size != file.size_bytes:
        raise Failed(f"has {size:,} bytes, {file.size_bytes:,} are published")
    if file.sha256:
        if sha256 != file.sha256:
            raise Failed(f"has sha256 {sha256}, published is {file.sha256}")
        return "published sha256"
    if file.md5 and md5 == file.md5:
        return "published md5"
    if file.unpacked_md5:
        if _md5_unpacked(path) != file.unpacked_md5:
            raise Failed(f"has md5 {md5}, published is {file.md5}, and holds other contents too")
        return "published md5 of its contents"
    if file.md5:
        raise Failed(f"has md5 {md5}, published is {file.md5}")
    if version and version.md5:
        if md5 != version.md5:
            raise Failed(f"has md5 {md5}, the server says {version.md5}")
        return "md5 the server gives"
    known = file.size_bytes is not None or (version is not None and version.size_bytes is not None)
    return "length" if known else "nothing"


def _md5_unpacked(path: str) -> str | None:
    """The md5 of what a .gz file holds, None where it is damaged."""
    md5 = hashlib.md5(usedforsecurity=False)
    try:
        with gzip.open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                md5.update(chunk)
    except (OSError, EOFError, zlib.error):
        return None
    return md5.hexdigest()


def check_present(
    file: RemoteFile, folder: str, record: dict[str, Any] | None, *, verify: bool, note: Callable[[str], None]
) -> dict[str, Any] | None:
    """The result for a file that is there already. Raises InputError where it is another than it should be."""
    path = os.path.join(folder, file.name)
    if not os.path.isfile(path):
        return None
    size = os.path.getsize(path)
    remedy = "remove it to fetch it again"
    if record and size != record["bytes"]:
        raise InputError(f"{path}: has {size:,} bytes, {record['bytes']:,} were fetched; {remedy}")
    if file.size_bytes is not None and size != file.size_bytes:
        raise InputError(f"{path}: has {size:,} bytes, {file.size_bytes:,} are published; {remedy}")
    if record and not verify:
        return {**record, "status": "present"}
    note(f"{file.name}: checking what is there")
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as data:
        while chunk := data.read(CHUNK_BYTES):
            sha256.update(chunk)
            md5.update(chunk)
    if record:
        if sha256.hexdigest() != record["sha256"]:
            raise InputError(f"{path}: has sha256 {sha256.hexdigest()}, {record['sha256']} was fetched; {remedy}")
        return {**record, "status": "present"}
    try:
        verified = check_bytes(file, path, size, sha256.hexdigest(), md5.hexdigest(), None)
    except Failed as error:
        raise InputError(f"{path}: {error}; {remedy}") from None
    if verified in UNCHECKED:
        note(f"{file.name}: was there; {UNCHECKED[verified]}")
    return result_of(file.name, size, sha256.hexdigest(), None, "present", verified)


def result_of(name: str, size: int, sha256: str, url: str | None, status: str, verified: str) -> dict[str, Any]:
    """What `fetch` returns of a file, and records."""
    return {"name": name, "bytes": size, "sha256": sha256, "url": url, "status": status, "verified": verified}
