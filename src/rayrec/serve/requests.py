"""A request before its rows are read: format and number of rows, and the errors that clients get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

Format = Literal["json", "tsv", "csv"]
FORMATS: dict[str, Format] = {
    "application/json": "json",
    "text/tab-separated-values": "tsv",
    "text/csv": "csv",
}
"""What is taken, by media type."""


_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class RequestError(Exception):
    """A request that is not answered with scores: its status, and the message to its sender."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        row: int | None = None,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.row, self.field, self.headers = status, message, row, field, headers or {}

    def body(self) -> bytes:
        return orjson.dumps({"error": {"message": self.message, "row": self.row, "field": self.field}})


@dataclass(frozen=True)
class Body:
    """The rows of one request, not looked at yet."""

    format: Format
    num_rows: int
    """Never less than there are."""
    num_bytes: int
    """As it came."""
    rows: list[Any] | None = None
    """Of JSON."""
    text: bytes = b""
    """Of other formats, without a byte order mark."""
    header: bool | None = None
    """Whether the first line of CSV names columns; None: the client does not say."""


def open_body(
    content: bytes, format: Format, *, max_rows: int, header: bool | None = None, single_column: bool = False
) -> Body:
    """`single_column`: the schema has one column, so an empty line at the end counts as a line. Raises RequestError for content
    that is no request at all, and for too many rows."""
    if format == "json":
        body = _open_json(content)
    else:
        text = content.removeprefix(_BYTE_ORDER_MARK)
        if not single_column:
            text = text.rstrip(b"\r\n")
        # A row ends with \n, \r\n, or, of CSV, with \r.
        ends = text.count(b"\n") + text.count(b"\r") - text.count(b"\r\n")
        num_rows = ends + (bool(text) and not text.endswith((b"\n", b"\r")))
        body = Body(format, num_rows, len(content), text=text, header=header)
    if not body.num_rows:
        raise RequestError(400, "the request holds no row", field="rows" if format == "json" else None)
    lines = max_rows + (format == "csv" and header is not False)  # one may be a header
    if body.num_rows > lines:
        raise RequestError(
            413, f"{body.num_rows} rows in one request, at most {max_rows} are taken; send them in several requests"
        )
    return body


def _open_json(content: bytes) -> Body:
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"not JSON: {error}") from None
    if type(found) is not dict:
        raise RequestError(400, 'a JSON request is an object, {"rows": [{...}, ...]}')
    for name in found:
        if name != "rows":
            raise RequestError(400, f"unknown field {shown(name)}; there is only rows", field=shown(name))
    if type(found.get("rows")) is not list:
        raise RequestError(400, "rows must be a list of objects", field="rows")
    return Body("json", len(found["rows"]), len(content), rows=found["rows"])


def shown(name: str) -> str:
    """A name from outside, short enough for an answer."""
    return name if len(name) <= 64 else name[:64] + "..."
