"""Log index: segments of a click log with counted and numbered valid rows, and its cache."""

from __future__ import annotations

import hashlib
import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.columns import partition_names
from rayrec.data.logs.faults import HEAD_BYTES, Faults, likely_cause
from rayrec.native import call
from rayrec.schema import RowSample, Schema
from rayrec.storage.cache import read_head

_MAX_INDICES = 64
"""Maximum number of indices per folder."""

WritableFormat = Literal["parquet", "npy", "binary"]
"""Preprocessed format that rayrec writes. Only other programs write npz."""
Format = Literal["text", "table", "random", "npz", WritableFormat]
"""File format. text: lines; table: Parquet or CSV; random: rows without a file; others:
preprocessed data (data/materialized).
"""
MAPPED = ("binary", "npy", "npz")
"""Memory-mapped formats, in which single rows are read and written."""
VERSION = 2
"""Version of stored indices. A log with an index of another version is indexed again."""


class SegmentEntry(NamedTuple):
    """Segment without row numbers."""

    path: str
    start: int
    stop: int
    rows: int
    """Number of valid rows."""
    checksum: int | None = None


@dataclass(frozen=True)
class Segment:
    """Range of one file, its valid rows numbered from first_row on (over the full log)."""

    path: str
    start: int
    stop: int
    """End of [start, stop): bytes of full text lines, or rows of the file in other formats."""
    first_row: int
    rows: int
    format: Format = "text"
    checksum: int | None = None
    """Checksum (native/checksum.c) of the rows' bytes, in a table of the schema's columns. None:
    unknown or preprocessed.
    """
    sample: SegmentSample | None = None
    """Rows of which this segment has those that a sample keeps, numbered over all kept rows. None:
    all rows.
    """

    @property
    def is_preprocessed(self) -> bool:
        return self.format not in ("text", "table", "random")

    @property
    def is_mapped(self) -> bool:
        return self.format in MAPPED


@dataclass(frozen=True)
class SegmentRange:
    """Rows [start, stop) of one segment, counted from its first valid row."""

    segment: Segment
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class SegmentSample:
    """Rows of a segment that are sampled by their label, and their positions in the log."""

    part: SegmentRange
    rule: RowSample
    key: int
    """Hash of the file's name, 0 to 2^64 - 1."""
    first_position: int
    """Number of the segment's first row among all rows of files with this name."""


