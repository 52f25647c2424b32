"""Pass over a log that finds the texts of a column's categories."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec.data.arrow import arrow_numbers, as_numpy
from rayrec.data.encoding.category_names import CategoryNames
from rayrec.data.encoding.known_categories import VocabularyLookup
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.engine import Engine, InProcess, Shared, StreamEngine, grouped
from rayrec.data.logs.column_values import is_text
from rayrec.data.logs.index import SegmentRange
from rayrec.data.logs.reading import Categories, read_categories
from rayrec.schema import Schema

_BOOLEANS: Final = (b"true", b"True", b"TRUE", b"false", b"False", b"FALSE")
"""Texts that are the integers 1 and 0 (`Schema.category_rules` 2)."""
_TASK_ROWS: Final = 1 << 21
"""Maximum rows of a task that looks for texts."""


# The counting pass keeps tokens only: a text for each would cost memory in every task for every
# column, also of models that never answer with a category. So the texts are found afterwards, in
# one more pass over one column, and only of the tokens in the vocabulary:
#
#   task      tokens in a part -> places in the vocabulary -> the first text for each place
#   driver    the first of all tasks, in file order
#
# The driver and each task have the vocabulary's texts in memory, and 9 bytes a category.
def find_names(
    preprocessor: Preprocessor,
    column: str,
    parts: Sequence[SegmentRange],
    *,
    engine: Engine,
) -> CategoryNames | None:
    """Find the texts of a column's vocabulary in the rows of a log. Columns that share the
    vocabulary are read, too. Of different texts with one token, the first in file order counts,
    whatever the tasks; texts that the Preprocessor has already are kept. Returns None if a category
    has no value there, as with a Preprocessor of another log, and for other logs than tables.
    """
    schema = preprocessor.schema
    if schema.tokens != "any" or any(part.segment.format != "table" for part in parts):
        return None
    inputs = preprocessor.inputs
    vocabulary = dict(zip(inputs.sparse, inputs.vocabularies, strict=True))
    columns = [name for name in inputs.sparse if vocabulary[name] == vocabulary[column]]
    num_tokens = len(preprocessor.vocabulary(inputs.sparse.index(column)))
    collected = _TextCollection(num_tokens)
    before = preprocessor.names
    if before is not None and before.column == column:
        collected.add_first(before)
    shared: Shared[Preprocessor] = InProcess(preprocessor)
    if isinstance(engine, StreamEngine):
        shared = engine.share(preprocessor)
    function = functools.partial(_names_in, preprocessor=shared, columns=columns)
    tasks = grouped(parts, lambda part: part.rows, max_bytes=_TASK_ROWS, overflows=True)
    for table in engine.run("names", function, tasks):
        collected.add(as_numpy(table.column("number")), table.column("text").combine_chunks())
    if not collected.is_complete:
        return None
    return CategoryNames(column, num_tokens, collected.texts())


def _names_in(
    parts: Sequence[SegmentRange],
    *,
    preprocessor: Shared[Preprocessor],
    columns: Sequence[str],
) -> pa.Table:
    """Return the categories of some parts in a data task: their places in the vocabulary, int64,
    and texts, null for integers.
    """
    loaded = preprocessor.get()
    lookup = VocabularyLookup(loaded, columns[0])
    collected = _TextCollection(len(loaded.vocabulary(loaded.inputs.sparse.index(columns[0]))))
    for part in parts:
        for column in columns:
            for values in _batches(read_categories(part, column, loaded.schema)):
                numbers = lookup.numbers(values.tokens)
                new = collected.first_of_new(numbers)
                items = values.items.take(arrow_numbers(new))
                texts = _texts(items, values.tokens[new], column, loaded.schema)
                collected.add(numbers[new].astype(np.int64), texts)
    numbers = np.concatenate([np.zeros(0, np.int64), *collected.numbers])
    return pa.table({"number": arrow_numbers(numbers), "text": collected.all_texts()})


def _batches(values: Categories) -> Iterator[Categories]:
    """Yield parts of the values, so that the arrays for their distinct ones stay small."""
    size = 1 << 20
    for start in range(0, len(values.tokens), size):
        yield Categories(
            values.items[start : start + size],
            values.tokens[start : start + size],
            values.lengths,
        )


def _texts(items: pa.Array, tokens: np.ndarray, column: str, schema: Schema) -> pa.Array:
    """Return the text of each category, null for an integer, large_string."""
    kind = items.type
    if column in schema.integers or types.is_boolean(kind) or types.is_floating(kind):
        return pa.nulls(len(items), pa.large_string())
    if types.is_date(kind):
        items = pc.cast(pc.cast(items, pa.date32()), pa.large_string())
    text = pc.cast(items, pa.large_binary() if is_text(kind) else pa.large_string())
    text = pc.cast(text, pa.large_string())
    integers = pc.cast(arrow_numbers(tokens.view(np.int64)), pa.large_string())
    is_integer = pc.equal(text, integers)
    if is_text(kind) and schema.category_rules >= 2:
        # Made here, as Arrow imports pandas for the first array of Python objects.
        booleans = pa.array(_BOOLEANS, pa.large_binary())
        is_boolean = pc.is_in(pc.cast(text, pa.large_binary()), value_set=booleans)
        is_integer = pc.or_(is_integer, is_boolean)
    return pc.if_else(is_integer, pa.scalar(None, pa.large_string()), text)


@final
class _TextCollection:
    """Texts found so far, the first of each place."""

    def __init__(self, size: int) -> None:
        self._is_found = np.zeros(size, bool)
        self.numbers: list[np.ndarray] = []
        """Places in the order in which they were found, int64 [places] each."""
        self._texts: list[pa.Array] = []

    @property
    def is_complete(self) -> bool:
        return bool(self._is_found.all())

    def first_of_new(self, numbers: np.ndarray) -> np.ndarray:
        """Return the index of the first of each place that has no text yet, ascending, int64. -1 is
        no place.
        """
        candidates = np.flatnonzero(numbers >= 0)
        candidates = candidates[~self._is_found[numbers[candidates]]]
        _, first = np.unique(numbers[candidates], return_index=True)
        return np.sort(candidates[first])

    def add(self, numbers: np.ndarray, texts: pa.Array) -> None:
        """Add places, each once, with their texts. Keeps earlier ones."""
        new = np.flatnonzero(~self._is_found[numbers])
        self._is_found[numbers[new]] = True
        self.numbers.append(numbers[new])
        self._texts.append(texts.take(arrow_numbers(new)))

    def add_first(self, names: CategoryNames) -> None:
        """Add the texts of the first places."""
        texts = names.texts
        if texts is None:
            texts = pa.nulls(names.num_tokens, pa.large_string())
        self.add(np.arange(names.num_tokens), texts)

    def all_texts(self) -> pa.Array:
        """Return the texts in the order in which they were collected."""
        return pa.concat_arrays([pa.array([], pa.large_string()), *self._texts])

    def texts(self) -> pa.Array | None:
        """Return the text of each place, of which all are collected. None if all are integers."""
        texts = self.all_texts()
        if texts.null_count == len(texts):
            return None
        order = np.argsort(np.concatenate(self.numbers), kind="stable")
        return texts.take(arrow_numbers(order))
