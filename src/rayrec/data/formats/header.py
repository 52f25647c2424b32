"""Header of a CSV file: its delimiter, its column names, and whether the first row is data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Final

from rayrec.config import InputError
from rayrec.data.encoding.rules import seconds_of
from rayrec.data.formats.typed_header import split_types
from rayrec.schema import Schema

_BLANKS: Final = " \t"
_MAX_FIELDS: Final = 10_000
_COMPARED_ROWS: Final = 200
_COMPARED_LETTERS: Final = 64 << 10
"""Maximum rows and letters below the first row that are compared with it."""
_MIN_REGULAR: Final = 0.9
"""Minimum fraction of rows with one number of fields if a mark is the delimiter."""
DOUBLE_COLON: Final = "::"
"""Delimiter of several characters that is found in files, such as MovieLens's."""
_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_MIN_NUMBERED: Final = 8
"""Minimum number of columns that may be named 0, 1, 2, ..., as pandas names them. A row of data
rarely counts as far.
"""


@dataclass(frozen=True)
class Header:
    """Delimiter and column names of a CSV file."""

    delimiter: str
    columns: tuple[str, ...]
    """Name of each field of a row."""
    is_row: bool
    """Whether the first row has the names. False: it has data."""


def quoted_text(escape: str | None) -> str:
    """Return the pattern of a quoted field's text between its quotes. In it, a doubled quote, or
    one behind the escape character, is a quote.
    """
    if escape is None:
        return r'(?:[^"]|"")*+'
    mark = re.escape(escape)
    return rf'(?:[^"{mark}]|""|{mark}.)*+'


def _plain_text(delimiter: str) -> str:
    """Return the pattern of text up to the next delimiter or line end."""
    mark = re.escape(delimiter)
    return rf"[^\r\n{mark}]*+" if len(delimiter) == 1 else rf"(?:(?!{mark})[^\r\n])*+"


@lru_cache(maxsize=64)
def row_pattern(delimiter: str, escape: str | None) -> str:
    """Return the pattern of a row up to its line end. Line ends in quoted fields do not end it."""
    field = rf'(?:"{quoted_text(escape)}")?+{_plain_text(delimiter)}'
    return rf"{field}(?:{re.escape(delimiter)}{field})*+"


