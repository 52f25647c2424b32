"""Users' own ids of known categories, by place in the vocabulary, and the places of tokens."""

from __future__ import annotations

from functools import cached_property
from typing import final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec.data.arrow import arrow_numbers, as_numpy
from rayrec.data.encoding.encoder import build_slots, find_ids, num_slots
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.logs.table_parser import category_items
from rayrec.schema import Schema


@final
class VocabularyLookup:
    """Place of each category in a column's vocabulary. Thread-safe."""

    def __init__(self, preprocessor: Preprocessor, column: str) -> None:
        tokens = preprocessor.vocabulary(preprocessor.inputs.sparse.index(column))
        size = num_slots(len(tokens))
        wide = tokens.dtype == np.uint64
        self._slots = np.zeros((size, 2) if wide else size, np.uint64)
        places = np.arange(len(tokens), dtype=np.int32)
        build_slots(np.ascontiguousarray(tokens), places, self._slots)

    def numbers(self, tokens: np.ndarray) -> np.ndarray:
        """Return the place of each token, -1 for unknown ones, int32 [tokens]."""
        return find_ids(tokens, self._slots, -1)


@final
class OwnIds:
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


def value_tokens(
    values: pa.Array, column: str, schema: Schema, *, path: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of single values by the rules of a column, of which the schema may know
    nothing or that it is a list, uint64 [present], and which values are present, bool [values].
    Values that are no category are not.
    """
    alone = Schema(
        label=None,
        sparse=(column,),
        tokens=schema.tokens,
        integers=(column,) if column in schema.integers else (),
        missing=schema.missing,
        category_rules=schema.category_rules,
    )
    _, tokens, counts = category_items(pa.table({column: values}), column, alone, path=path)
    return tokens, counts > 0
