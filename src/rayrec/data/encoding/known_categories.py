"""Known categories of a Preprocessor, and their frequencies. Ids fall in frequency, so a few
numbers per column give each id's.
"""

from dataclasses import replace
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec.config import InputError
from rayrec.data.arrow import arrow_numbers, as_numpy
from rayrec.data.encoded_rows import EncodedRows, Ids, JaggedIds
from rayrec.data.encoding.encoder import Encoder, build_slots, find_ids, num_slots
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.logs.table_parser import category_items
from rayrec.data.raw_block import RawBlock
from rayrec.schema import Schema

ENDS: Final = "frequency_ends"
"""Key in a Preprocessor's constants: for each sparse column, its number of tokens in at least 1, 2,
10, 100, ... rows.
"""
FREQUENCIES: Final = "frequencies"
"""Key in the constants of a log without labels: for each sparse column, runs [occurrences, number
of tokens], in id order.
"""
UNKNOWN: Final = "(not in the vocabulary)"


_EDGES: Final = (1, 2, *(10**digits for digits in range(1, 19)))


def frequency_ends(amounts: np.ndarray) -> list[int]:
    """Return the number of tokens at or above each frequency edge, without trailing zeros, from the
    rows of each token.
    """
    return list(takewhile(bool, (int(np.count_nonzero(amounts >= edge)) for edge in _EDGES)))


def frequency_runs(amounts: np.ndarray) -> list[list[int]]:
    """Return runs [amount, number of tokens] of falling amounts. Few: n occurrences have at most
    sqrt(2 n) distinct ones.
    """
    distinct, counts = np.unique(amounts, return_counts=True)
    return [[int(amount), int(count)] for amount, count in zip(distinct, counts, strict=True)][::-1]


def bucket_names(preprocessor: Preprocessor, column: str) -> list[str]:
    """Return a sparse column's buckets "1", "2-9", "10-99", ..., and UNKNOWN. Raises InputError if
    frequencies are unknown.
    """
    ends = _ends(preprocessor, column)
    ranges = ["1", *(f"{low:,}-{high - 1:,}" for low, high in pairwise(_EDGES[1 : len(ends) + 1]))]
    return [*ranges[: len(ends)], UNKNOWN]


def assign_buckets(preprocessor: Preprocessor, column: str, ids: np.ndarray) -> np.ndarray:
    """Return the index in `bucket_names` of each id of a present value, int8 [rows]. Raises
    InputError like `bucket_names`.
    """
    ends = _ends(preprocessor, column)
    rule = preprocessor.sparse[preprocessor.inputs.sparse.index(column)]
    numbers = ids.astype(np.int64) - rule.first_id
    if rule.gap is not None:
        numbers -= ids > rule.gap
    # The number of ends above a token's number is the number of edges that its count reaches.
    buckets = np.searchsorted(-np.array(ends, np.int64), -numbers, side="left") - 1
    return np.where(
        (ids != rule.unknown_id) & (numbers >= 0) & (buckets >= 0),
        buckets,
        len(ends),
    ).astype(np.int8)


def _ends(preprocessor: Preprocessor, column: str) -> list[int]:
    if column not in preprocessor.inputs.sparse:
        raise InputError(
            f"slice_by: frequency:{column}: the model takes {column} as a number; choose a sparse "
            "column"
        )
    if preprocessor.multi_hot:
        raise InputError(
            f"slice_by: frequency:{column}: every row has many ids in {column}; slice by its values"
        )
    ends_of: dict[str, Any] = preprocessor.constants.get(ENDS, {})
    if column not in ends_of:
        raise InputError(
            f"slice_by: frequency:{column}: token counts are unknown (hashed columns, ids by first "
            "appearance, and Preprocessors of earlier versions have none); choose another column"
        )
    ends: list[int] = ends_of[column]
    return ends


@final
class VocabularyLookup:
    """Place of each category in a column's vocabulary. Thread-safe."""

    def __init__(self, preprocessor: Preprocessor, column: str) -> None:
        tokens = preprocessor.vocabulary(preprocessor.inputs.sparse.index(column))
        size = num_slots(len(tokens))
        wide = tokens.dtype == np.uint64
        self._slots = np.zeros((size, 2) if wide else size, np.uint64)
        numbers = np.arange(len(tokens), dtype=np.int32)
        build_slots(np.ascontiguousarray(tokens), numbers, self._slots)

    def numbers(self, tokens: np.ndarray) -> np.ndarray:
        """Return the place of each token, -1 for unknown ones, int32 [tokens]."""
        return find_ids(tokens, self._slots, -1)


