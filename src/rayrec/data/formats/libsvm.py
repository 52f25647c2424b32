"""Text for libsvm and SVM-light: `label [qid:query] index:value ...`, with an optional comment at
the end (https://www.cs.cornell.edu/people/tj/svm_light, "Input file format").

    2 qid:7 3:0.5 9:1 # a comment
    0 qid:7 4:2

becomes

    label  group  index   value
    2      7      3, 9    0.5, 1
    0      7      4       2

Beside a file rank.train, rank.train.query may have the number of rows of each query instead, a line
each (https://lightgbm.readthedocs.io/en/latest/Parameters.html, "Query Data").
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.base import LineFormat, Roles
from rayrec.data.formats.content import all_lines_match
from rayrec.data.formats.tokens import (
    Tokens,
    split_lines,
    split_pairs,
    table_of,
)
from rayrec.schema import Schema

NUMBER: Final = r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?"
_LINE: Final = re.compile(rf"{NUMBER}(?: +qid:[0-9]+)?(?: +[0-9]+:{NUMBER})+ *(?:#.*)?".encode())
QUERIES: Final = ".query"
"""End of the name of a file with the queries of another one."""
_QUERY: Final = "qid:"
_GROUP: Final = "group"


def without_queries(files: Sequence[storage.File]) -> list[storage.File]:
    """Return the files of a folder that have rows: not those with the queries of another file."""
    paths = {file.path for file in files}
    return [
        file
        for file in files
        if not file.path.endswith(QUERIES) or file.path.removesuffix(QUERIES) not in paths
    ]


@final
class LibSvm(LineFormat):
    """Columns label, group (the query), and the lists index and value."""

    name: ClassVar[str] = "libsvm"

    def recognizes(self, start: bytes) -> bool:
        return all_lines_match(start, _LINE)

    def columns(self, path: str, schema: Schema) -> tuple[str, ...]:
        names = super().columns(path, schema)
        has_queries = bool(names) and _query_ends(path) is not None
        return (*names, _GROUP) if has_queries and _GROUP not in names else names

    def tables(
        self, path: str, schema: Schema, columns: Sequence[str] | None
    ) -> Iterator[pa.Table]:
        ends = _query_ends(path) if columns is None or _GROUP in columns else None
        rows = 0
        for table in super().tables(path, schema, columns):
            if ends is not None:
                table = _with_queries(table, path, ends, rows)
            rows += table.num_rows
            yield table
        if ends is not None and rows != ends[-1]:
            raise InputError(
                f"{path}{QUERIES}: counts {ends[-1]:,} rows, and {path} has {rows:,}; "
                "restore both files"
            )

    def cache_key(self, file: storage.File) -> tuple[object, tuple[object, ...]]:
        source, version = super().cache_key(file)
        path = f"{file.path}{QUERIES}"
        queries = storage.find_files([path]).get(path)
        if queries is None:
            return source, version
        return source, (*version, queries.size_bytes, queries.modified_ns)

    def roles(self, columns: Sequence[str]) -> Roles:
        return Roles({"index": "value"}, group=_GROUP if _GROUP in columns else None)

    def parse(self, text: bytes, columns: Sequence[str] | None, lists: Collection[str]) -> pa.Table:
        lines = split_lines(text)
        if b"#" in text:
            lines = pc.replace_substring_regex(lines, "#.*", "")
        tokens = Tokens.from_lines(lines)
        is_label = tokens.positions() == 0
        is_query = pc.starts_with(tokens.text, _QUERY).to_numpy(zero_copy_only=False)
        features = tokens.select(~is_label & ~is_query)
        (indices, values), is_pair = split_pairs(features.text, 2)
        arrays = {
            "label": tokens.select(is_label).single(),
            "index": features.with_text(indices).lists(),
            "value": features.with_text(values).lists(),
        }
        if is_query.any() or _GROUP in (columns or ()):
            queries = tokens.select(is_query)
            names = pc.utf8_slice_codeunits(queries.text, len(_QUERY))
            arrays[_GROUP] = queries.with_text(names).single()
        return table_of(arrays, features.rows_with(~is_pair), columns)


def _query_ends(path: str) -> np.ndarray | None:
    """Return the first row after each query of a file, int64 [queries]; None without a file of
    queries. Raises InputError for lines that are no numbers.
    """
    queries = f"{path}{QUERIES}"
    if not storage.exists(queries):
        return None
    lines = storage.read_text(queries).split()
    if not lines or not all(line.isdecimal() for line in lines):
        raise InputError(f"{queries}: must have the number of rows of a query in each line")
    return np.cumsum(np.array(lines, np.int64))


def _with_queries(table: pa.Table, path: str, ends: np.ndarray, first_row: int) -> pa.Table:
    """Return rows of a file, from `first_row` on, with the names of their queries. Files have
    different ones. A query in the line itself stays.
    """
    rows = np.arange(first_row, first_row + table.num_rows)
    numbers = pc.cast(pa.array(np.searchsorted(ends, rows, side="right")), pa.large_string())
    prefix = pa.scalar(storage.name_of(path), pa.large_string())
    names = pc.binary_join_element_wise(prefix, numbers, pa.scalar(" ", pa.large_string()))
    if _GROUP not in table.column_names:
        return table.append_column(_GROUP, names)
    named = pc.cast(table.column(_GROUP), pa.large_string())
    position = table.column_names.index(_GROUP)
    return table.set_column(position, _GROUP, pc.coalesce(named, names))
