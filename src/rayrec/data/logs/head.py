"""The first rows of a log: whether it has labels, and the refusal of one that cannot be trained on before any process starts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.logs.csv_reader import check_columns, csv_columns, read_csv
from rayrec.data.logs.faults import LABEL_FAULT, Faults
from rayrec.data.logs.parquet import is_parquet, open_parquet
from rayrec.data.logs.table_log import SUFFIXES, column_names, is_table
from rayrec.data.logs.table_parser import check_types, label_faults
from rayrec.data.logs.text_log import Chunk, index_chunk
from rayrec.data.logs.text_parser import MAX_LINE_BYTES
from rayrec.schema import Schema
from rayrec.storage.cache import GZIP_MAGIC, head_of, is_gzip

_HEAD_BYTES: Final = 1 << 16
_HEAD_ROWS: Final = 1000
_MANY_WRONG_LABELS: Final = 0.2
"""Share of the first rows from which on wrong labels are no accident."""


def with_tokens(schema: Schema, files: Sequence[storage.File]) -> Schema:
    """Return a schema whose delimiter is a tab with tokens: hexadecimal, if the files are text without a header. Raises
    InputError for a local text of which no line can be read so."""
    found = [file for file in files if file.size_bytes]
    if not found or any(file.path.lower().endswith(SUFFIXES) for file in found):
        return schema
    hexadecimal = schema.replace(tokens="hexadecimal")
    if not storage.is_url(found[0].path) and not is_gzip(found[0].path):
        _check_text(found[0], hexadecimal)
    return hexadecimal


def check_first_rows(path: str, files: Sequence[storage.File], schema: Schema, max_bad_fraction: float) -> None:
    """Raises InputError if all files of the raw log at `path` are empty, and for the first one that is not, if it lacks a column,
    if no line at its beginning can be parsed, or for many wrong labels there, more than `max_bad_fraction`."""
    first = next((file for file in files if file.size_bytes), None)
    if first is None:
        raise InputError(f"{path}: no usable rows; {'its files are' if files[1:] else 'it is'} empty")
    if is_table(files, schema):
        rows, faults = _check_table(first.path, schema)
    elif not is_gzip(first.path):
        rows, faults = _check_text(first, schema)
    else:
        return
    wrong_labels = faults.wrong_labels()
    if wrong_labels and faults.counts[LABEL_FAULT] > max(_MANY_WRONG_LABELS, max_bad_fraction) * (rows + faults.total):
        raise InputError(f"{first.path}: {wrong_labels}")


def _check_table(path: str, schema: Schema) -> tuple[int, Faults]:
    """Return the good labels among the first rows, and the faults of the others."""
    label, head = schema.label, None
    if is_parquet(path):
        with open_parquet(path) as parquet:
            check_columns(parquet.schema_arrow.names, schema.columns, path=path, optional=schema.optional)
            check_types(parquet.schema_arrow, schema, path=path)
            if label is not None:
                batch = next(parquet.iter_batches(_HEAD_ROWS, columns=[label]), None)
                head = None if batch is None else pa.table(batch)
    else:
        check_columns(csv_columns(path, schema), schema.columns, path=path, optional=schema.optional)
        head = next(read_csv(path, schema, read_bytes=_HEAD_BYTES), None)
    if label is None or head is None:
        return 0, Faults()
    faults = label_faults(head, label, path=path)
    return head.num_rows - faults.total, faults


def _check_text(file: storage.File, schema: Schema) -> tuple[int, Faults]:
    """Return the good rows at the beginning, and the faults of the others."""
    stop = min(_HEAD_BYTES, file.size_bytes)
    entries, faults = index_chunk(Chunk(file.path, 0, stop, file.size_bytes), schema, _HEAD_BYTES)
    rows, cause = sum(entry.rows for entry in entries), _cause(file.path, schema)
    if not rows and (cause or not faults.wrong_labels()):
        raise InputError(f"{file.path}: no line at its beginning can be read{cause}; {faults.describe()}")
    return rows, faults


def _cause(path: str, schema: Schema) -> str:
    with open(path, "rb") as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return ": it is UTF-16 text, save it as UTF-8"
    if b"\0" in head:
        return ": it is a binary file"
    line = head.partition(b"\n")[0]
    delimiter, columns = schema.delimiter.encode(), len(schema.columns)
    for other, name in ((b"\t", "tabs"), (b",", "commas"), (b";", "semicolons"), (b"|", "bars")):
        if other != delimiter and line.count(other) >= columns - 2 > line.count(delimiter):
            return f": its columns are separated by {name}, and the schema's delimiter is {schema.delimiter!r}"
    return ""


def has_label_column(files: Sequence[storage.File], schema: Schema) -> bool:
    """Whether a raw log has the label column of `schema`, if that has one, told by its first file that says so."""
    if schema.label is None:
        return True
    if is_table(files, schema):
        names = (column_names(file, schema) for file in files)
        return schema.label in next((columns for columns in names if columns), (schema.label,))
    labelled = len(schema.columns)
    for file in files:
        for line in _first_lines_of(file.path):
            columns = line.count(b"\t") + 1
            if columns in (labelled, labelled - 1):
                return columns == labelled
    return True


def _first_lines_of(path: str) -> list[bytes]:
    """The complete lines at a file's start, of about 16 lines of the greatest length."""
    most = 16 * MAX_LINE_BYTES
    text = head_of(path, most)
    whole = len(text) < most
    if text.startswith(GZIP_MAGIC):
        try:
            text = zlib.decompressobj(wbits=31).decompress(text, most)
        except zlib.error:
            return []  # said where the file is unpacked
        whole = whole and len(text) < most
    lines = text.split(b"\n")
    return lines if whole else lines[:-1]
