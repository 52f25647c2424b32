"""Row mapping from a stored table to a new one. Does not import torch."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowMap:
    """Source rows for a table of `rows` rows in a stored table of `stored_rows` rows."""

    rows: int
    stored_rows: int
    sources: np.ndarray | None = None
    """Stored row of each row, -1 if it has no source, int32 or int64 [rows]. None maps each row to the same stored row, if it
    exists."""

    def of(self, first: int, stop: int) -> np.ndarray:
        """Return the stored row of each of the rows [first, stop), -1 if it has no source, int64 [stop - first]."""
        if self.sources is not None:
            return self.sources[first:stop].astype(np.int64)
        same = np.arange(first, stop, dtype=np.int64)
        same[max(0, self.stored_rows - first) :] = -1
        return same
