"""Kernels of the functions in formulas of features, over whole columns. Each equals its definition
in `rayrec.data.features.definitions` to the last bit.

Columns are canonical Arrow arrays. Numbers are float64, and times int64 (UTC microseconds since
1970). Categories and texts are large_string, a dictionary with large_string, or int64, which stands
for its digits. Lists are large_list with float64, large_string or int64. Missing values are null,
also what is NaN, infinite or an empty text in a file. Lists and dictionaries have no null items.
"""

from __future__ import annotations

import functools
import re
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.encoded_rows import expand_ranges
from rayrec.data.features.definitions import (
    DECIMAL_TEXT,
    FIRST_TIME,
    LAST_TIME,
    NUM_VALUES,
    PART_MARK,
    SEPARATORS,
)
from rayrec.data.features.inputs import as_text
from rayrec.data.logs.column_values import VALUE, Text, category_tokens, text_numbers
from rayrec.formula.fitted import FITTED
from rayrec.formula.tree import (
    Call,
    Column,
    Literal,
    Lookup,
    Node,
    Type,
)
from rayrec.hashing import mix64
from rayrec.native import call

TableLookup = Callable[[Lookup, list[pa.Array], Type], pa.Array]
"""Function of a lookup, the canonical arrays of its one or two keys, [rows], and its type. It
returns the canonical array of the side table's values, null if a key is null or no row has it.
"""

_MAX_PARTS: Final = 3
"""Maximum categories of `cross`."""
_WIDEST: Final = 20
"""Characters of the longest int64."""

# Units of canonical times.
_HOUR_US: Final = 3_600_000_000
_DAY_US: Final = 24 * _HOUR_US

_DECIMAL: Final = DECIMAL_TEXT.pattern.replace("(", "(?:")
_KEY_AND_VALUE: Final = f"(?s)^(?P<key>.*):(?P<value>{_DECIMAL})$"
"""Pattern of an item such as a:0.5. The greedy key has all colons but the last."""


def evaluate(
    node: Node,
    columns: Mapping[str, pa.Array],
    rows: int,
    lookup: TableLookup,
) -> pa.Array:
    """Return the values of a formula, a canonical array [rows].

    Args:
        node: Checked tree, `rayrec.formula.types.Checked.node`. An unchecked lookup has no kernel.
        columns: Canonical arrays [rows] by column name, of the types that the check was given or
            returned in `sources`.
        rows: Number of rows, for constants.
        lookup: Called once for each lookup, in the order of evaluation.

    Values of a fitted function without constants are null.

    Raises:
        KeyError: For a column that `columns` lacks.
    """
    if isinstance(node, Column):
        return columns[node.name]
    if isinstance(node, Literal):
        kind = pa.float64() if isinstance(node.value, float) else pa.large_string()
        return pa.repeat(pa.scalar(node.value, kind), rows)
    if isinstance(node, Lookup):
        keys = [evaluate(key, columns, rows, lookup) for key in node.keys]
        return lookup(node, keys, node.type)
    if node.function in FITTED:
        # Without constants yet: only which rows are valid is asked for.
        kind = pa.large_string() if node.function == "quantile" else pa.float64()
        return pa.nulls(rows, kind)
    values, constants = _split(node)
    arrays = [evaluate(value, columns, rows, lookup) for value in values]
    return KERNELS[node.function](*arrays, *constants)


def _split(node: Call) -> tuple[Sequence[Node], list[Any]]:
    """Return the values and the constants among a call's arguments. After a check, only the rows of
    `cross` are a number among categories.
    """
    count = NUM_VALUES.get(node.function, len(node.arguments))
    last = node.arguments[-1]
    if node.function == "cross" and isinstance(last, Literal) and isinstance(last.value, float):
        count -= 1
    constants = []
    for constant in node.arguments[count:]:
        assert isinstance(constant, Literal)
        constants.append(constant.value)
    return node.arguments[:count], constants


