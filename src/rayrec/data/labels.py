"""Whether a log has labels."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from rayrec import storage
from rayrec.data import materialized
from rayrec.data.log import GZIP_MAGIC, head_of
from rayrec.data.parsing import MAX_LINE_BYTES
from rayrec.data.tables import column_names, is_table
from rayrec.schema import Schema


def has_labels(path: str, schema: Schema, *, files: Sequence[str] = ()) -> bool:
    """Whether a log of `schema` (the named `files` of a folder) has its label column, told by its first file that says so.

    Text without a header: by the first line with the right number of columns. A log with no such line counts as labelled,
    and its lines as faulty.
    """
    assert schema.label is not None
    if materialized.is_preprocessed(path):
        return materialized.open_preprocessed(path).labelled
    found = storage.list_files(path, names=files)
    if is_table(found, schema):
        names = (column_names(file, schema) for file in found)
        return schema.label in next((columns for columns in names if columns), (schema.label,))
    labelled = len(schema.columns)
    for file in found:
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
