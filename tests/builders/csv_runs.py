"""Runs by command on a small CSV log with a file per day."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv

from rayrec import cli

SCHEMA = (
    "{label: click, dense: [age], sparse: [user, item], tokens: any, timestamp: at, delimiter: ','}"
)


def write_days(folder: Path, *days: int, rows: int = 400) -> None:
    """Write the files of days into the folder `log`, and the schema next to it."""
    (folder / "log").mkdir(parents=True, exist_ok=True)
    (folder / "schema.yaml").write_text(SCHEMA)
    for day in days:
        rng = np.random.default_rng(day)
        columns = {
            name: rng.integers(0, limit, rows)
            for name, limit in (
                ("click", 2),
                ("age", 90),
                ("user", 30),
                ("item", 20),
            )
        }
        at = pa.array((day * 10**6 + np.arange(rows)) * 10**6, pa.timestamp("us"))
        arrow_csv.write_csv(pa.table({**columns, "at": at}), folder / "log" / f"day_{day}.csv")


def train(folder: Path, *flags: str, log: str = "log", quiet: bool = True) -> int:
    """Run `rayrec train` for two steps as run `run` in the folder, and return its status."""
    paths = [
        "--train-data.path",
        str(folder / log),
        "--storage-path",
        str(folder),
        "--schema",
        str(folder / "schema.yaml"),
    ]
    short = [
        "--name",
        "run",
        "--steps",
        "2",
        "--batch-size",
        "200",
        "--evaluate-every",
        "2",
        "--min-steps-per-epoch",
        "1",
    ]
    return cli.run(
        [
            "train",
            "clicks",
            *paths,
            *short,
            "--model",
            "linear",
            "--trackers.no-tensorboard",
            *["-q"] * quiet,
            *flags,
        ]
    )
