"""What belongs with the weights, the same in every checkpoint of a run: hashed where it comes from, not where it goes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Final, final

from rayrec import storage
from rayrec.checkpoint.folders import file_sizes
from rayrec.checkpoint.format import MANIFEST, is_data_file, read_manifest, sha256_of
from rayrec.config import InputError

Source = bytes | str
"""The content of a file, or the path or URL of one to copy."""
Described = dict[str, dict[str, Any]]
"""What the manifest says of each file, by name: its `bytes` and `sha256`."""
_NUM_THREADS: Final = 8
"""Files hashed and copied at a time."""


@final
class ExtraFiles:
    """Copies files into one checkpoint after the other. Each source is read, to be hashed, once: a copy that goes wrong is
    found by its size at once, or by its hash by whoever reads it, and a store need not give out again what it was given."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        """By name in the checkpoint's folder."""
        self._sources = dict(sources)
        self._described: Described = {}

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
        _threaded(
            lambda name: self._write(storage.join(folder, name), self._sources[name]),
            [name for name in self._sources if name not in kept],
        )
        return self._described | kept

    def _write(self, target: str, source: Source) -> None:
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
    return storage.size_of(path) == file["bytes"] and sha256_of(path) == file["sha256"]


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