@dataclass(frozen=True)
class Block:
    """Rows that are read, parsed and permuted together."""

    parts: tuple[SegmentRange, ...]
    seed: tuple[int, ...] | None
    """Seed of the permutation. None keeps the log's order."""

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of the parts, each once."""
        return tuple(dict.fromkeys(part.segment for part in self.parts))

    def order(self) -> np.ndarray:
        """Return the index in the parsed `segments` of each row of the block, int64 [rows]."""
        segments = self.segments
        bases = dict(
            zip(
                segments,
                itertools.accumulate((segment.rows for segment in segments), initial=0),
                strict=False,
            )
        )
        parts = ((bases[part.segment], part) for part in self.parts)
        indices = [
            np.arange(base + part.start, base + part.stop, dtype=np.int64) for base, part in parts
        ]
        rows = np.concatenate(indices)
        if self.seed is None:
            return rows
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed))).permutation(
            rows
        )


# From a log to the rows of a step; each level is found in the one above without reading the log
# again:
#
#   log        files in natural order
#   Segment    full lines, or rows of a table file, with the number of its first row
#   Part       rows of a segment: a set's border may divide one
#   Block      parts that are read together; rows in one permuted order
#
# Row numbers count valid rows only. They are stable as long as the files are, whatever the
# segments.
@dataclass(frozen=True)
class LogIndex:
    """Segments of a click log, and the faults of its invalid lines."""

    segments: tuple[Segment, ...]
    faults: Faults

    @property
    def rows(self) -> int:
        last = self.segments[-1] if self.segments else None
        return last.first_row + last.rows if last else 0

    @property
    def size_bytes(self) -> int:
        """Size of a text log."""
        return sum(segment.stop - segment.start for segment in self.segments)

    @property
    def format(self) -> Format:
        return self.segments[0].format if self.segments else "text"

    @property
    def is_preprocessed(self) -> bool:
        return bool(self.segments) and self.segments[0].is_preprocessed

    @property
    def bad_fraction(self) -> float:
        lines = self.rows + self.faults.total
        return self.faults.total / lines if lines else 0.0

    def parts(self, start: int, stop: int) -> Iterator[SegmentRange]:
        """Yield rows [start, stop) of the log."""
        number = max(
            bisect_right(self.segments, start, key=lambda segment: segment.first_row) - 1, 0
        )
        while number < len(self.segments) and self.segments[number].first_row < stop:
            segment = self.segments[number]
            low = max(start - segment.first_row, 0)
            high = min(stop - segment.first_row, segment.rows)
            if low < high:
                yield SegmentRange(segment, low, high)
            number += 1

    def check(self, max_bad_fraction: float, path: str) -> None:
        """Check that the log has rows, and not too many invalid ones. Raises InputError with the
        likely cause.
        """
        if self.rows and self.bad_fraction <= max_bad_fraction:
            return
        why = self.faults.describe() if self.faults.total else "it is empty"
        cause = self._cause()
        wrong_labels = None if cause else self.faults.wrong_labels(with_rule=self.format == "table")
        for reason in (cause or wrong_labels, self.faults.text_fix()):
            why += f"; {reason}" if reason else ""
        if not self.rows:
            raise InputError(f"{path}: no usable rows; {why}")
        fix = "" if wrong_labels else "; fix the log or raise --max-bad-fraction"
        raise InputError(
            f"{path}: {self.bad_fraction:.2%} of its lines are invalid, more than max_bad_fraction "
            f"{max_bad_fraction:.2%}; {why}{fix}"
        )

    def _cause(self) -> str:
        """Return the likely cause of the faults of a text log; "" if unknown."""
        if self.format != "text" or not self.faults.first or self.faults.first[0].byte is None:
            return ""
        return likely_cause(read_head(self.faults.first[0].path, HEAD_BYTES))

    def to_dict(self) -> dict[str, Any]:
        paths = sorted({segment.path for segment in self.segments})
        number = {path: i for i, path in enumerate(paths)}
        segments = [[number[s.path], s.start, s.stop, s.rows, s.checksum] for s in self.segments]
        return {
            "paths": paths,
            "format": self.format,
            "segments": segments,
            "faults": self.faults.to_dict(),
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> LogIndex:
        entries = (
            SegmentEntry(stored["paths"][number], *rest) for number, *rest in stored["segments"]
        )
        return cls(numbered(entries, stored["format"]), Faults.from_dict(stored["faults"]))


def numbered(
    entries: Iterable[SegmentEntry | tuple[str, int, int, int]], format: Format = "text"
) -> tuple[Segment, ...]:
    """Return segments in log order with consecutive row numbers."""
    segments = []
    first_row = 0
    for entry in entries:
        path, start, stop, rows, checksum = SegmentEntry(*entry)
        segments.append(Segment(path, start, stop, first_row, rows, format, checksum))
        first_row += rows
    return tuple(segments)


def checksum(data: np.ndarray) -> int:
    """Compute the checksum of contiguous uint8, 0 to 2^63 - 1. Always detects a changed 8-byte
    word, else misses 1 in 2^63.
    """
    return call("rayrec_checksum", data, data.nbytes)


def changed(path: str, start: int, stop: int, unit: str) -> InputError:
    """Return the error for a segment that changed since the log was indexed; `unit` is bytes or
    rows.
    """
    return InputError(
        f"{path}: {unit} {start}-{stop} changed since the log was indexed; restore the file, or "
        "choose another --name"
    )


def row_numbers(segments: Sequence[Segment]) -> np.ndarray:
    """Return the numbers in the log of the segments' rows, concatenated, int64."""
    return np.concatenate(
        [np.arange(each.first_row, each.first_row + each.rows, dtype=np.int64) for each in segments]
    )


def resolve_source(path: str) -> tuple[str, str]:
    """Return a key of the user's file behind a segment, and its name with its partitions. The
    segment's file may have been unpacked (see `unpacked_path`) or rewritten in several parts (see
    data/logs/parquet.py).
    """
    folder = storage.parent_folder(path)
    base = storage.name_of(path)
    plain = folder.partition("?")[0]
    partitions = "".join(f"{name}/" for name in partition_names(path))
    rewritten = re.fullmatch(r"(.*/tables/[0-9a-f]{16})/\d{5}(/[^/]*=[^/]*)*", plain)
    if rewritten:
        return rewritten[1], partitions + base.removesuffix(".parquet")
    return path, partitions + re.sub(r"^[0-9a-f]{16}-", "", base)


