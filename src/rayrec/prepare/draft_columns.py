"""Kinds of a log's columns, judged by their names and first values: numbers, times, categories and
lists.
"""

import re
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec.config import InputError, packaged_json
from rayrec.data.encoding.rules import BRACKETED
from rayrec.data.formats.typed_header import (
    CATEGORIES,
    CATEGORY,
    ITEM_MARK,
    NUMBERS,
)
from rayrec.data.logs import column_values as values
from rayrec.schema import BRACKETS, MAX_VECTOR

Kind = Literal[
    "unusable",
    "constant",
    "row number",
    "binary",
    "time",
    "decimal",
    "integer",
    "text",
    "list",
    "vector",
]

_WORDS: Final = (
    "NA",
    "N/A",
    "#N/A",
    "NaN",
    "nan",
    "null",
    "NULL",
    "None",
    "\\N",
    "?",
    "-",
    "unknown",
)
"""Texts that mean a missing number."""
NEGATIVE_MARKER: Final = "-1"
"""Number that may mean a missing one."""
_MIN_NUMBERS: Final = 0.95
"""Minimum fraction of numbers among a column's other values if a text is a marker of missing
ones.
"""
_MARKS: Final = "|;^\x01\x02\x03\x1d, "
"""Marks that may join the items of a list, the most certain first."""
_MIN_JOINED: Final = 0.1
"""Minimum fraction of values with several items in a column of lists."""
_MIN_WORD_LISTS: Final = 20
"""Minimum number of different values of a list joined by blanks or commas, which also occur in
names and sentences.
"""
_MIN_RECURRENCE: Final = 3
"""Minimum mean occurrences of items in lists that differ by row."""
_DECIMAL: Final = r"^-?[0-9]*\.[0-9]+(e[+-]?[0-9]+)?$"
_DATE: Final = r"^\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}"
_GROUPED: Final = r"^[+-]?\d{1,3}(,\d{3})+(\.\d+)?$|^[+-]?\d+,\d+$"
"""Numbers with commas: 1,234 or 3,14."""
_INDEX_NAME: Final = r"(?i)unnamed.*|index|row|row_?(id|no|num|number)|rowid"
_EPOCH: Final = {1990: 631_152_000, 2000: 946_684_800, 2100: 4_102_444_800}
"""Seconds from 1970 to years."""
_MANY: Final = 100
"""Minimum distinct times of a column without a name."""
_ENTITY: Final = "&#?[A-Za-z0-9]{2,8};"
"""Letter in HTML."""


@dataclass(frozen=True)
class Column:
    """Column of a log's first rows."""

    name: str
    array: pa.Array
    """Values, null if missing."""
    kind: Kind
    detail: str = ""
    """Reason for an unusable column, or the mark of its lists or vectors in text (`BRACKETS` for
    lists in brackets).
    """
    length: int = 0
    """Numbers of each vector."""
    markers: tuple[str, ...] = ()
    """Texts among numbers that mean a missing one."""
    distinct: int = 0
    """Number of different values."""
    numbers: np.ndarray | None = None
    """Present numbers in row order, float64. None for other values."""
    has_missing: bool = False
    has_nan: bool = False
    is_epoch: bool = False
    """Whether times are numbers since 1970."""
    is_named: bool = True
    """Whether the file names the column. A name by position says nothing on its values."""
    is_only_timestamp: bool = False
    """Whether times have a format that only `Schema.timestamp` reads."""
    declared: str = ""
    """Type in the file's header, empty if it has none."""

    @property
    def is_number(self) -> bool:
        return self.kind in ("binary", "decimal", "integer")

    @property
    def is_ordered(self) -> bool:
        """True if no number is below the previous one."""
        return self.numbers is not None and bool((np.diff(self.numbers) >= 0).all())


