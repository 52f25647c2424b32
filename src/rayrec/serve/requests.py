"""Request body before parsing its rows (format, number of rows), and the error that clients
receive.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import orjson

from rayrec.data.formats.base import LineFormat
from rayrec.data.formats.header import DOUBLE_COLON, row_pattern, split_fields
from rayrec.data.formats.header import find_delimiter as find_file_delimiter
from rayrec.data.formats.registry import format_of_text
from rayrec.data.formats.text_stream import with_newlines
from rayrec.data.json_rows import JsonRows, split_rows
from rayrec.schema import Schema

Format = Literal["json", "tsv", "csv", "lines"]
FORMATS: dict[str, Format] = {
    "application/json": "json",
    "text/tab-separated-values": "tsv",
    "text/csv": "csv",
    "text/plain": "lines",
    "application/x-ndjson": "lines",
}
"""Accepted formats by media type. "lines" have the format that a file with them has."""

_SPLIT_BYTES: Final = 2 << 10
"""Bytes of JSON from which on its rows are split by a kernel. Objects of fewer values take less
time than the arrays of the kernel.
"""
_DELIMITED_BYTES: Final = 64 << 10
"""Bytes at the start of a text that show its format and delimiter."""
_NONE: Final[Mapping[str, str]] = {}
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_JSON_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class RequestError(Exception):
    """Error answer to a request: HTTP status and message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        row: int | None = None,
        field: str | None = None,
        headers: Mapping[str, str] = _NONE,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.row = row
        self.field = field
        self.headers = headers

    def body(self) -> bytes:
        return orjson.dumps(
            {"error": {"message": self.message, "row": self.row, "field": self.field}}
        )


@dataclass(frozen=True)
class RequestBody:
    """Unparsed rows of one request."""

    format: Format
    num_rows: int
    """Upper bound of the number of rows."""
    num_bytes: int
    """Number of received bytes."""
    split: JsonRows | None = None
    """Rows of a JSON request with plain values only."""
    rows: list[Any] | None = None
    """Rows of another JSON request, as objects."""
    text: bytes = b""
    """Text of other formats, in UTF-8 without a byte order mark, and of `split`."""
    delimiter: str = "\t"
    """Separator of the text's columns."""
    header: bool | None = None
    """True if CSV has a header. None if the client does not specify it."""
    label: bool | None = None
    """True if lines have the ignored columns too. None if the client does not specify it."""
    line_format: LineFormat | None = None
    """Format of other lines than of CSV and TSV."""

    def objects(self) -> list[Any]:
        """Return the rows of a JSON request as objects."""
        rows = open_objects(self.text).rows if self.rows is None else self.rows
        assert rows is not None
        return rows


def count_byte(text: bytes, value: int) -> int:
    """Count a frequent byte. In long text, NumPy is eight times as fast as `bytes.count`, but it
    releases the GIL, which other threads may keep for a while.
    """
    return (
        text.count(value)
        if len(text) < 4096
        else int(np.count_nonzero(np.frombuffer(text, np.uint8) == value))
    )


def find_delimiter(format: Format, schema: Schema) -> str:
    """Return the column delimiter of a text format. Of CSV, the schema's unless it is the default,
    a tab.
    """
    if format == "tsv":
        return "\t"
    return "," if schema.delimiter == "\t" else schema.delimiter


def _delimiter_in(text: bytes, format: Format, schema: Schema) -> str:
    """Return the column delimiter of a text. Files of a schema with the default may have semicolons
    or `::`, so CSV rows may too. They do if these, and not commas, divide the first row into the
    columns of a line or a header, or into more fields.
    """
    delimiter = find_delimiter(format, schema)
    if format != "csv" or schema.delimiter != "\t":
        return delimiter
    alternatives = [mark for mark in (";", DOUBLE_COLON) if schema.list_delimiter not in mark]
    fields = {mark: first_fields(text, mark, schema.escape) for mark in (delimiter, *alternatives)}
    for mark, names in fields.items():
        if len(names) in map(len, schema.line_forms) or {*schema.unlabelled().columns} <= {*names}:
            return mark
    return max(fields, key=lambda mark: len(fields[mark]))


def first_fields(text: bytes, delimiter: str, escape: str | None) -> list[str]:
    """Return the fields of the first row, without surrounding blanks."""
    end, _ = next(row_ends(text, delimiter, escape), (len(text), len(text)))
    return [
        field.strip(" \t")
        for field in split_fields(text[:end].decode("utf-8", "replace"), delimiter, escape)
    ]


