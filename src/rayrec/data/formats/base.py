"""Interface of file formats: recognized from content, read as Arrow tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from rayrec import storage
from rayrec.data.formats.row_faults import FAULT
from rayrec.data.formats.text_stream import line_blocks
from rayrec.schema import Schema


@dataclass(frozen=True)
class Roles:
    """Uses of columns that a format itself names, for drafts of schemas."""

    list_weights: Mapping[str, str] = field(default_factory=dict)
    """Column of weights of each list."""
    weight: str | None = None
    """Column with the row's weight in the training loss."""
    group: str | None = None
    """Column within whose values rows are ranked."""
    unused: Mapping[str, str] = field(default_factory=dict)
    """Columns that are no input of a model, with the reasons."""


class Format(ABC):
    """Format of a log's files. One instance serves all files, in any process and thread.

    `tables` yields all rows of a file in order, with the file's own columns and names. Rows that
    cannot be read stay, as empty values with their fault in the column FAULT, so that numbers of
    rows are those of the file.
    """

    name: ClassVar[str]
    """Name in `Schema.format` and in --format."""
    is_sparse: ClassVar[bool] = False
    """Whether rows name the columns that they have, so that a file may lack some of the log's."""

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
    def tables(
        self, path: str, schema: Schema, columns: Sequence[str] | None
    ) -> Iterator[pa.Table]:
        """Yield the named columns of a file, a few MB of rows at a time. Columns that it lacks are
        absent or null. None: all that the rows have. Raises InputError for a damaged file.
        """

    def cache_key(self, file: storage.File) -> tuple[object, tuple[object, ...]]:
        """Return what a copy of a file's rows belongs to, and the version of its rows."""
        return file.path, (file.size_bytes, file.modified_ns)

    def roles(self, columns: Sequence[str]) -> Roles:
        """Return the uses of the columns of a file that the format itself names."""
        del columns
        return Roles()


class LineFormat(Format):
    """Format with a row a line, or several. Empty lines are skipped.

    A request to a server may have lines of one row too: they are parsed as those of a file.
    """

    has_row_per_line: ClassVar[bool] = True
    """Whether each line is one row."""

    @abstractmethod
    def parse(self, text: bytes, columns: Sequence[str] | None, lists: Collection[str]) -> pa.Table:
        r"""Return the rows of complete lines, which end with \n, with the column FAULT.

        `columns` are the names to return, null where a row lacks one. None: all that the lines
        have. Columns in `lists` must be lists; others may be too if `columns` is None.
        """

    def columns(self, path: str, schema: Schema) -> tuple[str, ...]:
        text = next(line_blocks(path, schema), b"")
        names = self.parse(text, None, schema.list_columns).column_names if text else []
        return tuple(name for name in names if name != FAULT)

    def tables(
        self, path: str, schema: Schema, columns: Sequence[str] | None
    ) -> Iterator[pa.Table]:
        for text in line_blocks(path, schema):
            table = self._parse_named(text, columns, schema)
            if table.num_rows:
                yield table

    def _parse_named(self, text: bytes, columns: Sequence[str] | None, schema: Schema) -> pa.Table:
        """Return the rows of lines. Columns that are none of the schema's cannot make a row
        invalid: they are taken as the lines have them.
        """
        unread = [name for name in columns or () if name not in schema.columns]
        if columns is None or not unread:
            return self.parse(text, columns, schema.list_columns)
        named = [name for name in columns if name in schema.columns]
        table = self.parse(text, named, schema.list_columns)
        every = self.parse(text, None, schema.list_columns)
        absent = [name for name in unread if name not in every.column_names]
        empty = self.parse(text, absent, schema.list_columns)
        for name in unread:
            source = empty if name in absent else every
            has_column = name in source.column_names
            values = source.column(name) if has_column else pa.nulls(table.num_rows)
            table = table.append_column(name, values)
        return table
