"""Small logs of users and items whose next item can be told, and configurations of retrieval models
on them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from builders.runs import LEAN, short_run

import rayrec
from rayrec import recipes
from rayrec.schema import Feature, Schema

ITEMS = 24
"""From 100 on; each user goes through them in turn."""
LENGTH = 8
LISTS = Schema(
    label=None,
    dense=(),
    sparse=("item",),
    lists=("item",),
    features=(Feature(name="item", max_length=LENGTH),),
)
PAIRS = Schema(
    label=None,
    dense=(),
    sparse=("user", "item"),
    tokens="any",
)
SMALL: dict[str, dict[str, Any]] = {
    "next_item": {
        "embedding_dim": 16,
        "hidden": 32,
        "dropout": 0.1,
        "k": 5,
    },
    "two_tower": {"embedding_dim": 8, "vector": 8, "k": 5},
}


def interactions(users: int, *, lists: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(user, item) of each user's items in the order of time: 4 to 9, one after the other. In
    lists, any item is the last one of some users.
    """
    lengths = 4 + (np.arange(users) + lists * (np.arange(users) // ITEMS)) % 6
    user = np.repeat(np.arange(users), lengths)
    place = np.arange(len(user)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return user, 100 + (user + place) % ITEMS


def write_log(folder: Path, name: str, *, users: int = 120) -> str:
    """Write the log of a recipe, and return its folder."""
    user, item = interactions(users, lists=name == "next_item")
    table = pa.table({"user": user % ITEMS, "item": item})
    if name == "next_item":
        starts = np.flatnonzero(np.diff(user, prepend=-1))
        offsets = pa.array([*starts, len(user)], pa.int32())
        table = pa.table({"item": pa.ListArray.from_arrays(offsets, pa.array(item))})
    folder.mkdir()
    pq.write_table(table, folder / "log.parquet")
    return str(folder)


def small(name: str, log: str, storage: Path, steps: int, **changes: Any) -> rayrec.TrainConfig:
    """Return the recipe with a small model, which learns from the log and evaluates on it."""
    schema = LISTS if name == "next_item" else PAIRS
    constant = {"schedule": {"decay_fraction": 0.0}}  # A decay depends on the number of steps
    fields: dict[str, Any] = {
        "workload": {
            "model": SMALL[name],
            **constant,
            **{f"{kind}_optimizer": {"learning_rate": 0.02} for kind in ("sparse", "dense")},
        },
        "eval_data": {"path": log},
        "batch_size": 32,
        "min_steps_per_epoch": 1,
        "early_stopping": {"patience": 0},
        "trackers": LEAN["trackers"],
        **changes,
    }
    return short_run(recipes.ALL[name](log, schema), storage, steps, **fields)
