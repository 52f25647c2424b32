"""Takes the wanted files out of an archive, and nothing else."""

from __future__ import annotations

import contextlib
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
from rayrec.datasets.checking import check_bytes, result_of
from rayrec.datasets.download import CHUNK_BYTES, Failed, Stopped, Version, writing_to
from rayrec.datasets.remote import RemoteFile
from rayrec.quantities import size_text


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
