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
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import IO, Any, Final

from rayrec import storage
from rayrec.config import InputError, suggest
from rayrec.datasets.download import CHUNK_BYTES, Digests, Download, Failed, Offer, Stopped
from rayrec.datasets.published_files import PUBLISHED, RemoteFile
from rayrec.humanize import one_line, size_text

LENGTH_TOLERANCE = 0.25
"""Maximum relative difference from an approximate size. Allows other compression, but not
truncation.
"""

_DAMAGED: Final = (
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
)
"""Errors of a damaged archive, besides OSError."""

UNCHECKED = {
    "length": "only its length was checked: neither its publisher nor the server has a checksum",
    "nothing": "nothing was checked: neither a length nor a checksum is published or sent",
}


@contextlib.contextmanager
def writing_to(path: str) -> Iterator[None]:
    """Convert disk errors to InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}). Free space, allow writing or change "
            "--out."
        ) from None


def check_offer(file: RemoteFile, offer: Offer) -> None:
    """Check before fetching that the offer can be the published file. Raises Failed."""
    size = offer.size_bytes
    about = file.expected_bytes
    if size is not None and about is not None:
        slack = 0.0 if file.size_bytes is not None else LENGTH_TOLERANCE * about
        if abs(size - about) > slack:
            raise Failed(
                f"size must be {'about ' if slack else ''}{about:,} bytes as published, got "
                f"{size:,}"
            )
    if offer.md5 and file.md5 and offer.md5 != file.md5:
        raise Failed(f"md5 must be {file.md5} as published, got {offer.md5}")


def check_bytes(file: RemoteFile, digests: Digests, offer: Offer) -> str:
    """Check a complete file with the best information available, and return its kind. Raises Failed
    on a mismatch.
    """
    size = digests.size_bytes
    if file.size_bytes is not None and size != file.size_bytes:
        raise Failed(f"size must be {file.size_bytes:,} bytes as published, got {size:,}")
    for name, expected, actual, source, kind in (
        ("sha256", file.sha256, digests.sha256, "as published", "published sha256"),
        ("md5", file.md5, digests.md5, "as published", "published md5"),
        ("md5", offer.md5, digests.md5, "by the server", "md5 the server gives"),
    ):
        if expected and actual != expected:
            raise Failed(f"{name} must be {expected} {source}, got {actual}")
        if expected:
            return kind
    has_length = file.size_bytes is not None or offer.size_bytes is not None
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
    digests = Digests.from_file(path)
    if record:
        if digests.sha256 != record["sha256"]:
            raise InputError(
                f"{path}: sha256 must be {record['sha256']} as fetched, got {digests.sha256}. {fix}"
            )
        return {**record, "status": "present"}
    try:
        verified = check_bytes(file, digests, Offer(None))
    except Failed as error:
        raise InputError(f"{path}: {error}. {fix}") from None
    if verified in UNCHECKED:
        note(f"Found {file.name}; {UNCHECKED[verified]}")
    return file_result(file.name, digests, None, "present", verified)


def file_result(
    name: str, digests: Digests, url: str | None, status: str, verified: str
) -> dict[str, Any]:
    """Return the entry of a file in the result of `fetch` and in its record."""
    fields = {"name": name, "bytes": digests.size_bytes, "sha256": digests.sha256}
    return {**fields, "url": url, "status": status, "verified": verified}


def require_space(folder: str, name: str, needed_bytes: int) -> None:
    """Check the free space of a folder's disk. Raises InputError."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise InputError(
            f"{folder}: {name} needs {size_text(needed_bytes)}, {size_text(free)} are free. "
            "Free space there, choose another --out or fetch less."
        )


