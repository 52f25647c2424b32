"""Values of Arrow columns of any type: numbers, times, and categories as 64-bit tokens. The token
of an integer is its 64-bit two's complement; text is hashed by XXH64 (seed 0, UTF-8). Integers have
the same tokens in CSV and in Parquet files. Text in the canonical decimal form of an int64 (no
plus, no leading zeros, no -0) counts as that integer, and a larger integer, unsigned or decimal, as
its text. Booleans are the integers 1 and 0, also as the texts true, True, TRUE, false, False and
FALSE. Two different categories get the same token with probability 2^-64, and are then one category
to the model. Among n different texts in a column, n^2 / 2^65 such pairs are expected: 3e-8 for a
million, 0.03 for a billion, 1 for 6.1 billion.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec.config import InputError
from rayrec.data.encoding.rules import (
    BRACKET_ITEM,
    BRACKETED,
    EPOCH_UNITS,
    GLUED,
    ISO_TIME,
    QUOTED,
    TIME_FORMATS,
    unescaped,
)
from rayrec.native import call
from rayrec.schema import BRACKETS

# rayrec_text_status in native/kernels.h
VALUE = 0
EMPTY = 1
REJECTED = 2
_LONG = 3


# The arrays are views of Arrow's buffers. NumPy's views hold references to them, so that the
# pointers that `call` passes to a kernel stay valid until it returns.
@dataclass(frozen=True)
class Text:
    """Text column for the kernels. Value i is data[offsets[i] : offsets[i + 1]]."""

    offsets: np.ndarray
    """Start of each value and the end, int64 [values + 1]."""
    data: np.ndarray
    """Concatenated bytes, uint8."""
    null: np.ndarray | None
    """Mask of null values, bool [values]. None if all are present."""

    @classmethod
    def from_array(cls, array: pa.Array) -> Text:
        """Wrap an Arrow array of strings or bytes of any kind, sharing its memory."""
        array = _as_bytes(array)
        _, offsets, data = array.buffers()
        empty = not len(array)  # Arrow may then have no buffers
        return cls(
            np.zeros(1, np.int64)
            if empty
            else np.frombuffer(offsets, np.int64, len(array) + 1, 8 * array.offset),
            np.zeros(1, np.uint8) if not data or not data.size else np.frombuffer(data, np.uint8),
            array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def is_ascii(self) -> bool:
        """True if all values are ASCII."""
        return bool(self.data[self.offsets[0] : self.offsets[-1]].max(initial=0) < 128)

    def call(self, kernel: str, *outputs: np.ndarray) -> np.ndarray:
        """Run a kernel over the values into `outputs`. Return VALUE, EMPTY or REJECTED for each
        value, uint8 [values].
        """
        status = np.empty(len(self), np.uint8)
        call(kernel, self.offsets, self.data, self.null, len(self), *outputs, status)
        return status


def _as_bytes(array: pa.Array) -> pa.Array:
    """Return text as large_binary. A cast to the same type would take microseconds, too."""
    return array if types.is_large_binary(array.type) else pc.cast(array, pa.large_binary())


def text_tokens(array: pa.Array, out: np.ndarray, *, booleans: bool = True) -> np.ndarray:
    """Write the tokens of an Arrow array of text to `out` (contiguous uint64) and return their
    status, uint8 [values]. Invalid UTF-8 is REJECTED. Without `booleans`, true and false are plain
    text. About 20 ns per value.
    """
    return Text.from_array(array).call(
        "rayrec_text_tokens" if booleans else "rayrec_plain_text_tokens", out
    )


def _values_of(
    array: pa.Array,
    dtype: type[np.generic],
) -> tuple[np.ndarray, tuple[np.ndarray | None, int]]:
    """Return the values of a fixed-width Arrow array, [values], undefined for null; and its
    validity bits, uint8, with the index of the first one. None: all are present. Shares its memory.
    """
    bits, values = array.buffers()
    valid = np.frombuffer(bits, np.uint8) if array.null_count else None
    item_bytes = np.dtype(dtype).itemsize
    numbers = np.frombuffer(values or b"", dtype, len(array), item_bytes * array.offset)
    return numbers, (valid, array.offset)


def _present_words(array: pa.Array, out: np.ndarray) -> np.ndarray:
    """Write the values of an Arrow array of 8 bytes each to `out` (contiguous), 0 for null, and
    return their status, uint8 [values].
    """
    values, validity = _values_of(array, np.uint64)
    status = np.empty(len(array), np.uint8)
    call("rayrec_present_words", values, *validity, len(array), out, status)
    return status


def integer_tokens(array: pa.Array, out: np.ndarray) -> np.ndarray:
    """Write the tokens of an Arrow array with integers of any width, or booleans (0 and 1), and
    return their status.
    """
    wide = array if types.is_uint64(array.type) else pc.cast(array, pa.int64())
    status = _present_words(wide, out)
    if types.is_uint64(array.type):
        # CSV files cannot tell unsigned from signed integers: there, text beyond int64 is hashed.
        large = np.flatnonzero(out >= 2**63)
        if len(large):
            tokens = np.empty(len(large), np.uint64)
            text_tokens(pc.cast(pa.array(out[large]), pa.string()), tokens)
            out[large] = tokens
    return status


def category_tokens(array: pa.Array, out: np.ndarray, *, booleans: bool = True) -> np.ndarray:
    """Write the tokens of an Arrow array with integers, text, or a dictionary of text, and return
    their status; see `text_tokens`.
    """
    if types.is_integer(array.type):
        return integer_tokens(array, out)
    if not types.is_dictionary(array.type):
        return text_tokens(array, out, booleans=booleans)
    tokens = np.empty(len(array.dictionary), np.uint64)
    statuses = text_tokens(
        array.dictionary,
        tokens,
        booleans=booleans,
    )
    codes, validity = _values_of(pc.cast(array.indices, pa.int32()), np.int32)
    status = np.empty(len(array), np.uint8)
    call("rayrec_coded_tokens", codes, *validity, len(array), tokens, statuses, out, status)
    return status


@dataclass(frozen=True)
class Markers:
    """Values that mean a missing number or category."""

    texts: pa.Array
    """Markers as they are written, large_binary."""
    numbers: np.ndarray
    """Values of the markers that are numbers, float64."""
    integers: np.ndarray
    """Tokens of the markers that are integers, uint64."""

    @classmethod
    @lru_cache(maxsize=64)
    def from_texts(cls, markers: tuple[str, ...]) -> Markers:
        texts = pa.array([marker.encode() for marker in markers], pa.large_binary())
        values, status = text_numbers(texts)
        numbers = values[(status == VALUE) & ~np.isnan(values)]
        integral = numbers[(np.trunc(numbers) == numbers) & (np.abs(numbers) < 2.0**53)]
        return cls(texts, numbers, integral.astype(np.int64).view(np.uint64))

    @classmethod
    @lru_cache(maxsize=64)
    def from_label(cls, markers: tuple[str, ...], positive: tuple[str, ...]) -> Markers:
        """Return the markers in a label column: none that are numbers or count as 1, since -1 may
        be a label.
        """
        texts = [marker.encode() for marker in markers if marker not in positive]
        _, status = text_numbers(pa.array(texts, pa.large_binary()))
        return cls.from_texts(
            tuple(text.decode() for text, kind in zip(texts, status, strict=True) if kind != VALUE)
        )

    def to_null(self, array: pa.Array) -> pa.Array:
        """Replace the markers among the values of a text column by null. Columns of other types are
        returned unchanged.
        """
        if not len(self.texts):
            return array
        if types.is_dictionary(array.type):
            return pa.DictionaryArray.from_arrays(array.indices, self.to_null(array.dictionary))
        if not is_text(array.type):
            return array
        array = pc.cast(array, pa.large_binary())
        marked = pc.is_in(array, value_set=self.texts)
        return (
            pc.if_else(marked, pa.scalar(None, pa.large_binary()), array)
            if pc.any(marked).as_py()
            else array
        )

    def mark_numbers(self, values: np.ndarray, status: np.ndarray) -> np.ndarray:
        """Return the status of numbers, EMPTY for the markers among them, uint8 [values]."""
        if not len(self.numbers):
            return status
        return np.where((status == VALUE) & np.isin(values, self.numbers), EMPTY, status)

    def mark_tokens(self, tokens: np.ndarray, status: np.ndarray) -> np.ndarray:
        """Return the status of categories, EMPTY for the integers among the markers, uint8
        [values].
        """
        if not len(self.integers):
            return status
        return np.where((status == VALUE) & np.isin(tokens, self.integers), EMPTY, status)


def split_lists(array: pa.Array, mark: str, *, trim: bool) -> tuple[pa.Array, np.ndarray]:
    """Split lists in text at `mark`, a character or BRACKETS. With `trim`, without blanks around
    items; those in brackets never have them. Return a list array, null for null, and which values
    are no lists in brackets, bool [values].
    """
    text = pc.cast(array, pa.large_binary())
    if mark == BRACKETS:
        return _split_brackets(text)
    if trim:
        text = pc.replace_substring_regex(text, pattern=r"^[ \t]+|[ \t]+$", replacement="")
        pattern = rf"[ \t]*{re.escape(mark)}[ \t]*"
        return pc.split_pattern_regex(text, pattern=pattern), np.zeros(len(array), bool)
    return pc.split_pattern(text, pattern=mark), np.zeros(len(array), bool)


_ITEM_END = "\x1e"
"""End of an item while lists in brackets are split. Values that contain it are no lists."""


# Arrow has no parser of bracketed lists. A sequence of its vectorized expressions replaces one:
#
#   1. BRACKETED   rejects text that is no list at all
#   2. GLUED       rejects items without a separator, after quoted items are shortened
#   3. inner       the text between the brackets
#   4. marked      each item without its quotes, followed by _ITEM_END
#   5. lists       marked text, split at _ITEM_END
def _split_brackets(text: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Split lists in brackets. Values of RE2's and Python's expressions are equal, see
    `rules.bracket_items`.
    """
    is_list_text = pc.match_substring_regex(text, BRACKETED)
    is_list_text = pc.and_(is_list_text, pc.invert(pc.match_substring(text, _ITEM_END)))
    unquoted = pc.replace_substring_regex(text, pattern=QUOTED, replacement="'")
    is_list_text = pc.and_(is_list_text, pc.invert(pc.match_substring_regex(unquoted, GLUED)))
    empty = pc.or_(pc.is_null(text), pc.match_substring_regex(text, r"^[ \t]*$").fill_null(True))
    bad = pc.invert(pc.or_(is_list_text.fill_null(False), empty)).to_numpy(zero_copy_only=False)
    inner = pc.replace_substring_regex(
        text, pattern=r"(?s)^[ \t]*\[(.*)\][ \t]*$", replacement=r"\1"
    )
    marked = pc.replace_substring_regex(
        inner, pattern=BRACKET_ITEM, replacement=rf"\1\2\3\4{_ITEM_END}"
    )
    marked = pc.if_else(
        pc.and_(is_list_text, pc.invert(empty)).fill_null(False),
        marked,
        pa.scalar(b"", pa.large_binary()),
    )
    lists = pc.split_pattern(marked, pattern=_ITEM_END)
    items = pc.list_flatten(lists)
    escaped = pc.match_substring(items, "\\")
    if pc.any(escaped).as_py():
        # Escapes are rare, so that only the distinct items with one are decoded in Python.
        coded = items.filter(escaped).dictionary_encode()
        plain = pa.array(
            [_unescaped_bytes(item) for item in coded.dictionary.to_pylist()], items.type
        )
        items = pc.replace_with_mask(items, escaped, plain.take(coded.indices))
        lists = pa.LargeListArray.from_arrays(pc.cast(lists.offsets, pa.int64()), items)
    return lists, bad


