"""Checks of downloaded files by length and checksum, and extraction of the wanted files from an archive."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import lzma
import os
import posixpath
import shutil
import tarfile
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from rayrec.config import InputError
from rayrec.datasets.download import CHUNK_BYTES, Failed, Stopped, Version, writing_to
from rayrec.datasets.published_files import RemoteFile
from rayrec.quantities import size_text

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


def require_space(folder: str, what: str, needed_bytes: int, *, freed_bytes: int = 0) -> None:
    """Raises InputError where a folder's disk has less room than that."""
    free = shutil.disk_usage(folder).free + freed_bytes
    if needed_bytes > free:
        raise InputError(
            f"{folder}: {what} needs {size_text(needed_bytes)}, {size_text(free)} are free; "
            "free space there, choose another --out or fetch less"
        )


def extract(
    archive: str,
    wanted: Sequence[RemoteFile],
    folder: str,
    *,
    url: str,
    note: Callable[[str], None],
    stop: threading.Event,
) -> list[dict[str, Any]]:
    """Writes the wanted members of a tar file into a folder; nothing else in it can name a place to write to.

    Raises InputError where the archive is damaged, and where a member is missing, no regular file, or not the published.
    """
    missing = {file.name: file for file in wanted}
    results = []
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                file = missing.get(posixpath.basename(member.name))
                if file is None or not member.isreg():
                    continue
                del missing[file.name]
                note(f"{file.name}: unpacking {size_text(member.size)}")
                results.append(_extract_member(tar, member, file, os.path.join(folder, file.name), url, stop))
                if not missing:
                    break
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; gzip's and bz2's own have no number
            raise
        raise InputError(f"{archive}: damaged, no whole tar file ({error}); remove it to fetch it again") from None
    if missing:
        raise InputError(f"{archive}: holds no file {' and no '.join(missing)}; is {url} the published archive?")
    return results


def _extract_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, file: RemoteFile, target: str, url: str, stop: threading.Event
) -> dict[str, Any]:
    require_space(os.path.dirname(target), file.name, member.size)
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    source = tar.extractfile(member)
    assert source is not None
    with writing_to(target):
        written = open(f"{target}.partial", "wb")  # noqa: SIM115 -- errors of reading are not those of writing
    try:
        with written:
            while chunk := source.read(CHUNK_BYTES):
                with writing_to(target):
                    written.write(chunk)
                sha256.update(chunk)
                md5.update(chunk)
                if stop.is_set():
                    raise Stopped
        try:
            verified = check_bytes(
                file, target, member.size, sha256.hexdigest(), md5.hexdigest(), Version(url, None, member.size, None)
            )
        except Failed as error:
            raise InputError(f"{file.name} of {url}: {error}; report it, and fetch from another --base-url") from None
        with writing_to(target):
            os.replace(f"{target}.partial", target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{target}.partial")
    return result_of(file.name, member.size, sha256.hexdigest(), url, "fetched", verified)
