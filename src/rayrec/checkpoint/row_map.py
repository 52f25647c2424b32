"""Which rows of a stored table the rows of a new one start with. Loads no torch."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowMap:
    """Where each row of a table of `rows` rows comes from in a stored table of `stored_rows` rows."""

    rows: int
    stored_rows: int
    sources: np.ndarray | None = None
    """int32 or int64 (rows): the stored row, -1: none. None: row r comes from row r, as far as that is stored."""

    def of(self, first: int, stop: int) -> np.ndarray:
        """int64 (stop - first): the stored row of each of the rows [first, stop), -1: none."""
        if self.sources is not None:
            return self.sources[first:stop].astype(np.int64)
        same = np.arange(first, stop, dtype=np.int64)
        same[max(0, self.stored_rows - first) :] = -1
        return same