def _unescaped_bytes(item: bytes) -> bytes:
    try:
        return unescaped(item.decode()).encode()
    except UnicodeError:  # Rejected as a category
        return item


LIMIT = 10**18
"""Maximum absolute value of a number."""

MakeError = Callable[[str, str], InputError]


def type_error(table_schema: pa.Schema, path: str) -> MakeError:
    return lambda name, fix: InputError(
        f"{path}: column {name} is of type {table_schema.field(name).type}; {fix}"
    )


MAX_SECONDS = 2.0**42
"""Maximum seconds from 1970: 139,000 years, whose microseconds fit an int64."""
_EXACT_SECONDS = 2**53 // 10**6
"""Seconds whose microseconds a float64 has exactly. Larger numbers may be of another unit."""


def epoch_seconds(numbers: np.ndarray) -> np.ndarray:
    """Convert numbers since 1970 in seconds, or in smaller units if they are as large, to seconds,
    float64.
    """
    magnitudes = np.abs(numbers)
    scales = np.select(
        [magnitudes < limit for limit, _ in EPOCH_UNITS], [scale for _, scale in EPOCH_UNITS], 1.0
    )
    return numbers / scales


def _formatted_times(text: pa.Array) -> pa.Array:
    """Parse text in one of the formats, timestamp[us], null for other text."""
    times = pa.nulls(len(text), pa.timestamp("us"))
    for form in TIME_FORMATS:
        if times.null_count > text.null_count:
            times = pc.coalesce(
                times, pc.strptime(text, format=form, unit="us", error_is_null=True)
            )
    return times


