"""Parsing of request rows with the parsers of the training log, and its errors."""

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.config import InputError, error_line
from rayrec.data.encoding.rules import seconds_of
from rayrec.data.features.lookups import open_named
from rayrec.data.formats.base import LineFormat
from rayrec.data.formats.csv_reader import read_csv_text
from rayrec.data.formats.row_faults import FAULT
from rayrec.data.formats.typed_header import split_types
from rayrec.data.json_rows import (
    BOOLEAN,
    DECIMAL,
    INTEGER,
    STRING,
    JsonRows,
    find_indices,
)
from rayrec.data.logs.column_values import LIMIT
from rayrec.data.logs.faults import LABEL_FAULT, Fault
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.logs.text_parser import TextParser, padded
from rayrec.data.raw_block import RawBlock
from rayrec.schema import Schema
from rayrec.serve.requests import (
    RequestBody,
    RequestError,
    count_byte,
    first_fields,
    row_ends,
    shorten,
)

MAX_INTEGER = 10**18 - 1

_EMPTY_LINE: Final = re.compile(rb"^\s*\n", re.MULTILINE)

Outcome = slice | RequestError
"""Result of one body: its range of the rows that were read together, or its error."""


class RowReader(ABC):
    """Parser of request bodies with one schema."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema.unlabelled()
        self._with_label = schema
        self._ignored = tuple(name for name in schema.columns if name not in self.schema.columns)
        self._known = {*self.schema.columns, *self._ignored}
        self._line_columns = functools.cache(self._find_line_columns)
        self._names = schema.columns
        self._kinds = np.full(len(self._names), STRING | INTEGER | DECIMAL | BOOLEAN, np.uint8)
        """Kinds of JSON values that become columns without an object each, by name, uint8. Of
        ignored columns, all.
        """

    @abstractmethod
    def read(self, bodies: Sequence[RequestBody]) -> tuple[RawBlock, list[Outcome]]:
        """Return the concatenated rows of valid bodies, without labels, and the outcome of each
        body.
        """

    def _split_rows(self, body: RequestBody) -> JsonRows | None:
        """Return the rows of a JSON request if they become columns without an object for each
        value. A request that was opened for another schema does not.
        """
        split = body.split
        if split is None or split.names != self._names or not split.has_only(self._kinds):
            return None
        return split

    def _check_names(self, row: Any, number: int) -> None:
        if type(row) is not dict:
            raise RequestError(400, f"row {number} is {kind_of(row)}, not an object", row=number)
        if row.keys() <= self._known:
            return
        unknown = next(name for name in row if name not in self._known)
        raise RequestError(
            400,
            f"row {number} has an unknown column {shorten(unknown)}",
            row=number,
            field=shorten(unknown),
        )

    def _find_line_columns(self, num_fields: int, label: bool | None) -> tuple[str, ...]:
        """Return the column names of a line without a header: all of the training log, or those
        without the ignored ones. `label`: whether the client says that lines have these. Raises
        RequestError if their order is unknown, or if the number of fields fits no kind of line, or
        not the client's kind.
        """
        forms = self._with_label.line_forms
        if not forms:
            raise RequestError(
                400,
                "rows without a header have no known order of columns, since "
                f"{self._why_no_order()}",
                row=0,
            )
        full = forms[0]
        bare = forms[-1]
        allowed = {None: (bare, full), True: (full,), False: (bare,)}[label]
        columns = next((form for form in allowed if len(form) == num_fields), None)
        if columns is None:
            ignored = [name for name in full if name not in bare]
            also = (
                f", or {len(full)} with {' and '.join(ignored)}"
                if label is None and ignored
                else ""
            )
            raise RequestError(
                400,
                f"row 0 has {num_fields} columns; {len(allowed[0])} are needed{also}",
                row=0,
            )
        for name in self.schema.columns:
            if name not in columns and name not in self.schema.optional:
                reason = "which the training log's lines lack (its folders have it)"
                raise RequestError(
                    400,
                    f"a row needs column {name}, {reason}; send application/json",
                    row=0,
                    field=name,
                )
        return columns

    def _why_no_order(self) -> str:
        if self.schema.header is None:
            why = "the model is from an earlier version, which did not store it"
        else:
            why = "its training log had none (a DataFrame, or files that differ)"
        return f"{why}; send application/json{self._other_format}"

    _other_format = ""
    """Further format with column names, as the end of a message."""


# One parser for all formats, that of the training log, so that scores are those of training:
#
#   JSON objects                  lines of text, labelled 0
#   lines like the log's          as they are
#   lines with other columns      reordered first
#   a line with an invalid label  its label is cut off: nobody reads it
@final
class HexadecimalReader(RowReader):
    """Reader for schemas with hexadecimal tokens. The native parser reads text, and JSON rows as
    lines of text.
    """

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema)
        self._indices = find_indices(self._names, (*self.schema.dense, *self.schema.sparse))
        num_dense = len(self.schema.dense)
        self._kinds[self._indices[:num_dense]] = INTEGER
        self._kinds[self._indices[num_dense:]] = STRING

    def read(self, bodies: Sequence[RequestBody]) -> tuple[RawBlock, list[Outcome]]:
        parser = TextParser(self.schema, sum(body.num_rows for body in bodies))
        outcomes: list[Outcome] = []
        for body in bodies:
            start = parser.rows
            try:
                if body.format == "csv":
                    raise RequestError(
                        415,
                        "rows of this model must be application/json or text/tab-separated-values",
                    )
                if body.format == "json":
                    self._parse(parser, self._json_lines(body), labelled=True)
                else:
                    num_fields = 1 + body.text.partition(b"\n")[0].count(b"\t")
                    columns = self._line_columns(num_fields, body.label)
                    if columns[
                        -len(self.schema.columns) :
                    ] == self.schema.columns and num_fields <= 1 + len(self.schema.columns):
                        self._parse(
                            parser,
                            body.text,
                            labelled=columns != self.schema.columns,
                        )
                    else:
                        self._parse(
                            parser,
                            self._reordered(body.text, columns),
                            labelled=False,
                        )
                outcomes.append(slice(start, parser.rows))
            except RequestError as error:
                # Rows of a rejected body, which the parser has taken until its fault.
                parser.drop_after(start)
                outcomes.append(error)
        return parser.block(), outcomes

    def _parse(self, parser: TextParser, text: bytes, *, labelled: bool) -> None:
        start = parser.rows
        faults = parser.parse(padded(text), len(text), labelled=labelled)
        if labelled and LABEL_FAULT in faults.counts:  # Labels are ignored, so invalid ones too
            parser.drop_after(start)
            self._parse(parser, re.sub(rb"(?m)^[^\t\n]*\t", b"", text), labelled=False)
        elif faults.total:
            fault = faults.first[0]
            raise _row_error(fault, text.count(b"\n", 0, fault.byte or 0))

    def _reordered(self, text: bytes, columns: Sequence[str]) -> bytes:
        """Return lines with the columns of the schema, from lines of a log with other columns or
        another order.
        """
        _reject_empty_lines(text, "\t")
        table = read_csv_text(
            text,
            self.schema,
            delimiter="\t",
            columns=columns,
            path="the request",
        )
        wrong = np.flatnonzero(table.column(FAULT).to_numpy())
        if len(wrong):
            row = int(wrong[0])
            raise RequestError(
                400,
                f"row {row} has not the {len(columns)} columns of row 0",
                row=row,
            )
        absent = pa.array([b""] * table.num_rows, pa.large_binary())
        values = [
            table.column(name).combine_chunks() if name in table.column_names else absent
            for name in self.schema.columns
        ]
        lines = pc.binary_join_element_wise(*values, pa.scalar(b"\t", pa.large_binary()))
        joined = pa.LargeListArray.from_arrays(pa.array([0, len(lines)], pa.int64()), lines)
        return pc.binary_join(joined, pa.scalar(b"\n", pa.large_binary()))[0].as_py()

    def _json_lines(self, body: RequestBody) -> bytes:
        """Return the rows of a JSON request as labelled lines."""
        split = self._split_rows(body)
        return self._lines(body.objects()) if split is None else split.lines(self._indices)

    def _lines(self, rows: list[Any]) -> bytes:
        """Return JSON rows as labelled lines. Raises RequestError for values that lines cannot
        have; the parser checks others.
        """
        dense = self.schema.dense
        sparse = self.schema.sparse
        lines = []
        for number, row in enumerate(rows):
            self._check_names(row, number)
            fields = []
            for value in map(row.get, dense):
                if value is None:
                    fields.append("")
                elif type(value) is int:
                    fields.append(str(value))
                else:
                    fields.append(self._integer_text(row, number, value))
            fields += ["" if value is None else value for value in map(row.get, sparse)]
            try:
                lines.append("0\t" + "\t".join(fields))
            except TypeError:
                raise _hexadecimal_error(
                    next(n for n in sparse if not isinstance(row.get(n), str | None)),
                    number,
                ) from None
        text = "\n".join(lines).encode()
        ends = [count_byte(text, byte) for byte in b"\t\n\r"]
        if ends != [len(rows) * (len(dense) + len(sparse)), len(rows) - 1, 0]:
            raise next(
                _hexadecimal_error(name, number)
                for number, row in enumerate(rows)
                for name in sparse
                if {*(row.get(name) or "")} & {"\t", "\n", "\r"}
            )
        return text

    def _integer_text(self, row: dict[str, Any], number: int, value: Any) -> str:
        # In JSON, 3.0 is an integer
        if type(value) is float and value.is_integer() and abs(value) <= MAX_INTEGER:
            return str(int(value))
        name = next(name for name in self.schema.dense if row.get(name) is value)
        wrong = (
            "has more than 18 digits"
            if type(value) is float and value.is_integer()
            else f"is {kind_of(value)}, not an integer"
        )
        raise RequestError(400, f"row {number}: {name} {wrong}", row=number, field=name)


def _hexadecimal_error(name: str, number: int) -> RequestError:
    return RequestError(
        400,
        f"row {number}: {name} is not 8 hexadecimal digits as a string",
        row=number,
        field=name,
    )


@final
class AnyReader(RowReader):
    """Reader for schemas with any tokens. Converts JSON and text to Arrow columns, as for log
    files.
    """

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema)
        columns = self.schema.columns
        self._has_lists = bool(self.schema.list_columns or self.schema.list_numbers)
        self._conversions = {name: self._conversion(name) for name in columns}
        self._numbers = tuple(
            name for name, (_, kind) in self._conversions.items() if kind == pa.float64()
        )
        self._texts = tuple(name for name in columns if name not in self._numbers)
        self._number_indices = find_indices(self._names, self._numbers)
        self._text_indices = find_indices(self._names, self._texts)
        self._kinds[self._number_indices] = INTEGER | DECIMAL | BOOLEAN
        for name in self._texts:
            # A time is not written as a decimal number of other digits
            is_time = self._conversions[name][0] is time_text
            other = INTEGER if is_time else INTEGER | BOOLEAN
            self._kinds[find_indices(self._names, [name])] = STRING | other

    def read(self, bodies: Sequence[RequestBody]) -> tuple[RawBlock, list[Outcome]]:
        parts: list[RawBlock] = []
        outcomes: list[Outcome] = []
        rows = 0
        for body in bodies:
            try:
                raw, faults = parse_table(self._table_of(body), self.schema)
                if faults.total:
                    raise _row_error(faults.first[0], faults.first[0].row or 0)
                outcomes.append(slice(rows, rows + raw.rows))
                rows += raw.rows
                parts.append(raw)
            except RequestError as error:
                outcomes.append(error)
            except InputError as error:
                outcomes.append(RequestError(400, error_line(error)))
        return RawBlock.concatenated(parts or [RawBlock.empty(self.schema)]), outcomes

    def _table_of(self, body: RequestBody) -> pa.Table:
        if body.format == "json":
            table = self._split_table(body)
            return self._table(body.objects()) if table is None else table
        if body.line_format is not None:
            return self._parse_lines(body.text, body.line_format)
        return self._split(body)

    def _parse_lines(self, text: bytes, line_format: LineFormat) -> pa.Table:
        """Parse lines of a format, which name their columns. Those that the log lacks are ignored,
        as in files.
        """
        empty = _EMPTY_LINE.search(text)
        if empty:
            row = count_byte(text[: empty.start()], ord("\n"))
            raise RequestError(400, f"row {row}: empty line", row=row)
        table = line_format.parse(text, self.schema.columns, self.schema.list_columns)
        absent = [name for name in self.schema.columns if name not in table.column_names]
        for name in absent:
            table = table.append_column(name, pa.nulls(len(table)))
        if all(table.column(name).null_count == len(table) for name in self.schema.columns):
            raise RequestError(
                400,
                f"no line of this {line_format.name} text has a column of the training log",
            )
        return table

    def _split_table(self, body: RequestBody) -> pa.Table | None:
        """Return what `_table` does, without an object for each value. None if some need one."""
        split = None if self._has_lists else self._split_rows(body)
        if split is None:
            return None
        numbers = split.numbers(self._number_indices)
        if numbers is None:
            return None
        arrays = dict(zip(self._numbers, numbers, strict=True))
        texts = split.texts(self._text_indices)
        arrays.update(zip(self._texts, texts, strict=True))
        return pa.table({name: arrays[name] for name in self.schema.columns})

    def _table(self, rows: list[Any]) -> pa.Table:
        for number, row in enumerate(rows):
            self._check_names(row, number)
        arrays: dict[str, pa.Array] = {}
        lists = (*self.schema.list_columns, *self.schema.list_numbers)
        # Columns of a type are slices of one long column, so that Arrow makes few
        long_columns: dict[pa.DataType, list[Any]] = {pa.float64(): [], pa.large_string(): []}
        for name, (item_of, kind) in self._conversions.items():
            values: Iterator[Any] = (row.get(name) for row in rows)
            if name in lists:
                arrays[name] = pa.array(_lists(values, name, item_of), pa.large_list(kind))
            else:
                long_columns[kind] += [
                    item_of(value, name, number) for number, value in enumerate(values)
                ]
        for kind, long_column in long_columns.items():
            column = pa.array(long_column, kind)
            names = self._numbers if kind == pa.float64() else self._texts
            for index, name in enumerate(name for name in names if name not in lists):
                arrays[name] = column.slice(index * len(rows), len(rows))
        return pa.table({name: arrays[name] for name in self._conversions})

    def _conversion(self, name: str) -> tuple[Callable[[Any, str, int], Any], pa.DataType]:
        """Return the function that converts a column's JSON values, and their type."""
        source = self.schema.program.sources.get(name)
        if name in self.schema.dense or name in self.schema.list_numbers:
            return self._number, pa.float64()
        if source is not None and source.kind == "number":
            return self._number, pa.float64()
        if source is not None and source.kind == "time":
            return time_text, pa.large_string()
        return token_text, pa.large_string()

    def _number(self, value: Any, name: str, row: int) -> float | None:
        if type(value) is str and value in self.schema.missing:
            return None
        return _number(value, name, row)

    _other_format = ", or text/csv with a header"

    def _split(self, body: RequestBody) -> pa.Table:
        """Parse text: TSV without a header, CSV with one if its first line is the columns'
        names.
        """
        if body.delimiter == self.schema.list_delimiter:
            raise RequestError(
                415,
                "columns and lists have the same delimiter in this format; send application/json",
            )
        if body.text.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise RequestError(400, "the request is UTF-16; send UTF-8", row=0)
        text = body.text
        fields = first_fields(body.text, body.delimiter, self.schema.escape)
        names, _ = split_types(fields)
        if self._has_header(body, names):
            columns: Sequence[str] = names
            _, start = next(
                row_ends(text, body.delimiter, self.schema.escape),
                (len(text), len(text)),
            )
            text = text[start:]
        else:
            columns = self._line_columns(len(names), body.label)
        if not text:
            raise RequestError(400, "the request has no rows")
        _reject_empty_lines(text, body.delimiter, self.schema.escape)
        return read_csv_text(
            text,
            self.schema,
            delimiter=body.delimiter,
            columns=columns,
            path="the request",
        )

    def _has_header(self, body: RequestBody, names: Sequence[str]) -> bool:
        """Return whether the first line is a header: as the client specifies, else whether it has
        all columns' names, in any order. Raises RequestError if it is invalid, as with names that
        the log lacks, or if the format has no header.
        """
        accepted = {*self._known, *(self.schema.header or ())}
        names_columns = set(self.schema.columns) <= set(names)
        if not (names_columns if body.header is None else body.header):
            return False
        if body.format == "tsv":
            raise RequestError(
                400,
                "row 0 names columns; text/tab-separated-values has no header, text/csv may have "
                "one",
                row=0,
            )
        for name in names:
            if name not in accepted:
                raise RequestError(
                    400,
                    f"the header has an unknown column {shorten(name)}",
                    field=shorten(name),
                )
            if names.count(name) > 1 and name in self._known:
                raise RequestError(
                    400,
                    f"the header names {name} {names.count(name)} times",
                    field=name,
                )
        for name in self.schema.columns:
            if name not in names:
                raise RequestError(400, f"the header does not name {name}", field=name)
        return True


