"""Search results as a text table and an HTML page. Pure."""

from collections.abc import Mapping
from typing import Any

from rayrec.humanize import aligned, value_text
from rayrec.observe.report.charts import NUM_SERIES, Line, line_chart
from rayrec.observe.report.page import Section, charts, document, join_parts, paragraph, table


def table_text(result: Mapping[str, Any]) -> str:
    """Format one line per trial, the best first, and notes on the best one."""
    heads, rows = _rows(result)
    return "\n".join([*aligned([heads, *rows], left=()), *_notes(result)])


def render(name: str, result: Mapping[str, Any]) -> str:
    """Render the page of a search."""
    heads, rows = _rows(result)
    best = sorted(result["trials"], key=lambda trial: trial["number"] != result["best"]["number"])
    lines = [Line(f"trial {trial['number']}", [tuple(point) for point in trial["curve"]]) for trial in best[:NUM_SERIES]]
    fields = dict.fromkeys(field for trial in result["trials"] for field in trial["values"])
    return document(
        f"Search {name}",
        (
            Section("Best", join_parts([paragraph(text) for text in _notes(result)])),
            Section("Trials", table(heads, rows, name="Trials", unfolded=True)),
            Section("Curves", charts([line_chart(f"Validation {result['metric']}", lines, x_label="step")])),
            Section("Settings", charts([_scatter(result, field) for field in fields])),
        ),
        wide=True,
    )


def _notes(result: Mapping[str, Any]) -> list[str]:
    best, metric = result["best"], result["metric"]
    values = ", ".join(f"{field} {_value(value)}" for field, value in best["values"].items())
    notes = [
        f"Trial {best['number']} is best: {metric} {best[metric]:.5f} on {result['validation_rows']:,} validation rows "
        f"(optimistic, because these rows selected it). {values or 'It has the settings of the recipe.'}"
    ]
    if result["trained_share"] is not None and result["trained_share"] < 1:
        notes.append(f"Trained {result['trained_share']:.1%} of the rows of these trials: weak trials were stopped early.")
    compared = result["compared"]
    if compared is not None:
        auroc = compared["auroc"]
        notes.append(
            f"On {result['test_rows']:,} test rows, its AUROC differs by {auroc['difference']:+.5f} from the recipe's own "
            f"settings ({auroc['low']:+.5f} to {auroc['high']:+.5f}, p = {auroc['p_value']:.3g})."
            if None not in auroc.values()
            else f"{result['test_rows']:,} test rows are too few for a comparison with the recipe's own settings."
        )
    return notes


def _rows(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    fields = dict.fromkeys(field for trial in result["trials"] for field in trial["values"])
    heads = ["trial", *(field.rpartition(".")[2] for field in fields), result["metric"], "step", "rows", "seconds", "state"]
    rows = []
    for trial in result["trials"]:
        settings = [_value(trial["values"][field]) if field in trial["values"] else "recipe" for field in fields]
        best = "-" if trial["best"] is None else f"{trial['best']:.5f}"
        measured = [best, f"{trial['step']:,}", f"{trial['rows']:,}", f"{trial['seconds']:.0f}"]
        rows.append([str(trial["number"]), *settings, *measured, trial["error"] or trial["state"]])
    return heads, rows


def _scatter(result: Mapping[str, Any], field: str) -> Any:
    """Plot the metric over a numeric field, one dot per trial."""
    points = [
        (float(trial["values"][field]), trial["best"])
        for trial in result["trials"]
        if isinstance(trial["values"].get(field), int | float) and trial["best"] is not None
    ]
    return line_chart(f"{result['metric']} by {field}", [Line(result["metric"], sorted(points))], x_label=field)


def _value(value: Any) -> str:
    return value_text(value) if isinstance(value, float) else str(value)
