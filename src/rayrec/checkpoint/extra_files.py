"""What belongs with the weights, the same in every checkpoint of a run: hashed where it comes from, not where it goes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Final, final

from rayrec import storage
from rayrec.checkpoint.discovery import file_sizes
from rayrec.checkpoint.format import MANIFEST, UnreadableError, is_data_file, read_manifest, sha256_of
from rayrec.config import InputError

Source = bytes | str
"""The content of a file, or the path or URL of one to copy."""
Described = dict[str, dict[str, Any]]
"""What the manifest says of each file, by name: its `bytes` and `sha256`."""
_NUM_THREADS: Final = 8
"""Files hashed and copied at a time."""


@final
class ExtraFiles:
    """Writes the same files into one checkpoint after the other. Each source is read once to be hashed and once to be copied
    into the first checkpoint. Later ones share the bytes of the checkpoint before (see `storage.clone_file`), so that a
    vocabulary of gigabytes is not moved with every save, and a source that somebody changes does not get into them. A copy that
    goes wrong is found by its size, or by its hash when it is read."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        """By name in the checkpoint's folder."""
        self._sources = dict(sources)
        self._described: Described = {}
        self._last: dict[str, str] = {}
        """Path of the copy in the last checkpoint, by name."""

    def write(self, folder: str) -> Described:
        """Raises InputError if a source is gone, OSError if storage is unavailable. The caller checks the sizes of the copies.

        A file of a complete checkpoint in the same folder that has other content stays: until the next manifest is written,
        that checkpoint is the one to resume from. An earlier start of the run saved it, with settings that may change.
        """
        new = [name for name in self._sources if name not in self._described]
        self._described |= zip(new, _threaded(_describe, [self._sources[name] for name in new]), strict=True)
        before = _recorded(folder) if self._sources else {}
        kept = {
            name: before[name]
            for name, file in self._described.items()
            if name in before
            and before[name]["sha256"] != file["sha256"]
            and _is(storage.join(folder, name), before[name])
        }
        written = {name: storage.join(folder, name) for name in self._sources if name not in kept}
        _threaded(lambda name: self._write(name, written[name]), written)
        self._last |= written
        return self._described | kept

    def _write(self, name: str, target: str) -> None:
        if not self._shares_last(name, target):
            _copy(self._sources[name], target)

    def _shares_last(self, name: str, target: str) -> bool:
        """Whether a file needs no copy, since `target` has the content of the last checkpoint's now."""
        last = self._last.get(name)
        if last is None or isinstance(self._sources[name], bytes):
            return False
        if storage.size_of(last) != self._described[name]["bytes"]:  # removed by retention, or cut short
            return False
        return last == target or storage.clone_file(last, target)


def repair(folder: str, sources: Mapping[str, Source]) -> list[str]:
    """Writes those files of a complete checkpoint again that are missing or not as recorded, from sources with the recorded
    content; returns their names. Checkpoints of one attempt share these files, so damage to one is damage to all of them.

    Nothing is done if the manifest is damaged. Raises OSError if storage is unavailable."""
    recorded = _recorded(folder)
    damaged = [name for name in sources if name in recorded and not _is(storage.join(folder, name), recorded[name])]
    repaired = [name for name in damaged if _has(sources[name], recorded[name])]
    for name in repaired:
        _copy(sources[name], storage.join(folder, name))
    return repaired


def _copy(source: Source, target: str) -> None:
    """Replaces the whole file: `target` may be a link that others share."""
    if isinstance(source, bytes):
        storage.write_bytes(target, source)
    else:
        storage.copy_file(source, target)


def _recorded(folder: str) -> Described:
    """The extra files of a complete checkpoint in a folder, none if there is no readable one."""
    files: Described = {}
    if storage.exists(storage.join(folder, MANIFEST)):
        with contextlib.suppress(InputError):
            files = read_manifest(folder)["files"]
    return {name: file for name, file in files.items() if "sha256" in file}


def _is(path: str, file: Mapping[str, Any]) -> bool:
    try:
        return storage.size_of(path) == file["bytes"] and sha256_of(path) == file["sha256"]
    except UnreadableError:
        return False


def _has(source: Source, file: Mapping[str, Any]) -> bool:
    """Whether a source still has the content that a manifest records."""
    try:
        return _describe(source) == dict(file)
    except InputError:
        return False


def _threaded(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """The results in the items' order; raises what the first failing call raised."""
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="checkpoint-files") as pool:
        return [future.result() for future in [pool.submit(copy_context().run, function, item) for item in items]]


def _describe(source: Source) -> dict[str, Any]:
    if isinstance(source, bytes):
        return {"bytes": len(source), "sha256": hashlib.sha256(source).hexdigest()}
    return {"bytes": storage.size_of(source), "sha256": sha256_of(source)}


def written_by(function: Callable[[str], None]) -> Callable[[str], Described]:
    """For a checkpoint that is saved once: what `function` writes into its folder, as it is found there."""

    def write(folder: str) -> Described:
        function(folder)
        sizes = {
            name: size_bytes
            for name, size_bytes in sorted(file_sizes(folder).items())
            if name != MANIFEST and not is_data_file(name) and not name.endswith(".partial")
        }
        sums = _threaded(sha256_of, [storage.join(folder, name) for name in sizes])
        return {name: {"bytes": sizes[name], "sha256": found} for name, found in zip(sizes, sums, strict=True)}

    return write
