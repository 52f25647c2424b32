"""SVG charts of the HTML report (lines, bars, timelines), and images as PNG data URLs."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace
from typing import Final

from markupsafe import Markup

from rayrec.humanize import clock_text, number_text
from rayrec.observe.report.page import draw, folded, table

NUM_SERIES = 8
"""Maximum number of lines in a chart. Each has a color, distinct for color-blind readers, and a
dash pattern.
"""

Point = tuple[float, float]


_VIEW: Final = SimpleNamespace(width=480.0, height=230.0)
"""Size of the SVG, in pixels."""
_LEFT = 58.0
_RIGHT = 14.0
_TOP = 14.0
_BOTTOM = 36.0
"""Margins around the lines, for labels."""
_MAX_POINTS = 800
"""Maximum number of points in a line. Longer lines are thinned out but keep their peaks."""
_MAX_ROWS = 20
"""Maximum number of rows in the table under a chart."""
_MAX_DOTS = 60
"""Maximum number of points in a line with dots and tooltips."""


@dataclass(frozen=True)
class Line:
    """One series of a line chart."""

    name: str
    points: Sequence[tuple[float, float | None]]
    """Points sorted by x. The line breaks if y is None or not finite."""


@dataclass(frozen=True)
class Mark:
    """Annotation at a position of the x axis."""

    x: float
    label: str
    """One or two characters, drawn at the top."""
    text: str
    """Tooltip text."""


@dataclass(frozen=True)
class _PlottedLine:
    """Line in the form used by the template."""

    name: str
    segments: Sequence[list[Point]]
    """Points between breaks."""

    @property
    def points(self) -> list[Point]:
        return [point for segment in self.segments for point in segment]

    @property
    def thinned(self) -> list[list[Point]]:
        num_points = len(self.points)
        return [
            _thin(segment, keep=max(2, _MAX_POINTS * len(segment) // num_points))
            for segment in self.segments
        ]

    @property
    def dots(self) -> list[Point]:
        return self.points if len(self.points) <= _MAX_DOTS else []


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
) -> Markup:
    """Render a `<figure>` with the chart, or nothing without points. `from_zero` starts the y axis
    at 0.
    """
    plotted = [
        _PlottedLine(line.name, _split_at_breaks(line.points)) for line in lines[:NUM_SERIES]
    ]
    points = [point for line in plotted for point in line.points]
    if not points:
        return Markup()
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    x_axis = _Axis.padded(
        0.0, max(xs), start=_LEFT, stop=_VIEW.width - _RIGHT, padding=0.0, max_ticks=7
    )
    low = 0.0 if from_zero else min(ys)
    y_axis = _Axis.padded(
        low, max(ys), start=_VIEW.height - _BOTTOM, stop=_TOP, padding=0.06, max_ticks=5
    )
    if from_zero:
        y_axis = replace(y_axis, low=0.0)
    return draw(
        "charts.html",
        "line_chart",
        title=title,
        description="; ".join(_describe(line) for line in plotted if line.segments),
        view=_VIEW,
        x=x_axis,
        y=y_axis,
        x_label=x_label,
        marks=[mark for mark in marks if x_axis.low <= mark.x <= x_axis.high],
        lines=plotted,
        numbers=_numbers(title, [x_label, *(line.name for line in plotted)], _point_rows(plotted)),
    )


def _describe(line: _PlottedLine) -> str:
    values = [y for _, y in line.points]
    first, minimum, maximum, last = map(
        number_text, (values[0], min(values), max(values), values[-1])
    )
    return f"{line.name} from {first} to {last}, lowest {minimum}, highest {maximum}"


def _point_rows(plotted: Sequence[_PlottedLine]) -> list[list[str]]:
    """Tabulate a few points of each line, for readers who cannot see the chart or use its
    tooltips.
    """
    values = [dict(line.points) for line in plotted]
    xs = sorted({x for line in values for x in line})
    if len(xs) > _MAX_ROWS:
        xs = [xs[round(number * (len(xs) - 1) / (_MAX_ROWS - 1))] for number in range(_MAX_ROWS)]
    return [
        [number_text(x), *(f"{line[x]:.6g}" if x in line else "" for line in values)]
        for x in dict.fromkeys(xs)
    ]


def _split_at_breaks(points: Iterable[tuple[float, float | None]]) -> list[list[Point]]:
    segments: list[list[Point]] = [[]]
    for x, y in points:
        if y is not None and math.isfinite(y):
            segments[-1].append((x, y))
        elif segments[-1]:
            segments.append([])
    return [segment for segment in segments if segment]


@dataclass(frozen=True)
class _Axis:
    """Linear map from values `low` to `high` to positions `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    max_ticks: int

    @classmethod
    def padded(
        cls, low: float, high: float, *, start: float, stop: float, padding: float, max_ticks: int
    ) -> _Axis:
        if high == low:
            margin = abs(high) * 0.1 or 1.0
            low, high = low - margin, high + margin
        spare = (high - low) * padding
        return cls(low - spare, high + spare, start, stop, max_ticks)

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        step = tick_step(self.low, self.high, max_ticks=self.max_ticks)
        return [
            number * step
            for number in range(
                math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1
            )
        ]


def tick_step(low: float, high: float, *, max_ticks: int) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten with at most `max_ticks` multiples between
    `low` and `high`.
    """
    min_step = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(min_step))
    return next(
        factor * power for factor in (1, 2, 5, 10) if factor * power >= min_step * (1 - 1e-9)
    )


# Thinning by means would hide spikes of the loss, which readers look for. Extremes of each group
# keep them.
def _thin(points: list[Point], *, keep: int) -> list[Point]:
    """Return at most `keep` points: the lowest and highest of each group of consecutive points."""
    if len(points) <= keep:
        return points
    size = -(-len(points) * 2 // keep)
    peaks: list[Point] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        minimum = min(group, key=lambda point: point[1])
        maximum = max(group, key=lambda point: point[1])
        peaks += sorted({minimum, maximum})
    return peaks


NUM_PARTS = 9
"""Maximum number of parts in a bar. Each has a color, the last one gray."""


_BAR_VIEW: Final = SimpleNamespace(
    width=960.0, left=120.0, right=70.0, inner=770.0, bar=20.0, row=28.0
)
"""Sizes and positions in the SVG, in pixels. `inner` is the width between the margins."""


@dataclass(frozen=True)
class Bar:
    """Stacked bar."""

    name: str
    parts: Sequence[float]
    """Nonnegative value of each part of the chart."""

    def fraction(self, value: float) -> float:
        return value / max(sum(self.parts), 1e-12)


def stacked_bars(
    title: str, parts: Sequence[str], bars: Sequence[Bar], *, text: Callable[[float], str]
) -> Markup:
    """Render a `<figure>` of bars on a common scale, or nothing if all are empty. `text` formats a
    value.
    """
    longest = max((sum(bar.parts) for bar in bars), default=0.0)
    if not longest:
        return Markup()
    assert len(parts) <= NUM_PARTS
    rows = [[bar.name, *(text(value) for value in bar.parts), text(sum(bar.parts))] for bar in bars]
    return draw(
        "charts.html",
        "stacked_bars",
        title=title,
        view=_BAR_VIEW,
        parts=parts,
        bars=bars,
        scale=_BAR_VIEW.inner / longest,
        text=text,
        numbers=_numbers(title, ["", *parts, "together"], rows),
    )


@dataclass(frozen=True)
class Span:
    """Time span on a timeline."""

    start_s: float
    stop_s: float
    text: str
    lost: bool = False
    """Whether the time was lost."""


@dataclass(frozen=True)
class Moment:
    """Event at a point in time."""

    at_s: float
    text: str


def timeline(
    title: str,
    lanes: Sequence[tuple[str, Sequence[Span]]],
    moments: Sequence[tuple[str, Sequence[Moment]]],
) -> Markup:
    """Render a `<figure>` with one lane per kind of span and moment, by seconds since the run
    began. Omits empty lanes, and returns nothing for a timeline of zero length.
    """
    lanes, moments = [lane for lane in lanes if lane[1]], [lane for lane in moments if lane[1]]
    end_s = max([span.stop_s for _, spans in lanes for span in spans], default=0.0)
    if end_s <= 0:
        return Markup()
    rows = [
        [name, clock_text(span.start_s), clock_text(span.stop_s), span.text]
        for name, spans in lanes
        for span in spans
    ]
    rows += [
        [name, clock_text(tick.at_s), "", tick.text] for name, ticks in moments for tick in ticks
    ]
    return draw(
        "charts.html",
        "timeline",
        title=title,
        view=_BAR_VIEW,
        lanes=lanes,
        moments=moments,
        scale=_BAR_VIEW.inner / end_s,
        end_s=end_s,
        numbers=_numbers(title, ["", "from", "to", "what"], rows),
    )


def _numbers(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    return folded(f"Numbers: {title}", table(heads, rows, name=title, unfolded=True))


# A PNG needs no library: signature, header, rows compressed by zlib, and an end.
#
#   IHDR   width, height, 8 bits per channel, 0 (gray) or 2 (RGB)
#   IDAT   each row after its filter byte, all compressed
#   IEND   empty
def data_url(pixels: Sequence[Sequence[int | Sequence[int]]]) -> str:
    """Encode pixel rows, each pixel 0 to 255 or (red, green, blue), as
    `data:image/png;base64,...`.
    """
    height = len(pixels)
    width = len(pixels[0])
    in_color = not isinstance(pixels[0][0], int)
    lines = []
    for row in pixels:
        values = chain.from_iterable((each,) if isinstance(each, int) else each for each in row)
        lines.append(b"\0" + bytes(values))  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if in_color else 0, 0, 0, 0)
    parts = (
        _chunk(b"IHDR", header),
        _chunk(b"IDAT", zlib.compress(b"".join(lines), 9)),
        _chunk(b"IEND", b""),
    )
    return (
        "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
