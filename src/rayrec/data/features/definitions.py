"""Definitions of the functions in formulas of features, for one row, in plain Python. The
`encode.py` of an export contains this module's text, and the kernels are tested against it.

Values are None if missing, else numbers as float, categories and texts as str, times as int (UTC
microseconds since 1970, less than 2^62 away), and lists of them. A result that is not finite is
missing, and so is an empty text. Missing in, missing out, unless a function says otherwise.
"""

from __future__ import annotations

import math
import operator
import re
import zoneinfo
from bisect import bisect_right
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from rayrec.hashing import mix64, xxh64

PART_MARK = "\x1f"
"""Mark between the parts of a crossed category."""
SEPARATORS = (
    r"[\x00-\x2f\x3a-\x40\x5b-\x60\x7b-\x7f"
    "\x80-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf\xd7\xf7\u2000-\u206f\u2e00-\u2e7f\u3000-\u3004"
    "\u3008-\u3020\uff00-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]+"
)
"""Pattern of the text between tokens, with equal results in Python's `re` and in Arrow's RE2. All
other characters count as letters or digits. These are fixed blocks, since the Unicode tables of
programs differ by version: ASCII, Latin-1, general, supplemental and CJK punctuation, and the
full-width forms.
"""
FIRST_TIME = -62_135_510_400_000_000
"""January 2 of the year 1, in microseconds since 1970. Earlier times have no hour or weekday."""
LAST_TIME = 253_402_214_400_000_000
"""December 31, 9999, in microseconds since 1970. Later times have no hour or weekday."""
NUM_VALUES = {
    "bucketize": 1,
    "clip": 1,
    "hash": 1,
    "last": 1,
    "split": 1,
    "ngrams": 1,
    "hour": 1,
    "weekday": 1,
    "aggregate": 1,
    "element": 1,
    "is_in": 1,
}
"""Number of arguments before the constant ones, for functions that have constant ones."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TRUE_AND_FALSE = {
    "true": 1,
    "True": 1,
    "TRUE": 1,
    "false": 0,
    "False": 0,
    "FALSE": 0,
}
INT64_TEXT = re.compile(r"0|-?[1-9][0-9]*")
DECIMAL_TEXT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LOWER = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")

TableLookup = Callable[[str, list[Any], str, Mapping[str, Any]], Any]
"""Function of a side table, its one or two keys, a column, and the type of the value, {"kind",
"is_list"}. It returns the value, None if a key is missing or no row has it.
"""


def value_of(node: Mapping[str, Any], row: Mapping[str, Any], lookup: TableLookup) -> Any:
    """Return the value of a formula.

    Args:
        node: JSON of the checked tree, from `rayrec.formula.tree.to_json`.
        row: Value of each column that the formula reads, None if missing.
        lookup: Called for each lookup, also if one of its keys is missing.

    Raises:
        KeyError: For a column that `row` lacks.
    """
    if "column" in node:
        return row[node["column"]]
    if "value" in node:
        return node["value"]
    name = node["function"]
    arguments = node["arguments"]
    if name == "lookup":
        keys = [value_of(key, row, lookup) for key in arguments[1:-1]]
        return lookup(arguments[0]["column"], keys, arguments[-1]["column"], node["type"])
    values = [value_of(argument, row, lookup) for argument in arguments]
    if name == "coalesce":
        return next((value for value in values if value is not None), None)
    if name == "when":
        condition, then, otherwise = values
        if condition is None:
            return None
        return then if condition else otherwise
    # The only function with a value for a missing argument
    if name == "len":
        return float(len(values[0] or ()))
    if None in values:
        return None
    return finite(DEFINITIONS[name](*values))


def finite(value: Any) -> Any:
    """Return a value, None for a number that is not finite and for an empty text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return None if value == "" else value


def category_token(text: str) -> int:
    """Return a category's 64-bit token: an integer's two's complement, 1 for true, 0 for false,
    else the text's XXH64. See `rayrec.data.logs.column_values`.
    """
    if INT64_TEXT.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return int(text) % 2**64
    if text in TRUE_AND_FALSE:
        return TRUE_AND_FALSE[text]
    return xxh64(text.encode())


def number(text: str | float) -> float | None:
    """Return the number of a decimal text with blanks around it, 1 or 0 of true or false. Other
    text is missing. Numbers stay.
    """
    if isinstance(text, float):
        return text
    text = text.strip(" \t")
    if text in TRUE_AND_FALSE:
        return float(TRUE_AND_FALSE[text])
    return float(text) if DECIMAL_TEXT.fullmatch(text) else None


def bucketize(x: float, edges: list[float]) -> str:
    """Return how many edges are at or below x: bucket i is edges[i - 1] <= x < edges[i]."""
    return str(bisect_right(edges, x))


def log(x: float) -> float:
    """Return sign(x) ln(1 + |x|) by the C library's log1p, as Arrow does. NumPy's differs in the
    last bit on some processors.
    """
    return math.copysign(math.log1p(abs(x)), x)


