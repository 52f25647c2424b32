"""Stacked bars and a timeline as inline SVG: what a whole is made of, and what happened when. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from rayrec.observe.charts import legend
from rayrec.observe.page import folded, table
from rayrec.observe.quantities import clock_text
from rayrec.observe.report_style import NUM_PARTS

_WIDTH, _LEFT, _RIGHT = 960.0, 120.0, 70.0
_BAR, _GAP = 20.0, 8.0


@dataclass(frozen=True)
class Bar:
    """A whole, in parts."""

    name: str
    parts: Sequence[float]
    """One for each part that the chart names; at least 0."""


def stacked_bars(title: str, parts: Sequence[str], bars: Sequence[Bar], *, text: Callable[[float], str]) -> str:
    """A `<figure>` with one bar below the other on a common scale, or nothing where all are empty. `text` writes a value."""
    longest = max((sum(bar.parts) for bar in bars), default=0.0)
    if not longest:
        return ""
    assert len(parts) <= NUM_PARTS
    scale, body = (_WIDTH - _LEFT - _RIGHT) / longest, []
    for row, bar in enumerate(bars):
        top, place = row * (_BAR + _GAP), _LEFT
        body.append(_label(_LEFT - 8, top + 14, bar.name, anchor="end"))
        for number, (part, value) in enumerate(zip(parts, bar.parts, strict=True), start=1):
            tip = f"{bar.name}, {part}: {text(value)} ({value / max(sum(bar.parts), 1e-12):.1%})"
            body.append(
                f'<rect class="dot series-{number}" x="{place:.1f}" y="{top:.1f}" width="{value * scale:.1f}" height="{_BAR:g}">'
                f"<title>{escape(tip)}</title></rect>"
            )
            place += value * scale
        body.append(_label(place + 6, top + 14, text(sum(bar.parts)), anchor="start", kind="value"))
    height = len(bars) * (_BAR + _GAP)
    rows = [[bar.name, *(text(value) for value in bar.parts), text(sum(bar.parts))] for bar in bars]
    numbers = folded(f"Numbers: {title}", table(["", *parts, "together"], rows, name=title, unfolded=True))
    return _figure(title, height, "".join(body), named=legend(parts) if parts[1:] else "", below=numbers)


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
) -> str:
    """A `<figure>` with a lane for each kind of stretch and of moment, by seconds since the run began; nothing where it has no
    length. Lanes in which nothing happened are left out."""
    lanes, moments = [lane for lane in lanes if lane[1]], [lane for lane in moments if lane[1]]
    end_s = max([span.stop_s for _, spans in lanes for span in spans], default=0.0)
    if end_s <= 0:
        return ""
    scale, body = (_WIDTH - _LEFT - _RIGHT) / end_s, []
    for row, (name, spans) in enumerate(lanes):
        top = row * (_BAR + _GAP)
        body.append(_label(_LEFT - 8, top + 14, name, anchor="end"))
        for span in spans:
            width = max(1.0, (span.stop_s - span.start_s) * scale)
            kind = "lost" if span.lost else "dot series-1"
            body.append(
                f'<rect class="{kind}" x="{_LEFT + span.start_s * scale:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{_BAR:g}"><title>{escape(span.text)}</title></rect>'
            )
    for row, (name, ticks) in enumerate(moments, start=len(lanes)):
        top = row * (_BAR + _GAP)
        body.append(_label(_LEFT - 8, top + 14, name, anchor="end"))
        for tick in ticks:
            x = _LEFT + min(tick.at_s, end_s) * scale
            body.append(
                f'<g><title>{escape(tick.text)}</title><line class="tick" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" '
                f'y2="{top + _BAR:.1f}"/></g>'
            )
    height = (len(lanes) + len(moments)) * (_BAR + _GAP)
    body.append(_label(_LEFT, height + 10, clock_text(0), anchor="start"))
    body.append(_label(_WIDTH - _RIGHT, height + 10, clock_text(end_s), anchor="end"))
    return _figure(title, height + 16, "".join(body), below=_places(title, lanes, moments))


def _places(
    title: str, lanes: Sequence[tuple[str, Sequence[Span]]], moments: Sequence[tuple[str, Sequence[Moment]]]
) -> str:
    """All of a timeline as a table."""
    rows = [
        [name, clock_text(span.start_s), clock_text(span.stop_s), span.text] for name, spans in lanes for span in spans
    ]
    rows += [[name, clock_text(tick.at_s), "", tick.text] for name, ticks in moments for tick in ticks]
    return folded(f"Numbers: {title}", table(["", "from", "to", "what"], rows, name=title, unfolded=True))


def _figure(title: str, height: float, body: str, *, named: str = "", below: str = "") -> str:
    return (
        f'<figure class="bars"><figcaption>{escape(title)}{named}</figcaption><div class="wide" role="region" tabindex="0" '
        f'aria-label="{escape(title)}"><svg viewBox="0 0 {_WIDTH:g} '
        f'{height:g}" role="img" aria-label="{escape(title)}">{body}</svg></div>{below}</figure>'
    )


def _label(x: float, y: float, text: str, *, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
