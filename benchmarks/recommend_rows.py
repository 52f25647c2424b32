"""Benchmark of `POST /v1/recommend` with 100,000 items: latency of a row with 50 items as history,
or with a user in `--histories`, and requests/s over several connections.

The model is a sasrec of width 64, trained for a few steps on generated events with every item. The
load comes from a separate process.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from rows import emit, note
from serve_benchmark import measure, percentiles_ms

import rayrec
from rayrec.observe.console import Console
from rayrec.recipes.interactions import next_item
from rayrec.schema import load_schema

ITEMS: Final = 100_000
LENGTH: Final = 50
WIDTH: Final = 64
CONNECTIONS: Final = (1, 16)
ALLOWED_MS: Final = 5.0
"""Goal of the median with one connection."""


def main(*, quick: bool) -> None:
    from hosts.ports import free_ports

    items = ITEMS // (100 if quick else 1)
    seconds = 1.0 if quick else 5.0
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "events.csv")
        generate(items).to_csv(path, index=False)
        run = _trained(path, folder)
        histories = os.path.join(folder, "lists")
        rayrec.sequences(path, out=histories, schema=_schema(), console=Console(quiet=True))
        port = free_ports(1)
        with rayrec.serving(
            run,
            port=port,
            ingress="direct",
            histories=os.path.join(histories, "histories"),
            console=Console(quiet=True),
        ):
            for name, row in _rows(items).items():
                body = os.path.join(folder, "body.json")
                Path(body).write_text(json.dumps({"rows": [row], "k": 20}))
                for connections in CONNECTIONS:
                    _measured(port, body, f"{items:,} items, {name}", connections, seconds)


def generate(items: int) -> pd.DataFrame:
    """Return events of users with 60 items each, so that every item occurs, in order of time."""
    per_user = 60
    users = -(-items // per_user) + 100
    numbers = np.arange(users * per_user)
    return pd.DataFrame(
        {
            "user": [f"user {number // per_user}" for number in numbers],
            "item": [f"item {number % items}" for number in numbers],
            "time": numbers,
        }
    )


def _schema() -> Any:
    columns = {"user": "user", "item": "item", "time": "time", "max_length": LENGTH}
    split = {"kind": "last_items", "validation": 1, "test": 1}
    return load_schema(json.dumps({"label": None, "sequence": columns, "split": split}), "serve")


def _trained(path: str, folder: str) -> str:
    """Return the folder of a run of a few steps."""
    config = next_item(path, _schema()).replace(
        workload={"model": {"class": "sasrec", "embedding_dim": WIDTH}},
        steps=10,
        storage_path=os.path.join(folder, "runs"),
        name="recommend",
        trackers={"prometheus": False, "tensorboard": False},
    )
    return rayrec.train(config, console=Console(quiet=True)).folder


def _rows(items: int) -> dict[str, dict[str, Any]]:
    """Return a request's row by its description."""
    history = [f"item {number * 7 % items}" for number in range(LENGTH)]
    return {
        f"history of {LENGTH}": {"history": history},
        "user of --histories": {"user": "user 7"},
    }


def _measured(port: int, body: str, name: str, connections: int, seconds: float) -> None:
    result = measure(port, "/v1/recommend", body=body, connections=connections, seconds=seconds)
    if result["failures"]:
        raise RuntimeError(f"{result['failures']} requests failed")
    times = percentiles_ms([result])
    note(f"  recommend, {name}, {connections} connections: {times}")
    goal = {"allowed_p50_ms": ALLOWED_MS} if connections == 1 else {}
    emit(
        "serve",
        peer=None,
        workload=f"/v1/recommend, {name}, 1 row a request, {connections} connections",
        unit="requests_per_s",
        value=len(result["taken_s"]) / result["seconds"],
        ratio=None,
        repeats=1,
        **times,
        **goal,
    )
