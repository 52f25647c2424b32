"""Draft of a schema from the first rows of a log."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.base import Format, Roles
from rayrec.data.formats.columns import check_columns
from rayrec.data.formats.csv import Csv
from rayrec.data.formats.csv_reader import csv_head
from rayrec.data.formats.header import (
    DOUBLE_COLON,
    head_rows,
    looks_like_data,
    regular_fields,
)
from rayrec.data.formats.parquet import Parquet, open_parquet
from rayrec.data.formats.registry import find_format
from rayrec.data.formats.row_faults import FAULT
from rayrec.data.formats.typed_header import (
    CATEGORY,
    NUMBER,
    NUMBERS,
    split_types,
)
from rayrec.data.frame_files import first_rows
from rayrec.data.log_source import LogSource
from rayrec.data.logs import column_values as values
from rayrec.data.logs.faults import (
    LABEL_FAULT,
    UTF8_FAULT,
    Faults,
    distinct_labels,
)
from rayrec.data.logs.partitions import with_sampled_partitions
from rayrec.data.logs.table_parser import parse_table
from rayrec.prepare.draft_columns import (
    NEGATIVE_MARKER,
    Column,
    as_declared,
    examine,
    has_decimals,
    has_several_items,
    is_amount,
    is_utf8,
    names_item,
    names_user,
    time_rank,
    without_name,
)
from rayrec.prepare.table_draft import Join, Role, find_join
from rayrec.schema import BRACKETS, Schema, SequenceColumns, SequenceSplit, load_schema

if TYPE_CHECKING:
    from rayrec.data.frame_files import Rows

_ROWS = 100_000
_BYTES = 16 << 20
"""Maximum rows, and bytes of a CSV file, that are examined."""
_ENOUGH_ROWS: Final = 1000
"""Rows of the first file that make it unnecessary to read the next ones."""
_MAX_FILES: Final = 64
"""Maximum files that are read for more rows."""
_COMMON_DELIMITERS: Final = ",\t;|"
_DELIMITERS: Final = (*_COMMON_DELIMITERS, DOUBLE_COLON, *"\x01^ :")
_STRONG_NAME = re.compile(r"^label$|^labels$|^target$|^y$|^clicks?$|^clicked$|is_?click(ed)?$")
_LABEL = re.compile(
    r"label|target|clic?k|convert|conversion|purchas|bought|buy|order|like|install|attributed|"
    r"respon|rating|score|stars|^y$|churn|fraud|surviv|subscri|outcome|^class$|income"
)
"""Names of labels, in lower case. The first pattern has the most certain ones."""
_RATING = re.compile(r"rating|score|stars|grade|review|label|target|^y$")
_FEW = 11
"""Maximum different values of a rating."""
_POSITIVE: Final = (
    "yes",
    "y",
    "true",
    "t",
    "click",
    "clicked",
    "positive",
    "pos",
    "success",
    "good",
    "1",
    "2",
)
_PAIRS: Final = (
    {"yes", "no"},
    {"y", "n"},
    {"t", "f"},
    {"pos", "neg"},
    {"positive", "negative"},
    {"-1", "1"},
    {"1", "2"},
)
"""Pairs of values that are a label if they are in the first or last column."""
_MAX_BAD_FRACTION: Final = 0.001
"""Maximum fraction of invalid rows of `rayrec train` by default."""
_FALLBACK_ENCODING: Final = "latin-1"
"""Encoding of files that are not UTF-8. Each sequence of bytes is valid in it."""
_SEQUENCE_RECIPE: Final = "next_item"
"""Recipe for events of users in the order of time."""
_PAIRS_RECIPE: Final = "two_tower --workload.model.item-features {item}"
"""Recipe and its flags for other events without a label."""
_MIN_ROWS: Final = 20
"""Minimum rows of a log, so that the default split leaves some for each part."""


@dataclass(frozen=True)
class _Head:
    """First rows of a log."""

    table: pa.Table
    """Valid and invalid rows, with FAULT for CSV."""
    delimiter: str = ""
    """Separator of a CSV file's columns."""
    header: tuple[str, ...] = ()
    """Names made up for a file without a header, in file order."""
    encoding: str | None = None
    """Encoding of a CSV file. None: UTF-8."""
    roles: Roles = field(default_factory=Roles)
    """Uses of columns that the file's format names."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Types of columns that the header declares; see `typed_header`."""
    unnamed: tuple[tuple[str, str], ...] = ()
    """Names of CSV columns that cannot be read by name, and the reasons."""