# Each rule reads only the values that the earlier ones did not:
#
#   1. a number          seconds since 1970, or smaller units by magnitude
#   2. ISO 8601          with and without zone apart, because Arrow casts one kind at a time
#   3. other formats     in order of TIME_FORMATS
#   4. anything else     REJECTED
def read_times(array: pa.Array, *, formats: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Parse text as (int64 microseconds, status): seconds (or smaller units) since 1970, or an ISO
    8601 date or time. `formats` also allows other common forms. Times without a zone are UTC.
    """
    binary = pc.cast(array, pa.large_binary())
    status = Text.from_array(binary).call("rayrec_check_numbers")
    null = pa.scalar(None, pa.large_binary())
    is_number = status == VALUE
    are_numbers = bool(is_number.all())
    numbers = binary if are_numbers else pc.if_else(pa.array(is_number), binary, null)
    seconds, _ = text_numbers(numbers)
    seconds = epoch_seconds(seconds)
    good = is_number & np.isfinite(seconds) & (np.abs(seconds) < MAX_SECONDS)
    values = np.rint(np.where(good, seconds, 0) * 1e6).astype(np.int64)
    if are_numbers:
        return values, np.where(good, VALUE, REJECTED).astype(np.uint8)
    text = pc.cast(
        pc.if_else(pc.match_substring_regex(binary, ISO_TIME), binary, null), pa.large_string()
    )
    zoned = pc.match_substring_regex(text, r"(Z|[+-]\d\d:?\d\d)$").fill_null(False)
    for mask, kind in ((zoned, pa.timestamp("us", "UTC")), (pc.invert(zoned), pa.timestamp("us"))):
        times = _cast_or_null(pc.if_else(mask, text, pa.scalar(None, pa.large_string())), kind)
        valid = times.is_valid().to_numpy(zero_copy_only=False)
        values[valid] = pc.fill_null(pc.cast(times, pa.int64()), 0).to_numpy(zero_copy_only=False)[
            valid
        ]
        good |= valid
    if formats and not good.all():
        unparsed = pc.if_else(pa.array(~good), binary, null)
        times = _formatted_times(_utf8_or_null(unparsed))
        valid = times.is_valid().to_numpy(zero_copy_only=False)
        values[valid] = pc.fill_null(pc.cast(times, pa.int64()), 0).to_numpy(zero_copy_only=False)[
            valid
        ]
        good |= valid
    return values, np.where(good, VALUE, REJECTED).astype(np.uint8)


def _utf8_or_null(binary: pa.Array) -> pa.Array:
    """Return text of printable ASCII as a string array, null for other text."""
    is_ascii = pc.match_substring_regex(binary, r"^[ -~]+$")
    return pc.cast(pc.if_else(is_ascii, binary, pa.scalar(None, binary.type)), pa.large_string())


# Arrow's cast fails for the whole array and does not say where. Halves are cast again, so that k
# impossible values among n cost about k log n casts.
def _cast_or_null(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast the values to `kind`; impossible ones, such as February 30, become null. Each of these
    costs several casts.
    """
    try:
        return pc.cast(array, kind)
    except pa.ArrowInvalid:
        middle = len(array) // 2
        if not middle:
            return pa.nulls(1, kind)
        return pa.concat_arrays(
            [_cast_or_null(half, kind) for half in (array[:middle], array[middle:])]
        )


def plain_array(column: pa.ChunkedArray) -> pa.Array:
    """Combine the chunks into one array without dictionaries."""
    if types.is_string(column.type) or types.is_binary(column.type):
        column = column.cast(pa.large_binary())  # 32-bit offsets may overflow over all chunks
    if column.num_chunks == 1:
        return resolved(column.chunk(0))  # Not copied
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = (
            pa.array([], column.type) if not array.num_chunks else pa.concat_arrays(array.chunks)
        )
    return resolved(array)


def resolved(array: pa.Array) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array.dictionary_decode() if types.is_dictionary(array.type) else array


_TEXT_TYPES = frozenset(
    kind.id
    for kind in (
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
    )
)


def is_text(kind: pa.DataType) -> bool:
    return kind.id in _TEXT_TYPES


def is_list(kind: pa.DataType) -> bool:
    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    return (
        views or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    )


def _zero_filled(array: pa.Array) -> np.ndarray:
    """Return numbers with 0 for null."""
    if array.null_count:
        array = pc.fill_null(array, 0)
    return array.to_numpy(zero_copy_only=False)


def _empty(array: pa.Array) -> np.ndarray:
    """Return EMPTY for null, else VALUE, uint8."""
    if not array.null_count:
        return np.full(len(array), VALUE, np.uint8)
    return array.is_null().to_numpy(zero_copy_only=False).astype(np.uint8)


def text_numbers(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Parse text as (float64, status): decimal numbers, `true` and `false` as 1 and 0, and NaN."""
    array = _as_bytes(array)
    values = np.empty(len(array))
    status = Text.from_array(array).call("rayrec_text_numbers", values)
    if status.max(initial=VALUE) <= EMPTY:
        return values, status
    # Numbers of many digits or with large exponents, which Arrow rounds correctly
    long = np.flatnonzero(status == _LONG)
    if len(long):
        texts = pc.cast(array.take(pa.array(long)), pa.large_string())
        values[long] = pc.cast(texts, pa.float64()).to_numpy()
        status[long] = VALUE
    words = np.flatnonzero(status == REJECTED)
    if len(words):
        for value, spellings in _WORDS.items():
            matches = pc.is_in(
                array.take(pa.array(words)), value_set=pa.array(spellings, pa.large_binary())
            )
            meant = words[matches.to_numpy(zero_copy_only=False)]
            values[meant] = value
            status[meant] = VALUE
    return values, status


_WORDS = {
    1.0: [b"true", b"True", b"TRUE"],
    0.0: [b"false", b"False", b"FALSE"],
    math.nan: [b"nan", b"NaN", b"NAN"],
}


def _seconds(array: pa.Array) -> pa.Array:
    """Return the seconds from 1970-01-01 00:00 UTC (or local time without a zone) to dates or
    timestamps, float64.
    """
    if types.is_date(array.type):
        array = pc.cast(array, pa.timestamp("s"))
    units = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    return pc.divide(
        pc.cast(pc.cast(array, pa.int64()), pa.float64(), safe=False), float(units[array.type.unit])
    )


def parse_numbers(
    array: pa.Array, name: str, make_error: MakeError, *, times: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return (float64, status), 0 if missing or rejected, also NaN and infinities. With `times`,
    dates and times in seconds.
    """
    if types.is_null(array.type):
        return np.zeros(len(array)), np.full(len(array), EMPTY, np.uint8)
    if is_text(array.type):
        values, status = text_numbers(array)
        rejected = np.flatnonzero(status == REJECTED)
        if times and len(rejected):
            microseconds, status[rejected] = read_times(
                array.take(pa.array(rejected)), formats=False
            )
            values[rejected] = microseconds / 1e6
        return values, status
    if types.is_boolean(array.type):
        array = pc.cast(array, pa.uint8())
    if times and (types.is_timestamp(array.type) or types.is_date(array.type)):
        array = _seconds(array)
    if not (
        types.is_integer(array.type)
        or types.is_floating(array.type)
        or types.is_decimal(array.type)
    ):
        raise make_error(name, "numbers are needed; convert it, or leave it out of the schema")
    numbers = pc.cast(array, pa.float64(), safe=False)  # Integers above 2^53 are rounded
    values = np.empty(len(array))
    return values, _present_words(numbers, values)


def parse_times(array: pa.Array, name: str, make_error: MakeError) -> tuple[np.ndarray, np.ndarray]:
    """Return (int64 microseconds since 1970-01-01 00:00 UTC, status) of dates, times, or numbers
    since 1970. Missing times are REJECTED.
    """
    if is_text(array.type):
        return read_times(array)
    if types.is_boolean(array.type):
        raise make_error(
            name, "a time must be a date, a timestamp, ISO 8601 text, or seconds since 1970"
        )
    if types.is_integer(array.type) and len(array) and not array.null_count:
        numbers = array.to_numpy()
        if numbers.min() > -_EXACT_SECONDS and numbers.max() < _EXACT_SECONDS:
            return numbers.astype(np.int64) * 10**6, np.full(len(numbers), VALUE, np.uint8)
    seconds, status = parse_numbers(array, name, make_error, times=True)
    seconds = seconds if types.is_temporal(array.type) else epoch_seconds(seconds)
    good = np.isfinite(seconds) & (np.abs(seconds) < MAX_SECONDS) & (status == VALUE)
    values = np.rint(np.where(good, seconds, 0) * 1e6).astype(np.int64)
    return values, np.where(good, VALUE, REJECTED)


def parse_integers(
    array: pa.Array, name: str, make_error: MakeError
) -> tuple[np.ndarray, np.ndarray]:
    """Return (int64, status) of numbers with at most 18 digits, as text or as integral numbers of
    other types.
    """
    if is_text(array.type):
        values = np.empty(len(array), np.int64)
        return values, Text.from_array(array).call("rayrec_text_integers", values)
    if types.is_integer(array.type):
        status = _empty(array)
        values = _zero_filled(array)
        if values.dtype == np.uint64:
            values = np.minimum(values, LIMIT)
        values = values.astype(np.int64)
        good = (values < LIMIT) & (values > -LIMIT)
        return np.where(good, values, 0), np.where(good, status, REJECTED)
    if types.is_decimal(array.type):
        text, integral = decimal_digits(array)
        values, status = parse_integers(text, name, make_error)
        return values, np.where(integral, status, REJECTED).astype(np.uint8)
    numbers, status = parse_numbers(array, name, make_error)
    good = np.isfinite(numbers) & (np.abs(numbers) < LIMIT) & (np.trunc(numbers) == numbers)
    return np.where(good, numbers, 0).astype(np.int64), np.where(good, status, REJECTED)


_WIDEST = 76
"""Maximum digits of Arrow's decimal numbers."""


def decimal_digits(array: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Return the digits of decimal numbers without their fractions, as text, and which have no
    fraction, bool [values]. Null is null, and has none. A float64 would be exact to 2^53 only.
    """
    wide = pc.cast(array, pa.decimal256(_WIDEST, max(array.type.scale, 0)))
    truncated = pc.trunc(wide)
    integral = pc.equal(wide, truncated).fill_null(True).to_numpy(zero_copy_only=False)
    return pc.cast(pc.cast(truncated, pa.decimal256(_WIDEST, 0)), pa.large_string()), integral


def decimal_tokens(array: pa.Array, out: np.ndarray, *, is_int64: bool = False) -> np.ndarray:
    """Write the tokens of integral decimal numbers of any size, as for their digits in CSV, and
    return their status. A fraction is REJECTED, and with `is_int64` a number beyond the range of
    int64.
    """
    text, integral = decimal_digits(array)
    status = (
        Text.from_array(text).call("rayrec_text_whole", out) if is_int64 else text_tokens(text, out)
    )
    out[~integral] = 0
    return np.where(integral, status, REJECTED).astype(np.uint8)


def float_tokens(array: pa.Array, out: np.ndarray) -> np.ndarray:
    """Write the tokens of integers stored as floating-point numbers, as pandas stores integers with
    gaps, and return their status. NaN is a missing value. A number is REJECTED if it is fractional
    or beyond the exact integers of its type.
    """
    mantissa = {pa.float16(): 11, pa.float32(): 24}.get(array.type, 53)
    missing = array.is_null().to_numpy(zero_copy_only=False)
    values = pc.fill_null(pc.cast(array, pa.float64(), safe=False), 0.0).to_numpy(
        zero_copy_only=False
    )
    missing |= np.isnan(values)
    good = (np.abs(values) < 2.0**mantissa) & (np.trunc(values) == values)
    out[:] = np.where(good, values, 0).astype(np.int64).view(np.uint64)
    return np.where(missing, EMPTY, np.where(good, VALUE, REJECTED)).astype(np.uint8)