@final
class UserIds:
    """Ids of a column's categories as users wrote them: integers, or texts if any is a text."""

    def __init__(self, preprocessor: Preprocessor, column: str) -> None:
        """Create from a vocabulary. Without names in the Preprocessor, the ids are tokens."""
        tokens = preprocessor.vocabulary(preprocessor.inputs.sparse.index(column))
        self.values: pa.Array = arrow_numbers(tokens.astype(np.uint64).view(np.int64))
        """Ids in the order of the vocabulary, int64 or large_string."""
        names = preprocessor.names
        self.is_known = False
        """Whether these are the users' ids. Otherwise they are tokens, which are hashes of texts.
        """
        if names is None or names.column != column or names.num_tokens < len(tokens):
            return
        self.is_known = True
        if names.texts is not None:
            integers = pc.cast(self.values, pa.large_string())
            self.values = pc.coalesce(names.texts, integers)

    @property
    def type(self) -> pa.DataType:
        """Type of the ids, int64 or large_string."""
        return self.values.type

    def take(self, numbers: np.ndarray) -> pa.Array:
        """Return the ids at places of the vocabulary, int64 [n]."""
        return self.values.take(arrow_numbers(numbers))

    @cached_property
    def as_objects(self) -> np.ndarray:
        """Ids as an array for Python, int64 or object [categories]."""
        if types.is_integer(self.type):
            return as_numpy(self.values)
        return np.array(self.values.to_pylist(), object)


@final
class ValueTokens:
    """Parser of single values by a column's rules. The column may have lists, or be unknown to the
    schema. Thread-safe.
    """

    def __init__(self, column: str, schema: Schema) -> None:
        self._column = column
        self._alone = Schema(
            label=None,
            sparse=(column,),
            tokens=schema.tokens,
            integers=(column,) if column in schema.integers else (),
            missing=schema.missing,
            category_rules=schema.category_rules,
        )

    def read(self, values: pa.Array, *, path: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of the present values, uint64 [present], and which are present, bool
        [values]. Values that are no category are not.
        """
        if not len(values):
            return np.zeros(0, np.uint64), np.zeros(0, bool)
        table = pa.table({self._column: values})
        _, tokens, counts = category_items(table, self._column, self._alone, path=path)
        return tokens, counts > 0


def ids_by_row(preprocessor: Preprocessor, column: str) -> np.ndarray:
    """Return the user's id of each table row of a sparse column (`UserIds`), [num_embeddings]. Ids
    are int64, or texts as objects. A row without a category has -1 or None. Raises InputError for a
    hashed column.
    """
    number = preprocessor.inputs.sparse.index(column)
    rule = preprocessor.sparse[number]
    if not rule.has_unique_ids:
        raise InputError(
            f"column {column}: ids must belong to one category each. Use a vocabulary without a "
            "limit."
        )
    values = UserIds(preprocessor, column).as_objects
    missing = None if values.dtype == object else -1
    result = np.full(rule.num_embeddings, missing, values.dtype)
    result[rule.ids()] = values
    return result


@final
class OOVCounter:
    """Counter of present categories outside the vocabulary, by row and column. A hashed column
    knows all categories.
    """

    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor
        inputs = preprocessor.inputs
        columns = preprocessor.sparse
        self._singles = [
            index for index, name in enumerate(inputs.sparse) if name not in inputs.lists
        ]
        self._lists = [index for index, name in enumerate(inputs.sparse) if name in inputs.lists]
        self._with_vocabulary = np.array(
            [column.num_tokens is not None for column in columns],
            np.int32,
        )
        self._unknown_ids = np.array([column.unknown_id for column in columns], np.int64)
        self._told_apart: Encoder | None = None
        with_vocabulary = [column for column in columns if column.num_tokens is not None]
        # A known category may have the id of unknown ones, for example through ids modulo the
        # table's rows. Then these get id -1.
        if any((column.ids() == column.unknown_id).any() for column in with_vocabulary):
            self._unknown_ids[:] = -1
            columns = tuple(
                column if column.num_tokens is None else replace(column, unknown_id=-1)
                for column in columns
            )
            slots = [preprocessor.column_slots(number) for number in range(len(columns))]
            self._told_apart = Encoder(
                preprocessor.dense,
                columns,
                slots,
                derivation=preprocessor.derivation,
                multi_hot=None,
            )

    def count(self, block: RawBlock, encoded: EncodedRows) -> np.ndarray:
        """Return counts by row and column of `preprocessor.inputs`, int32 [rows, num_sparse]. About
        0.1 µs per Criteo row.
        """
        ids = encoded.ids if self._told_apart is None else self._told_apart.encode(block).ids
        if self._preprocessor.integer_buckets:
            block = self._preprocessor.derivation.applied(block)
        unknown = np.zeros((block.rows, len(self._unknown_ids)), np.int32)
        if self._singles:
            first = (
                ids
                if isinstance(ids, np.ndarray)
                else np.stack([_one_hot(ids[index]) for index in self._singles])
            )
            is_unknown = (self._unknown_ids[self._singles] == first.T) & ~block.singles_missing()
            if not self._lists:
                return is_unknown * self._with_vocabulary
            unknown[:, self._singles] = is_unknown
        for index, column in zip(self._lists, block.lists, strict=True):
            bags = ids[index]
            assert isinstance(bags, JaggedIds)
            rows = np.repeat(np.arange(block.rows), bags.lengths)
            mask = (bags.values == self._unknown_ids[index]) & (column.lengths > 0)[rows]
            unknown[:, index] = np.bincount(rows[mask], minlength=block.rows)
        return unknown * self._with_vocabulary


def _one_hot(ids: Ids) -> np.ndarray:
    """Return one id per row: the first of a generated bag, the category's own."""
    assert isinstance(ids, np.ndarray)
    return ids if ids.ndim == 1 else ids[:, 0]