# Order of the decisions, each of which uses the ones before:
#
#   1. rows       of the first file, or more; encoding, delimiter and header of text
#   2. columns    each one's kind, from its values and its name
#   3. label      given; else 0 and 1, two words, or a rating, by name; a name beats a place
#   4. features   numbers are dense, the rest sparse; constant and unreadable columns are left out
#   5. check      the drafted schema must parse these rows
def draft(
    data: "str | Rows",
    *,
    label: str | None = None,
    tables: Sequence[str] = (),
    events: bool = False,
) -> str:
    """Return the schema of a log as YAML text with comments on each decision, from up to 100,000
    rows at its start. `data` is a path, a DataFrame, an Arrow table or a Dataset. `tables` are
    paths of side tables, whose columns become features. With `events`, rows are events to learn
    recommendations from, whatever label they may have.

    `rayrec train clicks` accepts the schema unchanged. Amounts and decimal numbers are dense,
    codes, small integers and text are sparse, lists are found by their marks, and one time of the
    row is its timestamp. Only constant and unreadable columns, row numbers and columns that
    may be other labels are left out. The label is `label`, else the column named most like one: of
    0 and 1, of two words, or a rating. Raises InputError for a log without label, features or
    enough valid rows, and for a table without a key of the log.
    """
    path = data if isinstance(data, str) else "path"
    head = _head(data) if isinstance(data, str) else _rows_head(data)
    columns = _columns_of(head, path)
    for name in columns.keys() & head.roles.unused.keys():
        reason = head.roles.unused[name]
        columns[name] = replace(columns[name], kind="unusable", detail=reason)
    if events and label is not None:
        raise InputError(f"--label: must be left out with --events, got {label}")
    chosen = _events_of(columns, path) if events else _choose_label(columns, label, path)
    if chosen.events:
        columns = _only_events(columns, chosen.events)
    columns = _without_negative(columns, chosen.name)
    plan = _Plan.from_columns(columns, chosen, head.roles)
    joins = _joins(tables, columns, plan)
    sequence = None if joins else _sequence(head, columns, chosen, plan, path)
    notes = [*_notes(head, columns, chosen, plan, sequence), *(join.note for join in joins)]
    comments = "".join(f"# {_one_line(note)}\n" for note in notes)
    text = comments + _yaml(head, columns, chosen, plan, joins, sequence)
    _check(text, head, path)
    return text


def _columns_of(head: _Head, path: str) -> dict[str, Column]:
    """Return the columns of first rows by name, with the types that their header declares."""
    is_text = FAULT in head.table.column_names
    table = head.table.drop_columns([FAULT]) if is_text else head.table
    columns = {}
    for name, column in _examined(table, path, is_text=is_text).items():
        if head.header:
            column = without_name(column)
        columns[name] = as_declared(column, head.types.get(name, ""))
    return columns


def recipe_of(text: str) -> str:
    """Return the recipe that trains on a log with the drafted schema `text`, with its flags."""
    schema = load_schema(text, "draft")
    if schema.sequence is not None:
        return _SEQUENCE_RECIPE
    return _PAIRS_RECIPE.format(item=schema.sparse[-1]) if _has_no_label(schema) else "clicks"


def _has_no_label(schema: Schema) -> bool:
    return schema.label is None and not schema.labels


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


# -- First rows
def _rows_head(data: "Rows") -> _Head:
    """Return the first rows in memory. Raises InputError without rows, or without usable types."""
    table = first_rows(data, _ROWS)
    if not table.num_rows:
        raise InputError("path: has no rows. Pass some")
    return _Head(table)


def _head(path: str) -> _Head:
    """Return the first rows of a log. Raises InputError without rows."""
    files = [file for file in LogSource.at(path).raw_files() if file.size_bytes]
    head: _Head | None = None
    if files:
        head = _file_head(files[0].path)
    if head is None or not head.table.num_rows:
        raise InputError(
            f"{path}: no usable rows below column names. Add a header, or choose another file"
        )
    table = _with_next_files(head, files)
    return replace(head, table=with_sampled_partitions(table, files))


