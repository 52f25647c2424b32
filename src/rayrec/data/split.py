"""Splits: which rows of a log are for training, for validation and for the final test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayrec.config import Config, InputError
from rayrec.data.log import LogIndex, source_of

NAMES = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Split(Config):
    """A split of a log in time order, as rows are in the log; validation and test are the halves of its end."""

    kind: Literal["sevenths", "last_file", "last_partition", "named_files"] = "sevenths"
    """sevenths: six parts of seven for training (Criteo Kaggle); last_file: all files but the last (Criteo 1TB);
    last_partition: all files but those of the last folder KEY=VALUE, such as the last day of dt=2026-01-31/;
    named_files: files whose names begin with train, valid and test."""
    test_first: bool = False
    """The end's first half is for the test and the second for validation, instead of the other way round."""

    def rows(self, index: LogIndex) -> dict[str, tuple[int, int]]:
        """Row ranges [start, stop) of `train`, `validation` and `test`.

        Seven near-equal chunks, the first `rows mod 7` one row longer; the end's first half, longer by one where odd, is
        for validation (TorchRec's order for Criteo 1TB), or with test_first for the test (dlrm's data_utils).
        Raises InputError where a part would be empty.
        """
        if self.kind == "named_files":
            return _by_name(index)
        if self.kind == "sevenths":
            boundary = index.rows - index.rows // 7
        else:
            unit = _partition if self.kind == "last_partition" else source_of
            last = unit(index.segments[-1].path) if index.segments else None
            boundary = next((s.first_row for s in index.segments if unit(s.path) == last), 0)
        middle = boundary + (index.rows - boundary + 1) // 2
        first, second = NAMES[:0:-1] if self.test_first else NAMES[1:]
        split = {"train": (0, boundary), first: (boundary, middle), second: (middle, index.rows)}
        empty = [name for name in NAMES if split[name][0] >= split[name][1]]
        if empty:
            num_files = len({source_of(segment.path) for segment in index.segments})
            raise InputError(
                f"split {self.kind}: {index.rows} rows in {num_files} files leave no rows for "
                f"{' and '.join(empty)}; give more data, or an evaluation log with --eval-data.path"
            )
        return {name: split[name] for name in NAMES}


def _partition(path: str) -> str:
    """The partitions that a file is in. Raises InputError if it is in none."""
    partition = source_of(path)[1].rpartition("/")[0]
    if not partition:
        raise InputError(f"split last_partition: {path} is in no folder named KEY=VALUE; choose last_file or sevenths")
    return partition


def _by_name(index: LogIndex) -> dict[str, tuple[int, int]]:
    split: dict[str, tuple[int, int]] = {}
    for segment in index.segments:
        base = source_of(segment.path)[1].rpartition("/")[2].lower()
        name = next((name for name in NAMES if base.startswith(name[:5])), None)
        if name is None:
            raise InputError(f"split named_files: {segment.path} begins with none of train, valid, test; rename it")
        start, stop = split.get(name, (segment.first_row, segment.first_row))
        if stop != segment.first_row:
            raise InputError(
                f"split named_files: the files of {name} do not follow each other at {segment.path}; join them"
            )
        split[name] = (start, segment.first_row + segment.rows)
    missing = [name for name in NAMES[:2] if name not in split]
    if missing:
        raise InputError(f"split named_files: no file begins with {' or '.join(name[:5] for name in missing)}")
    return {name: split[name] for name in NAMES if name in split}
