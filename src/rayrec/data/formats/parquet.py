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
_CODED_BYTES: Final = 8
"""Maximum stored bytes per value of text that is read as a dictionary. Text with more has few equal
values, or is long, so that Arrow takes longer to make a dictionary of it.
"""


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
def open_parquet(
    path: str,
    *,
    buffer_size: int = 0,
    dictionaries: Sequence[str] = (),
    metadata: pq.FileMetaData | None = None,
) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file, with read errors as InputErrors. Reads column chunks in parts of
    `buffer_size` bytes, 0: at once, and the columns `dictionaries` as dictionaries of text.
    `metadata` is that of the file, if it was read before.
    """
    filesystem, inner = storage.resolve(path)
    try:
        with pq.ParquetFile(
            inner,
            filesystem=filesystem,
            buffer_size=buffer_size,
            read_dictionary=list(dictionaries),
            metadata=metadata,
        ) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise unreadable_parquet(path, error) from None


def dictionary_columns(
    metadata: pq.FileMetaData,
    groups: Sequence[int],
    names: Sequence[str],
) -> list[str]:
    """Return the columns of text among `names` that row groups store as dictionaries, with few
    bytes per value.
    """
    rows = sum(metadata.row_group(number).num_rows for number in groups)
    coded = []
    for index in range(metadata.num_columns):
        leaf = metadata.schema.column(index)
        if leaf.path not in names or leaf.physical_type != "BYTE_ARRAY":
            continue
        chunks = [metadata.row_group(number).column(index) for number in groups]
        size_bytes = sum(chunk.total_uncompressed_size for chunk in chunks)
        are_coded = all(chunk.has_dictionary_page for chunk in chunks)
        if are_coded and size_bytes <= _CODED_BYTES * rows:
            coded.append(leaf.path)
    return coded


def unreadable_parquet(path: str, error: BaseException) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path}: no such file")
    return InputError(
        f"{path}: cannot be read as Parquet ({str(error).partition(chr(10))[0]}); fetch or write "
        "it again"
    )
