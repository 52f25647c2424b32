"""The panel that shows a run in a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayrec.observe.run_view import RunView
from rayrec.observe.time_split import PHASES, WORDS
from rayrec.quantities import duration_text, number_text, size_text

_STYLES: Final = dict(zip(PHASES, ("red", "magenta", "blue", "cyan", "green", "yellow", "bright_black"), strict=True))
_BAR_CELLS: Final = 40
_STALE_S: Final = 60.0
"""After which the age of the last event is worth telling."""


def panel(view: RunView, *, now_s: float | None = None, full: bool = False) -> RenderableType:
    """What is known of a run, in a few lines; `full`: where the time goes, what the data side does and the verdict as well.
    `now_s`: unix time."""
    parts: list[RenderableType] = [_progress(view), _figures(view)]
    if view.shares:
        parts.append(_split(view.shares))
    if full:
        parts += _details(view)
    age_s = (time.time() if now_s is None else now_s) - (view.last_time_s or 0.0)
    status = view.status
    if full and view.last_time_s is not None and age_s > _STALE_S and not view.ended:
        status += f" (nothing told for {duration_text(round(age_s))})"
    title = Text(" ".join(part for part in (view.recipe, view.name) if part) or "run")
    return Panel(Group(*parts), title=title, title_align="left", subtitle=Text(status), subtitle_align="left")


def _progress(view: RunView) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    told = f"step {view.step:,}" + (f" of {view.steps:,}" if view.steps else "")
    grid.add_row(ProgressBar(total=view.steps or 1, completed=view.step, width=_BAR_CELLS), Text(told))
    return grid


def _figures(view: RunView) -> RenderableType:
    text = Text()
    for name, value in view.figures():
        text.append(f"{name} ", style="dim").append(f"{value}   ")
    return text


def _split(shares: Mapping[str, float]) -> RenderableType:
    """A bar of the last interval's phases, and their shares in words."""
    bar, words = Text(), Text()
    for name in PHASES:
        cells = round(shares[name] * _BAR_CELLS)
        bar.append("█" * cells, style=_STYLES[name])
        if shares[name] >= 0.005:
            words.append(" ■ ", style=_STYLES[name]).append(f"{WORDS[name]} {shares[name]:.0%}")
    return Group(bar, words)


def _details(view: RunView) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if view.data is not None and view.data.get("stages"):
        parts.append(_data(view.data))
    found = view.verdict()
    if found is not None:
        parts.append(Text(found.text, style="bold"))
    return parts


def _data(event: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("data", "rows/s it could", "busy", "computing"):
        table.add_column(head, justify="left" if head == "data" else "right")
    for stage in event["stages"]:
        rate = number_text(round(stage["rows_per_s"]))
        table.add_row(stage["stage"], rate, f"{min(1.0, stage['busy']):.0%}", f"{min(1.0, stage['cpu_share']):.0%}")
    told = f"backlog {number_text(round(event['backlog_rows']))} rows"
    if event.get("object_store_bytes") is not None:
        told += (
            f"   object store {size_text(event['object_store_bytes'])} of {size_text(event['object_store_limit_bytes'])}"
            f"   spilled {size_text(event['spilled_bytes'])}"
        )
    return Group(table, Text(told, style="dim"))
