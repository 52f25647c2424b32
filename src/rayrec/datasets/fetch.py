"""Download of a published dataset's files into a folder, complete and checked."""

from __future__ import annotations

import contextlib
import functools
import lzma
import os
import posixpath
import shutil
import tarfile
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from rayrec import storage
from rayrec.config import InputError, suggest
from rayrec.datasets.download import (
    CHUNK_BYTES,
    Digests,
    Download,
    Failed,
    Partial,
    RetryConfig,
    Stopped,
    Version,
    writing_to,
)
from rayrec.datasets.published_files import PUBLISHED, RemoteFile
from rayrec.humanize import one_line, size_text

LENGTH_TOLERANCE = 0.25
"""Maximum relative difference from an approximate size. Allows other compression, but not
truncation.
"""

UNCHECKED = {
    "length": "only its length was checked: neither its publisher nor the server has a checksum",
    "nothing": "nothing was checked: neither a length nor a checksum is published or sent",
}


def check_offer(file: RemoteFile, version: Version) -> None:
    """Check before fetching that the offered version can be the published file. Raises Failed."""
    size = version.size_bytes
    about = file.expected_bytes
    if size is not None and about is not None:
        slack = 0.0 if file.size_bytes is not None else LENGTH_TOLERANCE * about
        if abs(size - about) > slack:
            raise Failed(
                f"size must be {'about ' if slack else ''}{about:,} bytes as published, got "
                f"{size:,}",
                final=True,
            )
    if version.md5 and file.md5 and version.md5 != file.md5:
        raise Failed(f"md5 must be {file.md5} as published, got {version.md5}", final=True)


def check_bytes(file: RemoteFile, digests: Digests, version: Version | None) -> str:
    """Check a complete file with the best information available, and return its kind. Raises Failed
    on a mismatch.
    """
    size = digests.size_bytes
    if file.size_bytes is not None and size != file.size_bytes:
        raise Failed(f"size must be {file.size_bytes:,} bytes as published, got {size:,}")
    for name, expected, actual, source, kind in (
        ("sha256", file.sha256, digests.sha256, "as published", "published sha256"),
        ("md5", file.md5, digests.md5, "as published", "published md5"),
        ("md5", version and version.md5, digests.md5, "by the server", "md5 the server gives"),
    ):
        if expected and actual != expected:
            raise Failed(f"{name} must be {expected} {source}, got {actual}")
        if expected:
            return kind
    has_length = file.size_bytes is not None or (
        version is not None and version.size_bytes is not None
    )
    return "length" if has_length else "nothing"


def check_present(
    file: RemoteFile,
    folder: str,
    record: dict[str, Any] | None,
    *,
    verify: bool,
    note: Callable[[str], None],
) -> dict[str, Any] | None:
    """Check a file in the folder and return its result. None if not present. Raises InputError if
    it is not the expected file.
    """
    path = os.path.join(folder, file.name)
    if not os.path.isfile(path):
        return None
    size = os.path.getsize(path)
    fix = "Remove it to fetch it again."
    if record and size != record["bytes"]:
        raise InputError(
            f"{path}: size must be {record['bytes']:,} bytes as fetched, got {size:,}. {fix}"
        )
    if file.size_bytes is not None and size != file.size_bytes:
        raise InputError(
            f"{path}: size must be {file.size_bytes:,} bytes as published, got {size:,}. {fix}"
        )
    if record and not verify:
        return {**record, "status": "present"}
    note(f"Checking {file.name}")
    digests = Digests()
    digests.add_file(path)
    if record:
        if digests.sha256 != record["sha256"]:
            raise InputError(
                f"{path}: sha256 must be {record['sha256']} as fetched, got {digests.sha256}. {fix}"
            )
        return {**record, "status": "present"}
    try:
        verified = check_bytes(file, digests, None)
    except Failed as error:
        raise InputError(f"{path}: {error}. {fix}") from None
    if verified in UNCHECKED:
        note(f"Found {file.name}; {UNCHECKED[verified]}")
    return result_of(file.name, digests, None, "present", verified)


def result_of(
    name: str, digests: Digests, url: str | None, status: str, verified: str
) -> dict[str, Any]:
    """Return the entry of a file in the result of `fetch` and in its record."""
    fields = {"name": name, "bytes": digests.size_bytes, "sha256": digests.sha256}
    return {**fields, "url": url, "status": status, "verified": verified}


def require_space(folder: str, name: str, needed_bytes: int, *, freed_bytes: int = 0) -> None:
    """Check the free space of a folder's disk. Raises InputError."""
    free = shutil.disk_usage(folder).free + freed_bytes
    if needed_bytes > free:
        raise InputError(
            f"{folder}: {name} needs {size_text(needed_bytes)}, {size_text(free)} are free. "
            "Free space there, choose another --out or fetch less."
        )


@dataclass(frozen=True)
class _Call:
    """State shared by all transfers of a `fetch` call."""

    folder: str
    retries: RetryConfig
    reported: _Progress
    note: Callable[[str], None]
    stop: threading.Event = field(default_factory=threading.Event)