@lru_cache(maxsize=64)
def _patterns(marks: str, escape: str | None) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of a quoted field, and of a row up to its line end, for some possible
    one-character delimiters.
    """
    quoted = rf'(?<![^{re.escape(marks)}\r\n])"{quoted_text(escape)}"'
    return re.compile(quoted, re.DOTALL), re.compile(rf'(?:[^\r\n"]++|{quoted}|")++', re.DOTALL)


def split_fields(row: str, delimiter: str, escape: str | None = None) -> list[str]:
    """Split one row into its fields, without quotes. Quoted fields may contain the delimiter."""
    mark = re.escape(delimiter)
    matches = re.finditer(
        rf'(?:^|{mark})(?:"({quoted_text(escape)})")?({_plain_text(delimiter)})', row, re.DOTALL
    )
    return [_unquoted(match[1] or "", escape) + match[2] for match in islice(matches, _MAX_FIELDS)]


def _unquoted(text: str, escape: str | None) -> str:
    if escape is None:
        return text.replace('""', '"')
    mark = re.escape(escape)
    return re.sub(rf'"(")|{mark}(["{mark}])', lambda match: match[1] or match[2], text)


def find_delimiter(text: str, schema: Schema) -> str:
    """Return the delimiter: the schema's, or in place of the default, a tab, the mark that occurs
    most in the first row, outside quotes. `::` is the delimiter if it divides most of the first
    rows into one number of fields, and that mark does not.
    """
    if schema.delimiter != "\t":
        return schema.delimiter
    marks = "\t,;".replace(schema.list_delimiter, "")
    quoted, row = _patterns(marks, schema.escape)
    first = row.search(text)
    plain = quoted.sub("", first[0]) if first else ""
    likely = "\t" if "\t" in plain else max(marks, key=plain.count)
    if DOUBLE_COLON not in plain or schema.list_delimiter in DOUBLE_COLON:
        return likely
    for mark in (likely, DOUBLE_COLON):
        if regular_fields(text, mark, schema.escape) > 1:
            return mark
    return likely


def regular_fields(text: str, delimiter: str, escape: str | None) -> int:
    """Return the field count that most rows at the start of a text have, 0 if it differs."""
    counts = Counter(len(fields) for fields in head_rows(text, delimiter, escape))
    if not counts:
        return 0
    number, rows = counts.most_common(1)[0]
    return number if rows >= _MIN_REGULAR * counts.total() else 0


def head_rows(text: str, delimiter: str, escape: str | None) -> Iterator[list[str]]:
    """Yield the fields of each row that is not empty, of the first row and up to _COMPARED_ROWS
    below it that have a line end.
    """
    row = re.compile(rf"(?=[^\r\n]){row_pattern(delimiter, escape)}", re.DOTALL)
    first = row.search(text)
    if first is None:
        return
    yield split_fields(first[0], delimiter, escape)
    below = text[first.end() : first.end() + _COMPARED_LETTERS]
    for match in islice(row.finditer(below), _COMPARED_ROWS):
        # The end of the text may cut a row, and a part of a value may equal a name.
        if match.end() < len(below):
            yield split_fields(match[0], delimiter, escape)


def looks_like_data(first: Sequence[str], rows: Iterable[Sequence[str]]) -> bool:
    """Return whether the first row of a file is data instead of column names, judged by its fields
    and by the `rows` below. Data are numbers or times, unless they count columns (0, 1, 2, ...),
    and texts that occur again in their own column.
    """
    fields = [field.strip(_BLANKS) for field in first]
    values = [field for field in fields if _is_value(field)]
    counts_up = values in (
        [str(start + number) for number in range(len(values))] for start in (0, 1)
    )
    if values and len(values) == sum(map(bool, fields)):
        return not (counts_up and len(values) >= _MIN_NUMBERED)
    if values and not counts_up:
        return True
    below = [[field.strip(_BLANKS) for field in row] for row in rows]
    below = [row for row in below if row != fields]  # Files joined to one repeat their header
    columns = ([row[number] for row in below if number < len(row)] for number in range(len(fields)))
    return any(map(_recurs, fields, columns))


def _is_value(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None or seconds_of(text) is not None


def _recurs(field: str, values: Sequence[str]) -> bool:
    """Return whether the field of a first row occurs in its column. 0 and 1, which may be names,
    must be the only values.
    """
    return bool(field) and field in values and (not _is_value(field) or {*values} <= {"0", "1"})


def read_header(head: bytes, schema: Schema, *, path: str) -> Header:
    """Return the header in a file's first bytes (without a byte order mark). If the schema's
    delimiter is a tab, the default, a comma, a semicolon or `::` is accepted too. A first row
    without names is data in the order of `Schema.line_forms`. Raises InputError for data of unknown
    order, and for names that differ only in blanks or case.
    """
    text = head.decode("utf-8", "replace")
    delimiter = find_delimiter(text, schema)
    fields, *rows = [*head_rows(text, delimiter, schema.escape)] or [[]]
    first, _ = split_types(fields)
    if _is_header(first, rows, schema):
        _reject_similar(first, schema, path)
        # A schema of an earlier version may have names with blanks.
        names = tuple(field if field in schema.columns else field.strip(_BLANKS) for field in first)
        return Header(delimiter, names, is_row=True)
    columns = schema.line_columns(len(first))
    if columns is None:
        forms = " or ".join(str(len(form)) for form in schema.line_forms)
        counts = (
            f"; it has {len(first)} columns, and lines of this log have {forms}" if forms else ""
        )
        unknown = ", and the training log had no order of columns" if schema.header == () else ""
        raise InputError(
            f"{path}: its first row looks like data, so there is no header{unknown}{counts}. Add "
            "one, or name the columns in file order in the schema of the training: `header: [...]`"
        )
    return Header(delimiter, columns, is_row=False)


def _is_header(first: Sequence[str], rows: Sequence[Sequence[str]], schema: Schema) -> bool:
    """Return whether the first row has names, also wrong ones. If lines have a known order, most
    names of another file are known too. Others are read as data if `header` is declared, or if they
    look like it.
    """
    is_data = looks_like_data(first, rows)
    if not schema.line_forms:
        return not is_data
    names = {field.strip(_BLANKS) for field in first}
    if names.issuperset(name for name in schema.columns if name not in schema.optional):
        return True
    trained = {name.casefold() for form in (schema.line_forms[0], schema.columns) for name in form}
    if 2 * sum(name.casefold() in trained for name in names) >= len(first):
        return True
    columns = schema.line_columns(len(first))
    if columns is None:
        return not is_data
    is_declared = schema.header is not None and not schema.header_row
    numeric = {*schema.dense, *schema.dropped, *schema.label_names}
    has_number = any(
        name in numeric and _is_value(field.strip(_BLANKS))
        for name, field in zip(columns, first, strict=True)
    )
    return not (is_declared or is_data or has_number)


def _reject_similar(names: Sequence[str], schema: Schema, path: str) -> None:
    """Check that no other name is a column's name but for blanks and case. Raises InputError.
    Columns that differ so in the schema itself are found by their exact names.
    """
    for column in schema.columns:
        similar = [
            name
            for name in dict.fromkeys(names)
            if name.strip(_BLANKS).casefold() == column.strip(_BLANKS).casefold()
        ]
        if len(similar) > 1 and not {*similar} <= {*schema.columns}:
            raise InputError(
                f"{path}: names {' and '.join(map(repr, similar))} differ only in blanks or case; "
                "rename one in the header"
            )
