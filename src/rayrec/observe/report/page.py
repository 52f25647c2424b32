"""An HTML page that needs no other file and runs no script: templates, sections and tables. Pure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rayrec.quantities import clock_text, number_text

BEST = "\0"
"""First character of a table's cell that has the best value of its row."""
_LONG_TABLE = 12
"""Longer tables are folded."""
_FILTERS: Final[dict[str, Callable[[float], str]]] = {
    "px": lambda value: f"{value:.1f}",
    "number": number_text,
    "digits": lambda value: f"{value:.6g}",
    "thousands": lambda value: f"{value:,.6g}",
    "percent": lambda value: f"{value:.1%}",
    "clock": clock_text,
}


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("rayrec.observe.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(_FILTERS)
    return environment


def draw(template: str, macro: str, **values: object) -> Markup:
    """The HTML of a template's macro; text in `values` is escaped."""
    return getattr(_environment().get_template(template).module, macro)(**values)


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; left out if `body` is empty."""

    title: str
    body: Markup

    @property
    def id(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def document(title: str, sections: Sequence[Section | None], *, intro: str = "", wide: bool = False) -> str:
    """The whole page: links to the sections, `intro` (Markup, if it is HTML), the sections. `wide`: as wide as the window."""
    present = [section for section in sections if section and section.body]
    return _environment().get_template("page.html").render(title=title, sections=present, intro=intro, wide=wide) + "\n"


def joined(parts: Sequence[str]) -> Markup:
    return Markup("\n").join(part for part in parts if part)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, name: str, unfolded: bool = False) -> Markup:
    """A table of texts. A column without a value in any row is left out; a cell that starts with BEST is emphasized; a long table
    is folded unless `unfolded`."""
    kept = [place for place in range(len(heads)) if not place or not rows or any(row[place] not in ("", "-") for row in rows)]
    drawn = draw(
        "parts.html",
        "table",
        heads=[heads[place] for place in kept],
        rows=[[row[place] for place in kept] for row in rows],
        name=name,
        best=BEST,
    )
    return drawn if unfolded or len(rows) <= _LONG_TABLE else folded(f"{name}: {len(rows)} rows", drawn)


def folded(title: str, body: Markup) -> Markup:
    """`body`, shown after a click on the title."""
    return draw("parts.html", "folded", title=title, body=body)


def facts(named: Sequence[tuple[str, str]]) -> Markup:
    """A list of names with values."""
    return draw("parts.html", "facts", named=named)


def tiles(named: Sequence[tuple[str, str]]) -> Markup:
    """The most important values, in large type; empty if there are none."""
    return draw("parts.html", "tiles", named=named) if named else Markup()


def charts(drawn: Sequence[Markup]) -> Markup:
    """Charts in a grid; empty if there are none."""
    present = [chart for chart in drawn if chart]
    return draw("parts.html", "charts", drawn=present) if present else Markup()


def paragraph(text: str) -> Markup:
    return draw("parts.html", "paragraph", text=text)
