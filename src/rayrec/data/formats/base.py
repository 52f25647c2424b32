"""What a file format is: recognized from content, read as Arrow tables with the file's columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

import pyarrow as pa

from rayrec.data.formats.row_faults import FAULT
from rayrec.data.formats.text_stream import line_blocks
from rayrec.schema import Schema


class Format(ABC):
    """Format of a log's files. One instance serves all files, in any process and thread.

    `tables` yields all rows of a file in order, with the file's own columns and names. Rows that
    cannot be read stay, as empty values with their fault in the column FAULT, so that numbers of
    rows are those of the file.
    """

    name: ClassVar[str]
    """Name in `Schema.format` and in --format."""

    @abstractmethod
    def recognizes(self, start: bytes) -> bool:
        """Return whether a file that begins with `start` (unpacked, without a byte order mark) has
        this format.
        """

    @abstractmethod
    def columns(self, path: str, schema: Schema) -> tuple[str, ...]:
        """Return the names of a file's columns in file order, without those of its folders; none
        if it is empty. Raises InputError for a damaged file.
        """

    @abstractmethod
    def tables(self, path: str, schema: Schema, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the named columns of a file, a few MB of rows at a time. Columns that it lacks are
        absent or null. Raises InputError for a damaged file.
        """


class LineFormat(Format):
    """Format with one row a line. Empty lines are skipped.

    A request to a server may have such lines too: they are parsed as those of a file.
    """

    @abstractmethod
    def parse(self, text: bytes, columns: Sequence[str] | None, lists: Collection[str]) -> pa.Table:
        r"""Return the rows of complete lines, which end with \n, with the column FAULT.

        `columns` are the names to return, null where a row lacks one. None: all that the lines
        have. Columns in `lists` must be lists; others may be too if `columns` is None.
        """

    def columns(self, path: str, schema: Schema) -> tuple[str, ...]:
        # Sparse formats name a column only in rows that have it, so the start of a file may lack
        # some of the schema's.
        text = next(line_blocks(path, schema), b"")
        if not text:
            return ()
        found = self.parse(text, None, schema.lists).column_names
        found = [name for name in found if name != FAULT]
        return (*found, *(name for name in self.rare_columns(schema) if name not in found))

    def rare_columns(self, schema: Schema) -> tuple[str, ...]:
        """Return the schema's columns that few rows of a file may have."""
        del schema
        return ()

    def tables(self, path: str, schema: Schema, columns: Sequence[str]) -> Iterator[pa.Table]:
        for text in line_blocks(path, schema):
            table = self.parse(text, columns, schema.lists)
            if table.num_rows:
                yield table