def row_ends(text: bytes, delimiter: str, escape: str | None = None) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each line end (\\n, \\r\\n or \\r) that ends a row. Skips those in
    quoted fields.
    """
    if b'"' not in text:
        yield from (match.span() for match in _LINE_END.finditer(text))
        return
    row = rf"{row_pattern(delimiter, escape)}(\r\n|\n|\r|\Z)".encode()
    yield from (match.span(1) for match in re.finditer(row, text, re.DOTALL) if match[1])


def open_body(
    content: bytes,
    format: Format,
    *,
    schema: Schema,
    max_rows: int,
    header: bool | None = None,
    label: bool | None = None,
) -> RequestBody:
    """Check the body's outline and count its rows. Raises RequestError if it is not a request or
    has too many rows.
    """
    text = content.removeprefix(_BYTE_ORDER_MARK)
    line_format = None
    if format == "lines":
        format, line_format = _format_of_lines(text, schema)
    if format == "json":
        body = _open_json(text, schema, max_rows)
    elif line_format is not None:
        text = with_newlines(text.rstrip(b"\r\n") + b"\n")
        num_rows = count_byte(text, ord("\n"))
        body = RequestBody(format, num_rows, len(content), text=text, line_format=line_format)
    else:
        # With one column, an empty line at the end is a row
        if len(schema.dense) + len(schema.sparse) != 1:
            text = text.rstrip(b"\r\n")
        delimiter = _delimiter_in(text, format, schema)
        if b'"' in text and schema.tokens == "any":
            ends = sum(1 for _ in row_ends(text, delimiter, schema.escape))
        else:
            ends = text.count(b"\n") + text.count(b"\r") - text.count(b"\r\n")
        num_rows = ends + (bool(text) and not text.endswith((b"\n", b"\r")))
        body = RequestBody(
            format,
            num_rows,
            len(content),
            text=text,
            delimiter=delimiter,
            header=header,
            label=label,
        )
    if not body.num_rows:
        raise RequestError(
            400,
            "the request has no rows",
            field="rows" if format == "json" else None,
        )
    lines = max_rows + (format == "csv" and header is not False)  # One line may be a header
    if body.num_rows > lines:
        raise RequestError(
            413,
            f"{body.num_rows} rows in one request, more than the limit of {max_rows}; send them "
            "in several requests",
        )
    return body


# Lines have the format that a file with them has, by the same rules (`find_format`):
#
#   model of hexadecimal tokens   Criteo's text, whatever the lines look like
#   format of lines               that one, whose parser reads the body
#   other text                    TSV if its first rows have tabs, else CSV
def _format_of_lines(text: bytes, schema: Schema) -> tuple[Format, LineFormat | None]:
    """Return how to read lines: as CSV or TSV, or in another format of files."""
    if schema.tokens == "hexadecimal":
        return "tsv", None
    # As of a file, only the start decides. Its last line may be cut, and then has no end.
    start = text[:_DELIMITED_BYTES] if len(text) > _DELIMITED_BYTES else text + b"\n"
    file_format = format_of_text(with_newlines(start), schema)
    if isinstance(file_format, LineFormat):
        if not file_format.has_row_per_line:
            raise RequestError(
                415,
                f"a line of {file_format.name} is several rows; send them as application/json",
            )
        return "lines", file_format
    return (
        "tsv" if find_file_delimiter(start.decode("utf-8", "replace"), schema) == "\t" else "csv",
        None,
    )


def _open_json(content: bytes, schema: Schema, max_rows: int) -> RequestBody:
    split = None
    if len(content) >= _SPLIT_BYTES:
        split = split_rows(content, schema.columns, max_rows=max_rows)
    if split is None:
        return open_objects(content)
    return RequestBody("json", len(split), len(content), split=split, text=content)


def open_objects(content: bytes) -> RequestBody:
    """Open a JSON request with rows of any values, which become Python objects."""
    rows = parse_object(content, fields=("rows",))["rows"]
    return RequestBody("json", len(rows), len(content), rows=rows)


def parse_object(content: bytes, *, fields: Sequence[str]) -> dict[str, Any]:
    """Parse the JSON object of a request, which has no other fields, and a list `rows`. Raises
    RequestError for other text, and for a repeated name.
    """
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"not JSON: {error}") from None
    if type(parsed) is not dict:
        raise RequestError(400, 'a JSON request must be an object, {"rows": [{...}, ...]}')
    for name in parsed:
        if name not in fields:
            expected = f"the only field is {fields[0]}"
            if fields[1:]:
                expected = f"fields are {', '.join(fields)}"
            raise RequestError(
                400,
                f"unknown field {shorten(name)}; {expected}",
                field=shorten(name),
            )
    if type(parsed.get("rows")) is not list:
        raise RequestError(400, "rows must be a list of objects", field="rows")
    members = len(parsed) + sum(len(row) for row in parsed["rows"] if type(row) is dict)
    if (
        count_byte(content, ord(":")) != members
        and _JSON_STRING.sub(b"", content).count(b":") != members
    ):
        _reject_repeated_names(content)
    return parsed


def _reject_repeated_names(content: bytes) -> None:
    """Raise RequestError for an object with a repeated name. Objects nested too deep for this are
    rejected later.
    """

    def check(pairs: list[tuple[str, Any]]) -> None:
        names = set[str]()
        for name, _ in pairs:
            if name in names:
                raise RequestError(
                    400,
                    f"{shorten(name)} occurs twice in one object",
                    field=shorten(name),
                )
            names.add(name)

    with contextlib.suppress(RecursionError):
        json.loads(content, object_pairs_hook=check, parse_int=str)


def shorten(name: str) -> str:
    """Shorten a client's name for an error message."""
    return name if len(name) <= 64 else name[:64] + "..."
