"""Rules that convert numbers and categories to model inputs, in NumPy. The `encode.py` of an export
contains this module's text, and the kernels are tested against it.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Literal

import numpy as np

from rayrec.hashing import GOLDEN, mix64, murmur3

MIN_INTEGER = -(2**62)
"""`DenseColumn.lowest` without a lower bound."""

ISO_TIME = r"^\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?)?$"
"""Pattern of dates and times as ISO 8601 text."""


EPOCH_UNITS = ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6), (math.inf, 1e9))
"""Units of numbers since 1970 by their magnitude, as (limit, units per second): seconds up to the
year 5138, milliseconds, microseconds and nanoseconds. The ranges of the years 1973 to 5138 in these
units do not overlap.
"""
TIME_FORMATS = (
    "%Y/%m/%d %H:%M:%S",
    "%Y/%m/%d %H:%M",
    "%Y/%m/%d",
    "%d.%m.%Y %H:%M:%S",
    "%d.%m.%Y %H:%M",
    "%d.%m.%Y",
    "%m/%d/%Y %I:%M:%S %p",
    "%m/%d/%Y %I:%M %p",
    "%m/%d/%Y %H:%M:%S",
    "%m/%d/%Y %H:%M",
    "%m/%d/%Y",
)
"""Formats of timestamps in text other than ISO 8601. Of a date with slashes, the month precedes the
day.
"""

QUOTED = r"""(?s)"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
"""Pattern of an item in quotes. Like the next three, with equal results in Python's `re` and in
Arrow's RE2.
"""
BRACKET_ITEM = (
    r"""(?s)[ \t]*(?:(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|(-?[0-9.]+))[ \t]*(?:,|[ \t]|$)"""
    r"""|(?:null|None|NaN|nan)[ \t]*(?:,|$)|([^,"'\[\]]*?)[ \t]*(?:,|$))"""
)
"""Pattern of an item between brackets and its end: text in quotes, a number, a missing item, or
other text.
"""
BRACKETED = r"""(?s)^[ \t]*\[(?:[^"'\[\]]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*\][ \t]*$"""
"""Pattern of a list in brackets without lists in it."""
GLUED = r"""'[^, \t\]]|[^', \t\[][ \t]*'"""
"""Pattern of other text next to an item in quotes, once each QUOTED item is replaced by a quote."""


def bracket_items(text: str) -> list[str] | None:
    """Return the items of a list in brackets, such as ['a', 'b'] or ["a", "b"], empty if missing.
    None for other text.
    """
    if not text.strip(" \t"):
        return []
    if (
        not re.search(BRACKETED, text)
        or "\x1e" in text
        or re.search(GLUED, re.sub(QUOTED, "'", text))
    ):
        return None
    inner = text.strip(" \t")[1:-1]
    matches = re.finditer(BRACKET_ITEM, inner)
    return [unescaped(match[1] or match[2] or match[3] or match[4] or "") for match in matches]


_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def unescaped(text: str) -> str:
    """Replace the escapes of JSON and Python in the text of an item in quotes."""
    if "\\" not in text:
        return text

    def plain(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, code)

    pattern = r"(?s)\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|.)"
    # JSON writes a character beyond 16 bits as two surrogates.
    return re.sub(pattern, plain, text).encode("utf-16", "surrogatepass").decode("utf-16")


def seconds_of(value: date | str) -> float | None:
    """Return the seconds since 1970 of a date or time, or of its ISO 8601 text, in UTC unless it
    has a zone. Other text: None.
    """
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value if re.fullmatch(ISO_TIME, value, re.ASCII) else "")
        except ValueError:
            return None
    time = value if isinstance(value, datetime) else datetime(value.year, value.month, value.day)
    time = time if time.tzinfo else time.replace(tzinfo=UTC)
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) / 10**6


