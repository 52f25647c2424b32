"""What a run cost in money: the time its machines were at work, times their price. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rayrec.config import InputError
from rayrec.observe.history import Event

_POINT = 0.01
"""Of AUROC."""


@dataclass(frozen=True)
class Price:
    """What the machines cost."""

    per_node_hour: float
    """In `currency`."""
    nodes: int = 1
    currency: str = "USD"

    def __post_init__(self) -> None:
        if self.per_node_hour < 0 or self.nodes < 1:
            raise InputError(
                f"price_per_node_hour {self.per_node_hour}, nodes {self.nodes}: at least 0, and at least 1 node"
            )


@dataclass(frozen=True)
class Cost:
    """Of a run so far; None where it cannot be told."""

    node_hours: float
    total: float
    per_epoch: float | None
    """Over the epochs trained, whole or not."""
    per_auroc_point: float | None
    """For each 0.01 of AUROC above 0.5, which guessing has."""
    currency: str = "USD"


def cost(events: Sequence[Event], price: Price) -> Cost:
    """Counts the time from each start of the driver to the last that is heard of it; machines that stand idle between are not the
    run's."""
    hours = working_s(events) / 3600 * price.nodes
    total = hours * price.per_node_hour
    epochs, auroc = _epochs(events), _auroc(events)
    return Cost(
        node_hours=hours,
        total=total,
        per_epoch=total / epochs if epochs else None,
        per_auroc_point=total / ((auroc - 0.5) / _POINT) if auroc is not None and auroc > 0.5 else None,
        currency=price.currency,
    )


def working_s(events: Sequence[Event]) -> float:
    """Seconds for which the drivers of a run were at work; the time between them is left out. Pure."""
    total = 0.0
    for before, event in pairwise(events):
        if event["kind"] != "run":
            total += event["time"] - before["time"]
    return total


def epochs_trained(rows: int | None, rows_of_sets: Mapping[str, int]) -> float | None:
    """Passes over the training rows that so many rows trained are, whole or not; None where that is not known. Pure."""
    return rows / rows_of_sets["train"] if rows is not None and rows_of_sets.get("train") else None


def _epochs(events: Sequence[Event]) -> float | None:
    sets: Mapping[str, Any] = next((event["rows_of_sets"] for event in reversed(events) if "rows_of_sets" in event), {})
    rows = next((event["rows"] for event in reversed(events) if event["kind"] == "step"), None)
    return epochs_trained(rows, sets)


def _auroc(events: Sequence[Event]) -> float | None:
    for event in reversed(events):
        if event["kind"] == "finish" and "metrics" in event:
            return event["metrics"].get("auroc")
        if event["kind"] == "evaluate" and "auroc" in event:
            return event["auroc"]
    return None
