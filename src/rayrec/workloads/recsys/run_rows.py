"""The encoded rows of a run's log, or of another one of its schema, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from rayrec import machine
from rayrec.config import InputError
from rayrec.data.encoded import EncodedRows
from rayrec.data.engine import TaskContext, ThreadEngine
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import Block, LogIndex, Part
from rayrec.ingest.stream import open_block

if TYPE_CHECKING:
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.workloads.run_config import DataConfig

BATCH_ROWS: Final = 2048
"""Rows that are encoded at once."""


def open_run_log(data: DataConfig, preprocessor: Preprocessor, *, cache: str, max_bad_fraction: float = 1.0) -> LogIndex:
    """The index of a log, which folder `cache` keeps. Raises InputError where there is no log, it cannot be read, or more than a
    share of its lines are faulty."""
    if data.path is None:
        raise InputError("the run names no log")
    return LogSource.at(data.path, data.files).index(
        preprocessor.schema,
        segment_bytes=data.segment_bytes,
        context=TaskContext(ThreadEngine(machine.usable_cpus()), cache),
        max_bad_fraction=max_bad_fraction,
    )


def encoded(index: LogIndex, rows: tuple[int, int], preprocessor: Preprocessor) -> Iterator[EncodedRows]:
    """Rows [start, stop) of a log in their order, `BATCH_ROWS` or fewer at once."""
    return encoded_parts((index.parts(*rows)), preprocessor)


def encoded_parts(parts: Iterable[Part], preprocessor: Preprocessor) -> Iterator[EncodedRows]:
    """As `encoded`, of some parts of a log."""
    for part in parts:
        read = open_block(Block((part,), None), preprocessor).encode
        size = part.stop - part.start
        for start in range(0, size, BATCH_ROWS):
            yield read(start, min(start + BATCH_ROWS, size))
