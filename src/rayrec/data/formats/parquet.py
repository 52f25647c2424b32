"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final, final

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.base import Format
from rayrec.schema import Schema

PARQUET_MAGIC: Final = b"PAR1"
_BLOCK_ROWS: Final = 1 << 15


@final
class Parquet(Format):
    """Columns of any types. A file whose row groups are small is read where it is."""

    name: ClassVar[str] = "parquet"

    def recognizes(self, start: bytes) -> bool:
        return start.startswith(PARQUET_MAGIC)

    def columns(self, path: str, schema: Schema) -> tuple[str, ...]:
        with open_parquet(path) as parquet:
            return tuple(parquet.schema_arrow.names)

    def tables(
        self, path: str, schema: Schema, columns: Sequence[str] | None
    ) -> Iterator[pa.Table]:
        with open_parquet(path) as parquet:
            names = parquet.schema_arrow.names
            stored = names if columns is None else [name for name in columns if name in names]
            for batch in parquet.iter_batches(_BLOCK_ROWS, columns=stored, use_threads=False):
                yield pa.table(batch).select(stored)


@contextmanager
def open_parquet(path: str, *, buffer_size: int = 0) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file, with read errors as InputErrors. Reads column chunks in parts of
    `buffer_size` bytes, 0: at once.
    """
    filesystem, inner = storage.resolve(path)
    try:
        with pq.ParquetFile(inner, filesystem=filesystem, buffer_size=buffer_size) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise unreadable_parquet(path, error) from None


def unreadable_parquet(path: str, error: BaseException) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path}: no such file")
    return InputError(
        f"{path}: cannot be read as Parquet ({str(error).partition(chr(10))[0]}); fetch or write "
        "it again"
    )