def sources_in_order(paths: Iterable[str]) -> list[tuple[str, str]]:
    """Return the sources (see `resolve_source`) of segments in log order, sorted by path, or by
    name if some are in the cache folder.
    """
    sources = list(dict.fromkeys(map(resolve_source, dict.fromkeys(paths))))
    if all(storage.name_of(key) == name.rpartition("/")[2] for key, name in sources):
        return sorted(sources)
    return sorted(sources, key=lambda source: source[1])


# An entry belongs to (paths, schema, segment size), and is valid for one version of the files:
#
#   same version           read
#   other version          index again, replace; report a segment whose bytes changed
#   damaged, or absent     index again
#   derived file missing   index again, which makes it
@dataclass(frozen=True)
class CachedIndex:
    """Cached index of some files, segmented in one way."""

    path: str | None
    """Path of the cached index. None: not cached."""
    version: str
    """Hash of the versions of the files."""
    listed: frozenset[str]
    """Paths of the files, known to exist."""

    @classmethod
    def at(
        cls,
        folder: str | None,
        *,
        files: Sequence[storage.File],
        schema: Schema,
        segment_bytes: int,
        suffix: str = "",
    ) -> CachedIndex:
        """Return the entry in `folder` (None: no cache). `suffix` distinguishes indices with
        further dependencies.
        """
        paths = [file.path for file in files]
        source = hashlib.sha256(
            repr((paths, _read_fields(schema), segment_bytes, suffix)).encode()
        ).hexdigest()[:16]
        versions = [(file.size_bytes, file.modified_ns) for file in files]
        version = hashlib.sha256(repr((VERSION, versions)).encode()).hexdigest()[:16]
        path = None if folder is None else storage.join(folder, f"index-{source}.json")
        return cls(path, version, frozenset(paths))

    def read(self) -> LogIndex | None:
        """Return the index; None if absent, damaged, of other file versions, or if files derived
        from them are missing.
        """
        version, index = self._stored()
        if index is None or version != self.version:
            return None
        derived = {segment.path for segment in index.segments} - self.listed
        return index if len(storage.find_files(sorted(derived))) == len(derived) else None

    def write(self, index: LogIndex) -> str | None:
        """Replace the index of an older version of the files. Return its first segment with other
        bytes now, or None.
        """
        if self.path is None:
            return None
        _, old = self._stored()
        storage.write_json(self.path, {"version": self.version, **index.to_dict()})
        folder = storage.parent_folder(self.path)
        indices = [
            file
            for file in storage.files_in(folder)
            if storage.name_of(file.path).startswith("index-")
        ]
        # Other schemas and segment sizes leave entries behind, so only the latest stay.
        for file in sorted(indices, key=lambda file: file.modified_ns)[:-_MAX_INDICES]:
            storage.remove_file(file.path)
        return None if old is None else _edited(old, index)

    def keep(self, index: LogIndex, note: Callable[[str], None]) -> LogIndex:
        """Write the index, and report if the log was edited since it was last indexed."""
        edited = self.write(index)
        if edited:
            note(
                f"{edited} changed since the log was last indexed; runs on the old rows cannot "
                "resume"
            )
        return index

    def _stored(self) -> tuple[str | None, LogIndex | None]:
        """Return the version of the files and their index; None if it is absent or damaged."""
        if self.path is None or not storage.exists(self.path):
            return None, None
        try:
            stored = storage.read_json(self.path)
            return stored["version"], LogIndex.from_dict(stored)
        # Not JSON, or JSON of another shape
        except (ValueError, TypeError, LookupError, AttributeError):
            return None, None


def _read_fields(schema: Schema) -> dict[str, Any]:
    """Return the fields that decide which rows are valid. A sample and the constants of formulas do
    not.
    """
    return schema.replace(sample=None, fitted=()).to_dict()


def _edited(old: LogIndex, new: LogIndex) -> str | None:
    checksums = {
        (segment.path, segment.start, segment.stop): segment.checksum for segment in old.segments
    }
    for segment in new.segments:
        before = checksums.get((segment.path, segment.start, segment.stop))
        if before is not None and segment.checksum not in (None, before):
            unit = "bytes" if segment.format == "text" else "rows"
            return f"{segment.path}: {unit} {segment.start}-{segment.stop}"
    return None
