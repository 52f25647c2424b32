"""Report sections about the model: metrics, calibration, categories, numbers, embedding tables,
samples. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from rayrec.humanize import number_text, size_text, value_text
from rayrec.observe.report.charts import Bar, Line, data_url, line_chart, stacked_bars
from rayrec.observe.report.page import Section, charts, draw, join_parts, paragraph, table
from rayrec.observe.run_summary import Event, select_metrics


def metrics(evaluation: Event | None, summary: Mapping[str, Any] | None) -> Section | None:
    """Show the test and validation metrics of a finished run, otherwise the last evaluation."""
    if summary is not None:
        sets = {"test": summary["metrics"], "validation": summary["validation"]}
        # Without test rows, both are of the validation rows. Summaries of earlier versions do not
        # say so.
        if (
            summary.get("metrics_set") == "validation"
            or summary["metrics"] == summary["validation"]
        ):
            sets = {"validation": summary["validation"]}
    elif evaluation is None:
        return None
    else:
        sets = {f"{evaluation['set']} at step {evaluation['step']:,}": select_metrics(evaluation)}
    names = list(dict.fromkeys(name for values in sets.values() for name in values))
    rows = [[name, *(value_text(values.get(name)) for values in sets.values())] for name in names]
    return Section("Metrics", table(["metric", *sets], rows, name="Metrics"))


def calibration(events: Sequence[Event]) -> Section | None:
    """Plot observed against predicted click rates."""
    shown = _samples(events, "reliability")
    if not shown:
        return None
    bins = shown[-1]["bins"]
    name = shown[-1]["set"]
    limit = max(max(group["predicted"], group["observed"]) for group in bins)
    lines = [
        Line("observed", [(group["predicted"], group["observed"]) for group in bins]),
        Line("ideal", [(0.0, 0.0), (limit, limit)]),
    ]
    chart = line_chart(
        f"Share of clicks in the {name} rows, by predicted probability",
        lines,
        x_label="predicted probability",
        from_zero=True,
    )
    note = (
        f"{len(bins)} groups of about "
        f"{number_text(round(sum(group['rows'] for group in bins) / len(bins)))} rows each."
    )
    return Section("Calibration", charts([draw("parts.html", "noted", chart=chart, text=note)]))


def categories(events: Sequence[Event]) -> Section | None:
    """Tabulate the vocabularies and the shares of unknown and missing values."""
    shown = _samples(events, "categories")
    if not shown:
        return None
    rows = [
        [
            column["column"],
            "hashed" if column["num_tokens"] is None else f"{column['num_tokens']:,}",
            f"{column['num_embeddings']:,}",
            *(
                "-" if column[name] is None else f"{column[name]:.2%}"
                for name in ("unknown", "missing")
            ),
        ]
        for column in shown[-1]["columns"]
    ]
    heads = ["column", "known categories", "table rows", "unknown", "missing"]
    note = paragraph(f"Unknown and missing: share of the values of the {shown[-1]['set']} rows.")
    return Section("Categories", note + table(heads, rows, name="Categories"))


def numbers(events: Sequence[Event]) -> Section | None:
    """Tabulate the columns with numbers beyond the range of the counted rows."""
    rows = [
        [
            column["column"],
            sample["set"],
            f"{column['clipped']:,}",
            f"{column['clipped'] / column['values']:.2%}",
        ]
        for sample in _samples(events, "numbers")
        for column in sample["columns"]
        if column["clipped"]
    ]
    if not rows:
        return None
    note = paragraph(
        "Values beyond the range of the counted rows, which the model gets as the end of the range."
    )
    return Section(
        "Clipped numbers",
        note + table(["column", "rows", "clipped", "share"], rows, name="Clipped numbers"),
    )


def sharding(events: Sequence[Event]) -> Section | None:
    """Show the embedding tables of each worker."""
    start = next(
        (event for event in reversed(events) if event["kind"] == "start" and event.get("tables")),
        None,
    )
    if start is None:
        return None
    ranks = sorted({int(rank) for shards in start["tables"] for rank in shards["bytes_of_rank"]})
    kinds = list(dict.fromkeys(shards["sharding_type"] for shards in start["tables"]))
    bars = []
    for rank in ranks:
        sizes = dict.fromkeys(kinds, 0.0)
        for shards in start["tables"]:
            sizes[shards["sharding_type"]] += shards["bytes_of_rank"].get(str(rank), 0)
        bars.append(Bar(f"worker {rank}", list(sizes.values())))
    chart = stacked_bars(
        "Weights and optimizer state of embedding tables, by worker", kinds, bars, text=size_text
    )
    rows = [
        [
            shards["table"],
            f"{shards['num_embeddings']:,}",
            str(shards["embedding_dim"]),
            shards["sharding_type"],
            ", ".join(shards["bytes_of_rank"]),
            size_text(sum(shards["bytes_of_rank"].values())),
        ]
        for shards in start["tables"]
    ]
    heads = ["table", "rows", "dimension", "sharding", "workers", "size"]
    return Section("Embedding tables", chart + table(heads, rows, name="Embedding tables"))


def samples(events: Sequence[Event]) -> Section:
    """Show sample images and texts of the final model."""
    images = [_image(sample) for sample in _samples(events, "image")]
    figures = draw("parts.html", "images", samples=images) if images else Markup()
    texts = draw("parts.html", "texts", samples=_samples(events, "text"))
    return Section("Samples, by the final weights", join_parts((figures, texts)))


def _samples(events: Sequence[Event], kind: str) -> list[Mapping[str, Any]]:
    every: list[Mapping[str, Any]] = next(
        (event["samples"] for event in reversed(events) if event["kind"] == "samples"), []
    )
    return [sample for sample in every if sample["kind"] == kind]


def _image(sample: Mapping[str, Any]) -> dict[str, str | bool]:
    label = str(sample["label"])
    prediction = str(sample["prediction"])
    sure = f" ({sample['probability']:.0%})" if sample.get("probability") is not None else ""
    wrong = label != prediction
    url = data_url(sample["pixels"])
    return {"label": label, "prediction": prediction, "wrong": wrong, "sure": sure, "url": url}
