"""Parser of tab-separated text to a RawBlock, with counts of all invalid lines."""

import ctypes

import numpy as np

from rayrec.data.logs.faults import LABEL_FAULT, LABEL_LETTERS, Fault, Faults, distinct_labels
from rayrec.data.raw_block import RawBlock, category_type, number_type
from rayrec.native import c_fields, call
from rayrec.schema import Schema

FAULT_KINDS = (
    "empty line",
    "too few columns",
    "too many columns",
    LABEL_FAULT,
    "not an integer",
    "not 8 hexadecimal digits",
    "line too long",
)
"""Kinds in the order of rayrec_fault_kind in native/kernels.h."""
MAX_LINE_BYTES = 4096
PADDING_BYTES = 64  # RAYREC_TEXT_PADDING


# The structs of native/kernels.h, field by field. They point into arrays of this process, which
# must outlive the call.
class CLayout(ctypes.Structure):
    _fields_ = c_fields("int32 has_label num_dense num_sparse max_line_bytes")


class CRawRows(ctypes.Structure):
    _fields_ = c_fields("void* integers tokens missing labels; int64 capacity")


_FAULT_DTYPE = np.dtype([("byte", np.int64), ("kind", np.int32), ("column", np.int32)])


def max_rows_in(schema: Schema, length: int) -> int:
    """Return the maximum number of rows in `length` bytes: a row has a byte per separator and one
    for its label.
    """
    return length // (len(schema.columns) + (1 if schema.label else 0)) + 1


def padded(text: bytes | bytearray | memoryview | np.ndarray) -> np.ndarray:
    """Return a copy of the text with the padding that the parser may read."""
    source = text if isinstance(text, np.ndarray) else np.frombuffer(text, np.uint8)
    out = np.zeros(len(source) + PADDING_BYTES, np.uint8)
    out[: len(source)] = source
    return out


class TextParser:
    """Parser of text into columns with room for `capacity` rows; `block` returns them without a
    copy.
    """

    def __init__(self, schema: Schema, capacity: int) -> None:
        self.schema = schema
        self.capacity = capacity
        self.rows = 0
        # np.empty: unused pages are never touched, so a generous capacity costs nothing.
        self._numbers = np.empty((capacity, len(schema.dense)), number_type(schema))
        self._categories = np.empty((capacity, len(schema.sparse)), category_type(schema))
        self._missing = np.empty(capacity, np.uint64)
        self._labels = np.empty(capacity, np.float32)
        columns = (self._numbers, self._categories, self._missing, self._labels)
        self._addresses = [(column.ctypes.data, column.strides[0]) for column in columns]
        self._files: list[tuple[str, int]] = []

    def parse(
        self,
        text: np.ndarray,
        length: int,
        *,
        path: str = "",
        first_byte: int = 0,
        max_faults: int = Faults.keep,
        labelled: bool | None = None,
    ) -> Faults:
        """Append the rows of text[:length], and return the faults among its lines with details of
        the first `max_faults`. `text` is uint8 with PADDING_BYTES after `length`; it begins with a
        line, at `first_byte` of file `path`. `labelled` is whether lines begin with a label. None:
        if the schema has one.
        """
        # The kernel reads up to PADDING_BYTES beyond the text.
        assert text.dtype == np.uint8
        assert len(text) >= length + PADDING_BYTES
        schema = self.schema
        before = self.rows
        if labelled is None:
            labelled = schema.label is not None
        if not self._files or self._files[-1][0] != path:
            self._files.append((path, before))
        counts = np.zeros(len(FAULT_KINDS), np.int64)
        details = np.zeros(max_faults, _FAULT_DTYPE)
        num_details = ctypes.c_int64()
        layout = CLayout(labelled, len(schema.dense), len(schema.sparse), MAX_LINE_BYTES)
        # Points to the first free row of the parser's own arrays, which never move: their capacity
        # is known before the text is parsed.
        out = CRawRows(
            *(start + before * row_bytes for start, row_bytes in self._addresses),
            self.capacity - before,
        )
        parsed = (counts, details, len(details), ctypes.byref(num_details))
        rows = call("rayrec_parse", text, length, ctypes.byref(layout), ctypes.byref(out), *parsed)
        assert rows >= 0, "capacity is derived from the shortest possible row"
        self.rows += rows
        if not counts.any():
            return Faults()
        names = (*([schema.label or ""] * labelled), *schema.dense, *schema.sparse, "")
        located = [
            (start, FAULT_KINDS[kind], names[column])
            for start, kind, column in details[: num_details.value].tolist()
        ]
        by_kind = zip(FAULT_KINDS, counts.tolist(), strict=True)
        faults = Faults(
            {kind: count for kind, count in by_kind if count},
            [Fault(path, first_byte + start, kind, name) for start, kind, name in located],
        )
        wrong = [_label_at(text, start) for start, kind, _ in located if kind == LABEL_FAULT]
        if wrong:
            good = np.unique(self._labels[before : self.rows]).astype(np.int64).astype(str)
            faults.labels[names[0]] = distinct_labels([*wrong, *good.tolist()])
        return faults

    def drop_after(self, row: int) -> None:
        """Drop the rows from number `row` on."""
        self.rows = row
        self._files = [(path, start) for path, start in self._files if start < row]

    def block(self) -> RawBlock:
        """Return the rows; they share memory with rows parsed after `drop_after`."""
        rows = self.rows
        label = self.schema.label
        stops = [*(start for _, start in self._files[1:]), rows][: len(self._files)]
        return RawBlock(
            self.schema,
            self._numbers[:rows],
            self._categories[:rows],
            self._missing[:rows],
            labels={} if label is None else {label: self._labels[:rows]},
            files=tuple(
                (path, start, stop) for (path, start), stop in zip(self._files, stops, strict=True)
            ),
        )


def _label_at(text: np.ndarray, start: int) -> str:
    """Return the text of the label at the start of a line, at most LABEL_LETTERS."""
    line = text[start : start + LABEL_LETTERS].tobytes()
    return line.partition(b"\t")[0].decode("utf-8", "replace")


def parse(schema: Schema, text: bytes, *, path: str = "") -> tuple[RawBlock, Faults]:
    """Parse a small text in memory."""
    parser = TextParser(schema, max_rows_in(schema, len(text)))
    faults = parser.parse(padded(text), len(text), path=path)
    return parser.block(), faults