# States of a file:
#
#   missing     not in the folder
#   incomplete  .fetch/NAME, while it is transferred or unpacked, and checked
#   complete    NAME, by an atomic rename after the checks
#   recorded    and in fetched.json, with its checksum and the kind of check
#
# A killed call may leave incomplete files. The next call removes them. It may also leave a complete
# file without a record. The next call checks it against the published checksum.
@dataclass(frozen=True)
class _Call:
    """State shared by all transfers of a `fetch` call."""

    folder: str
    attempts: int
    reported: _Progress
    note: Callable[[str], None]
    stop: threading.Event = field(default_factory=threading.Event)

    def scratch_path(self, name: str) -> str:
        """Return the path of an incomplete file. Readers of the folder skip hidden names."""
        return os.path.join(self.folder, _SCRATCH, name)

    def publish(self, name: str) -> None:
        """Move a complete file to its name."""
        target = os.path.join(self.folder, name)
        with writing_to(target):
            storage.sync(self.scratch_path(name))
            os.replace(self.scratch_path(name), target)


def _extract(
    archive: str, members: Sequence[RemoteFile], call: _Call, *, url: str
) -> list[dict[str, Any]]:
    """Extract the wanted members of a tar or zip file into the folder. No path in the archive is
    used for writing. Raises InputError if the archive is damaged, or a member is missing, not a
    regular file, or not the published one.
    """
    # Members are found by their last name. A path in the archive could lead out of the folder.
    missing = {file.name: file for file in members}
    results = []
    try:
        with contextlib.closing(_members(archive)) as archived:
            for member in archived:
                file = missing.pop(posixpath.basename(member.name), None)
                if file is None:
                    continue
                call.note(f"Unpacking {file.name}, {size_text(member.size_bytes)}")
                results.append(_extract_member(member, file, call, url))
                if not missing:
                    break
    except (*_DAMAGED, OSError) as error:
        # Disk error: gzip and bz2 set no errno.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(
            f"{archive}: damaged archive ({one_line(error)}). Remove it to fetch it again."
        ) from None
    if missing:
        raise InputError(
            f"{archive}: file {' and '.join(missing)} not found in it. Is {url} the published "
            "archive?"
        )
    return results


@dataclass(frozen=True)
class _Member:
    """Regular file in an archive."""

    name: str
    size_bytes: int
    open: Callable[[], IO[bytes]]


def _members(archive: str) -> Generator[_Member]:
    """Yield the regular files of a tar or zip file. Each can be read until the next one."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                if not info.is_dir():
                    read = functools.partial(zipped.open, info)
                    yield _Member(info.filename, info.file_size, read)
        return
    with tarfile.open(archive, "r:*") as tar:
        for each in tar:
            if each.isreg():
                read = functools.partial(_open_in_tar, tar, each)
                yield _Member(each.name, each.size, read)


def _open_in_tar(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    source = tar.extractfile(member)
    assert source is not None  # A regular file
    return source


def _extract_member(member: _Member, file: RemoteFile, call: _Call, url: str) -> dict[str, Any]:
    path = call.scratch_path(file.name)
    require_space(call.folder, file.name, member.size_bytes)
    digests = Digests()
    source = member.open()
    with writing_to(path):
        # Reading and writing fail for different reasons, with different fixes.
        # Closed below: errors of reading are not those of writing.
        output = open(path, "wb")  # noqa: SIM115
    with source, output:
        while chunk := source.read(CHUNK_BYTES):
            with writing_to(path):
                output.write(chunk)
            digests.add(chunk)
            # Another transfer failed. Threads cannot be killed, so each looks for it.
            if call.stop.is_set():
                raise Stopped
    try:
        verified = check_bytes(file, digests, Offer(member.size_bytes))
    except Failed as error:
        raise InputError(
            f"{file.name} of {url}: {error}. Report it, and put a copy into {call.folder} by hand."
        ) from None
    call.publish(file.name)
    return file_result(file.name, digests, url, "fetched", verified)


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
_SCRATCH = ".fetch"
"""Folder in the folder for incomplete files. Removed at the end, or by the next call."""


def fetch(
    files: Sequence[RemoteFile],
    folder: str,
    *,
    verify: bool = False,
    parallelism: int = 2,
    attempts: int = 4,
    progress: Callable[[str, int, int | None], None] = lambda name, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Fetch missing files, and return name, bytes, sha256, url, status (`fetched` or `present`) and
    `verified` for each file.

    A file gets its name only when it is complete and checked: by the published sha256 or md5, else
    by the server's checksum, else by its length alone, with a note. After an interruption, the next
    call keeps the complete files and starts over with the others.

    Args:
        files: Files to fetch.
        folder: Local target folder.
        verify: Whether to compare checksums, not only sizes, of files that are present.
        parallelism: Number of concurrent transfers.
        attempts: Maximum number of attempts for each file.
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
    with _locked(folder):
        records = _Records(folder)
        results = {}
        for file in files:
            if result := check_present(
                file, folder, records.read(file.name), verify=verify, note=note
            ):
                records.write(result)
                results[file.name] = result
        requested: dict[RemoteFile, list[RemoteFile]] = {}
        for file in files:
            if file.name not in results:
                requested.setdefault(file.archive or file, []).append(file)
        _check_space(folder, requested)
        for terms in dict.fromkeys(file.terms for file in requested if file.terms):
            note(terms)
        call = _Call(folder, attempts, _Progress(list(requested), progress), note)

        def run(transfer: RemoteFile) -> None:
            for result in _transfer(transfer, requested[transfer], call):
                records.write(result)
                results[result["name"]] = result

        _in_parallel(run, list(requested), parallelism, call.stop)
    return [results[file.name] for file in files]


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Create a folder, with another one for incomplete files, which is removed at the end. Raises
    InputError if another process has opened it.
    """
    scratch = os.path.join(folder, _SCRATCH)
    busy = f"{folder}: another fetch is writing there. Wait for it or choose another --out."
    with contextlib.ExitStack() as stack:
        with writing_to(folder):
            os.makedirs(folder, exist_ok=True)
            # Two processes must not write to one folder for incomplete files.
            stack.enter_context(storage.locked(os.path.join(folder, ".fetch.lock"), busy))
            shutil.rmtree(scratch, ignore_errors=True)  # A killed call left it.
            os.makedirs(scratch)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        yield