@dataclass(frozen=True)
class _Lists:
    """Lists of a column: row i has items[starts[i] : starts[i] + lengths[i]]."""

    items: pa.Array
    starts: np.ndarray
    """int64 [rows]."""
    lengths: np.ndarray
    """Number of items, 0 if missing, int64 [rows]."""
    missing: np.ndarray
    """Mask of missing lists, bool [rows]."""

    @classmethod
    def from_array(cls, array: pa.Array) -> _Lists:
        offsets = array.offsets.to_numpy().astype(np.int64, copy=False)
        missing = _missing(array)
        # A null list may have items in the file.
        lengths = np.where(missing, 0, np.diff(offsets))
        return cls(array.values, offsets[:-1], lengths, missing)

    def positions(self) -> np.ndarray:
        """Return the positions in `items` of all rows' items, row by row, int64."""
        return expand_ranges(self.starts, self.lengths)

    def rows(self) -> np.ndarray:
        """Return the row number of each position, int64."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def number(array: pa.Array) -> pa.Array:
    """Parse texts as numbers. Numbers stay."""
    if pa.types.is_floating(array.type):
        return array
    if pa.types.is_integer(array.type):
        # Integers above 2^53 are rounded, as their digits would be.
        return pc.cast(array, pa.float64(), safe=False)
    trimmed = pc.ascii_trim(as_text(array), characters=" \t")
    values, status = text_numbers(trimmed)
    return _number_array(np.where(status == VALUE, values, np.nan))


def bucketize(array: pa.Array, edges: Sequence[float]) -> pa.Array:
    """Return the number of edges at or below each number."""
    buckets = np.empty(len(array), np.int64)
    numbers = np.ascontiguousarray(_floats(array))
    call(
        "rayrec_bucketize",
        numbers,
        len(array),
        np.array(edges),
        len(edges),
        buckets,
    )
    return _masked(buckets, _missing(array))


def log(array: pa.Array) -> pa.Array:
    """Return sign(x) ln(1 + |x|), by Arrow's log1p, which is the C library's."""
    values = _floats(array)
    logarithms = pc.log1p(pa.array(np.abs(values))).to_numpy(zero_copy_only=False)
    return _number_array(np.copysign(logarithms, values))


def clip(array: pa.Array, low: float, high: float) -> pa.Array:
    """Return the nearest numbers from low to high."""
    values = _floats(array)
    raised = np.where(values < low, low, values)
    return _number_array(np.where(values > high, high, raised))


def hash_row(array: pa.Array, rows: float) -> pa.Array:
    """Return the rows of categories in a hashed table."""
    tokens = np.empty(len(array), np.uint64)
    status = category_tokens(array, tokens)
    missing = status != VALUE
    return _rows_of_tokens(tokens, rows, missing)


def _rows_of_tokens(tokens: np.ndarray, rows: float, missing: np.ndarray) -> pa.Array:
    """Return the rows of tokens in a hashed table, null where `missing`."""
    mixed = mix64(tokens)
    hashed = mixed % np.uint64(rows)
    # Rows are at most 2^31, so that they fit an int64.
    return _masked(hashed.view(np.int64), missing)


def cross(*arguments: Any) -> pa.Array:
    """Join the categories of each row, and hash them if a number of rows follows."""
    parts = [part for part in arguments if isinstance(part, pa.Array)]
    offsets, data = _joined(parts)
    missing = functools.reduce(np.logical_or, map(_missing, parts))
    if len(parts) < len(arguments):
        text = Text(offsets, data, None)
        tokens = np.empty(len(text), np.uint64)
        text.call("rayrec_text_tokens", tokens)
        return _rows_of_tokens(tokens, arguments[-1], missing)
    present = None
    if missing.any():
        present = pa.array(~missing).buffers()[1]
    return pa.LargeStringArray.from_buffers(
        len(missing),
        pa.py_buffer(offsets),
        pa.py_buffer(data),
        present,
    )


def _joined(parts: Sequence[pa.Array]) -> tuple[np.ndarray, np.ndarray]:
    """Join two or three categories of each row by PART_MARK, any text where one is null. Return the
    offsets and bytes of the texts, as `Text` has them.
    """
    rows = len(parts[0])
    columns = [_operand(part) for part in parts]
    # With one mark too many for each row
    widest = rows * len(parts)
    for offsets, _ in columns:
        if offsets is None:
            widest += _WIDEST * rows
        else:
            widest += int(offsets[-1] - offsets[0])
    joined_offsets = np.zeros(rows + 1, np.int64)
    data = np.empty(widest, np.uint8)
    pointers = [pointer for column in columns for pointer in column]
    pointers += [None, None] * (_MAX_PARTS - len(parts))
    call(
        "rayrec_join_texts",
        *pointers,
        ord(PART_MARK),
        rows,
        joined_offsets,
        data,
    )
    end = joined_offsets[-1]
    return joined_offsets, data[:end]


# The arrays own their memory or are views of Arrow's buffers, to which they refer. The arguments of
# `call` refer to the arrays until the kernel has returned, and kernels keep no pointer.
def _operand(array: pa.Array) -> tuple[np.ndarray | None, np.ndarray]:
    """Return categories for kernels that take both forms: the offsets and bytes of texts, or None
    and the integers, 0 for null.
    """
    if pa.types.is_integer(array.type):
        integers = _integers(array)
        return None, np.ascontiguousarray(integers)
    text = Text.from_array(as_text(array))
    return text.offsets, text.data


def _alike(*arrays: pa.Array) -> Sequence[pa.Array]:
    """Return values of one type. Categories may be texts, integers and dictionaries."""
    kinds = {array.type for array in arrays}
    # Two dictionaries may have different numbers for a text.
    has_dictionary = any(map(pa.types.is_dictionary, kinds))
    if len(kinds) == 1 and not has_dictionary:
        return arrays
    return [as_text(array) for array in arrays]


def concat(*arrays: pa.Array) -> pa.Array:
    """Concatenate the lists of each row."""
    lists = [_Lists.from_array(array) for array in _alike(*arrays)]
    sizes = [len(column.items) for column in lists]
    shifts = _ends(np.array(sizes))[:-1]
    starts = [column.starts + shift for column, shift in zip(lists, shifts, strict=True)]
    missing = np.any([column.missing for column in lists], axis=0)
    # The ranges of all lists, row by row and in a row in the order of the arguments
    lengths = np.stack([column.lengths for column in lists], axis=1)
    lengths[missing] = 0
    ranges = np.stack(starts, axis=1)
    positions = expand_ranges(ranges.ravel(), lengths.ravel())
    items = pa.concat_arrays([column.items for column in lists])
    return _list_array(items.take(pa.array(positions)), lengths.sum(axis=1), missing)


def lower(array: pa.Array) -> pa.Array:
    """Replace A to Z by a to z."""
    return pc.ascii_lower(as_text(array))


def split(array: pa.Array, separator: str) -> pa.Array:
    """Split texts at a separator."""
    return _without_empty(pc.split_pattern(as_text(array), pattern=separator))


def tokens(array: pa.Array) -> pa.Array:
    """Split texts at SEPARATORS."""
    missing = _missing(array)
    text = Text.from_array(pc.fill_null(as_text(array), ""))
    num_bytes = int(text.offsets[-1] - text.offsets[0])
    lengths = np.empty(len(array), np.int64)
    ends = np.zeros((num_bytes + len(array)) // 2 + 1, np.int64)
    data = np.empty(num_bytes, np.uint8)
    count = call(
        "rayrec_text_runs",
        text.offsets,
        text.data,
        len(array),
        _separators(),
        lengths,
        ends[1:],
        data,
    )
    offsets = ends[: count + 1]
    used = data[: offsets[-1]]
    items = pa.LargeStringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(used))
    return _list_array(items, lengths, missing)


@functools.lru_cache(maxsize=1)
def _separators() -> np.ndarray:
    """Return which code points below 2^16 are separators, uint8. No others are."""
    is_separator = np.zeros(1 << 16, np.uint8)
    characters = "".join(map(chr, range(1 << 16)))
    for match in re.finditer(SEPARATORS, characters):
        is_separator[match.start() : match.end()] = 1
    return is_separator


def ngrams(array: pa.Array, n: float) -> pa.Array:
    """Return all runs of n code points of each text."""
    # In bytes: characters have several, so each gram has a range of its own.
    size = int(n)
    missing = _missing(array)
    text = pc.fill_null(as_text(array), "")
    characters = pc.utf8_length(text).to_numpy().astype(np.int64)
    data = _text_bytes(text)
    # Bytes other than 10xxxxxx start a code point.
    starts = np.append(np.flatnonzero((data & 0xC0) != 0x80), len(data))
    first = np.cumsum(characters) - characters
    lengths = np.maximum(characters - size + 1, 0)
    grams = expand_ranges(first, lengths)
    begins = starts[grams]
    sizes = starts[grams + size] - begins
    offsets = pa.py_buffer(_ends(sizes))
    content = pa.py_buffer(data[expand_ranges(begins, sizes)])
    items = pa.LargeStringArray.from_buffers(len(grams), offsets, content)
    return _list_array(items, lengths, missing)


def hour(array: pa.Array, zone: str = "UTC") -> pa.Array:
    """Return the hour of the day, 0 to 23."""
    local, missing = _local_times(array, zone)
    return _masked(local // _HOUR_US % 24, missing)


def weekday(array: pa.Array, zone: str = "UTC") -> pa.Array:
    """Return the day of the week, 0 for Monday to 6."""
    local, missing = _local_times(array, zone)
    # January 1, 1970 was a Thursday.
    return _masked((local // _DAY_US + 3) % 7, missing)


def age(time: pa.Array, earlier: pa.Array) -> pa.Array:
    """Return the seconds from `earlier` to `time`."""
    missing = _missing(time) | _missing(earlier)
    seconds = (_integers(time) - _integers(earlier)).astype(np.float64) / 1e6
    return _number_array(np.where(missing, np.nan, seconds))


def length(array: pa.Array) -> pa.Array:
    """Return the number of items, 0 of a missing list."""
    return pa.array(_Lists.from_array(array).lengths.astype(np.float64))


def last(array: pa.Array, n: float) -> pa.Array:
    """Return the last n items of each list."""
    lists = _Lists.from_array(array)
    lengths = np.minimum(lists.lengths, int(n))
    positions = expand_ranges(lists.starts + lists.lengths - lengths, lengths)
    return _list_array(lists.items.take(pa.array(positions)), lengths, lists.missing)


def overlap(left: pa.Array, right: pa.Array) -> pa.Array:
    """Return the number of different items that both lists of a row have."""
    left, right = _alike(left, right)
    left_lists = _Lists.from_array(left)
    right_lists = _Lists.from_array(right)
    longest = int(right_lists.lengths.max(initial=0))
    counts = np.empty(len(left))
    num_slots = max(2, 1 << (2 * longest - 1).bit_length())
    slots = np.empty(num_slots, np.uint32)
    call(
        "rayrec_count_common",
        *_operand(left_lists.items),
        left_lists.starts,
        left_lists.lengths,
        *_operand(right_lists.items),
        right_lists.starts,
        right_lists.lengths,
        len(left),
        slots,
        counts,
    )
    return _masked(counts, left_lists.missing | right_lists.missing)


def _distinct(keys: np.ndarray) -> np.ndarray:
    """Return the distinct keys in order. The stable sort profits from keys that are ordered by row,
    and takes a hundredth of the time of NumPy's unique.
    """
    keys = np.sort(keys, kind="stable")
    is_first = np.ones(len(keys), bool)
    is_first[1:] = keys[1:] != keys[:-1]
    return keys[is_first]


def count_in(array: pa.Array, item: pa.Array) -> pa.Array:
    """Return the number of items of each list that equal the row's `item`."""
    # A dictionary differs from all items of lists.
    if array.type.value_type != item.type:
        array = as_text(array)
        item = as_text(item)
    lists = _Lists.from_array(array)
    counts = np.empty(len(array))
    call(
        "rayrec_count_equal",
        *_operand(lists.items),
        lists.starts,
        lists.lengths,
        *_operand(item),
        len(array),
        counts,
    )
    return _masked(counts, lists.missing | _missing(item))


