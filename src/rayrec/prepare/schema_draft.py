"""Draft of a schema from the first rows of a CSV or Parquet log."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from pyarrow import types

from rayrec.config import InputError
from rayrec.data.log_source import LogSource
from rayrec.data.logs import column_values as values
from rayrec.data.logs.content import is_parquet
from rayrec.data.logs.csv_reader import FAULT, check_columns, csv_columns, read_csv
from rayrec.data.logs.faults import LABEL_FAULT, Faults, distinct_labels
from rayrec.data.logs.parquet import open_parquet
from rayrec.data.logs.partitions import with_sampled_partitions
from rayrec.data.logs.table_log import is_table
from rayrec.schema import Schema

_ROWS, _BYTES = 30_000, 2 << 20
"""Rows and bytes read at once. Of a CSV file, twice these bytes are read."""
_LABEL = re.compile(
    r"label|target|clic?k|convert|conversion|purchas|bought|buy|order|like|install|attributed|respon|rating|score|stars|^y$"
)
"""Names of labels, in lower case."""
_FEW, _MANY = 11, 100
"""Maximum different values of a label that is not binary, and of a column that never identifies the row."""
_KEY, _JOINED = 0.9, 0.1
"""Minimum fractions of different values in a column that identifies the row, and of texts with several categories in a list."""


def draft(path: str, *, label: str | None = None) -> str:
    """Return the schema of a log as YAML text with comments, from at most 30,000 rows and 4 MiB at the start of its first file.
    Decimal numbers, dates and times are dense, integers and text sparse, and lists are found. Columns with one value, or with
    another in each row, are left out. The label is `label`, or a column of 0 and 1: one named like click, else the first or last
    column, else any. Without one, a column named like rating, as a number to learn. Raises InputError without any."""
    table, delimiter = _head(path)
    error = values.type_error(table.schema, path)
    columns = {name: values.plain_array(table.column(name)) for name in table.column_names}
    roles = {name: _role(array, name, error) for name, array in columns.items()}
    binary = [name for name, role in roles.items() if role == "binary"]
    named = [name for name in columns if _LABEL.search(name.lower())]
    ends = [name for name in binary if name in (table.column_names[0], table.column_names[-1])]
    few = [name for name in named if roles[name] != "lists" and pc.count_distinct(columns[name]).as_py() <= _FEW]
    candidates = [label] if label else [name for name in binary if name in named] or ends or binary or few
    if not candidates:
        raise InputError(f"{path}: no column of 0 and 1 for the label among {', '.join(columns)}. Add one, or pass --label")
    check_columns(table.column_names, candidates[:1], path=path)
    label, notes = candidates[0], [f"Drafted from {table.num_rows:,} rows. Integers are categories: move amounts to dense."]
    is_number = not (values.numbers_of(columns[label], label, error)[1] == values.REJECTED).any()
    distinct = pc.unique(columns[label].drop_null()).to_pylist()
    texts = distinct_labels(value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in distinct)
    problem = Faults({LABEL_FAULT: 1}, labels={label: texts}).wrong_labels()
    labels = [] if label in binary or set(texts) <= {"0", "1", ""} else [{"name": label, "kind": "number", "missing": "fault"}]
    if labels and not is_number:
        raise InputError(f"{path}: {problem or f'column {label} has no numbers as label'}")
    notes += [f"Learns {label} as a number. For clicks: {problem}."] if labels else []
    roles |= {name: "may be another label" if name in named else "sparse" for name in binary} | {label: "label"}
    mark, joined = _joined({name: columns[name] for name, role in roles.items() if role == "sparse"}, delimiter)
    roles |= dict.fromkeys(joined, "lists")
    dense = [name for name, role in roles.items() if role == "dense"]
    has_nan = any(np.isnan(values.numbers_of(columns[name], name, error, times=True)[0]).any() for name in dense)
    schema = {
        "label": None if labels else label,
        "labels": labels,
        "dense": dense,
        "sparse": [name for name, role in roles.items() if role in ("sparse", "lists")],
        "lists": [name for name, role in roles.items() if role == "lists"],
        "list_delimiter": mark.strip("|"),
        "delimiter": delimiter.strip(",\t"),
        "nan": "missing" if has_nan else "",
    }
    schema = {name: value for name, value in schema.items() if value or name in ("label", "dense", "sparse")}
    left_out = [f"{name} ({role})" for name, role in roles.items() if role not in ("label", "dense", "sparse", "lists")]
    notes += [f"Left out: {', '.join(left_out)}."] if left_out else []
    text = yaml.safe_dump(schema, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    return "".join(f"# {note}\n" for note in notes) + text


def _head(path: str) -> tuple[pa.Table, str]:
    """Return the first rows of a log, and the delimiter of its columns, or an empty text. Raises InputError without rows."""
    files = [file for file in LogSource.at(path).raw_files() if file.size_bytes]
    schema, table, delimiter = Schema(label=None, sparse=("-",), list_delimiter="^"), None, ""
    if files and is_table(files, schema) and is_parquet(files[0].path):
        with open_parquet(files[0].path, buffer_size=_BYTES) as parquet:
            table = next((pa.table(batch) for batch in parquet.iter_batches(_ROWS)), None)
    elif files:
        names = {mark: csv_columns(files[0].path, schema.replace(delimiter=mark)) for mark in ",;|\t"}
        delimiter = max(names, key=lambda mark: len(names[mark]))
        schema = schema.replace(delimiter=delimiter, sparse=("-", *filter(None, names[delimiter])), optional=("-",))
        rows = next(read_csv(files[0].path, schema, read_bytes=_BYTES), None)
        table = rows and rows.filter(pc.equal(rows.column(FAULT), 0)).drop_columns([FAULT])
    if not table:
        raise InputError(f"{path}: no usable rows below column names. Add a header, or choose another file")
    return with_sampled_partitions(table, files), delimiter


def _role(array: pa.Array, name: str, error: values.MakeError) -> str:
    """Return binary, dense, sparse or lists, or why a column is left out."""
    kind = array.type
    if values.is_list(kind) and (values.is_text(kind.value_type) or types.is_integer(kind.value_type)):
        return "lists"
    try:
        numbers, status = values.numbers_of(array, name, error, times=True)
    except InputError:
        return f"of type {kind}"
    present = array.filter(pa.array(status != values.EMPTY))
    distinct = pc.count_distinct(present).as_py()
    if distinct < 2:
        return "one value"
    if (status == values.VALUE).all() and np.array_equal(np.unique(numbers), [0, 1]):
        return "binary"
    is_number = not (status == values.REJECTED).any()
    is_integral = values.is_text(kind) and not (values.integers_of(present, name, error)[1] == values.REJECTED).any()
    if is_number and not (is_integral or types.is_integer(kind)):
        return "dense"
    if distinct <= max(_MANY, _KEY * len(present)):
        return "sparse"
    return "dense" if is_number and not re.search(r"(?i)id$|key$|index$|^unnamed", name) else "another value in each row"


def _joined(columns: dict[str, pa.Array], delimiter: str) -> tuple[str, list[str]]:
    """Return the mark that joins categories of lists in text, and the columns with such lists. Categories recur in other lists,
    and are no parts of sentences."""
    for mark in "|;,".replace(delimiter, "") if delimiter else "|;,":
        names = []
        for name, array in columns.items():
            if values.is_text(array.type):
                text = pc.cast(array, pa.large_binary())
                items = pc.list_flatten(pc.split_pattern(text, pattern=mark))
                several = pc.mean(pc.greater(pc.count_substring(text, pattern=mark), 0)).as_py() >= _JOINED
                recur = pc.count_distinct(items).as_py() < pc.count_distinct(text).as_py()
                names += [name] if several and recur and not pc.any(pc.starts_with(items, pattern=" ")).as_py() else []
        if names:
            return mark, names
    return ";" if delimiter == "|" else "|", []
