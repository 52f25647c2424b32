"""The stretches of a log that a data report and an evaluation compare: its files, or the sevenths of a single one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rayrec.data.log import LogIndex, Segment, source_of
from rayrec.data.position import Part

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