def clip(x: float, low: float, high: float) -> float:
    """Return the nearest number from low to high."""
    if x < low:
        return low
    return high if x > high else x


def hash_row(text: str, rows: float) -> str:
    """Return a category's row in a hashed table: its token, mixed by SplitMix64, modulo `rows`. See
    `rayrec.data.encoding.rules.SparseColumn.mixed`.
    """
    token = mix64(np.array([category_token(text)], np.uint64))
    return str(int(token[0]) % int(rows))


def cross(*parts: Any) -> str:
    """Return the categories joined by PART_MARK, or the row of their hash if rows follow."""
    if isinstance(parts[-1], float):
        return hash_row(PART_MARK.join(parts[:-1]), parts[-1])
    return PART_MARK.join(parts)


def concat(*lists: list[Any]) -> list[Any]:
    """Return the items of all lists."""
    return [item for items in lists for item in items]


def lower(text: str) -> str:
    """Replace A to Z by a to z. Other letters stay, since the case tables of Unicode differ by the
    version of Python and Arrow.
    """
    return text.translate(_LOWER)


def split(text: str, separator: str) -> list[str]:
    """Return the parts between separators, without empty ones."""
    return [part for part in text.split(separator) if part]


def tokens(text: str) -> list[str]:
    """Return the runs of letters or digits: of characters outside SEPARATORS."""
    return [part for part in re.split(SEPARATORS, text) if part]


def ngrams(text: str, n: float) -> list[str]:
    """Return all runs of n code points, none of a shorter text."""
    size = int(n)
    return [text[start : start + size] for start in range(len(text) - size + 1)]


def hour(time: int, zone: str = "UTC") -> str | None:
    """Return the hour of the day, 0 to 23. In the hour that a clock shows twice, both times have
    it.
    """
    local = _local_time(time, zone)
    return None if local is None else str(local.hour)


def weekday(time: int, zone: str = "UTC") -> str | None:
    """Return the day of the week, 0 for Monday to 6."""
    local = _local_time(time, zone)
    return None if local is None else str(local.weekday())


def age(time: int, earlier: int) -> float:
    """Return the seconds from `earlier` to `time`: the integer difference as a float, over 10^6."""
    return float(time - earlier) / 1e6


def last(items: list[Any], n: float) -> list[Any]:
    """Return the last n items, all of a shorter list."""
    return items[max(0, len(items) - int(n)) :]


def overlap(left: list[str], right: list[str]) -> float:
    """Return the number of different items that both lists have."""
    return float(len({*left} & {*right}))


def count_in(items: list[str], item: str) -> float:
    """Return the number of items that equal another one."""
    return float(items.count(item))


def aggregate(numbers: list[float], mode: str) -> float | None:
    """Return the sum (added from the first to the last in float64), mean, minimum, maximum or
    count of numbers. Those of an empty list: 0, missing, missing, missing, 0.
    """
    if mode == "count":
        return float(len(numbers))
    # The built-in sum rounds differently from Python 3.12 on.
    total = 0.0
    for value in numbers:
        total += value
    if mode == "sum":
        return total
    if not numbers:
        return None
    if mode == "mean":
        return total / len(numbers)
    # The sum with 0.0 makes 0.0 of -0.0, which is equal to it.
    return (min(numbers) if mode == "min" else max(numbers)) + 0.0


def element(numbers: list[float], index: float) -> float | None:
    """Return a number of a vector, which is missing if the vector has no numbers."""
    return numbers[int(index)] if numbers else None


def dot(left: list[str], right: list[str]) -> float:
    """Return the sum of the products of values with equal keys in lists such as [a:0.5, b]. An
    item without a number after its last colon has the value 1. Values of one key add up in the
    second list.
    """
    values: dict[str, float] = {}
    for item in right:
        key, value = key_and_value(item)
        values[key] = values.get(key, 0.0) + value
    total = 0.0
    for item in left:
        key, value = key_and_value(item)
        total += value * values.get(key, 0.0)
    return total


def key_and_value(item: str) -> tuple[str, float]:
    """Return the key and the value of an item such as a:0.5."""
    key, colon, text = item.rpartition(":")
    if colon and DECIMAL_TEXT.fullmatch(text):
        return key, float(text)
    return item, 1.0


def divide(left: float, right: float) -> float | None:
    """Return a quotient. That by 0 is missing."""
    return left / right if right else None


def _local_time(time: int, zone: str) -> datetime | None:
    if not FIRST_TIME <= time < LAST_TIME:
        return None
    return (_EPOCH + timedelta(microseconds=time)).astimezone(zoneinfo.ZoneInfo(zone))


DEFINITIONS: dict[str, Callable[..., Any]] = {
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
    "last": last,
    "overlap": overlap,
    "count_in": count_in,
    "aggregate": aggregate,
    "element": element,
    "dot": dot,
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": divide,
    "equal": operator.eq,
    "differs": operator.ne,
    "less": operator.lt,
    "at_most": operator.le,
    "more": operator.gt,
    "at_least": operator.ge,
    "is_in": lambda left, right: left in right,
}
"""Definition of each function whose result is missing if an argument is."""