def coalesce(*arrays: pa.Array) -> pa.Array:
    """Return the first present value of each row."""
    return pc.coalesce(*_alike(*arrays))


def when(condition: pa.Array, then: pa.Array, otherwise: pa.Array) -> pa.Array:
    """Return values of `then` if the condition holds, else of `otherwise`."""
    return pc.if_else(condition, *_alike(then, otherwise))


def aggregate(array: pa.Array, mode: str) -> pa.Array:
    """Return the sum, mean, min, max or count of each list of numbers."""
    lists = _Lists.from_array(array)
    lengths = lists.lengths.astype(np.float64)
    if mode == "count":
        return pa.array(lengths, mask=lists.missing)
    # Lists may share or skip items, so each row's are taken in its order.
    values = lists.items.to_numpy(zero_copy_only=False)[lists.positions()]
    if mode in ("min", "max"):
        results = _extremes(
            values,
            lists.lengths,
            np.minimum if mode == "min" else np.maximum,
        )
    else:
        # bincount adds in the order of items; np.add.reduceat adds in pairs.
        results = np.bincount(lists.rows(), weights=values, minlength=len(array))
        if mode == "mean":
            results = _quotient(results, lengths)
    return _number_array(np.where(lists.missing, np.nan, results))


def element(array: pa.Array, index: float) -> pa.Array:
    """Return a number of each vector, missing if it has no numbers."""
    lists = _Lists.from_array(array)
    values = lists.items.to_numpy(zero_copy_only=False)
    filled = lists.lengths > 0
    results = np.full(len(array), np.nan)
    results[filled] = values[lists.starts[filled] + int(index)]
    return _number_array(results)


