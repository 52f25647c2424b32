"""Click logs that need one ability: products of features, interests in a list, or related
labels.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from rayrec.data.synthetic import exact_auroc
from rayrec.schema import Schema, load_schema


@dataclass(frozen=True)
class Planted:
    """Log, its schema, and the true log-odds."""

    table: pa.Table
    schema: dict[str, Any]
    logits: dict[str, np.ndarray]
    """True log-odds of each label, (rows,)."""

    def write(self, folder: str) -> Schema:
        """Write the log as Parquet in a new folder and return its schema."""
        os.makedirs(folder)
        pq.write_table(self.table, os.path.join(folder, "train.parquet"), row_group_size=1 << 16)
        return load_schema(yaml.safe_dump(self.schema), "planted")

    def best(self, label: str, rows: int) -> float:
        """Compute the true probabilities' AUROC over the labelled ones of the last `rows` rows."""
        values = self.table[label].slice(len(self.table) - rows)
        has_label = values.is_valid().to_numpy()
        auroc = exact_auroc(self.logits[label][-rows:][has_label], values.drop_null().to_numpy())
        assert auroc is not None
        return auroc


def crosses(
    rows: int, seed: int = 0, *, fields: int = 9, values: int = 14, products: int = 6
) -> Planted:
    """Make a log in which six products of three fields change the odds. A single field has little
    effect.
    """
    rng = np.random.default_rng(seed)
    columns = _popular(rng, values, (rows, fields), 0.5)
    logits = 0.3 * sum(rng.normal(0, 1, values)[columns[:, field]] for field in range(fields))
    for triple in [rng.permutation(fields)[:3] for _ in range(products)]:
        signs = rng.choice([-1, 1], (3, values)) * (0.5 + rng.random((3, values)))
        factors = [signs[index][columns[:, field]] for index, field in enumerate(triple)]
        logits = logits + 2 * np.prod(factors, axis=0) / products**0.5
    logits = _with_rate(logits, 0.3)
    names = [f"field_{field}" for field in range(fields)]
    table = pa.table(
        {
            "click": _sample_clicks(rng, logits),
            **{name: columns[:, i] for i, name in enumerate(names)},
        }
    )
    return Planted(table, {"label": "click", "dense": [], "sparse": names}, {"click": logits})


