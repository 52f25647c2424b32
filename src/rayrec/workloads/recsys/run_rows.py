"""Encoded rows of a run's log, or of another log with its schema, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from rayrec import host_resources
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.engine import TaskContext, ThreadEngine
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import Block, LogIndex, SegmentRange
from rayrec.ingest.stream import open_block

if TYPE_CHECKING:
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.workloads.run_config import DataConfig

BATCH_ROWS: Final = 2048
"""Maximum rows per encoded batch."""


def open_run_log(data: DataConfig, preprocessor: Preprocessor, *, cache: str, max_bad_fraction: float = 1.0) -> LogIndex:
    """Return the index of a log, cached in folder `cache`. Raises InputError if the log is missing, unreadable, or has too many
    invalid lines."""
    if data.path is None:
        raise InputError("the run's config.yaml must name its log")
    return LogSource.at(data.path, data.files).index(
        preprocessor.schema,
        segment_bytes=data.segment_bytes,
        context=TaskContext(ThreadEngine(host_resources.usable_cpus()), cache),
        max_bad_fraction=max_bad_fraction,
    )


def encode_parts(parts: Iterable[SegmentRange], preprocessor: Preprocessor) -> Iterator[EncodedRows]:
    """Yield the rows of parts of a log in order, in batches of up to `BATCH_ROWS`."""
    for part in parts:
        read = open_block(Block((part,), None), preprocessor).encode
        size = part.stop - part.start
        for start in range(0, size, BATCH_ROWS):
            yield read(start, min(start + BATCH_ROWS, size))
