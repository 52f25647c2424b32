"""Sections of a report on what was learnt and how it is kept: metrics, calibration, categories, tables, samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rayrec.observe.bars import Bar, stacked_bars
from rayrec.observe.charts import Line, line_chart
from rayrec.observe.history import Event, metrics_of
from rayrec.observe.page import section, table
from rayrec.observe.pictures import data_url
from rayrec.observe.quantities import number_text, size_text, value_text


def metrics(events: Sequence[Event], summary: Mapping[str, Any] | None) -> str:
    """Of a finished run those of its test and validation rows, else the last evaluation's."""
    if summary is not None:
        sets = {"test": summary["metrics"], "validation": summary["validation"]}
        if summary["metrics"] == summary["validation"]:  # without test rows, or with the same
            sets = {"validation": summary["validation"]}
    else:
        evaluation = next((event for event in reversed(events) if event["kind"] == "evaluate"), None)
        if evaluation is None:
            return ""
        sets = {f"{evaluation['set']} at step {evaluation['step']:,}": metrics_of(evaluation)}
    names = list(dict.fromkeys(name for values in sets.values() for name in values))
    rows = [[name, *(value_text(values.get(name)) for values in sets.values())] for name in names]
    return section("Metrics", table(["metric", *sets], rows, name="Metrics"))


def calibration(events: Sequence[Event]) -> str:
    """How often clicks came where they were predicted to."""
    shown = _samples(events, "reliability")
    if not shown:
        return ""
    bins, name = shown[-1]["bins"], shown[-1]["set"]
    most = max(max(group["predicted"], group["observed"]) for group in bins)
    lines = [
        Line("observed", [(group["predicted"], group["observed"]) for group in bins]),
        Line("as predicted", [(0.0, 0.0), (most, most)]),
    ]
    chart = line_chart(
        f"Share of clicks in the {name} rows, by predicted probability",
        lines,
        x_label="predicted probability",
        from_zero=True,
    )
    told = f"<p>{len(bins)} groups of about {number_text(round(sum(group['rows'] for group in bins) / len(bins)))} rows each.</p>"
    return section("Calibration", f'<div class="charts"><div>{chart}{told}</div></div>')


def categories(events: Sequence[Event]) -> str:
    """Vocabularies, and how many values of the evaluated rows they do not hold."""
    shown = _samples(events, "categories")
    if not shown:
        return ""
    rows = [
        [
            column["column"],
            "hashed" if column["num_tokens"] is None else f"{column['num_tokens']:,}",
            f"{column['num_embeddings']:,}",
            *("-" if column[name] is None else f"{column[name]:.2%}" for name in ("unknown", "missing")),
        ]
        for column in shown[-1]["columns"]
    ]
    heads = ["column", "known categories", "rows of its table", "unknown", "missing"]
    told = f"<p>Unknown and missing: share of the values of the {escape(shown[-1]['set'])} rows.</p>"
    return section("Categories", told + table(heads, rows, name="Categories"))


def sharding(events: Sequence[Event]) -> str:
    """Which worker holds what of the embedding tables."""
    start = next((event for event in reversed(events) if event["kind"] == "start" and event.get("tables")), None)
    if start is None:
        return ""
    ranks = sorted({int(rank) for shards in start["tables"] for rank in shards["bytes_of_rank"]})
    kinds = list(dict.fromkeys(shards["sharding_type"] for shards in start["tables"]))
    bars = [
        Bar(
            f"worker {rank}",
            [
                float(
                    sum(
                        shards["bytes_of_rank"].get(str(rank), 0)
                        for shards in start["tables"]
                        if shards["sharding_type"] == kind
                    )
                )
                for kind in kinds
            ],
        )
        for rank in ranks
    ]
    chart = stacked_bars("Weights and optimizer state of embedding tables, by worker", kinds, bars, text=size_text)
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
    return section("Embedding tables", chart + table(heads, rows, name="Embedding tables"))


def samples(events: Sequence[Event]) -> str:
    """Images and texts, by the final weights."""
    images = "".join(_image(sample) for sample in _samples(events, "image"))
    texts = "".join(_text(sample) for sample in _samples(events, "text"))
    body = (f'<div class="images">{images}</div>' if images else "") + texts
    return section("Samples, by the final weights", body)


def _samples(events: Sequence[Event], kind: str) -> list[Mapping[str, Any]]:
    every: list[Mapping[str, Any]] = next(
        (event["samples"] for event in reversed(events) if event["kind"] == "samples"), []
    )
    return [sample for sample in every if sample["kind"] == kind]


def _image(sample: Mapping[str, Any]) -> str:
    label, prediction = str(sample["label"]), str(sample["prediction"])
    wrong = label != prediction
    sure = f" ({sample['probability']:.0%})" if sample.get("probability") is not None else ""
    verdict = f"✗ {prediction}{sure}, is {label}" if wrong else f"✓ {prediction}{sure}"
    shown = escape(f"label {label}, prediction {prediction}")
    return (
        f'<figure class="{"wrong" if wrong else "right"}"><img src="{data_url(sample["pixels"])}" alt="{shown}" title="{shown}">'
        f"<figcaption>{escape(verdict)}</figcaption></figure>"
    )


def _text(sample: Mapping[str, Any]) -> str:
    return f'<p class="text"><b>{escape(str(sample["prompt"]))}</b>{escape(str(sample["text"]))}</p>'
