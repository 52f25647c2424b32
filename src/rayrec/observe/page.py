"""A page of HTML that needs no other file and runs no script: its frame, its sections and its tables. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from rayrec.observe.report_style import STYLE

BEST = "\0"
"""What a cell of a table starts with whose value is the best in its row."""
_LONG_TABLE = 12
"""Rows beyond which a table is folded."""


def document(title: str, sections: Sequence[str], *, wide: bool = False) -> str:
    """The whole page, of all the window's width if `wide`; empty sections are left out. A list of links to the sections comes
    first."""
    present, kind = [part for part in sections if part], ' class="all"' if wide else ""
    links = "".join(
        f'<a href="#{place}">{heading}</a>'
        for part in present
        for place, heading in re.findall(r'<section id="([^"]*)"><h2>(.*?)</h2>', part)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main{kind}>\n<h1>{escape(title)}</h1>\n"
        + (f'<nav aria-label="Sections">{links}</nav>\n' if links else "")
        + "\n".join(present)
        + "\n</main></body></html>\n"
    )


def section(title: str, body: str) -> str:
    """A part of the page with a heading; nothing where there is no body."""
    if not body:
        return ""
    place = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return f'<section id="{place}"><h2>{escape(title)}</h2>{body}</section>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, name: str, unfolded: bool = False) -> str:
    """A table called `name` whose cells are text; a long one is folded unless it is to stay `unfolded`. A column in which no row
    has a value is left out, and a cell that starts with BEST is emphasised."""
    kept = [
        place
        for place in range(len(heads))
        if not place or not rows or any(row[place] not in ("", "-") for row in rows)
    ]
    heads, rows = [heads[place] for place in kept], [[row[place] for place in kept] for row in rows]
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{escape(cell)}</th>' if place == 0 else _cell(cell) for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    # Focusable, so that a narrow window's scrolling is in reach of a keyboard.
    drawn = (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(name)}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
    if unfolded or len(rows) <= _LONG_TABLE:
        return drawn
    return f"<details><summary>{escape(name)}: {len(rows)} rows</summary>{drawn}</details>"


def _cell(text: str) -> str:
    if text.startswith(BEST):
        return f'<td><b title="the best of all runs">{escape(text.removeprefix(BEST))} ★</b></td>'
    return f"<td>{escape(text)}</td>"


def folded(title: str, body: str) -> str:
    """Something that is shown when asked for."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def facts(named: Sequence[tuple[str, str]]) -> str:
    """Names with values."""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in named)
    return f"<dl>{items}</dl>"


def tiles(named: Sequence[tuple[str, str]]) -> str:
    """Names with values that are to be seen first."""
    drawn = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in named)
    return f'<div class="figures">{drawn}</div>' if drawn else ""
