"""Line charts as inline SVG: axes with round numbers, up to eight lines, marks where something happened. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from rayrec.observe.page import folded, table
from rayrec.observe.quantities import number_text
from rayrec.observe.report_style import NUM_SERIES

Point = tuple[float, float]

_WIDTH, _HEIGHT = 480.0, 230.0
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


def line_chart(
    title: str, lines: Sequence[Line], *, x_label: str, marks: Sequence[Mark] = (), from_zero: bool = False
) -> str:
    """A `<figure>` with the chart, or nothing where there is no point. `from_zero`: the y axis begins at 0."""
    drawn = [(line, _pieces(line.points)) for line in lines[:NUM_SERIES]]
    points = [point for _, pieces in drawn for piece in pieces for point in piece]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_axis = _Axis.around(0.0, max(xs), start=_LEFT, stop=_WIDTH - _RIGHT, padding=0.0, most_ticks=7)
    y_axis = _Axis.around(
        0.0 if from_zero else min(ys), max(ys), start=_HEIGHT - _BOTTOM, stop=_TOP, padding=0.06, most_ticks=5
    )
    if from_zero:
        y_axis = _Axis(0.0, y_axis.high, y_axis.start, y_axis.stop, y_axis.most_ticks)
    body = [*_grid(x_axis, y_axis, x_label), *_marks(marks, x_axis)]
    for number, (line, pieces) in enumerate(drawn, start=1):
        body += _line(line.name, pieces, number, x_axis, y_axis, x_label)
    named = legend([line.name for line, _ in drawn], lines=True) if drawn[1:] else ""
    said = "; ".join(_said(line.name, pieces) for line, pieces in drawn if pieces)
    return (
        f"<figure><figcaption>{escape(title)}{named}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(f"{title}: {said}")}">{"".join(body)}</svg>'
        f"{_numbers(title, drawn, x_label)}</figure>"
    )


def _said(name: str, pieces: Sequence[list[Point]]) -> str:
    """A line in words."""
    points = [point for piece in pieces for point in piece]
    values = [y for _, y in points]
    first, lowest, highest, last = map(number_text, (values[0], min(values), max(values), values[-1]))
    return f"{name} from {first} to {last}, lowest {lowest}, highest {highest}"


def _numbers(title: str, drawn: Sequence[tuple[Line, Sequence[list[Point]]]], x_label: str) -> str:
    """A few points of every line as a table, for those who do not see the chart or have no mouse for its tooltips."""
    values = [dict(point for piece in pieces for point in piece) for _, pieces in drawn]
    places = sorted({x for line in values for x in line})
    if len(places) > _MOST_ROWS:
        places = [places[round(number * (len(places) - 1) / (_MOST_ROWS - 1))] for number in range(_MOST_ROWS)]
    rows = [
        [number_text(x), *(f"{line[x]:.6g}" if x in line else "" for line in values)] for x in dict.fromkeys(places)
    ]
    heads = [x_label, *(line.name for line, _ in drawn)]
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


def _grid(x_axis: _Axis, y_axis: _Axis, x_label: str) -> list[str]:
    body = []
    for tick in y_axis.ticks():
        place = y_axis.at(tick)
        body.append(_segment("grid", x_axis.start, place, x_axis.stop, place))
        body.append(_text(x_axis.start - 7, place + 3.5, number_text(tick), anchor="end"))
    for tick in x_axis.ticks():
        place = x_axis.at(tick)
        body.append(_segment("axis", place, y_axis.start, place, y_axis.start + 4))
        body.append(_text(place, y_axis.start + 16, number_text(tick), anchor="middle"))
    body.append(_segment("axis", x_axis.start, y_axis.start, x_axis.stop, y_axis.start))
    body.append(_text((x_axis.start + x_axis.stop) / 2, _HEIGHT - 4, x_label, anchor="middle"))
    return body


def _segment(kind: str, x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def _text(x: float, y: float, text: str, *, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _marks(marks: Sequence[Mark], x_axis: _Axis) -> list[str]:
    body = []
    for mark in marks:
        if not x_axis.low <= mark.x <= x_axis.high:
            continue
        place = x_axis.at(mark.x)
        body.append(
            f"<g><title>{escape(mark.text)}</title>{_segment('mark', place, _TOP, place, _HEIGHT - _BOTTOM)}"
            f"{_text(place, _TOP - 4, mark.label, anchor='middle', kind='marked')}</g>"
        )
    return body


def _line(
    name: str, pieces: Sequence[list[Point]], number: int, x_axis: _Axis, y_axis: _Axis, x_label: str
) -> list[str]:
    body = []
    num_points = sum(map(len, pieces))
    for piece in pieces:
        thinned = _thinned(piece, keep=max(2, _MOST_POINTS * len(piece) // num_points))
        places = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in thinned)
        body.append(f'<polyline class="line series-{number}" points="{places}"/>')
    if num_points > _MOST_DOTS:
        return body
    return body + [
        f'<circle class="dot series-{number}" cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="2.5">'
        f"<title>{escape(name)} {y:.6g} ({escape(x_label)} {x:,.6g})</title></circle>"
        for piece in pieces
        for x, y in piece
    ]


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


def legend(names: Sequence[str], *, lines: bool = False) -> str:
    """The names of the series, each with its colour, and of `lines` with its dash."""
    kind = "swatch dashed" if lines else "swatch"
    return "".join(
        f'<span class="legend"><span class="{kind} series-{number}"></span>{escape(name)}</span>'
        for number, name in enumerate(names, start=1)
    )