# The first rule that fits decides the kind:
#
#   1. unusable       without a name, or of a type without numbers, text or lists
#   2. list, vector   Arrow's lists of integers or text, and equally long ones of decimals
#   3. constant       fewer than two different values
#   4. numbers        `_describe_numbers`: time, binary, decimal, epoch, row number, integer
#   5. time           text in a format that only `Schema.timestamp` reads
#   6. list, vector   text whose items are joined by a mark
#   7. text           anything else
#
# Markers of missing numbers are removed before, or a column with one "NA" would be text.
def examine(name: str, array: pa.Array, make_error: values.MakeError) -> Column:
    """Return the kind of a column."""
    kind = array.type
    if not name.strip():
        return Column(name, array, "unusable", "has no name")
    if values.is_list(kind) or types.is_null(kind):
        return _describe_lists(name, array)
    array, markers = _without_markers(array, name, make_error)
    try:
        numbers, status = values.parse_numbers(array, name, make_error, times=True)
    except InputError:
        return Column(name, array, "unusable", f"of type {kind}")
    present = status != values.EMPTY
    column = Column(name, array, "text", markers=markers, has_missing=not present.all())
    column = replace(column, distinct=_distinct(array))
    if column.distinct < 2:
        return replace(column, kind="constant")
    if not (status == values.REJECTED).any():
        is_text_time = (
            values.is_text(kind)
            and (values.parse_numbers(array, name, make_error)[1] == values.REJECTED).any()
        )
        return _describe_numbers(
            column,
            numbers[present],
            is_time=is_text_time or types.is_temporal(kind),
        )
    times = values.read_times(array)[1]
    if (times[present] == values.VALUE).all():
        return replace(column, kind="time", is_only_timestamp=True)
    mark = list_mark(array)
    if mark:
        return _as_vector(replace(column, kind="list", detail=mark))
    return column


def as_declared(column: Column, declared: str) -> Column:
    """Return a column with the kind that its file's header declares; see `typed_header`."""
    if not declared or column.kind in ("unusable", "constant"):
        return column
    column = replace(column, declared=declared)
    if declared in (CATEGORIES, NUMBERS):
        return _as_vector(replace(column, kind="list", detail=ITEM_MARK))
    # Ids may count up, as times and numbers of rows do.
    is_other = column.kind in ("row number", "list") or (
        column.kind == "time" and declared == CATEGORY
    )
    if is_other:
        return replace(column, kind="text" if column.numbers is None else "integer", detail="")
    return column


def is_utf8(array: pa.Array) -> bool:
    """Return whether all bytes of a column are text."""
    if types.is_binary(array.type) or types.is_large_binary(array.type):
        try:
            pc.cast(array, pa.large_string())
        except pa.ArrowInvalid:
            return False
    return True


def _describe_lists(name: str, array: pa.Array) -> Column:
    if types.is_null(array.type):
        return Column(name, array, "constant")
    item = array.type.value_type
    item = item.value_type if types.is_dictionary(item) else item
    if types.is_floating(item) or types.is_decimal(item):
        column = _as_vector(Column(name, array, "list"))
        if column.kind == "vector":
            return column
    if not (values.is_text(item) or types.is_integer(item)):
        return Column(name, array, "unusable", f"of type {array.type}")
    items = values.resolved(pc.list_flatten(array))
    return Column(name, array, "list" if items.null_count < len(items) else "constant")


def _distinct(array: pa.Array) -> int:
    """Return the number of different values that are not missing."""
    array = array.drop_null()
    if values.is_text(array.type):
        array = pc.cast(array, pa.large_binary())
        array = array.filter(pc.not_equal(array, b""))
    return pc.count_distinct(array).as_py()


