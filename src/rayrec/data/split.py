"""Ranges of a log's rows: those for training, validation and the final test, and those of each day."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rayrec.config import Config, InputError
from rayrec.data.log import LogIndex, Segment, source_of
from rayrec.data.position import Part

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


MAX_SLICES = 64
"""Files that are compared one by one; of more, neighbours are put together."""


@dataclass(frozen=True)
class Slice:
    """A stretch of the log that is compared with others."""

    name: str
    start: int
    stop: int
    """[start, stop): rows of the log"""


def slices_of(index: LogIndex) -> tuple[str, list[Slice]]:
    """What the slices are (file, files, seventh), and the slices in the order of the log."""
    files: list[Slice] = []
    last = None
    for segment in index.segments:
        key, name = source_of(segment.path)
        stop = segment.first_row + segment.rows
        if key == last:
            files[-1] = replace(files[-1], stop=stop)
        else:
            files.append(Slice(name, segment.first_row, stop))
        last = key
    if len(files) > MAX_SLICES:
        ends = [len(files) * (i + 1) // MAX_SLICES for i in range(MAX_SLICES)]
        groups = [files[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
        return "files", [
            Slice(f"{group[0].name} ... {group[-1].name}", group[0].start, group[-1].stop) for group in groups
        ]
    if len(files) != 1:
        return "file", files
    size, longer = divmod(index.rows, 7)
    edges = [i * size + min(i, longer) for i in range(8)]
    named = [Slice(f"seventh {i + 1}", edges[i], edges[i + 1]) for i in range(7)]
    return "seventh", [piece for piece in named if piece.stop > piece.start]


def parts_of(segments: Sequence[Segment], start: int, stop: int) -> Iterator[Part]:
    """Rows [start, stop) of the log."""
    place = max(bisect_right(segments, start, key=lambda segment: segment.first_row) - 1, 0)
    while place < len(segments) and segments[place].first_row < stop:
        segment = segments[place]
        low, high = max(start - segment.first_row, 0), min(stop - segment.first_row, segment.rows)
        if low < high:
            yield Part(segment, low, high)
        place += 1
