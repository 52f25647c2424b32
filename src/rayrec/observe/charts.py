"""Line charts as inline SVG: axes with round numbers, up to eight lines, marks where something happened. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from markupsafe import Markup

from rayrec.observe.page import draw, folded, table
from rayrec.quantities import number_text

NUM_SERIES = 8
"""Most lines of a chart, each with a color and a dash; the colors differ for color-blind readers too."""

Point = tuple[float, float]


class _View(NamedTuple):
    """Size of the SVG in pixels."""

    width: float
    height: float


_VIEW: Final = _View(480.0, 230.0)
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 14.0, 14.0, 36.0
"""Margins around the lines, for labels."""
_MOST_POINTS = 800
"""Of a line; more are thinned out, which keeps peaks."""
_MOST_ROWS = 20
"""Of the table of numbers under a chart."""
_MOST_DOTS = 60
"""A line of more points has no dot, and so no tooltip, for each."""


@dataclass(frozen=True)
class Line:
    """One series."""

    name: str
    points: Sequence[tuple[float, float | None]]
    """By x; where y is None or not finite the line is broken."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at a place of the x axis."""

    x: float
    label: str
    """A character or two, drawn at the top."""
    text: str
    """What a tooltip says."""


@dataclass(frozen=True)
class _Drawn:
    """A line as the template draws it."""

    name: str
    pieces: Sequence[list[Point]]
    """The points between breaks."""

    @property
    def points(self) -> list[Point]:
        return [point for piece in self.pieces for point in piece]

    @property
    def thinned(self) -> list[list[Point]]:
        num_points = len(self.points)
        return [_thinned(piece, keep=max(2, _MOST_POINTS * len(piece) // num_points)) for piece in self.pieces]

    @property
    def dots(self) -> list[Point]:
        return self.points if len(self.points) <= _MOST_DOTS else []


def line_chart(
    title: str, lines: Sequence[Line], *, x_label: str, marks: Sequence[Mark] = (), from_zero: bool = False
) -> Markup:
    """A `<figure>` with the chart; empty if there is no point. `from_zero`: the y axis starts at 0."""
    drawn = [_Drawn(line.name, _pieces(line.points)) for line in lines[:NUM_SERIES]]
    points = [point for line in drawn for point in line.points]
    if not points:
        return Markup()
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_axis = _Axis.around(0.0, max(xs), start=_LEFT, stop=_VIEW.width - _RIGHT, padding=0.0, most_ticks=7)
    y_axis = _Axis.around(
        0.0 if from_zero else min(ys), max(ys), start=_VIEW.height - _BOTTOM, stop=_TOP, padding=0.06, most_ticks=5
    )
    if from_zero:
        y_axis = replace(y_axis, low=0.0)
    return draw(
        "charts.html",
        "line_chart",
        title=title,
        said="; ".join(_said(line) for line in drawn if line.pieces),
        view=_VIEW,
        x=x_axis,
        y=y_axis,
        x_label=x_label,
        marks=[mark for mark in marks if x_axis.low <= mark.x <= x_axis.high],
        lines=drawn,
        numbers=_numbers(title, drawn, x_label),
    )


def _said(line: _Drawn) -> str:
    """A line in words."""
    values = [y for _, y in line.points]
    first, lowest, highest, last = map(number_text, (values[0], min(values), max(values), values[-1]))
    return f"{line.name} from {first} to {last}, lowest {lowest}, highest {highest}"


def _numbers(title: str, drawn: Sequence[_Drawn], x_label: str) -> Markup:
    """A few points of every line as a table, for those who do not see the chart or have no mouse for its tooltips."""
    values = [dict(line.points) for line in drawn]
    places = sorted({x for line in values for x in line})
    if len(places) > _MOST_ROWS:
        places = [places[round(number * (len(places) - 1) / (_MOST_ROWS - 1))] for number in range(_MOST_ROWS)]
    rows = [
        [number_text(x), *(f"{line[x]:.6g}" if x in line else "" for line in values)] for x in dict.fromkeys(places)
    ]
    heads = [x_label, *(line.name for line in drawn)]
    return folded(f"Numbers: {title}", table(heads, rows, name=title, unfolded=True))


def _pieces(points: Iterable[tuple[float, float | None]]) -> list[list[Point]]:
    """The points between breaks."""
    pieces: list[list[Point]] = [[]]
    for x, y in points:
        if y is not None and math.isfinite(y):
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


@dataclass(frozen=True)
class _Axis:
    """Numbers from `low` to `high` on places from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    most_ticks: int

    @classmethod
    def around(cls, low: float, high: float, *, start: float, stop: float, padding: float, most_ticks: int) -> _Axis:
        if high == low:
            around = abs(high) * 0.1 or 1.0
            low, high = low - around, high + around
        spare = (high - low) * padding
        return cls(low - spare, high + spare, start, stop, most_ticks)

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        step = tick_step(self.low, self.high, most=self.most_ticks)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def tick_step(low: float, high: float, *, most: int) -> float:
    """1, 2 or 5 times a power of ten, such that at most so many multiples lie between two numbers."""
    wanted = (high - low) / most
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9))


def _thinned(points: list[Point], *, keep: int) -> list[Point]:
    """Where there are more than `keep`: the lowest and the highest of every few that follow each other."""
    if len(points) <= keep:
        return points
    size = -(-len(points) * 2 // keep)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        lowest, highest = min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])
        kept += sorted({lowest, highest})
    return kept