def _describe_numbers(column: Column, numbers: np.ndarray, *, is_time: bool) -> Column:
    """Return the kind of a column of numbers or times."""
    array = column.array
    has_nan = bool(np.isnan(numbers).any())
    column = replace(
        column,
        has_nan=has_nan,
        has_missing=column.has_missing or has_nan,
        numbers=numbers[~np.isnan(numbers)],
    )
    assert column.numbers is not None
    if is_time:
        return replace(column, kind="time")
    if np.array_equal(np.unique(column.numbers), [0, 1]):
        return replace(column, kind="binary")
    if not _is_integral(array, column.numbers):
        return replace(column, kind="decimal")
    if _is_epoch(column):
        return replace(column, kind="time", is_epoch=True)
    steps = np.unique(np.diff(column.numbers[:1000]))
    is_counter = (
        len(steps) == 1 and steps[0] != 0 and bool((np.diff(column.numbers) == steps[0]).all())
    )
    if not column.has_missing and (
        is_counter
        or (re.fullmatch(_INDEX_NAME, column.name.strip()) and column.distinct == len(array))
    ):
        return replace(column, kind="row number")
    return replace(column, kind="integer")


def _matches(array: pa.Array, pattern: str, *, ignore_case: bool = True) -> bool:
    """Return whether all values of text that are not missing match."""
    text = pc.cast(array, pa.large_binary()).drop_null()
    text = text.filter(pc.not_equal(text, b""))
    return bool(pc.all(pc.match_substring_regex(text, pattern, ignore_case=ignore_case)).as_py())


def _is_integral(array: pa.Array, numbers: np.ndarray) -> bool:
    if values.is_text(array.type):
        return _matches(array, r"^[ \t]*[+-]?[0-9]+[ \t]*$")
    return types.is_integer(array.type) or bool((np.trunc(numbers) == numbers).all())


def without_name(column: Column) -> Column:
    """Return a column of a file without a header, whose name tells nothing. Integers with many
    values in the years from 1990 to 2100 are times.
    """
    column = replace(column, is_named=False)
    is_time = column.kind == "integer" and column.distinct > _MANY and _in_years(column, 1990)
    return replace(column, kind="time", is_epoch=True) if is_time else column


def _is_epoch(column: Column) -> bool:
    """Return whether integers are times since 1970: of years 2000 to 2100 in order, or from 1990 on
    by name.
    """
    is_named = not _TIMES.isdisjoint(split_words(column.name))
    if not _in_years(column, 1990 if is_named else 2000):
        return False
    return column.distinct > 1 and (is_named or column.is_ordered)


def _in_years(column: Column, first: int) -> bool:
    """Return whether all numbers are seconds, milliseconds or microseconds from 1970 to the years
    from 1990 or 2000 to 2100.
    """
    assert column.numbers is not None
    start = _EPOCH[first]
    for unit in (1, 10**3, 10**6):
        if column.numbers.min() >= start * unit and column.numbers.max() < _EPOCH[2100] * unit:
            return True
    return False


def _without_markers(
    array: pa.Array,
    name: str,
    make_error: values.MakeError,
) -> tuple[pa.Array, tuple[str, ...]]:
    """Return a column of numbers or times in text without the markers of missing ones, and these.
    Others are unchanged.
    """
    if not values.is_text(array.type):
        return array, ()
    text = pc.cast(array, pa.large_binary())
    is_word = pc.is_in(
        text,
        value_set=pa.array([word.encode() for word in _WORDS], pa.large_binary()),
    )
    if not pc.any(is_word).as_py():
        return array, ()
    plain = text.filter(pc.invert(is_word)).drop_null()
    _, status = values.parse_numbers(plain, name, make_error, times=True)
    status = status[status != values.EMPTY]
    if not len(status) or np.mean(status == values.VALUE) < _MIN_NUMBERS:
        return array, ()
    markers = {word.decode() for word in pc.unique(text.filter(is_word)).to_pylist()}
    return pc.if_else(is_word, pa.scalar(None, text.type), text), tuple(
        word for word in _WORDS if word in markers
    )