def _in_parallel(
    run: Callable[[RemoteFile], None],
    files: Sequence[RemoteFile],
    parallelism: int,
    stop: threading.Event,
) -> None:
    """Run all transfers. A failure or interrupt stops the others."""

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
            stop.set()  # Also after Ctrl-C, which only this thread gets.
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error


def _transfer(file: RemoteFile, members: Sequence[RemoteFile], call: _Call) -> list[dict[str, Any]]:
    """Fetch a file, or an archive whose wanted members are extracted."""
    url = file.url
    path = os.path.join(call.folder, file.name)
    if file not in members and check_present(file, call.folder, None, verify=True, note=call.note):
        return _extract(path, members, call, url=path)  # The user's archive is kept.

    def accept(offer: Offer) -> None:
        check_offer(file, offer)
        call.reported.total(file, offer.size_bytes)
        require_space(call.folder, file.name, offer.size_bytes or 0)

    advance = functools.partial(call.reported.advance, file)
    download = Download(url, accept=accept, advance=advance, stop=call.stop)
    scratch = call.scratch_path(file.name)
    try:
        with writing_to(path):
            download.run(scratch, attempts=call.attempts)
        digests = Digests.from_file(scratch)
        verified = check_bytes(file, digests, download.offer)
    except Failed as error:
        hint = f" from {file.page}" if file.page else ""
        raise InputError(
            f"{file.name}: cannot be fetched ({url}: {error}). Try again later, or put it into "
            f"{call.folder} by hand{hint}."
        ) from None
    how = f"; {UNCHECKED[verified]}" if verified in UNCHECKED else f", checked by the {verified}"
    call.note(f"Fetched {file.name}, {size_text(digests.size_bytes)}{how}")
    if file not in members:
        return _extract(scratch, members, call, url=url)
    call.publish(file.name)
    return [file_result(file.name, digests, url, "fetched", verified)]


def _check_space(folder: str, requested: Mapping[RemoteFile, Sequence[RemoteFile]]) -> None:
    """Check the disk space for all known sizes of transfers and their members. Unknown ones are
    checked when a server reports them.
    """
    files = {*requested, *(member for members in requested.values() for member in members)}
    names = f"the {len(requested)} files"
    if len(requested) < 3:
        names = " and ".join(file.name for file in requested)
    require_space(folder, names, sum(file.expected_bytes or 0 for file in files))


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
