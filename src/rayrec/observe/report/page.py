"""Self-contained HTML page without scripts: templates, sections and tables. Pure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rayrec.humanize import clock_text, number_text

BEST = "\0"
"""First character of the cell with the best value in a table row."""
_LONG_TABLE = 12
"""Number of rows above which tables are collapsed."""
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
    """Render a template macro. Text in `values` is escaped."""
    return getattr(_environment().get_template(template).module, macro)(**values)


@dataclass(frozen=True)
class Section:
    """Part of the page with a heading. Omitted if `body` is empty."""

    title: str
    body: Markup

    @property
    def id(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def document(
    title: str, sections: Sequence[Section | None], *, intro: str = "", wide: bool = False
) -> str:
    """Render the page: links to the sections, `intro` (Markup for HTML), and the sections. `wide`
    uses the full window width.
    """
    present = [section for section in sections if section and section.body]
    return (
        _environment()
        .get_template("page.html")
        .render(title=title, sections=present, intro=intro, wide=wide)
        + "\n"
    )


def join_parts(parts: Sequence[str]) -> Markup:
    return Markup("\n").join(part for part in parts if part)


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, name: str, unfolded: bool = False
) -> Markup:
    """Render a table of texts without empty columns. Emphasizes cells that start with `BEST`, and
    collapses long tables.
    """
    columns = [
        index
        for index in range(len(heads))
        if not index or not rows or any(row[index] not in ("", "-") for row in rows)
    ]
    rendered = draw(
        "parts.html",
        "table",
        heads=[heads[index] for index in columns],
        rows=[[row[index] for index in columns] for row in rows],
        name=name,
        best=BEST,
    )
    return (
        rendered
        if unfolded or len(rows) <= _LONG_TABLE
        else folded(f"{name}: {len(rows)} rows", rendered)
    )


def folded(title: str, body: Markup) -> Markup:
    """Show `body` after a click on the title."""
    return draw("parts.html", "folded", title=title, body=body)


def facts(named: Sequence[tuple[str, str]]) -> Markup:
    """Render a list of names and values."""
    return draw("parts.html", "facts", named=named)


def tiles(named: Sequence[tuple[str, str]]) -> Markup:
    """Render the most important values in large type. Empty without values."""
    return draw("parts.html", "tiles", named=named) if named else Markup()


def charts(rendered: Sequence[Markup]) -> Markup:
    """Arrange charts in a grid. Empty without charts."""
    present = [chart for chart in rendered if chart]
    return draw("parts.html", "charts", rendered=present) if present else Markup()


def paragraph(text: str) -> Markup:
    return draw("parts.html", "paragraph", text=text)
