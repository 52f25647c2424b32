"""Drafts of schemas for generated files: training accepts each one unchanged, or the file is
rejected in one line.
"""

import csv
import random
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec import cli
from rayrec.prepare.schema_draft import recipe_of

ROWS = 300
SEEDS = [pytest.param(seed, marks=[] if seed < 12 else pytest.mark.extended) for seed in range(120)]
MARKERS = (
    "NA",
    "N/A",
    "NaN",
    "null",
    "\\N",
    "?",
    "-",
    "unknown",
    "-1",
    "",
    "none",
    "missing",
)
NAMES = (
    "user_id",
    "item",
    "age",
    "price",
    "label",
    "click",
    "time",
    "date",
    "rating",
    "Zip Code",
    "größe",
    "c1",
    "a:b",
    "'q'",
    "row",
)
START = datetime(2025, 3, 1)

Make = Callable[[random.Random, int], Any]
WORDS = (
    "red",
    "green",
    "blue",
    "New York",
    "a,b",
    "x|y",
    'say "hi"',
    "é",
    "0",
    "007",
    "[a]",
    "#",
    "null",
    "true",
)
VALUES: dict[str, Make] = {
    "code": lambda rng, row: rng.randrange(10**8),
    "small": lambda rng, row: rng.randrange(7),
    "amount": lambda rng, row: int(rng.expovariate(0.02)),
    "negative": lambda rng, row: rng.randrange(-9, 9),
    "huge": lambda rng, row: 10**18 + rng.randrange(10**18),
    "decimal": lambda rng, row: round(rng.gauss(0, 9), 3),
    "float": lambda rng, row: rng.gauss(0, 1) * 10 ** rng.randrange(-9, 9),
    "counter": lambda rng, row: 5 + row,
    "constant": lambda rng, row: "same",
    "word": lambda rng, row: rng.choice(WORDS),
    "hash": lambda rng, row: f"{rng.randrange(2**64):016x}",
    "sentence": lambda rng, row: " ".join(rng.choices(WORDS, k=5)),
    "pipes": lambda rng, row: "|".join(rng.choices("abcdef", k=rng.randrange(1, 5))),
    "blanks": lambda rng, row: " ".join(
        f"i{rng.randrange(40)}" for _ in range(rng.randrange(1, 9))
    ),
    "brackets": lambda rng, row: str(rng.choices("abcdef", k=rng.randrange(1, 5))),
    "vector": lambda rng, row: ",".join(f"{rng.random():.3f}" for _ in range(4)),
    "epoch": lambda rng, row: 1_700_000_000 + 60 * row,
    "milliseconds": lambda rng, row: 1_700_000_000_000 + 61_003 * row,
    "iso": lambda rng, row: (START + timedelta(minutes=row)).isoformat(),
    "american": lambda rng, row: (START + timedelta(hours=row)).strftime("%m/%d/%Y %I:%M:%S %p"),
    "day": lambda rng, row: (START + timedelta(days=row % 28)).date().isoformat(),
    "yes": lambda rng, row: rng.choice(["yes", "no"]),
    "sign": lambda rng, row: rng.choice([-1, 1]),
    "stars": lambda rng, row: rng.randrange(1, 6),
    "empty": lambda rng, row: "",
}
NESTED: dict[str, Make] = {
    "list": lambda rng, row: rng.choices(range(9), k=rng.randrange(4)),
    "words": lambda rng, row: rng.choices(WORDS, k=rng.randrange(4)),
    "embedding": lambda rng, row: [rng.random(), rng.random()],
    "items": lambda rng, row: [{"sku": "a", "n": row}],
    "struct": lambda rng, row: {"a": row},
    "matrix": lambda rng, row: [[1, 2], [row]],
    "datetime": lambda rng, row: START + timedelta(seconds=row),
    "duration": lambda rng, row: timedelta(seconds=row),
    "bytes": lambda rng, row: bytes(rng.choices(range(256), k=3)),
    "boolean": lambda rng, row: rng.random() < 0.5,
    "null": lambda rng, row: None,
}


def _columns(
    rng: random.Random,
    makers: dict[str, Make],
    marker: Any,
) -> list[tuple[str, list[Any]]]:
    """Return columns with random names, kinds and missing values; some names occur twice."""
    columns: list[tuple[str, list[Any]]] = []
    for number in range(rng.randrange(1, 9)):
        make = makers[rng.choice([*makers])]
        name = rng.choice(NAMES) + ("" if rng.random() < 0.5 else str(number))
        gaps = rng.choice([0, 0, 0.03, 0.3])
        columns.append(
            (name, [marker if rng.random() < gaps else make(rng, row) for row in range(ROWS)])
        )
    if rng.random() < 0.9:
        name = rng.choice(["click", "label", "bought", "last"])
        columns.insert(
            rng.randrange(len(columns) + 1),
            (name, [rng.randrange(2) for _ in range(ROWS)]),
        )
    return columns


def _write_csv(rng: random.Random, folder: Path) -> str:
    columns = _columns(rng, VALUES, rng.choice(MARKERS))
    delimiter = rng.choice(",;\t|")
    path = folder / ("log.tsv" if delimiter == "\t" else "log.csv")
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=rng.choice(["\n", "\r\n"]))
        if rng.random() < 0.8:
            writer.writerow([name for name, _ in columns])
        writer.writerows(zip(*(values for _, values in columns), strict=True))
    return str(path)


def _write_parquet(rng: random.Random, folder: Path) -> str:
    columns = _columns(rng, VALUES | NESTED, None)
    names = [name for name, _ in columns]
    pq.write_table(
        pa.table([pa.array(values) for _, values in columns], names=names),
        folder / "log.parquet",
    )
    return str(folder / "log.parquet")


@pytest.mark.parametrize("seed", SEEDS)
def test_random_file_trains_or_is_rejected(
    seed: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = random.Random(seed)
    log = rng.choice([_write_csv, _write_csv, _write_parquet])(rng, tmp_path)
    schema = str(tmp_path / "schema.yaml")
    status = cli.run(["schema", log, "--out", schema, "-q"])
    error = capsys.readouterr().err
    if status:
        assert (status, error.count("\n")) == (2, 1)
        assert "Traceback" not in error
        return
    settings = (
        f"--steps 1 --batch-size 64 --workers 1 --storage-path {tmp_path} --name run "
        "--trackers.no-tensorboard -q"
    )
    recipe = recipe_of(Path(schema).read_text()).split()
    assert cli.run(["train", *recipe, "--schema", schema, "--data", log, *settings.split()]) == 0
