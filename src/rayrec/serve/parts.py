"""Tables that come one after the other, as numbered Parquet files."""

from __future__ import annotations

import os
from typing import final

import pyarrow as pa
import pyarrow.parquet as pq

PART_ROWS = 1 << 20
"""Rows of one file, about 12 MB of click scores."""


@final
class Parts:
    """Writes part-00000.parquet, part-00001.parquet, ... into a local folder; a context that ends the last one."""

    def __init__(self, folder: str) -> None:
        self._folder, self._number, self._in_part = folder, 0, 0
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, table: pa.Table) -> None:
        start = 0
        while start < len(table):
            piece = table.slice(start, PART_ROWS - self._in_part)
            if self._writer is None:
                name = os.path.join(self._folder, f"part-{self._number:05d}.parquet")
                self._writer = pq.ParquetWriter(name, table.schema, use_dictionary=_repeating(table.schema))
            self._writer.write_table(piece)
            start += len(piece)
            self._in_part += len(piece)
            self.rows += len(piece)
            if self._in_part == PART_ROWS:
                self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._in_part, self._number = None, 0, self._number + 1


def _repeating(schema: pa.Schema) -> list[str]:
    """Columns whose values repeat; of others a dictionary would only be tried and thrown away."""
    return [
        field.name
        for field in schema
        if field.name == "label" or (field.name != "row" and not pa.types.is_floating(field.type))
    ]