def _reject_empty_lines(text: bytes, delimiter: str, escape: str | None = None) -> None:
    """Raise RequestError for an empty line. Skipping it would shift the numbers of later rows."""
    row_start = 0
    for row, (start, end) in enumerate(row_ends(text, delimiter, escape)):
        if start == row_start:
            raise RequestError(400, f"row {row}: empty line", row=row)
        row_start = end


def _number(value: Any, name: str, row: int) -> float | None:
    if value is None:
        return None
    if type(value) is str and (seconds := seconds_of(value)) is not None:
        return seconds
    if type(value) not in (int, float, bool):
        raise RequestError(
            400,
            f"row {row}: {name} is {kind_of(value)}, not a number",
            row=row,
            field=name,
        )
    if not -LIMIT <= value <= LIMIT:
        raise RequestError(400, f"row {row}: {name} is beyond 10^18", row=row, field=name)
    return float(value)


def token_text(value: Any, name: str, number: int) -> str | None:
    """Return a category as text. Integers become their digits, true and false 1 and 0, as in
    files.
    """
    if value is None or type(value) is str:
        return value
    # Larger ones are rounded
    if type(value) is float and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if type(value) in (int, bool):
        return str(int(value))  # orjson reads integers beyond 64 bits as floats
    if type(value) is float and not -(2.0**63) < value < 2.0**64:
        why = "beyond 64 bits; send its digits as a string"
        raise RequestError(400, f"row {number}: {name} is a number {why}", row=number, field=name)
    kind = (
        "a number from 2^53 on that is written as a float"
        if type(value) is float and abs(value) >= 2**53
        else kind_of(value)
    )
    raise RequestError(
        400,
        f"row {number}: {name} is {kind}, not a string or an integer",
        row=number,
        field=name,
    )


