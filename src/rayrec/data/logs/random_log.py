"""Random click log without files, `random:ROWS` or `random:ROWS:SEED`: the rows of `rayrec
generate`, made when they are read.
"""

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex, Segment, SegmentEntry, numbered
from rayrec.data.raw_block import RawBlock
from rayrec.data.stage_times import stage
from rayrec.schema import Schema

if TYPE_CHECKING:  # Only random logs need the distribution, and every command reads this file
    from rayrec.data.synthetic_law import GroundTruth, Rows

_ROW_BYTES = 256
"""Assumed size of a row, about that of one in Criteo's text."""


def _parsed(path: str) -> tuple[int, int]:
    """Return the number of rows and the seed. Raises InputError."""
    match = re.fullmatch(r"random:(\d+)(?::(\d+))?(/day_\d+)?", path)
    if match is None or not int(match[1]):
        raise InputError(
            f"{path}: must be random:ROWS or random:ROWS:SEED with at least one row, such as "
            "random:1000000"
        )
    return int(match[1]), int(match[2] or 0)


def random_files(path: str) -> list[storage.File]:
    """Return a file per day, with its rows in place of bytes. Raises InputError for another path
    than random:ROWS[:SEED].
    """
    starts = _day_starts(_parsed(path)[0])
    return [
        storage.File(f"{path}/day_{day}", stop - start, 0)
        for day, (start, stop) in enumerate(itertools.pairwise(starts))
    ]


def _day_starts(rows: int) -> list[int]:
    from rayrec.data.synthetic import SyntheticLog, day_starts

    return day_starts(rows, min(SyntheticLog.days, rows))


def check_random(path: str, schema: Schema) -> None:
    """Check that the schema has the columns of Criteo's logs, which random rows have. Raises
    InputError.
    """
    from rayrec.data.synthetic_law import NUM_DENSE, NUM_SPARSE

    if schema.tokens != "hexadecimal" or (len(schema.dense), len(schema.sparse)) != (
        NUM_DENSE,
        NUM_SPARSE,
    ):
        raise InputError(
            f"{path}: random rows have the columns of Criteo's logs, {NUM_DENSE} dense and "
            f"{NUM_SPARSE} sparse, which the schema must have. Use a recipe for Criteo, or a log."
        )


def index_random(path: str, schema: Schema, *, segment_bytes: int) -> LogIndex:
    """Return the index. Makes no row."""
    check_random(path, schema)
    size = max(segment_bytes // _ROW_BYTES, 1)
    entries = (
        SegmentEntry(file.path, start, stop, stop - start)
        for file in random_files(path)
        for start in range(0, file.size_bytes, size)
        for stop in [min(start + size, file.size_bytes)]
    )
    return LogIndex(numbered(entries, "random"), Faults())


@lru_cache(maxsize=1)
def _ground_truth(seed: int) -> "GroundTruth":
    from rayrec.data.synthetic_law import GroundTruth

    return GroundTruth("kaggle", seed)


def read_random(segments: Sequence[Segment], schema: Schema) -> RawBlock:
    """Make the rows of segments. A row depends on its number, the number of rows (by its day) and
    the seed only.
    """
    with stage("parse"):
        return RawBlock.concatenated([_made(segment, schema) for segment in segments])


def _made(segment: Segment, schema: Schema) -> RawBlock:
    from rayrec.data.synthetic import block_spans
    from rayrec.data.synthetic_law import BLOCK_ROWS

    rows, seed = _parsed(segment.path)
    truth = _ground_truth(seed)
    starts = _day_starts(rows)
    first = segment.first_row
    stop = segment.first_row + segment.rows
    parts: list[Rows] = []
    for block in range(first // BLOCK_ROWS, -(-stop // BLOCK_ROWS)):
        start = block * BLOCK_ROWS
        spans = block_spans(block, starts=starts, stop=stop)
        parts += [part for _, part in truth.rows(block, spans=spans, skip=max(first - start, 0))]
    return RawBlock.concatenated([_block(part, segment.path, schema) for part in parts])


def _block(rows: "Rows", path: str, schema: Schema) -> RawBlock:
    """Convert rows to a block, where missing values are 0."""
    num_dense = len(schema.dense)
    bits = np.arange(len(schema.positions), dtype=np.uint64)
    present = (rows.missing[:, None] >> bits & np.uint64(1)) == 0
    return RawBlock(
        schema,
        np.where(present[:, :num_dense], rows.dense.T, 0).astype(np.int64, order="C"),
        np.ascontiguousarray(np.where(present[:, num_dense:], rows.tokens.T, np.uint32(0))),
        rows.missing,
        labels={} if schema.label is None else {schema.label: rows.labels.astype(np.float32)},
        files=((path, 0, len(rows.labels)),),
    )