def dot(left: pa.Array, right: pa.Array) -> pa.Array:
    """Return the sum of the products of values with equal keys."""
    left_lists = _Lists.from_array(as_text(left))
    right_lists = _Lists.from_array(as_text(right))
    left_keys, left_values = _keys_and_values(left_lists.items)
    right_keys, right_values = _keys_and_values(right_lists.items)
    left_codes, right_codes, num_codes = _codes(left_keys, right_keys)
    left_positions = left_lists.positions()
    right_positions = right_lists.positions()
    # A key of both sides is a row and a text. bincount adds in the order of items.
    keys = right_lists.rows() * num_codes + right_codes[right_positions]
    distinct = _distinct(keys)
    totals = np.bincount(
        np.searchsorted(distinct, keys),
        weights=right_values[right_positions],
        minlength=len(distinct),
    )
    keys_on_left = left_lists.rows() * num_codes + left_codes[left_positions]
    indices = np.searchsorted(distinct, keys_on_left)
    # One past the end stands for keys above all others, and has the total 0
    is_equal = np.append(distinct, -1)[indices] == keys_on_left
    factors = np.where(is_equal, np.append(totals, 0.0)[indices], 0.0)
    with np.errstate(all="ignore"):
        products = left_values[left_positions] * factors
        sums = np.bincount(left_lists.rows(), weights=products, minlength=len(left))
    return _number_array(np.where(left_lists.missing | right_lists.missing, np.nan, sums))