# -- Lists in text
def list_mark(array: pa.Array) -> str:
    """Return the mark that joins the items of lists in text, or BRACKETS, or an empty text for
    other columns. Items recur in other lists.
    """
    text = pc.cast(array, pa.large_binary()).drop_null()
    text = text.filter(pc.not_equal(text, b""))
    if _matches(array, BRACKETED, ignore_case=False):
        lists, bad = values.split_lists(text, BRACKETS, trim=False)
        has_items = pc.sum(pc.list_value_length(lists)).as_py() > len(text)
        return BRACKETS if has_items and not bad.any() else ""
    if _matches(array, _DATE) or _matches(array, _GROUPED):
        return ""
    return next((mark for mark in _MARKS if _is_joined(text, mark)), "")


# A mark joins items if it occurs often enough and the items recur more than the texts do, which
# they do not in names, sentences or codes. Blanks and commas are frequent in prose, so that words
# need many more texts than items.
def _is_joined(text: pa.Array, mark: str) -> bool:
    """Return whether a mark joins the items of lists in text."""
    if mark == ";":
        text = pc.replace_substring_regex(text, _ENTITY, "")
    several = pc.mean(pc.greater(pc.count_substring(text, pattern=mark), 0)).as_py()
    if several < _MIN_JOINED:
        return False
    items = pc.list_flatten(values.split_lists(text, mark, trim=True)[0])
    if _matches(items, _DECIMAL):
        return True
    num_items = pc.count_distinct(items).as_py()
    num_texts = pc.count_distinct(text).as_py()
    recur = num_items < num_texts or len(items) >= _MIN_RECURRENCE * num_items
    if mark in ", " and not _matches(items, r"[0-9]"):
        return num_texts >= _MIN_WORD_LISTS and 2 * num_items < num_texts
    return recur


def has_decimals(column: Column) -> bool:
    """Return whether the items of lists in text are decimal numbers."""
    items = pc.list_flatten(values.split_lists(column.array, column.detail, trim=True)[0])
    items = pc.cast(items, pa.large_binary()).drop_null()
    return bool(len(items)) and _matches(items, _DECIMAL)


def _as_vector(column: Column) -> Column:
    """Return a column of lists as one of vectors, if all have equally many decimal numbers."""
    lists = column.array
    if not values.is_list(lists.type):
        if column.declared != NUMBERS and not has_decimals(column):
            return column
        lists, _ = values.split_lists(lists, column.detail, trim=True)
    sizes = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    items = values.resolved(pc.list_flatten(lists))
    present = items.is_valid()
    if values.is_text(items.type):
        present = pc.and_(present, pc.fill_null(pc.greater(pc.binary_length(items), 0), False))
    row_of = np.repeat(np.arange(len(sizes)), sizes)[present.to_numpy(zero_copy_only=False)]
    lengths = np.bincount(row_of, minlength=1)
    length = int(lengths.max())
    if not 2 <= length <= MAX_VECTOR or ((lengths > 0) & (lengths < length)).any():
        return column
    return replace(column, kind="vector", length=length)


def has_several_items(column: Column) -> bool:
    """Return whether the lists of a column have more than one different item."""
    return pc.count_distinct(values.resolved(pc.list_flatten(column.array))).as_py() > 1


# -- Names
_WORDS_OF_NAMES: Final[dict[str, list[str]]] = packaged_json(__package__, "column_words.json")
"""Words in the names of codes, entities with codes, amounts and times."""
_IDS: Final = frozenset(_WORDS_OF_NAMES["ids"])
_ENTITIES: Final = frozenset(_WORDS_OF_NAMES["entities"])
_AMOUNTS: Final = frozenset(_WORDS_OF_NAMES["amounts"])
_TIMES: Final = frozenset(_WORDS_OF_NAMES["times"])
_USERS: Final = frozenset(_WORDS_OF_NAMES["users"])
_ITEMS: Final = frozenset(_WORDS_OF_NAMES["items"])


