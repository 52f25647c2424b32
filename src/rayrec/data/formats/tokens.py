"""Lines of text as tokens between blanks, for formats of sparse features.

Arrow splits a block of lines at once, so that no Python runs per row. All tokens are in one array,
with the row of each:

    lines            text                row_of
    1 3:0.5 7:2      1  3:0.5  7:2       0  0  0
    0 7:1            0  7:1              1  1

A format selects tokens by their places and their text, and makes a column of each selection: one
value (`single`) or a list (`lists`) a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.formats.row_faults import FAULT, MALFORMED


def split_lines(text: bytes) -> pa.LargeStringArray:
    r"""Return the lines of `text`, which end with \n, without those of blanks only. They keep their
    ends, so that they share the text's memory.
    """
    data = np.frombuffer(text, np.uint8)
    offsets = np.concatenate([[0], np.flatnonzero(data == ord("\n")) + 1]).astype(np.int64)
    lines = pa.LargeStringArray.from_buffers(
        len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(text)
    )
    return lines.filter(pc.invert(pc.ascii_is_space(lines)))


@dataclass(frozen=True)
class Tokens:
    """Tokens of rows, in order."""

    text: pa.LargeStringArray
    row_of: np.ndarray
    """Row of each token, int64, ascending."""
    rows: int

    @classmethod
    def from_lines(cls, lines: pa.LargeStringArray) -> Tokens:
        """Split lines at blanks and tabs, any number of them."""
        split = pc.ascii_split_whitespace(lines)
        tokens = cls(
            pc.list_flatten(split),
            pc.list_parent_indices(split).to_numpy().astype(np.int64),
            len(lines),
        )
        return tokens.select(pc.greater(pc.binary_length(tokens.text), 0))

    def select(self, mask: np.ndarray | pa.BooleanArray) -> Tokens:
        """Return the tokens that `mask`, bool, selects."""
        mask = mask if isinstance(mask, np.ndarray) else mask.to_numpy(zero_copy_only=False)
        return Tokens(self.text.filter(pa.array(mask)), self.row_of[mask], self.rows)

    def with_text(self, text: pa.LargeStringArray) -> Tokens:
        """Return tokens of the same rows with another text."""
        return Tokens(text, self.row_of, self.rows)

    # In the example of the module, rows begin at tokens 0 and 3:
    #
    #   tokens     1  3:0.5  7:2  0  7:1
    #   row_of     0  0      0    1  1
    #   positions  0  1      2    0  1
    def positions(self) -> np.ndarray:
        """Return the place of each token in its row, from 0, int64."""
        first = np.searchsorted(self.row_of, np.arange(self.rows))
        return np.arange(len(self.row_of)) - first[self.row_of]

    def counts(self) -> np.ndarray:
        """Return the number of tokens of each row, int64 [rows]."""
        return np.bincount(self.row_of, minlength=self.rows)

    def lists(self) -> pa.LargeListArray:
        """Return the tokens of each row as a list."""
        offsets = np.concatenate([[0], np.cumsum(self.counts())]).astype(np.int64)
        return pa.LargeListArray.from_arrays(pa.array(offsets), self.text)

    def single(self) -> pa.LargeStringArray:
        """Return the first token of each row, null if it has none."""
        first = self.select(self.positions() == 0)
        indices = np.full(self.rows, -1)
        indices[first.row_of] = np.arange(len(first.row_of))
        return first.text.take(pa.array(indices, mask=indices < 0))

    def rows_with(self, mask: np.ndarray | pa.BooleanArray) -> np.ndarray:
        """Return which rows have a token that `mask` selects, bool [rows]."""
        return self.select(mask).counts() > 0


def split_pairs(text: pa.LargeStringArray, parts: int) -> tuple[list[pa.Array], np.ndarray]:
    """Split each text at its first `parts` - 1 colons. Returns the parts, empty where a text has
    fewer, and which texts have all, bool.
    """
    split = pc.split_pattern(text, ":", max_splits=parts - 1)
    is_full = pc.equal(pc.list_value_length(split), parts).to_numpy(zero_copy_only=False)
    if not is_full.all():
        empty = pa.scalar([""] * parts, pa.list_(pa.large_string()))
        split = pc.if_else(pa.array(is_full), split, empty)
    # Now every text has as many items, one behind the other.
    items = pc.list_flatten(split)
    columns = []
    for part in range(parts):
        indices = np.arange(part, len(items), parts)
        columns.append(items.take(pa.array(indices)))
    return columns, is_full


def table_of(
    arrays: Mapping[str, pa.Array],
    malformed: np.ndarray,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Return a table of arrays by name, with the column FAULT. Rows that `malformed`, bool, selects
    are MALFORMED. `columns` are the names to keep. None: all.
    """
    if columns is not None:
        arrays = {name: arrays[name] for name in columns if name in arrays}
    faults = np.where(malformed, MALFORMED, 0).astype(np.uint8)
    return pa.table({**arrays, FAULT: pa.array(faults)})
