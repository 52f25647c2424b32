"""One checkpoint made of several, in memory that does not grow with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayrec import storage
from rayrec.checkpoint.discovery import Checkpoint
from rayrec.checkpoint.extra_files import written_by
from rayrec.checkpoint.format import data_file
from rayrec.checkpoint.reader import verified_bytes
from rayrec.checkpoint.safetensors import TORCH_DTYPES, header
from rayrec.checkpoint.writer import Written, commit


@dataclass(frozen=True)
class Place:
    """Where a tensor of a source is in the joined checkpoint: all of a tensor, or columns of it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor there."""
    first_column: int = 0
    """Of dimension 1, if the tensor has two or more."""


def join(
    path: str,
    sources: Sequence[tuple[Checkpoint, Mapping[str, Place]]],
    *,
    state: dict[str, Any],
    extra_files: Callable[[str], None],
) -> int:
    """Writes a checkpoint of tensors of other checkpoints, a file each, into an empty folder; returns its size in bytes. A source
    comes with the place of each of its tensors that are taken, by name. `state` and `extra_files` are as for
    `rayrec.checkpoint.save`.

    Memory: a few blocks of 16 MiB. Every checksum is verified as the bytes are copied. Raises DamagedError for a source that is
    not as it was written, InputError for places that leave gaps.
    """
    written = [_copied(path, number, *source) for number, source in enumerate(sources)]
    shapes = {place.name: place.shape for _, places in sources for place in places.values()}
    return commit(path, written, shapes=shapes, state=state, score=None, extra_files=written_by(extra_files))


def _copied(path: str, number: int, source: Checkpoint, places: Mapping[str, Place]) -> Written:
    tensors, file = source.manifest()["tensors"], data_file(number, "")
    chunks = [(name, chunk) for name in sorted(places) for chunk in tensors[name]["chunks"]]
    entries, start = [], 0
    for name, chunk in chunks:
        dtype = TORCH_DTYPES[tensors[name]["dtype"]]
        size_bytes = dtype.itemsize * math.prod(chunk["sizes"])
        key = f"{places[name].name}@{','.join(map(str, _offsets(chunk, places[name])))}"
        entries.append((key, dtype, tuple(chunk["sizes"]), start, size_bytes))
        start += size_bytes
    head = header(entries)

    def pieces() -> Iterator[bytes]:
        yield head
        for name, chunk in chunks:
            yield from verified_bytes(source, name, chunk)

    storage.write_stream(storage.join(path, file), pieces())
    described = tuple(
        (
            places[name].name,
            {"dtype": tensors[name]["dtype"], "shape": list(places[name].shape)},
            {**chunk, "offsets": _offsets(chunk, places[name]), "file": file, "start": len(head) + entry[3]},
        )
        for (name, chunk), entry in zip(chunks, entries, strict=True)
    )
    return Written(file, len(head) + start, described)


def _offsets(chunk: Mapping[str, Any], place: Place) -> list[int]:
    offsets = list(chunk["offsets"])
    if place.first_column:
        offsets[1] += place.first_column
    return offsets