def split_words(name: str) -> list[str]:
    """Return the words of a column name in lower case."""
    return [
        word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+|[^\W_]+", name)
    ]


def is_id_name(name: str) -> bool:
    """Return whether a column of integers has the name of a code."""
    words = split_words(name) or [""]
    last = words[-1]
    if re.fullmatch(r"c[0-9]+", "".join(words)):
        return True
    return last in _IDS or last in _ENTITIES or (last.endswith("id") and last[:-2] in _ENTITIES)


def names_user(name: str) -> bool:
    """Return whether a column has the name of a user, or of a user's session."""
    return _names_one_of(name, _USERS)


def names_item(name: str) -> bool:
    """Return whether a column has the name of an item that users choose."""
    return _names_one_of(name, _ITEMS)


def _names_one_of(name: str, entities: frozenset[str]) -> bool:
    words = split_words(name)
    return any(word in entities or word.removesuffix("id") in entities for word in words)


def is_amount_name(name: str) -> bool:
    """Return whether a column of integers has the name of an amount."""
    words = split_words(name)
    return not is_id_name(name) and (
        not _AMOUNTS.isdisjoint(words) or bool(re.fullmatch(r"i[0-9]+", "".join(words)))
    )


def time_rank(column: Column) -> tuple[bool, bool]:
    """Return the order of columns with times by how likely they have the row's time, the most
    likely first.
    """
    words = split_words(column.name)
    is_named = words[-1:] == ["timestamp"] or not {
        "time",
        "timestamp",
        "ts",
        "datetime",
    }.isdisjoint(words)
    return not is_named, not column.is_ordered


_FEW = 50
_MIN_AMOUNTS = 10
"""Maximum different integers of categories, and of an amount by name that counts as categories all
the same.
"""
_MAX_AMOUNT: Final = 2**53
"""Maximum of amounts. Larger integers are codes: as float64 numbers, neighbors are equal."""
_CONCENTRATED = 0.35
_EDGE = 0.25
"""Maximum part of the range with the middle half of amounts, or with the half below or above the
median. Codes spread evenly.
"""


# The first line that fits decides whether integers are amounts or codes:
#
#   beyond 2^53                 codes, which float64 cannot tell apart
#   name of an id, or codes     codes (leading zeros, many digits)
#   name of an amount           amounts, if they have enough different values
#   floats                      amounts
#   else                        amounts if there are many values, concentrated in their range
def is_amount(column: Column) -> bool:
    """Return whether a column of integers has amounts, by its name, else by the shape of its
    values; else it has codes.
    """
    assert column.numbers is not None
    is_text = values.is_text(column.array.type)
    if np.abs(column.numbers).max() > _MAX_AMOUNT:
        return False
    if (column.is_named and is_id_name(column.name)) or (is_text and _has_codes(column.array)):
        return False
    if is_amount_name(column.name):
        return column.distinct > _MIN_AMOUNTS
    kind = column.array.type
    # Databases write integers as decimals without a scale, such as NUMBER(19) and decimal(20,0).
    if types.is_floating(kind) or (types.is_decimal(kind) and kind.scale > 0):
        return True
    return column.distinct > _FEW and is_concentrated(column.numbers)


def is_concentrated(numbers: np.ndarray) -> bool:
    """Return whether numbers are unevenly spread over their range, as amounts are."""
    low, quarter, median, three_quarters, high = np.quantile(numbers, [0, 0.25, 0.5, 0.75, 1])
    spread = high - low
    return bool(
        three_quarters - quarter < _CONCENTRATED * spread
        or min(median - low, high - median) < _EDGE * spread
    )


def _has_codes(array: pa.Array) -> bool:
    """Return whether some integers in text have leading zeros, or more digits than numbers have."""
    text = pc.cast(array, pa.large_binary())
    return bool(pc.any(pc.match_substring_regex(text, r"^0[0-9]|^[+-]?[0-9]{16,}$")).as_py())
