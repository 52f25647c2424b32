"""What belongs with the weights, the same in every checkpoint of a run: hashed where it comes from, not where it goes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, final

from rayrec import storage
from rayrec.checkpoint.folders import file_sizes
from rayrec.checkpoint.format import MANIFEST, is_data_file, sha256_of

Source = bytes | str
"""The content of a file, or the path or URL of one to copy."""
Described = dict[str, dict[str, Any]]
"""What the manifest says of each file, by name: its `bytes` and `sha256`."""


@final
class ExtraFiles:
    """Copies files into one checkpoint after the other. Each source is read, to be hashed, once: a copy that goes wrong is
    found by its size at once, or by its hash by whoever reads it, and a store need not give out again what it was given."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        """By name in the checkpoint's folder."""
        self._sources = dict(sources)
        self._described: Described = {}

    def write(self, folder: str) -> Described:
        """Raises InputError if a source is gone, OSError if storage is unavailable. The caller checks the sizes of the copies."""
        for name, source in self._sources.items():
            if name not in self._described:
                self._described[name] = _describe(source)
            target = storage.join(folder, name)
            if isinstance(source, bytes):
                storage.write_bytes(target, source)
            else:
                storage.copy_file(source, target)
        return self._described


def _describe(source: Source) -> dict[str, Any]:
    if isinstance(source, bytes):
        return {"bytes": len(source), "sha256": hashlib.sha256(source).hexdigest()}
    return {"bytes": storage.size_of(source), "sha256": sha256_of(source)}


def written_by(function: Callable[[str], None]) -> Callable[[str], Described]:
    """For a checkpoint that is saved once: what `function` writes into its folder, as it is found there."""

    def write(folder: str) -> Described:
        function(folder)
        return {
            name: {"bytes": size_bytes, "sha256": sha256_of(storage.join(folder, name))}
            for name, size_bytes in sorted(file_sizes(folder).items())
            if name != MANIFEST and not is_data_file(name) and not name.endswith(".partial")
        }

    return write