def time_text(value: Any, name: str, row: int) -> str | None:
    """Return a time as in text files: the text of a date or time, or a number since 1970."""
    if value is None or type(value) is str:
        return value
    if type(value) not in (int, float):
        raise RequestError(
            400,
            f"row {row}: {name} is {kind_of(value)}, not a time",
            row=row,
            field=name,
        )
    return repr(value)


def _lists(
    values: Iterator[Any],
    name: str,
    item_of: Callable[[Any, str, int], Any],
) -> list[list[Any] | None]:
    """Convert the items of lists with `item_of` (item, name, row)."""
    lists: list[list[Any] | None] = []
    for number, value in enumerate(values):
        if value is not None and type(value) is not list:
            raise RequestError(
                400,
                f"row {number}: {name} is {kind_of(value)}, not a list",
                row=number,
                field=name,
            )
        lists.append(None if value is None else [item_of(item, name, number) for item in value])
    return lists


def _row_error(fault: Fault, row: int) -> RequestError:
    location = f" in column {fault.column}" if fault.column else ""
    return RequestError(
        400,
        f"row {row}: {fault.kind}{location}",
        row=row,
        field=fault.column or None,
    )


def kind_of(value: Any) -> str:
    """Return a phrase for the type of a JSON value."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(
        type(value),
        "a number that is not an integer" if type(value) is float else "a number",
    )


def make_reader(schema: Schema) -> RowReader:
    """Return the reader of a schema. It ignores labels, row weights and timestamps, unless a side
    table depends on the time. Opens the side tables. Raises InputError if one has another content
    than the schema.
    """
    for name in schema.table_names:
        open_named(schema, name)
    return HexadecimalReader(schema) if schema.tokens == "hexadecimal" else AnyReader(schema)
