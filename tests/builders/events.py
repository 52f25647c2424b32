"""Small logs of events, whose next item can be told, and runs of next-item models on them."""

from pathlib import Path
from typing import Any

import pandas as pd
from builders.interactions import SMALL, interactions
from builders.runs import LEAN, short_run

from rayrec import recipes
from rayrec.schema import Schema, SequenceColumns
from rayrec.workloads.base import TrainConfig

USERS = 90
SCHEMA = Schema(
    label=None,
    sequence=SequenceColumns(user="user", item="item", time="time", max_length=8),
)
NEW_ITEMS = 12
"""Number of items that only `grown_events` has."""


def events(users: int = USERS) -> pd.DataFrame:
    """Return the events of users in no order."""
    user, item = interactions(users)
    time = [1_700_000_000 + 60 * number for number in range(len(user))]
    frame = pd.DataFrame({"user": user, "item": item, "time": time})
    return frame.sample(frac=1, random_state=1)


def grown_events() -> pd.DataFrame:
    """Return the events and later ones, of new users and partly of new items."""
    later = events()
    later["user"] += USERS
    later["item"] += NEW_ITEMS
    later["time"] += 1_000_000
    return pd.concat([events(), later])


def write_events(folder: Path, frame: pd.DataFrame | None = None) -> str:
    """Write events, of `USERS` users by default, and return the file's path."""
    path = folder / "events.csv"
    (events() if frame is None else frame).to_csv(path, index=False)
    return str(path)


def events_run(
    path: str | None,
    storage: str | Path,
    steps: int | None = 4,
    **changes: Any,
) -> TrainConfig:
    """Return a run of a small next-item model, evaluated at the last step."""
    fields: dict[str, Any] = {
        "batch_size": 32,
        "min_steps_per_epoch": 1,
        "workload": {"model": SMALL["next_item"]},
        **LEAN,
        **changes,
    }
    return short_run(recipes.next_item(path, SCHEMA), storage, steps, **fields)