def interests(
    rows: int,
    seed: int = 0,
    *,
    items: int = 200,
    topics: int = 10,
    users: int = 20_000,
    length: int = 10,
) -> Planted:
    """Make a log in which a click is likelier if an earlier clicked item has the topic of this
    item. Each item has one topic.
    """
    rng = np.random.default_rng(seed)
    topic = np.sort(rng.integers(0, topics, items))
    begins = np.searchsorted(topic, np.arange(topics + 1))
    naming = rng.permutation(items)  # so that the number of an item says nothing

    def draw_item(topic_ids: np.ndarray) -> np.ndarray:
        """Draw an item of each wanted topic."""
        return begins[topic_ids] + (
            rng.random(topic_ids.shape) * (begins[topic_ids + 1] - begins[topic_ids])
        ).astype(np.int64)

    likes = rng.integers(0, topics, (users, 3))
    user = _popular(rng, users, (rows,), 0.5)
    row_likes = likes[user]
    item = np.where(
        rng.random(rows) < 0.3, draw_item(row_likes[:, 0]), _popular(rng, items, (rows,), 0.8)
    )
    history = _popular(rng, items, (rows, length), 0.8)
    liked = np.take_along_axis(row_likes, rng.integers(0, 3, (rows, length)), axis=1)
    history = np.where(rng.random((rows, length)) < 0.25, draw_item(liked), history)
    lengths = rng.integers(length // 2, length + 1, rows)
    is_present = np.arange(length) < lengths[:, None]
    match = ((topic[history] == topic[item][:, None]) & is_present).any(axis=1)
    logits = _with_rate(3 * match + rng.normal(0, 0.5, items)[item], 0.25)
    return _listed(rng, logits, item, history, is_present, naming=naming, user=user)


def returns(
    rows: int,
    seed: int = 0,
    *,
    items: int = 1000,
    length: int = 20,
    rate: float = 0.3,
    exponent: float = 0.5,
) -> Planted:
    """Make a log in which an item of the history is likelier clicked. A sum of embeddings does not
    store which items it contains.
    """
    rng = np.random.default_rng(seed)
    history = _popular(rng, items, (rows, length), exponent)
    lengths = rng.integers(length // 2, length + 1, rows)
    position = (rng.random(rows) * lengths).astype(np.int64)
    is_repeat = rng.random(rows) < rate
    item = np.where(
        is_repeat, history[np.arange(rows), position], _popular(rng, items, (rows,), exponent)
    )
    is_present = np.arange(length) < lengths[:, None]
    seen = ((history == item[:, None]) & is_present).any(axis=1)
    logits = _with_rate(3 * seen + rng.normal(0, 0.5, items)[item], 0.25)
    return _listed(rng, logits, item, history, is_present, naming=rng.permutation(items))


def labels(
    rows: int, seed: int = 0, *, users: int = 200, items: int = 150, labelled_fraction: float = 0.05
) -> Planted:
    """Make a log in which one affinity decides clicks, a label of all rows, and purchases, a label
    of one row in twenty.
    """
    rng = np.random.default_rng(seed)
    user = _popular(rng, users, (rows,), 0.5)
    item = _popular(rng, items, (rows,), 0.6)
    hour = rng.integers(0, 24, rows)
    device = _popular(rng, 6, (rows,), 0.8)
    fit = 0.75 * (rng.normal(0, 1, (users, 4))[user] * rng.normal(0, 1, (items, 4))[item]).sum(1)
    click = _with_rate(fit + rng.normal(0, 0.5, items)[item] + rng.normal(0, 0.4, 24)[hour], 0.25)
    bought = _with_rate(fit + rng.normal(0, 0.7, items)[item] + rng.normal(0, 0.5, 6)[device], 0.1)
    table = pa.table(
        {
            "click": _sample_clicks(rng, click),
            "bought": pa.array(
                _sample_clicks(rng, bought), mask=rng.random(rows) >= labelled_fraction
            ),
            "user": user,
            "item": item,
            "hour": hour,
            "device": device,
        }
    )
    schema = {
        "label": "click",
        "labels": [{"name": "bought"}],
        "dense": [],
        "sparse": ["user", "item", "hour", "device"],
    }
    return Planted(table, schema, {"click": click, "bought": bought})


def only(planted: Planted, label: str) -> Planted:
    """Return the rows with `label`, with this label only."""
    has_label = planted.table[label].is_valid().to_numpy()
    schema = {**planted.schema, "label": label, "labels": []}
    return Planted(
        planted.table.filter(pa.array(has_label)), schema, {label: planted.logits[label][has_label]}
    )


TRUTHS: dict[str, Callable[[int], Planted]] = {
    "crosses": crosses,
    "interests": interests,
    "returns": returns,
    "labels": labels,
}


def _listed(
    rng: np.random.Generator,
    logits: np.ndarray,
    item: np.ndarray,
    history: np.ndarray,
    is_present: np.ndarray,
    *,
    naming: np.ndarray,
    **more: np.ndarray,
) -> Planted:
    """Make a log of items and their history, [rows, length], masked by `is_present`. `naming`:
    number of each item.
    """
    offsets = np.concatenate([[0], np.cumsum(is_present.sum(axis=1))]).astype(np.int32)
    lists = pa.ListArray.from_arrays(offsets, naming[history[is_present]])
    table = pa.table(
        {"click": _sample_clicks(rng, logits), **more, "item": naming[item], "history": lists}
    )
    schema = {
        "label": "click",
        "dense": [],
        "sparse": [*more, "item", "history"],
        "lists": ["history"],
        "features": [{"name": "history", "vocabulary": "item", "max_length": 50}],
    }
    return Planted(table, schema, {"click": logits})


def _popular(
    rng: np.random.Generator, count: int, shape: tuple[int, ...], exponent: float
) -> np.ndarray:
    """Sample numbers below `count`, low ones more often."""
    weights = (np.arange(count) + 6.0) ** -exponent
    return np.searchsorted(np.cumsum(weights / weights.sum())[:-1], rng.random(shape))


def _with_rate(logits: np.ndarray, rate: float) -> np.ndarray:
    """Shift the logits so that the mean probability is `rate`."""
    low = -30.0
    high = 30.0
    for _ in range(50):
        middle = (low + high) / 2
        above = (1 / (1 + np.exp(-(logits + middle)))).mean() > rate
        low, high = (low, middle) if above else (middle, high)
    return logits + low


def _sample_clicks(rng: np.random.Generator, logits: np.ndarray) -> np.ndarray:
    return (rng.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(np.int8)