def _keys_and_values(items: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Return the keys of items such as a:0.5, and their values, float64."""
    parts = pc.extract_regex(items, pattern=_KEY_AND_VALUE)
    has_value = parts.is_valid()
    keys = pc.if_else(has_value, parts.field("key"), items)
    values, _ = text_numbers(parts.field("value"))
    return keys, np.where(has_value.to_numpy(zero_copy_only=False), values, 1.0)


def is_in(array: pa.Array, constants: Sequence[float | str]) -> pa.Array:
    """Return whether each value is one of the constants, null for a missing one."""
    if pa.types.is_floating(array.type):
        # Arrow's set tells 0.0 from -0.0.
        array = pc.add(array, 0.0)
        constants = [float(constant) + 0.0 for constant in constants]
    else:
        array = as_text(array)
    matches = pc.is_in(array, value_set=pa.array(constants, array.type))
    return pc.if_else(array.is_valid(), matches, pa.scalar(None, pa.bool_()))


def equal(left: pa.Array, right: pa.Array) -> pa.Array:
    """Return whether values are equal."""
    return pc.equal(*_alike(left, right))


def differs(left: pa.Array, right: pa.Array) -> pa.Array:
    """Return whether values differ."""
    return pc.not_equal(*_alike(left, right))


def _arithmetic(
    function: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Callable[..., pa.Array]:
    """Return the kernel of an operator. Overflow gives missing values, not warnings."""

    def kernel(left: pa.Array, right: pa.Array) -> pa.Array:
        with np.errstate(all="ignore"):
            return _number_array(function(_floats(left), _floats(right)))

    return kernel


def _quotient(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return quotients, not finite if the divisor is 0."""
    with np.errstate(all="ignore"):
        return left / right


def _extremes(values: np.ndarray, lengths: np.ndarray, function: np.ufunc) -> np.ndarray:
    """Return the minimum or maximum of each row's values, NaN without values."""
    results = np.full(len(lengths), np.nan)
    filled = np.flatnonzero(lengths)
    if len(filled):
        ends = np.cumsum(lengths)
        # The sum with 0.0 makes 0.0 of -0.0.
        results[filled] = function.reduceat(values, (ends - lengths)[filled]) + 0.0
    return results


def _missing(array: pa.Array) -> np.ndarray:
    """Return the mask of null values, bool [rows]."""
    if not array.null_count:
        return np.zeros(len(array), bool)
    return array.is_null().to_numpy(zero_copy_only=False)


def _floats(array: pa.Array) -> np.ndarray:
    """Return numbers, NaN for null, float64 [rows]."""
    return array.to_numpy(zero_copy_only=False)


def _integers(array: pa.Array) -> np.ndarray:
    """Return times or integers, 0 for null, int64 [rows]."""
    return pc.fill_null(array, 0).to_numpy(zero_copy_only=False)


def _number_array(values: np.ndarray) -> pa.Array:
    """Return an array of numbers, null if they are not finite."""
    # Without a mask, Arrow shares NumPy's memory.
    present = np.isfinite(values)
    return pa.array(values) if present.all() else pa.array(values, mask=~present)


def _masked(values: np.ndarray, missing: np.ndarray) -> pa.Array:
    """Return an array of values, null where `missing`."""
    return pa.array(values, mask=missing) if missing.any() else pa.array(values)


def _list_array(items: pa.Array, lengths: np.ndarray, missing: np.ndarray) -> pa.Array:
    """Return lists of consecutive items, null where `missing`."""
    mask = pa.array(missing) if missing.any() else None
    return pa.LargeListArray.from_arrays(pa.array(_ends(lengths)), items, mask=mask)


def _ends(lengths: np.ndarray) -> np.ndarray:
    """Return 0 and the sums of the first lengths, int64 [lengths + 1]."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def _without_empty(array: pa.Array) -> pa.Array:
    """Return lists of texts without the empty ones."""
    lists = _Lists.from_array(array)
    filled = pc.greater(pc.binary_length(lists.items), 0)
    before = _ends(filled.to_numpy(zero_copy_only=False))
    lengths = before[lists.starts + lists.lengths] - before[lists.starts]
    # Arrow's split gives no items to a missing text, so those that are left are the rows' in order.
    return _list_array(lists.items.filter(filled), lengths, lists.missing)


def _text_bytes(text: pa.Array) -> np.ndarray:
    """Return the concatenated bytes of texts without nulls, uint8."""
    _, offsets, data = text.buffers()
    if not len(text) or data is None or not data.size:
        return np.zeros(0, np.uint8)
    ends = np.frombuffer(offsets, np.int64, len(text) + 1, 8 * text.offset)
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]


def _codes(left: pa.Array, right: pa.Array) -> tuple[np.ndarray, np.ndarray, int]:
    """Return integers of the texts of two arrays, equal for equal texts, int64, and their bound,
    1 or more.
    """
    encoded = pa.concat_arrays([left, right]).dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    num_codes = max(1, len(encoded.dictionary))
    return codes[: len(left)], codes[len(left) :], num_codes


def _local_times(array: pa.Array, zone: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the times on a zone's clocks, int64 microseconds [rows], and those that are missing or
    outside of FIRST_TIME to LAST_TIME, bool [rows].
    """
    times = _integers(array)
    missing = _missing(array) | (times < FIRST_TIME) | (times >= LAST_TIME)
    times = np.where(missing, 0, times)
    if zone == "UTC" or not len(times):
        return times, missing
    # Spans are few, a thousand for a thousand years, so that counting them costs less than sorting.
    spans = times >> _SPAN_BITS
    first = spans.min()
    present = np.flatnonzero(np.bincount(spans - first)) + first
    tables = [_offsets(zone, span) for span in present.tolist()]
    starts = np.concatenate([table[0] for table in tables])
    offsets = np.concatenate([table[1] for table in tables])
    # Each span begins with an entry, so that a time never gets an offset of another span.
    return times + offsets[np.searchsorted(starts, times, side="right") - 1], missing


_SPAN_BITS: Final = 45
"""Binary logarithm of a span of 407 days, in microseconds."""
_STEP_BITS: Final = 36
"""Binary logarithm of a step of 19 hours, in microseconds."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


# Arrow ignores the rule at the end of a zone's file, which holds after its last listed change. That
# is in 2037 in most files, but years ago in files of the `slim` form. So Python's zoneinfo finds
# the changes in each span of time, once, and the kernel only searches.
@functools.lru_cache(maxsize=16384)
def _offsets(zone: str, span: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the times of a span from which a zone's offset from UTC holds, the first of them the
    span's start, and these offsets, int64 microseconds.
    """
    clock = zoneinfo.ZoneInfo(zone)
    start = span << _SPAN_BITS
    starts = [start]
    offsets = [_offset(clock, start)]
    for time in range(start, (span + 1) << _SPAN_BITS, 1 << _STEP_BITS):
        end = time + (1 << _STEP_BITS) - 1
        after = _offset(clock, end)
        if after != offsets[-1]:
            starts.append(_change(clock, max(time - 1, start), end))
            offsets.append(after)
    return np.array(starts), np.array(offsets)


def _change(clock: zoneinfo.ZoneInfo, before: int, after: int) -> int:
    """Return the first time with the offset that holds at `after`, unlike at `before`."""
    offset = _offset(clock, after)
    while after - before > 1:
        middle = (before + after) // 2
        if _offset(clock, middle) == offset:
            after = middle
        else:
            before = middle
    return after


def _offset(clock: zoneinfo.ZoneInfo, time: int) -> int:
    """Return a zone's offset from UTC, in microseconds, at the nearest time that has one."""
    time = min(max(time, FIRST_TIME), LAST_TIME - 1)
    offset = (_EPOCH + timedelta(microseconds=time)).astimezone(clock).utcoffset()
    assert offset is not None
    return offset // timedelta(microseconds=1)


KERNELS: Final[dict[str, Callable[..., pa.Array]]] = {
    "number": number,
    "bucketize": bucketize,
    "log": log,
    "clip": clip,
    "hash": hash_row,
    "cross": cross,
    "concat": concat,
    "lower": lower,
    "split": split,
    "tokens": tokens,
    "ngrams": ngrams,
    "hour": hour,
    "weekday": weekday,
    "age": age,
    "len": length,
    "last": last,
    "overlap": overlap,
    "count_in": count_in,
    "coalesce": coalesce,
    "when": when,
    "aggregate": aggregate,
    "element": element,
    "dot": dot,
    "add": _arithmetic(np.add),
    "subtract": _arithmetic(np.subtract),
    "multiply": _arithmetic(np.multiply),
    "divide": _arithmetic(np.divide),
    "equal": equal,
    "differs": differs,
    "less": pc.less,
    "at_most": pc.less_equal,
    "more": pc.greater,
    "at_least": pc.greater_equal,
    "is_in": is_in,
}
"""Kernel of each function. Values are arrays [rows], constants Python values."""
