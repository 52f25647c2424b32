"""Text with a delimiter between its fields, quotes, and perhaps a header."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import pyarrow as pa

from rayrec.data.formats.base import Format
from rayrec.data.formats.csv_reader import csv_columns, read_csv
from rayrec.schema import Schema


class Csv(Format):
    """Columns of text. Any file that is no other format is read as CSV."""

    name: ClassVar[str] = "csv"

    def recognizes(self, start: bytes) -> bool:
        return b"\0" not in start

    def columns(self, path: str, schema: Schema) -> tuple[str, ...]:
        return csv_columns(path, schema)

    def tables(
        self, path: str, schema: Schema, columns: Sequence[str] | None
    ) -> Iterator[pa.Table]:
        columns = csv_columns(path, schema) if columns is None else columns
        return read_csv(path, schema, columns)
