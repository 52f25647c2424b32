"""Lines of text as tokens between blanks, for formats of sparse features. No Python per row."""

from __future__ import annotations

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
        return tokens.where(pc.greater(pc.binary_length(tokens.text), 0))

    def where(self, mask: np.ndarray | pa.BooleanArray) -> Tokens:
        """Return the tokens that `mask`, bool, selects."""
        mask = mask if isinstance(mask, np.ndarray) else mask.to_numpy(zero_copy_only=False)
        return Tokens(self.text.filter(pa.array(mask)), self.row_of[mask], self.rows)

    def with_text(self, text: pa.LargeStringArray) -> Tokens:
        """Return tokens of the same rows with another text."""
        return Tokens(text, self.row_of, self.rows)

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
        first = self.where(self.positions() == 0)
        places = np.full(self.rows, -1)
        places[first.row_of] = np.arange(len(first.row_of))
        return first.text.take(pa.array(places, mask=places < 0))

    def rows_with(self, mask: np.ndarray | pa.BooleanArray) -> np.ndarray:
        """Return which rows have a token that `mask` selects, bool [rows]."""
        return self.where(mask).counts() > 0


def split_pairs(text: pa.LargeStringArray, parts: int) -> tuple[list[pa.Array], np.ndarray]:
    """Split each text at its first `parts` - 1 colons. Returns the parts, empty where a text has
    fewer, and which texts have all, bool.
    """
    split = pc.split_pattern(text, ":", max_splits=parts - 1)
    is_full = pc.equal(pc.list_value_length(split), parts).to_numpy(zero_copy_only=False)
    split = (
        pc.if_else(pa.array(is_full), split, pa.scalar([""] * parts, pa.list_(pa.large_string())))
        if not is_full.all()
        else split
    )
    items = pc.list_flatten(split)
    return [
        items.take(pa.array(np.arange(part, len(items), parts))) for part in range(parts)
    ], is_full


def table_of(columns: dict[str, pa.Array], malformed: np.ndarray) -> pa.Table:
    """Return a table of columns with FAULT, MALFORMED in the rows that `malformed`, bool,
    selects.
    """
    faults = np.where(malformed, MALFORMED, 0).astype(np.uint8)
    return pa.table({**columns, FAULT: pa.array(faults)})
