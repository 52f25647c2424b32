"""Rows of segments that a sample of one label keeps (`Schema.sample`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from rayrec.data.logs.index import (
    LogIndex,
    Segment,
    SegmentRange,
    SegmentSample,
    changed,
    resolve_source,
)
from rayrec.hashing import GOLDEN, mix64, xxh64
from rayrec.schema import RowSample

_PACKED: Final = re.compile(r"(\.gz|\.zip|\.parquet)+$")
_BITS: Final = 53
"""Bits of a hash that are compared with `keep`, in units of 2^-53."""


# What decides whether a row is kept, so that all readers keep the same rows:
#
#   name      of its file, without folder and packing: the rows of a log, moved, or preprocessed
#             without a full shuffle, are the same
#   position  its number among the valid rows of files with this name, in the log's order: neither
#             segments, blocks and workers, nor the order of differently named files matter
#
# Equal rows have different positions, so that a share of them is kept, as of other rows. Their
# content would decide for all of them at once.
def segment_samples(
    parts: Sequence[SegmentRange], index: LogIndex, rule: RowSample
) -> Iterator[SegmentSample]:
    """Yield the sample of each part of a log's index."""
    positions: dict[int, tuple[int, int]] = {}
    rows_of: dict[int, int] = {}
    for segment in index.segments:
        key = _file_key(segment.path)
        first_position = rows_of.get(key, 0)
        # Segments without rows have the number of the next one, which replaces them
        positions[segment.first_row] = key, first_position
        rows_of[key] = first_position + segment.rows
    for part in parts:
        yield SegmentSample(part, rule, *positions[part.segment.first_row])


@lru_cache(maxsize=1024)
def _file_key(path: str) -> int:
    """Return the hash of a file's name without folder and packing, 0 to 2^64 - 1."""
    name = resolve_source(path)[1].rpartition("/")[2]
    return xxh64(_PACKED.sub("", name).encode())


def sampled_parts(samples: Sequence[SegmentSample], counts: Sequence[int]) -> list[SegmentRange]:
    """Return the samples as parts of a log of their own, whose rows are numbered from 0. `counts`
    has the row count of each, empty ones are left out.
    """
    parts = []
    first_row = 0
    for sample, rows in zip(samples, counts, strict=True):
        source = sample.part.segment
        segment = Segment(
            source.path,
            source.start,
            source.stop,
            first_row,
            rows,
            source.format,
            source.checksum,
            sample,
        )
        if rows:
            parts.append(SegmentRange(segment, 0, rows))
        first_row += rows
    return parts


def select_rows(sample: SegmentSample, labels: np.ndarray) -> np.ndarray:
    """Return the kept rows among those of the sampled segment, int64, ascending. `labels` has the
    labels of all of them, 0 or 1.
    """
    part = sample.part
    rows = np.arange(part.start, part.stop, dtype=np.int64)
    positions = (rows + sample.first_position).astype(np.uint64)
    hashes = mix64(positions * np.uint64(GOLDEN) + np.uint64(sample.key))
    is_sampled = hashes >> np.uint64(64 - _BITS) < np.uint64(round(sample.rule.keep * 2**_BITS))
    is_other = labels[part.start : part.stop] != sample.rule.label
    return rows[is_sampled | is_other]


def log_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments of the log that sampled segments are taken from; others unchanged."""
    return [each if each.sample is None else each.sample.part.segment for each in segments]


def sampled_rows(segment: Segment, labels: np.ndarray) -> np.ndarray:
    """Return the rows of a sampled segment among those of the log's segment, int64, ascending.
    Raises InputError if the labels, of all rows of that one, are not those that were counted.
    """
    assert segment.sample is not None
    rows = select_rows(segment.sample, labels)
    if len(rows) != segment.rows:
        unit = "bytes" if segment.format == "text" else "rows"
        raise changed(segment.path, segment.start, segment.stop, unit)
    return rows


def all_sampled_rows(segments: Sequence[Segment], labels: np.ndarray) -> np.ndarray:
    """Return the rows of sampled segments among those of their `log_segments`, concatenated.
    `labels` and errors are those of `sampled_rows`.
    """
    numbers = []
    first = 0
    for segment, source in zip(segments, log_segments(segments), strict=True):
        stop = first + source.rows
        numbers.append(first + sampled_rows(segment, labels[first:stop]))
        first = stop
    return np.concatenate(numbers)
