"""Stacked bars and a timeline as inline SVG: what a whole is made of, and what happened when. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from markupsafe import Markup

from rayrec.observe.page import draw, folded, table
from rayrec.quantities import clock_text

NUM_PARTS = 9
"""Most parts of a bar, each with a color; the last one is gray."""


class _View(NamedTuple):
    """Places in the SVG, in pixels."""

    width: float
    left: float
    right: float
    bar: float
    row: float

    @property
    def inner(self) -> float:
        return self.width - self.left - self.right


_VIEW: Final = _View(width=960.0, left=120.0, right=70.0, bar=20.0, row=28.0)


@dataclass(frozen=True)
class Bar:
    """A whole, in parts."""

    name: str
    parts: Sequence[float]
    """One for each part that the chart names; at least 0."""

    def share(self, value: float) -> float:
        return value / max(sum(self.parts), 1e-12)


def stacked_bars(title: str, parts: Sequence[str], bars: Sequence[Bar], *, text: Callable[[float], str]) -> Markup:
    """A `<figure>` with one bar below the other on a common scale, or nothing where all are empty. `text` writes a value."""
    longest = max((sum(bar.parts) for bar in bars), default=0.0)
    if not longest:
        return Markup()
    assert len(parts) <= NUM_PARTS
    rows = [[bar.name, *(text(value) for value in bar.parts), text(sum(bar.parts))] for bar in bars]
    return draw(
        "charts.html",
        "stacked_bars",
        title=title,
        view=_VIEW,
        parts=parts,
        bars=bars,
        scale=_VIEW.inner / longest,
        text=text,
        numbers=_numbers(title, ["", *parts, "together"], rows),
    )


@dataclass(frozen=True)
class Span:
    """A stretch of time."""

    start_s: float
    stop_s: float
    text: str
    lost: bool = False
    """Whether nothing was gained in it."""


@dataclass(frozen=True)
class Moment:
    """Something that happened at a time."""

    at_s: float
    text: str


def timeline(
    title: str, lanes: Sequence[tuple[str, Sequence[Span]]], moments: Sequence[tuple[str, Sequence[Moment]]]
) -> Markup:
    """A `<figure>` with a lane for each kind of stretch and of moment, by seconds since the run began; nothing where it has no
    length. Lanes in which nothing happened are left out."""
    lanes, moments = [lane for lane in lanes if lane[1]], [lane for lane in moments if lane[1]]
    end_s = max([span.stop_s for _, spans in lanes for span in spans], default=0.0)
    if end_s <= 0:
        return Markup()
    return draw(
        "charts.html",
        "timeline",
        title=title,
        view=_VIEW,
        lanes=lanes,
        moments=moments,
        scale=_VIEW.inner / end_s,
        end_s=end_s,
        numbers=_places(title, lanes, moments),
    )


def _places(
    title: str, lanes: Sequence[tuple[str, Sequence[Span]]], moments: Sequence[tuple[str, Sequence[Moment]]]
) -> Markup:
    """All of a timeline as a table."""
    rows = [
        [name, clock_text(span.start_s), clock_text(span.stop_s), span.text] for name, spans in lanes for span in spans
    ]
    rows += [[name, clock_text(tick.at_s), "", tick.text] for name, ticks in moments for tick in ticks]
    return _numbers(title, ["", "from", "to", "what"], rows)


def _numbers(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    return folded(f"Numbers: {title}", table(heads, rows, name=title, unfolded=True))