def _extract(
    archive: str, members: Sequence[RemoteFile], call: _Call, *, url: str
) -> list[dict[str, Any]]:
    """Extract the wanted members of a tar file into the folder. No path in the archive is used for
    writing. Raises InputError if the archive is damaged, or a member is missing, not a regular
    file, or not the published one.
    """
    missing = {file.name: file for file in members}
    results = []
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                file = missing.get(posixpath.basename(member.name))
                if file is None or not member.isreg():
                    continue
                del missing[file.name]
                call.note(f"Unpacking {file.name}, {size_text(member.size)}")
                results.append(_extract_member(tar, member, file, call, url))
                if not missing:
                    break
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        # Disk error: gzip and bz2 set no errno.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(
            f"{archive}: damaged tar file ({one_line(error)}). Remove it to fetch it again."
        ) from None
    if missing:
        raise InputError(
            f"{archive}: file {' and '.join(missing)} not found in it. Is {url} the published "
            "archive?"
        )
    return results


def _extract_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, file: RemoteFile, call: _Call, url: str
) -> dict[str, Any]:
    target = os.path.join(call.folder, file.name)
    require_space(call.folder, file.name, member.size)
    digests = Digests()
    source = tar.extractfile(member)
    assert source is not None
    with writing_to(target):
        # Closed below: errors of reading are not those of writing.
        output = open(f"{target}.partial", "wb")  # noqa: SIM115
    try:
        with output:
            while chunk := source.read(CHUNK_BYTES):
                with writing_to(target):
                    output.write(chunk)
                digests.add(chunk)
                if call.stop.is_set():
                    raise Stopped
        try:
            verified = check_bytes(file, digests, Version(url, None, member.size, None))
        except Failed as error:
            raise InputError(
                f"{file.name} of {url}: {error}. Report it, and put a copy into {call.folder} by "
                "hand."
            ) from None
        with writing_to(target):
            os.replace(f"{target}.partial", target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{target}.partial")
    return result_of(file.name, digests, url, "fetched", verified)


def files_of(name: str) -> tuple[RemoteFile, ...]:
    """Return the files of a dataset. Raises InputError for an unknown name, with the nearest
    match.
    """
    if name not in PUBLISHED:
        hint = suggest(name, PUBLISHED, otherwise=f"there are {', '.join(PUBLISHED)}")
        raise InputError(f"dataset '{name}' not found, {hint}")
    return PUBLISHED[name]


RECORD = "fetched.json"
"""Record in the folder: bytes, sha256, url and kind of check of each file. Data readers skip .json
files.
"""


def fetch(
    files: Sequence[RemoteFile],
    folder: str,
    *,
    verify: bool = False,
    parallelism: int = 2,
    retries: RetryConfig | None = None,
    progress: Callable[[str, int, int | None], None] = lambda name, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Fetch missing files, and return name, bytes, sha256, url, status (`fetched` or `present`) and
    `verified` for each file.

    A file gets its name only when it is complete and checked: by the published sha256 or md5, else
    by the server's checksum, else by its length alone, with a note. After an interruption, the next
    call resumes NAME.partial.

    Args:
        files: Files to fetch.
        folder: Local target folder.
        verify: Whether to compare checksums, not only sizes, of files that are present.
        parallelism: Number of concurrent transfers.
        retries: Retry policy.
        progress: Called with a name, the bytes done and the total bytes, or None if unknown.
        note: Called with messages for the user.

    Raises InputError if a file cannot be fetched, is not the published one, or does not fit on the
    disk.
    """
    if storage.is_url(folder):
        raise InputError(
            f"{folder}: must be a local folder. Choose one with --out and copy the files from "
            "there."
        )
    folder = storage.absolute(folder)
    lock_path = os.path.join(folder, ".fetch.lock")
    busy = "another fetch is writing there. Wait for it or choose another --out."
    with contextlib.ExitStack() as locked:
        with writing_to(folder):
            os.makedirs(folder, exist_ok=True)
            # Two processes must not append to one partial file.
            locked.enter_context(storage.locked(lock_path, f"{folder}: {busy}"))
        records = _Records(folder)
        results = {}
        for file in files:
            if result := check_present(
                file, folder, records.read(file.name), verify=verify, note=note
            ):
                records.write(result)
                results[file.name] = result
        requested: dict[str, list[RemoteFile]] = {}
        transfers: dict[str, RemoteFile] = {}
        for file in files:
            if file.name not in results:
                transfer = file.archive or file
                transfers[transfer.name] = transfer
                requested.setdefault(transfer.name, []).append(file)
        partials = {name: Partial(os.path.join(folder, name)) for name in transfers}
        _check_space(folder, list(transfers.values()), partials, requested)
        for terms in dict.fromkeys(file.terms for file in transfers.values() if file.terms):
            note(terms)
        call = _Call(
            folder, retries or RetryConfig(), _Progress(list(transfers.values()), progress), note
        )

        def run(transfer: RemoteFile) -> None:
            for result in _transfer(
                transfer, requested[transfer.name], partials[transfer.name], call
            ):
                records.write(result)
                results[result["name"]] = result

        _in_parallel(run, list(transfers.values()), parallelism, call.stop)
    return [results[file.name] for file in files]


def _in_parallel(
    run: Callable[[RemoteFile], None],
    files: Sequence[RemoteFile],
    parallelism: int,
    stop: threading.Event,
) -> None:
    """Run all transfers. A failure or interrupt stops the others, whose partial files stay."""

    def run_unless_stopped(file: RemoteFile) -> None:
        if stop.is_set():
            raise Stopped
        try:
            run(file)
        except BaseException:
            stop.set()  # Before this thread takes the next file.
            raise

    with ThreadPoolExecutor(max_workers=parallelism) as pool:
        futures = [pool.submit(run_unless_stopped, file) for file in files]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
    errors = [
        error for future in futures if not future.cancelled() and (error := future.exception())
    ]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error


def _transfer(
    file: RemoteFile, members: Sequence[RemoteFile], partial: Partial, call: _Call
) -> list[dict[str, Any]]:
    """Fetch a file, or an archive whose wanted members are extracted before it is removed."""
    folder = call.folder
    reported = call.reported
    url = file.url
    path = os.path.join(folder, file.name)
    if file not in members and check_present(file, folder, None, verify=True, note=call.note):
        return _extract(path, members, call, url=path)  # The user's archive is kept.
    verified = ""
    reported.advance(file, partial.size_bytes)

    def accept(version: Version) -> None:
        check_offer(file, version)
        reported.total(file, version.size_bytes)
        require_space(folder, file.name, version.size_bytes or 0, freed_bytes=partial.size_bytes)

    def check() -> None:
        nonlocal verified
        assert partial.version is not None
        verified = check_bytes(file, partial.digests, partial.version)

    try:
        Download(
            url,
            partial,
            call.retries,
            accept,
            check,
            functools.partial(reported.advance, file),
            call.stop,
        ).run()
    except Failed as error:
        hint = f" from {file.page}" if file.page else ""
        raise InputError(
            f"{file.name}: cannot be fetched ({url}: {error}). Try again later, or put it into "
            f"{folder} by hand{hint}."
        ) from None
    how = f"; {UNCHECKED[verified]}" if verified in UNCHECKED else f", checked by the {verified}"
    call.note(f"Fetched {file.name}, {size_text(partial.size_bytes)}{how}")
    if file in members:
        partial.finish(path)
        return [result_of(file.name, partial.digests, url, "fetched", verified)]
    results = _extract(partial.path, members, call, url=url)
    partial.finish(None)
    return results


def _check_space(
    folder: str,
    transfers: Sequence[RemoteFile],
    partials: dict[str, Partial],
    members: dict[str, list[RemoteFile]],
) -> None:
    """Check the disk space for all known sizes. Unknown ones are checked when a server reports
    them.
    """
    needed = 0
    for file in transfers:
        needed += max((file.expected_bytes or 0) - partials[file.name].size_bytes, 0)
        needed += sum(
            member.expected_bytes or 0 for member in members[file.name] if member is not file
        )
    names = (
        " and ".join(file.name for file in transfers)
        if len(transfers) < 3
        else f"the {len(transfers)} files"
    )
    require_space(folder, names, needed)


class _Progress:
    """Progress in bytes over all files."""

    def __init__(
        self, files: Sequence[RemoteFile], progress: Callable[[str, int, int | None], None]
    ) -> None:
        self._lock = threading.Lock()
        self._progress = progress
        self._done: dict[str, int] = {}
        self._total = {file.name: file.expected_bytes for file in files}

    def total(self, file: RemoteFile, size_bytes: int | None) -> None:
        with self._lock:
            self._total[file.name] = size_bytes

    def advance(self, file: RemoteFile, done: int) -> None:
        with self._lock:
            self._done[file.name] = done
            totals = [total for total in self._total.values() if total is not None]
            total = sum(totals) if len(totals) == len(self._total) else None
            self._progress("fetch (bytes)", sum(self._done.values()), total)


class _Records:
    """Records in fetched.json, rewritten after each file."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, RECORD)
        self._lock = threading.Lock()
        self._by_name: dict[str, dict[str, Any]] = {}
        # If the record is missing or damaged, files are only checksummed again.
        with contextlib.suppress(InputError, KeyError, TypeError):
            self._by_name = {
                record["name"]: record
                for record in storage.read_json(self._path)["files"]
                if isinstance(record["name"], str)
                and isinstance(record["bytes"], int)
                and isinstance(record["sha256"], str)
            }

    def read(self, name: str) -> dict[str, Any] | None:
        return self._by_name.get(name)

    def write(self, result: dict[str, Any]) -> None:
        record = {key: value for key, value in result.items() if key != "status"}
        with self._lock:
            if self._by_name.get(record["name"]) != record:
                self._by_name[record["name"]] = record
                storage.write_json(self._path, {"files": list(self._by_name.values())})