@dataclass(frozen=True)
class DenseColumn:
    """Transform x -> (f(x) - mean - mean_low) * scale as float32, computed in float64 and bounded.
    A missing value becomes missing_value. The fields from `mean_low` on were added later: their
    defaults are the rules of earlier versions.
    """

    kind: Literal["signed_log", "log", "identity"] = "signed_log"
    """Function f(x): sign(x) ln(1 + |x|), ln(max(x, lowest) + shift), or max(x, lowest)."""
    shift: float = 1.0
    lowest: int = MIN_INTEGER
    mean: float = 0.0
    scale: float = 1.0
    missing_value: float = 0.0
    mean_low: float = 0.0
    """Rounding error of `mean`, which matters if the values differ in their last digits only."""
    lower: float | None = None
    """Lower bound of the inputs, exact in float32. None: no bounds."""
    upper: float | None = None
    """Upper bound of the inputs, exact in float32. None: no bounds."""
    indicator: bool = False
    """Whether the model has an additional input for the column: 1 if the value is missing, else
    0.
    """

    def transform(self, values: np.ndarray) -> np.ndarray:
        """Return f(x) of present numbers of any dtype, float64. The logarithm of 0 or less is -inf
        or NaN.
        """
        x = np.asarray(values, np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.kind == "signed_log":
                return np.copysign(np.log1p(np.abs(x)), x)
            raised = np.maximum(x, self.lowest)
            return np.log(raised + self.shift) if self.kind == "log" else raised

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Return the model inputs of present numbers of any dtype, float32. Without bounds, they
        are -inf or NaN if the logarithm is.
        """
        with np.errstate(over="ignore"):
            inputs = ((self.transform(values) - self.mean - self.mean_low) * self.scale).astype(
                np.float32
            )
        if self.lower is None or self.upper is None:
            return inputs
        # fmax turns NaN, the logarithm of a negative number, into the lower bound, like -inf of 0.
        return np.fmin(np.fmax(inputs, np.float32(self.lower)), np.float32(self.upper))

    def encode(self, values: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Return the model inputs of a column's numbers, `missing` bool [rows]. float32 [rows]."""
        return np.where(missing, np.float32(self.missing_value), self.apply(values))


@dataclass(frozen=True)
class SparseColumn:
    """Rule that converts a category to an id below num_embeddings. With a vocabulary of
    `num_tokens` known tokens, token number i has id first_id + i, plus one from `gap` on, modulo
    num_embeddings. Without one (`num_tokens` None), a token has id first_id + token mod
    (num_embeddings - first_id).
    """

    num_embeddings: int
    """Rows of the column's embedding table."""
    num_tokens: int | None
    """Vocabulary size. None: hashed."""
    first_id: int = 2
    unknown_id: int = 0
    """Id of tokens outside the vocabulary: new or too rare."""
    missing_id: int = 1
    """Id of an empty field."""
    gap: int | None = None
    """Id within the vocabulary's range that is reserved for the empty field. None: no gap."""
    token_modulo: int | None = None
    """Modulo applied to tokens before the lookup. None: no modulo."""
    murmur3: bool = False
    """Whether to replace 32-bit tokens of a hashed column by their murmur3 hashes."""
    mixed: bool = False
    """Whether to mix a hashed column's token bits before the modulo, to spread multiples over all
    rows. Old versions: False.
    """

    @property
    def has_unique_ids(self) -> bool:
        """True if every known token has a unique id."""
        if self.num_tokens is None:
            return False
        return self.first_id + self.num_tokens + (self.gap is not None) <= self.num_embeddings

    def ids(self) -> np.ndarray:
        """Return the id of every token of the vocabulary, int32 [num_tokens]."""
        assert self.num_tokens is not None
        ids = np.arange(self.first_id, self.first_id + self.num_tokens, dtype=np.int64)
        if self.gap is not None:
            ids[max(0, self.gap - self.first_id) :] += 1
        return (ids % self.num_embeddings).astype(np.int32)

    def encode(
        self,
        tokens: np.ndarray,
        missing: np.ndarray | None,
        lookup: Callable[[np.ndarray], np.ndarray],
        dtype: np.dtype,
    ) -> np.ndarray:
        """Return the id of each token (uint32 or uint64), in `dtype` (int32 or int64) [tokens].
        `missing` is the mask of empty fields, bool [tokens], or None if all are present. `lookup`
        returns the vocabulary's ids of tokens, after `token_modulo`. It is not called for a hashed
        column.
        """
        if self.num_tokens is None:
            if self.murmur3:
                tokens = murmur3(tokens)
            tokens = tokens.astype(np.uint64, copy=False)
            if self.mixed:
                tokens = mix64(tokens)
            ids = (tokens % np.uint64(self.num_embeddings - self.first_id)).astype(
                dtype
            ) + dtype.type(self.first_id)
        else:
            ids = lookup(self.apply_modulo(tokens)).astype(dtype, copy=False)
        return ids if missing is None else np.where(missing, dtype.type(self.missing_id), ids)

    def apply_modulo(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens after `token_modulo`, of the same dtype."""
        return (
            tokens if self.token_modulo is None else tokens % tokens.dtype.type(self.token_modulo)
        )


def age_gaps(ages: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the seconds from each item of rows' lists to the next one, from the last one to the
    row's time, float32 [items]. Takes ages in seconds, float64 [items], and the lists' lengths,
    [rows]. Exact in microseconds before they are rounded, so that they do not depend on the time
    from which ages count.
    """
    microseconds = np.rint(ages * 1e6)
    following = np.append(microseconds[1:], 0.0)[: len(ages)]
    following[np.cumsum(lengths)[lengths > 0] - 1] = 0.0
    return ((microseconds - following) / 1e6).astype(np.float32)


def bucket_tokens(integers: np.ndarray) -> np.ndarray:
    """Convert integers to categories: floor(ln(x)^2) for x > 2, else x, plus 2^31 so that tokens
    sort like the numbers. Takes int64 and returns uint32 [rows]. Uses the C library's logarithm,
    like the kernel: NumPy's may differ at an integer.
    """
    buckets = [
        math.floor(math.log(x) * math.log(x)) if x > 2 else max(x, -(2**31))
        for x in integers.tolist()
    ]
    return (np.array(buckets, np.int64) + 2**31).astype(np.uint32)


def expand_bag(
    ids: np.ndarray, size: int, num_embeddings: int, *, column: int, seed: int, pareto: bool
) -> np.ndarray:
    """Return each id followed by its `size` - 1 random ids, int64 [rows, size]. See `MultiHot`."""
    stream = mix64(mix64(np.array([(seed + GOLDEN) & (2**64 - 1)], np.uint64)) + np.uint64(column))
    bag = mix64(stream + np.uint64(GOLDEN) * (ids.astype(np.uint64) + np.uint64(1)))
    bits = mix64(bag[:, None] + np.uint64(GOLDEN) * np.arange(1, size, dtype=np.uint64))
    if pareto:
        v = ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53
        value = 1.0 / (v * v) ** 2 - 1.0
        random_ids = np.where(value < 2.0**31, value, -(2.0**31)).astype(np.int64) % num_embeddings
    else:
        random_ids = _upper_half(bits, num_embeddings).astype(np.int64)
    return np.concatenate([ids.astype(np.int64)[:, None], random_ids], axis=1)


def _upper_half(values: np.ndarray, factor: int) -> np.ndarray:
    """Return the upper 64 bits of the products of uint64 values and a factor below 2^63."""
    half = np.uint64(32)
    mask = np.uint64(2**32 - 1)
    high = np.uint64(factor >> 32)
    low = np.uint64(factor & (2**32 - 1))
    middle = (values >> half) * low + ((values & mask) * low >> half)
    return (
        (values >> half) * high
        + (middle >> half)
        + ((values & mask) * high + (middle & mask) >> half)
    )
