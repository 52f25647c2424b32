"""Click logs in Parquet or CSV: cut into segments of whole row groups, and read into raw columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayrec import storage
from rayrec.data.columns import RawColumns
from rayrec.data.engine import Engine
from rayrec.data.log import LogIndex, Segment
from rayrec.data.parsing import RawRows
from rayrec.schema import Schema


def is_table(files: Sequence[storage.File], schema: Schema) -> bool:
    raise NotImplementedError


def index_tables(
    files: Sequence[storage.File],
    schema: Schema,
    *,
    segment_bytes: int,
    engine: Engine,
    cache_folder: str,
    note: Callable[[str], None],
    progress: Callable[[str, int, int | None], None],
) -> LogIndex:
    raise NotImplementedError


def read_tables(segments: Sequence[Segment], schema: Schema) -> RawRows | RawColumns:
    raise NotImplementedError
