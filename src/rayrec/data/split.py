"""Splits by time: which rows of a log are for training, for validation and for the final test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayrec.config import Config, InputError
from rayrec.data.log import LogIndex


@dataclass(frozen=True, kw_only=True)
class TimeSplit(Config):
    """A split of a log in time order, as rows are in the log; validation and test are the halves of its end."""

    kind: Literal["sevenths", "last_file"] = "sevenths"
    """sevenths: six parts of seven for training (Criteo Kaggle); last_file: all files but the last (Criteo 1TB)."""

    def rows(self, index: LogIndex) -> dict[str, tuple[int, int]]:
        """Row ranges [start, stop) of `train`, `validation` and `test`.

        Seven near-equal chunks, the first `rows mod 7` one row longer; the end's first half, longer by one where odd, is
        for validation (dlrm's data_utils; for 1TB TorchRec's order of the halves).
        Raises InputError where a part would be empty.
        """
        if self.kind == "sevenths":
            boundary = index.rows - index.rows // 7
        else:
            last = index.segments[-1].path if index.segments else ""
            boundary = next((s.first_row for s in index.segments if s.path == last), 0)
        middle = boundary + (index.rows - boundary + 1) // 2
        split = {"train": (0, boundary), "validation": (boundary, middle), "test": (middle, index.rows)}
        empty = [name for name, (start, stop) in split.items() if start >= stop]
        if empty:
            raise InputError(
                f"split {self.kind}: {index.rows} rows in {len({s.path for s in index.segments})} files leave no rows for "
                f"{' and '.join(empty)}; give more data, or an evaluation log with --eval-data.path"
            )
        return split