def _with_next_files(head: _Head, files: Sequence[storage.File]) -> pa.Table:
    """Return the first file's rows with those of the next files, until there are enough. Logs in
    many folders have small files. Raises InputError for a file without the first file's columns or
    with other types.
    """
    num_files = min(-(-_ENOUGH_ROWS // head.table.num_rows), _MAX_FILES)
    names = [name for name in head.table.column_names if name != FAULT]

    def rows_of(file: storage.File) -> list[pa.Table]:
        if not head.delimiter:
            more = _file_head(file.path)
            return [] if more is None else [more.table.slice(0, _ENOUGH_ROWS)]
        schema = _text_schema(names, head.delimiter, head.header, head.encoding)
        return list(_first_tables(Csv(), file.path, schema, names))

    tables = [head.table]
    for more in storage.in_parallel(rows_of, files[1:num_files], path=files[0].path):
        tables.extend(more)
    # Also with names that occur twice
    if all(table.schema.equals(head.table.schema) for table in tables):
        return pa.concat_tables(tables)
    return _concatenated(tables, files[0].path).select(head.table.column_names)


def _text_schema(
    names: Sequence[str],
    delimiter: str,
    header: Sequence[str],
    encoding: str | None,
) -> Schema:
    """Return a schema that reads the named columns of a CSV file as text."""
    schema = Schema(
        label=None,
        sparse=tuple(names),
        delimiter=delimiter,
        list_delimiter=_list_delimiter(delimiter),
    )
    return schema.replace(header=tuple(header) or None, encoding=encoding)


def _file_head(path: str) -> _Head | None:
    """Return the first rows of a file of any format; None if it has none."""
    schema = Schema(label=None, sparse=("-",))
    file_format = find_format(path, schema)
    if isinstance(file_format, Csv):
        return _csv_head(path)
    if file_format.name == Parquet.name:
        return _parquet_head(path)
    first = next(file_format.tables(path, schema, None), None)
    if first is None:
        return None
    # Lists in the first rows are lists in all.
    lists = [each.name for each in first.schema if values.is_list(each.type)]
    names = tuple(name for name in first.column_names if name != FAULT)
    schema = schema.replace(sparse=names, lists=tuple(lists))
    tables = list(_first_tables(file_format, path, schema, names))
    table = _concatenated(tables, path).slice(0, _ROWS)
    return _Head(table, roles=file_format.roles(names))


def _concatenated(tables: Sequence[pa.Table], path: str) -> pa.Table:
    """Return the rows of tables. Columns whose types have nothing in common become text. Raises
    InputError for lists and single values in one column.
    """
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        kinds = [dict(zip(table.column_names, table.schema.types, strict=True)) for table in tables]
        first = kinds[0]
        mixed = [name for name in first if any(each.get(name) != first[name] for each in kinds)]
    try:
        texts = [_with_text(table, mixed) for table in tables]
        return pa.concat_tables(texts, promote_options="permissive")
    except pa.ArrowException as error:
        raise InputError(
            f"{path}: a column has other types in other rows or files of the log ({error})"
        ) from None


def _with_text(table: pa.Table, names: Collection[str]) -> pa.Table:
    """Return a table whose named columns are text, or lists of text."""
    fields = [
        column.with_type(_text_type(column.type)) if column.name in names else column
        for column in table.schema
    ]
    return table.cast(pa.schema(fields))


def _text_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_null(kind):
        return kind
    return pa.large_list(pa.large_string()) if values.is_list(kind) else pa.large_string()


def _parquet_head(path: str) -> _Head:
    tables = []
    rows = 0
    with open_parquet(path, buffer_size=2 << 20) as parquet:
        for batch in parquet.iter_batches(_ROWS):
            tables.append(pa.table(batch))
            rows += batch.num_rows
            if rows >= _ROWS:
                break
        table = pa.concat_tables(tables) if tables else parquet.schema_arrow.empty_table()
    return _Head(table.slice(0, _ROWS))


def _csv_head(path: str, encoding: str | None = None) -> _Head | None:
    text = csv_head(path, encoding).decode("utf-8", "replace")
    if not text.strip("\r\n"):
        return None
    delimiter = _find_delimiter(text)
    fields, *rows = list(head_rows(text, delimiter, None))
    first, types = split_types(fields)
    header = (
        tuple(f"c{number}" for number in range(len(first))) if looks_like_data(first, rows) else ()
    )
    names = header or tuple(field.strip(" \t") for field in first)
    counts = Counter(names)
    usable = [name for name, count in counts.items() if name and count == 1]
    unnamed = tuple((name, _unnamed_reason(name)) for name in counts if name not in usable)
    if not usable:
        return None
    schema = _text_schema(usable, delimiter, header, encoding)
    tables = list(_first_tables(Csv(), path, schema, usable))
    if not tables:
        return None
    head = _Head(
        pa.concat_tables(tables).slice(0, _ROWS),
        delimiter,
        header,
        encoding,
        types=types,
        unnamed=unnamed,
    )
    return (
        _csv_head(path, _FALLBACK_ENCODING)
        if encoding is None and _is_in_other_encoding(head, schema, path)
        else head
    )


def _is_in_other_encoding(head: _Head, schema: Schema, path: str) -> bool:
    """Return whether a name or too many rows are not UTF-8."""
    if any("\ufffd" in name for name in head.table.column_names):
        return True
    if all(is_utf8(values.plain_array(column)) for column in head.table.columns):
        return False
    faults = parse_table(head.table, schema, path=path)[1]
    return faults.counts.get(UTF8_FAULT, 0) > _MAX_BAD_FRACTION * head.table.num_rows


def _unnamed_reason(name: str) -> str:
    return "name of several columns" if name else "has no name"


def _first_tables(
    file_format: Format,
    path: str,
    schema: Schema,
    names: Sequence[str],
) -> Iterator[pa.Table]:
    rows = size = 0
    for table in file_format.tables(path, schema, names):
        yield table
        rows += table.num_rows
        size += table.nbytes
        if rows >= _ROWS or size >= _BYTES:
            return


def _find_delimiter(text: str) -> str:
    """Return the mark that divides most rows into one number of fields, the larger the better."""
    num_fields = {mark: regular_fields(text, mark, None) for mark in _DELIMITERS}
    # Common marks first: text has blanks and colons in regular numbers, too.
    for marks in (_COMMON_DELIMITERS, (DOUBLE_COLON,)):
        likely = max(marks, key=num_fields.__getitem__)
        if num_fields[likely] > 1:
            return likely
    return max(_DELIMITERS, key=num_fields.__getitem__)


def _list_delimiter(delimiter: str) -> str:
    return ";" if delimiter == "|" else "|"


def _examined(table: pa.Table, path: str, *, is_text: bool) -> dict[str, Column]:
    """Return the columns of a table by name. Of two with one name, neither can be named in a
    schema.
    """
    columns: dict[str, Column] = {}
    for name, chunks in zip(table.column_names, table.columns, strict=True):
        if name in columns:
            columns[name] = replace(columns[name], kind="unusable", detail=_unnamed_reason(name))
            continue

        def make_error(name: str, fix: str, kind: pa.DataType = chunks.type) -> InputError:
            return InputError(f"{path}: column {name} is of type {kind}; {fix}")

        array = values.plain_array(chunks)
        # Text of CSV has been examined: its invalid rows are counted.
        if is_text or is_utf8(array):
            columns[name] = examine(name, array, make_error)
        else:
            columns[name] = Column(name, array, "unusable", "not UTF-8")
    return columns


# -- Label
@dataclass(frozen=True)
class _Label:
    """Target of a draft: a label, or the chosen items of events."""

    column: Column | None
    """Column of the label. None: the rows are events."""
    rule: Mapping[str, Any] | None = None
    """Rule of `Schema.label`, with at_least or positive. None: the column has 0 and 1, or
    numbers.
    """
    is_number: bool = False
    """Whether the label is a number to learn."""
    note: str = ""
    events: tuple[str, str] | None = None
    """Columns with the user and the chosen item in a log without a label."""

    @property
    def name(self) -> str:
        return "" if self.column is None else self.column.name


def _choose_label(columns: Mapping[str, Column], name: str | None, path: str) -> _Label:
    """Choose the label, or the user and the item of events. Raises InputError without either."""
    if name is not None:
        check_columns(list(columns), [name], path=path)
        return _label_from(columns[name], path)
    usable = [
        column
        for column in columns.values()
        if column.kind not in ("unusable", "constant", "row number", "list", "vector")
    ]
    ends = {next(iter(columns)), [*columns][-1]}
    binary = [column for column in usable if column.kind == "binary"]
    two = [
        column
        for column in usable
        if column.kind in ("text", "integer", "decimal") and column.distinct == 2
    ]
    rated = [
        column
        for column in usable
        if column.kind in ("integer", "decimal") and 2 < column.distinct <= _FEW
    ]

    def named(candidates: list[Column], pattern: re.Pattern[str]) -> list[Column]:
        return [column for column in candidates if pattern.search(column.name.lower())]

    candidates = [
        *named(binary, _STRONG_NAME),
        *named(two, _STRONG_NAME),
        *named(binary, _LABEL),
        *named(two, _LABEL),
        *named(rated, _RATING),
        *(column for column in binary if column.name in ends),
        *(column for column in two if column.name in ends and _is_pair(column)),
        *binary,
    ]
    if candidates:
        return _label_from(candidates[0], path)
    user_and_item = _find_events(columns)
    if user_and_item is None:
        raise InputError(
            f"{path}: no column of 0 and 1, of two words or of ratings for the label, and no user "
            f"and item of events, among {', '.join(columns)}. Add one, or pass --label"
        )
    return _Label(None, events=user_and_item)


def _events_of(columns: Mapping[str, Column], path: str) -> _Label:
    """Return the user and the item of events. Raises InputError without them."""
    user_and_item = _find_events(columns)
    if user_and_item is None:
        raise InputError(
            f"{path}: no columns of a user and an item, among {', '.join(columns)}. Name them user "
            "and item, or write the schema by hand"
        )
    return _Label(None, events=user_and_item)


def _events_note(events: tuple[str, str], sequence: SequenceColumns | None) -> str:
    user, item = events
    recipe = _PAIRS_RECIPE.format(item=item) if sequence is None else _SEQUENCE_RECIPE
    return (
        f"No label: a row is an event, in which {user} chose {item}. Learn what users choose by "
        f"`rayrec train {recipe}`; for clicks or ratings, add a label."
    )


# Columns of codes are the user and the item:
#
#   named             the first with the name of a user or session, and the first with that of an
#                     item
#   without header    the first and the second, which is their usual order
#
# Without both, the log has no events.
def _find_events(columns: Mapping[str, Column]) -> tuple[str, str] | None:
    """Return the columns with the user and the item of events, None if there are none."""
    codes = [
        column
        for column in columns.values()
        if column.kind in ("integer", "text", "row number", "binary")
    ]
    if all(column.is_named for column in codes):
        codes = [column for column in codes if not _is_dense(column)]
        users = [column.name for column in codes if names_user(column.name)]
        items = [column.name for column in codes if names_item(column.name)]
    else:
        users = [column.name for column in codes[:1]]
        items = [column.name for column in codes[1:2]]
    return (users[0], items[0]) if users and items else None


def _only_events(columns: Mapping[str, Column], events: Sequence[str]) -> dict[str, Column]:
    """Return the columns, of which only those of events and times are used. What else is known of
    an item would tell which one was chosen.
    """
    chosen = {}
    item = events[-1]
    # The item comes last, as `recipe_of` needs.
    for name in (*(each for each in columns if each != item), item):
        column = columns[name]
        if name in events:
            column = as_declared(column, CATEGORY)
        elif column.kind not in ("time", "constant", "unusable"):
            column = replace(column, kind="unusable", detail="of the item or the event")
        chosen[name] = column
    return chosen


def _distinct_texts(column: Column) -> list[str]:
    """Return the first distinct values of a column as text, numbers in order."""
    distinct = pc.unique(column.array.drop_null()).to_pylist()
    texts = (
        value.decode("utf-8", "replace") if isinstance(value, bytes) else _plain(value)
        for value in distinct
    )
    return [text for text in distinct_labels(texts) if text]


def _plain(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _is_pair(column: Column) -> bool:
    texts = {text.lower() for text in _distinct_texts(column)}
    return texts in _PAIRS or sorted(text[:1] for text in texts) == ["<", ">"]


def _label_from(column: Column, path: str) -> _Label:
    """Return how a column is learned. Raises InputError for a column with neither two values nor
    numbers.
    """
    texts = _distinct_texts(column) if column.kind not in ("unusable", "list", "vector") else []
    if column.kind == "binary":
        return _Label(column)
    if column.distinct == 2 and column.kind in ("text", "integer", "decimal"):
        positive = _find_positive(texts, column)
        other = next(text for text in texts if text != positive)
        return _Label(
            column,
            {"positive": [positive]},
            note=f"{column.name}: {positive} counts as 1, {other} as 0 (label.positive).",
        )
    numbers = column.numbers
    if column.kind in ("integer", "decimal") and numbers is not None:
        if column.distinct <= _FEW:
            return _rated(column, numbers)
        return _Label(column, is_number=True, note=f"Learns {column.name} as a number.")
    problem = Faults({LABEL_FAULT: 1}, labels={column.name: texts}).wrong_labels(with_rule=True)
    raise InputError(
        f"{path}: {problem or f'column {column.name} has no two values or numbers for a label'}"
    )


def _find_positive(texts: Sequence[str], column: Column) -> str:
    """Return the value of two that counts as 1: a known word, the larger number, one with > before
    it, or the rarer one.
    """
    if column.is_number:
        return texts[1]
    positive = [text for text in texts if text.lower() in _POSITIVE]
    positive = positive or [text for text in texts if text.startswith(">")]
    if len(positive) == 1:
        return positive[0]
    counts = {
        text: pc.sum(pc.equal(pc.cast(column.array, pa.large_binary()), text.encode())).as_py()
        for text in texts
    }
    return min(texts, key=lambda text: counts[text] or 0)


def _rated(column: Column, numbers: np.ndarray) -> _Label:
    """Return a label of ratings, positive from the median on, or from the number above the smallest
    if that is the median.
    """
    threshold = float(np.quantile(numbers, 0.5, method="higher"))
    if threshold == numbers.min():
        threshold = float(numbers[numbers > threshold].min())
    threshold = int(threshold) if threshold.is_integer() else threshold
    number = f"labels: [{{name: {column.name}, kind: number, missing: fault}}]"
    note = (
        f"{column.name}: {threshold} or more counts as 1 (label.at_least). To learn the number: "
        f"label: null, {number}."
    )
    return _Label(column, {"at_least": threshold}, note=note)


# -- Roles of the other columns
def _without_negative(columns: dict[str, Column], label: str) -> dict[str, Column]:
    """Mark -1 as missing in all columns if it is the only negative number of those with it, and
    rare beside larger numbers.
    """
    numeric = [column for column in columns.values() if column.is_number and column.name != label]
    with_it = [
        column for column in numeric if column.numbers is not None and (column.numbers == -1).any()
    ]
    is_marker = any(column.distinct > 3 and _is_dense(column) for column in with_it)
    if not is_marker or any(
        (column.numbers < 0)[column.numbers != -1].any()
        for column in with_it
        if column.numbers is not None
    ):
        return columns
    marked = {
        column.name: replace(
            column,
            markers=(*column.markers, NEGATIVE_MARKER),
            numbers=_other_numbers(column),
            has_missing=True,
        )
        for column in with_it
    }
    return columns | marked


def _other_numbers(column: Column) -> np.ndarray:
    assert column.numbers is not None
    return column.numbers[column.numbers != -1]


@dataclass(frozen=True)
class _Plan:
    """Columns of a draft by their use."""

    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    lists: tuple[str, ...]
    vectors: tuple[str, ...]
    timestamp: str | None
    left_out: Mapping[str, str]
    """Reason for each column that is left out."""
    list_weights: Mapping[str, str]
    weight: str | None
    group: str | None

    @classmethod
    def from_columns(cls, columns: Mapping[str, Column], label: _Label, roles: Roles) -> "_Plan":
        other = {label.name, roles.weight, *roles.list_weights.values()}
        features = [column for column in columns.values() if column.name not in other]
        # Weights of 1 each are no weights.
        weights = {
            name: weight
            for name, weight in roles.list_weights.items()
            if has_several_items(columns[weight])
        }
        left_out: dict[str, str] = {}
        times = sorted(
            (column for column in features if column.kind == "time" and not column.has_missing),
            key=time_rank,
        )
        timestamp = times[0].name if times else None
        uses: dict[str, list[str]] = {
            "dense": [],
            "sparse": [],
            "lists": [],
            "vectors": [],
        }
        for column in features:
            reason = _reason(column)
            if reason:
                left_out[column.name] = reason
            elif column.name != timestamp:
                for use in _uses(column):
                    uses[use].append(column.name)
        if timestamp is not None and not any(uses.values()):
            uses["dense"].append(timestamp)
        lists = tuple(uses["lists"])
        return cls(
            tuple(uses["dense"]),
            tuple(uses["sparse"]),
            lists,
            tuple(uses["vectors"]),
            timestamp,
            left_out,
            list_weights={name: weights[name] for name in lists if name in weights},
            weight=roles.weight,
            group=roles.group,
        )


def _uses(column: Column) -> tuple[str, ...]:
    """Return the fields of the schema that name a column."""
    if column.kind == "vector":
        return ("vectors",)
    if _is_dense(column):
        return ("dense",)
    return ("sparse", "lists") if column.kind == "list" else ("sparse",)


def _is_dense(column: Column) -> bool:
    if column.declared:
        return column.declared == NUMBER and column.numbers is not None
    if column.kind == "integer":
        return is_amount(column)
    return column.kind == "decimal" or (column.kind == "time" and not column.is_only_timestamp)


def _reason(column: Column) -> str:
    """Return why a column is left out, empty if it is not."""
    if column.kind == "unusable":
        return column.detail
    if column.kind == "constant":
        return "one value"
    if column.kind == "row number":
        return "row number"
    if column.kind == "list" and column.declared == NUMBERS:
        return "lists of numbers, not equally many"
    if column.kind == "list" and column.detail and has_decimals(column):
        return "lists of decimals, not equally many"
    is_two = column.kind == "binary" or (
        column.distinct == 2 and column.kind == "text" and _is_pair(column)
    )
    return "may be another label" if is_two and _LABEL.search(column.name.lower()) else ""


def _joins(tables: Sequence[str], log: Mapping[str, Column], plan: _Plan) -> list[Join]:
    """Draft the joins of side tables with a log."""
    singles = {name: log[name] for name in plan.sparse if name not in plan.lists}
    names = {*log}
    joins = []
    for path in tables:
        head = _head(path)
        columns = _columns_of(head, path)
        roles: dict[str, Role] = {}
        for name, column in columns.items():
            # A column that may be a label of a log is none of a table
            is_useless = column.kind in (
                "unusable",
                "constant",
                "row number",
                "vector",
            )
            if is_useless or column.declared == NUMBERS:
                continue
            is_number = column.kind == "binary" or _is_dense(column)
            roles[name] = "list" if column.kind == "list" else "category"
            roles[name] = "number" if is_number and column.kind != "time" else roles[name]
        join = find_join(path, columns, roles, singles, names=names, form=_form(head, columns))
        names |= {feature["name"] for feature in join.features}
        joins.append(join)
    return joins


# Events have lists to learn from if they have times, and users who come back. The rows at the start
# of a log tell both.
def _sequence(
    head: _Head,
    columns: Mapping[str, Column],
    label: _Label,
    plan: _Plan,
    path: str,
) -> SequenceColumns | None:
    """Return the columns of the lists of events. None for rows with a label, without a time, with
    missing users or items, or without a user whose items are enough for all parts.
    """
    if label.events is None or plan.timestamp is None:
        return None
    user, item = label.events
    sequence = SequenceColumns(user=user, item=item, time=plan.timestamp)
    schema = Schema(label=None, sequence=sequence).updated(_form(head, columns))
    raw, _ = parse_table(head.table, schema.events, path=path)
    is_complete = ~raw.missing.any(axis=1)
    _, counts = np.unique(raw.categories[is_complete, 0], return_counts=True)
    is_enough = counts.max(initial=0) >= sequence.min_length + sum(SequenceSplit().sizes)
    missing = raw.rows - int(is_complete.sum())
    return sequence if is_enough and missing <= _MAX_BAD_FRACTION * raw.rows else None


# -- Text of the draft
def _yaml(
    head: _Head,
    columns: Mapping[str, Column],
    label: _Label,
    plan: _Plan,
    joins: Sequence[Join],
    sequence: SequenceColumns | None,
) -> str:
    if sequence is not None:
        names = {"user": sequence.user, "item": sequence.item, "time": sequence.time}
        split = SequenceSplit().to_dict()
        return _dumped({"label": None, "sequence": names, "split": split, **_form(head, columns)})
    name = label.name
    label_rule: Any = {"name": name, **label.rule} if label.rule else name
    fields: dict[str, Any] = {
        "label": None if label.is_number or label.events else label_rule,
        "labels": [{"name": name, "kind": "number", "missing": "fault"}] if label.is_number else [],
        "dense": list(plan.dense),
        "sparse": list(plan.sparse),
        "lists": list(plan.lists),
        "vectors": [_vector(columns[each]) for each in plan.vectors],
        "tables": _tables(joins),
        "features": _features(columns, plan, joins),
        "weight": plan.weight or "",
        "group": plan.group or "",
        "timestamp": plan.timestamp or "",
        "list_delimiter": _list_delimiter(head.delimiter).strip("|"),
        **_form(head, columns),
        "nan": "missing" if any(columns[each].has_nan for each in plan.dense) else "",
    }
    fields = {
        key: value for key, value in fields.items() if value or key in ("label", "dense", "sparse")
    }
    return _dumped(fields)


def _dumped(fields: Mapping[str, Any]) -> str:
    return yaml.safe_dump(
        fields,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=120,
    )


def _vector(column: Column) -> dict[str, str | int]:
    settings: dict[str, str | int] = {
        "name": column.name,
        "length": column.length,
    }
    if column.detail not in ("", "|"):
        settings["list_delimiter"] = column.detail
    return settings


def _tables(joins: Sequence[Join]) -> dict[str, dict[str, Any]]:
    return {join.name: {"path": join.path, "key": join.key, **join.form} for join in joins}


def _form(head: _Head, columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return the fields for the form of text, without those that are as by default."""
    form = {
        "delimiter": "" if head.delimiter in ",\t" else head.delimiter,
        "encoding": head.encoding or "",
        "header": list(head.header),
        "missing": list(_markers(columns)),
    }
    return {name: value for name, value in form.items() if value}


def _features(
    columns: Mapping[str, Column],
    plan: _Plan,
    joins: Sequence[Join],
) -> list[dict[str, str]]:
    """Return the settings of lists with their own mark, or weights, then side tables' features."""
    features = []
    for name in plan.lists:
        settings = {}
        if columns[name].detail not in ("", "|"):
            settings["list_delimiter"] = columns[name].detail
        if name in plan.list_weights:
            settings["weights"] = plan.list_weights[name]
        if settings:
            features.append({"name": name, **settings})
    for join in joins:
        features += join.features
    return features


def _markers(columns: Mapping[str, Column]) -> list[str]:
    return list(dict.fromkeys(marker for column in columns.values() for marker in column.markers))


def _notes(
    head: _Head,
    columns: Mapping[str, Column],
    label: _Label,
    plan: _Plan,
    sequence: SequenceColumns | None,
) -> list[str]:
    """Return a sentence on each decision that a person may want to change."""
    notes = [f"Drafted from {head.table.num_rows:,} rows."]
    if head.header:
        notes.append(
            "The file has no header: the columns are named by their position. Rename them here "
            "(header and below)."
        )
    if head.types:
        notes.append("The header says which columns are numbers, categories and lists.")
    if head.encoding:
        notes.append(
            f"The file is not UTF-8 and was read as {head.encoding}. Name its encoding if letters "
            "are wrong."
        )
    if label.note:
        notes.append(label.note)
    if label.events is not None:
        notes.append(_events_note(label.events, sequence))
    if sequence is not None:
        notes.append(
            f"Each {sequence.user} has a list of {sequence.item}, in the order of "
            f"{sequence.time}. split says what is held out: the last items of each, or the latest "
            "events by {kind: time, validation: 7d, test: 7d}."
        )
    else:
        notes += _integer_notes(columns, plan)
    if plan.timestamp and sequence is None:
        use = "and the only" if plan.timestamp in plan.dense else "no"
        notes.append(f"{plan.timestamp} is the row's time, {use} input of the model.")
    times = [name for name in plan.dense if columns[name].kind == "time" and name != plan.timestamp]
    notes += _listed("Times as numbers of seconds:", times)
    joined = [
        f"{name} at {columns[name].detail!r}"
        for name in plan.lists
        if columns[name].detail not in ("", BRACKETS)
    ]
    notes += _listed("Lists, split:", joined)
    notes += _listed("Vectors, whose numbers are inputs each:", plan.vectors)
    notes += _marker_notes(columns)
    reasons = {**dict(head.unnamed), **plan.left_out}
    left_out = [f"{name or repr(name)} ({reason})" for name, reason in reasons.items()]
    return notes + _listed("Left out:", left_out)


def _listed(head: str, items: Sequence[str]) -> list[str]:
    """Return a sentence that lists the items. None without any."""
    return [f"{head} {', '.join(items)}."] if items else []


def _integer_notes(columns: Mapping[str, Column], plan: _Plan) -> list[str]:
    kinds = {"as numbers": plan.dense, "as categories": plan.sparse}
    integers = {
        kind: ", ".join(name for name in names if columns[name].kind == "integer")
        for kind, names in kinds.items()
    }
    shown = [f"{kind} {names}" for kind, names in integers.items() if names]
    if not shown:
        return []
    return [f"Integers: {'; '.join(shown)}. Move amounts to dense, codes to sparse."]


def _marker_notes(columns: Mapping[str, Column]) -> list[str]:
    markers = _markers(columns)
    if not markers:
        return []
    names = ", ".join(column.name for column in columns.values() if column.markers)
    notes = [
        f"Missing among numbers: {', '.join(markers)} in {names}. They count as missing in all "
        "columns."
    ]
    uncertain = [marker for marker in markers if marker in (NEGATIVE_MARKER, "unknown")]
    if uncertain:
        notes.append(f"Remove {' and '.join(uncertain)} from missing if they are values.")
    return notes


def _check(text: str, head: _Head, path: str) -> None:
    """Check that training accepts the draft on the first rows. Raises InputError."""
    fields = yaml.safe_load(text)
    if not any(fields.get(name) for name in ("dense", "sparse", "sequence")):
        raise InputError(
            f"{path}: no column to learn from beside the label; "
            f"{text.partition('# Left out: ')[2].partition(chr(10))[0]}"
        )
    try:
        schema = load_schema(text, "draft")
        schema = schema if schema.sequence is None else schema.events
        raw, faults = parse_table(head.table, schema, path=path)
    except InputError as error:
        raise InputError(f"{path}: cannot draft a schema; {error}") from None
    if faults.total > _MAX_BAD_FRACTION * head.table.num_rows:
        fix = faults.text_fix()
        raise InputError(f"{path}: {faults.describe()}; fix the log{f', or {fix}' if fix else ''}")
    if raw.rows < _MIN_ROWS:
        raise InputError(
            f"{path}: {raw.rows} rows are too few to train, validate and test; at least "
            f"{_MIN_ROWS} are needed"
        )
    labels = raw.labels.get(schema.label or "")
    if labels is not None and len(np.unique(labels)) < 2:
        raise InputError(f"{path}: all {raw.rows} rows have one label; choose another with --label")
