"""Small log of a shop with side tables of its items and their prices, and runs on it."""

import csv
import random
from pathlib import Path
from typing import Any

from builders.runs import LEAN

from rayrec import recipes
from rayrec.schema import Schema, load_schema
from rayrec.workloads.base import TrainConfig

SCHEMA = """
label: click
timestamp: time
delimiter: ","
dense: [age]
sparse: [user, item, history]
lists: [history]
vectors: [point]
tables:
  items: {path: ITEMS, key: item}
  prices: {path: PRICES, key: item, time: since}
  offers: {path: OFFERS, key: [user, item], time: since}
features:
- {name: category, from: "lookup(items, item, category)"}
- {name: tags, from: "lower(lookup(items, item, tags))"}
- {name: price, from: "log(lookup(prices, item, price))"}
- {name: bucket, from: "bucketize(lookup(prices, item, price), [50, 100])"}
- {name: level, from: "quantile(lookup(prices, item, price), 4)"}
- {name: youth, from: "zscore(age) + 1"}
- {name: mixed, from: "cross(level, quantile(youth, 2))"}
- {name: hour, from: "hour(time)"}
- {name: recent, from: "last(history, 2)"}
- {name: seen, from: "count_in(history, item)"}
- {name: taste, from: "cross(user, category)"}
- {name: offer, from: "lookup(offers, user, item, share)"}
- {name: days, from: "age(time, registered) / 86400"}
"""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_shop(folder: Path, *, rows: int = 600) -> Path:
    """Write a log, and tables of items, of their prices at two times, and of offers of an item to a
    user from some day on. Returns the folder.
    """
    rng = random.Random(0)
    items = [
        {"item": n, "category": f"c{n % 4}", "tags": rng.choice(["A", "B", ""])} for n in range(30)
    ]
    prices = [
        {"item": n, "price": n + day, "since": f"2026-01-{day:02d}"}
        for n in range(30)
        for day in (1, 11)
    ]
    offers = [
        {"user": user, "item": n, "share": f"{user}-{n}-{day}", "since": f"2026-01-{day:02d}"}
        for user in range(0, 40, 2)
        for n in range(0, 30, 2)
        for day in (5, 12)
    ]
    log = [
        {
            "click": int(rng.random() < 0.4),
            "time": f"2026-01-{1 + n % 20:02d} {n % 24:02d}:30:00",
            "age": rng.choice(["", 20, 33.5]),
            "user": rng.randrange(40),
            "item": rng.randrange(35),  # Some are in no table
            "history": "|".join(str(rng.randrange(30)) for _ in range(rng.randrange(4))),
            "point": rng.choice(["", "0.5|-1|2e-3", "1|2|3"]),
            "registered": rng.choice(["", "2025-12-01"]),
        }
        for n in range(rows)
    ]
    write_rows(folder / "items.csv", items)
    write_rows(folder / "prices.csv", prices)
    write_rows(folder / "offers.csv", offers)
    write_rows(folder / "log.csv", log)
    return folder


def schema_of(folder: Path, text: str = SCHEMA) -> Schema:
    for name in ("items", "prices", "offers"):
        text = text.replace(name.upper(), str(folder / f"{name}.csv"))
    return load_schema(text, "schema.yaml")


def config_of(folder: Path, runs: str | Path, **changes: Any) -> TrainConfig:
    """Return a run of a few steps on the log."""
    config = recipes.clicks(schema=schema_of(folder)).replace(
        train_data={"path": str(folder / "log.csv")},
        scaling={"num_workers": 1},
        batch_size=64,
        steps=6,
        name="run",
        storage_path=str(runs),
        **LEAN,
    )
    return config.replace(**changes)
