"""HTML page of one evaluation. Pure."""

from collections.abc import Sequence
from typing import Any, Final

from markupsafe import Markup

from rayrec.inference.result_tables import (
    baseline_rows,
    importance_metrics,
    importance_note,
    importance_rows,
    metric_rows,
    resampling_note,
    slice_rows,
    source_facts,
)
from rayrec.observe.report.charts import Bar, stacked_bars
from rayrec.observe.report.page import (
    Section,
    document,
    facts,
    join_parts,
    paragraph,
    table,
    tiles,
)

_TILES: Final = 4
_BARS: Final = 30
"""Maximum number of features in the chart. The table below it has all."""


def render(result: dict[str, Any]) -> str:
    """Render the page of a result of `rayrec.inference.evaluate.evaluate`: metrics, and what its
    options added.
    """
    metrics = metric_rows(result)
    note = paragraph(resampling_note(result["resampling"])) if "resampling" in result else Markup()
    sections = [Section("Metrics", join_parts((_table(metrics, "Metrics"), note)))]
    if "baselines" in result:
        rows = baseline_rows(result["baselines"])
        sections.append(Section("Baselines", _table(rows, "Baselines")))
    if "importance" in result:
        sections.append(
            Section(
                "Importance of features",
                _importance(result["importance"]),
            )
        )
    for by, slices in result.get("slices", {}).items():
        sections.append(Section(f"By {by}", _table(slice_rows(slices), f"By {by}")))
    named = [(row[0], row[1]) for row in metrics[1 : 1 + _TILES]]
    intro = join_parts((facts(source_facts(result)), tiles(named)))
    return document(f"Evaluation of {result['checkpoint']}", sections, intro=intro)


def _table(rows: Sequence[Sequence[str]], name: str) -> Markup:
    heads, *cells = rows
    return table(heads, cells, name=name, unfolded=True)


def _importance(importance: dict[str, Any]) -> Markup:
    """Render a chart of the main metric's loss, and the table of all. A feature whose permutation
    improves the metric has an empty bar.
    """
    main = importance_metrics(importance)[0]
    losses = {each["feature"]: each[main]["loss"] for each in importance["features"]}
    bars = [Bar(name, [max(loss or 0.0, 0.0)]) for name, loss in losses.items()]
    chart = stacked_bars(
        f"Loss of {main} if the values of a feature are permuted",
        [main],
        bars[:_BARS],
        text=lambda value: f"{value:.5f}",
    )
    rows = _table(importance_rows(importance), "Importance")
    return join_parts((chart, rows, paragraph(f"{importance_note(importance)}.")))
