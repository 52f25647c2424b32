"""Drafts of schemas for the shapes of public logs, and training with them unchanged."""

import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import yaml
from builders.faults import rejects

from rayrec import cli, recipes
from rayrec.config import InputError
from rayrec.data.encoding.rules import seconds_of
from rayrec.data.logs.column_values import REJECTED, numbers_of
from rayrec.prepare import schema_draft
from rayrec.prepare.schema_draft import draft
from rayrec.schema import Schema, load_schema

ROWS, RANDOM = range(400), random.Random(0)


def pick(*values: Any) -> list[Any]:
    return [RANDOM.choice(values) for _ in ROWS]


CLICKS, IDS, PRICES, ITEMS = pick(0, 1), [f"{n:016x}" for n in ROWS], [RANDOM.random() * 9 for _ in ROWS], pick(*range(9))
TIMES = [datetime(2026, 1, 1) + timedelta(minutes=n) for n in ROWS]
GENRES = [RANDOM.sample(("action", "comedy", "drama", "horror", "war"), RANDOM.randrange(1, 4)) for _ in ROWS]
SHAPES: dict[str, tuple[dict[str, list[Any]], str]] = {
    "e-commerce.csv": (
        {"event_time": TIMES, "product_id": ITEMS, "category": pick("tv", "sofa", None), "price": PRICES, "session": IDS,
         "is_weekend": pick(0, 1), "country": pick("de"), "purchased": CLICKS},
        "{label: purchased, dense: [event_time, price], sparse: [product_id, category, is_weekend]}"),
    "ads.csv": ({"id": list(ROWS), "click": CLICKS, "hour": pick(*range(14102100, 14102124)), "C1": ITEMS, "app": pick("a", "b")},
        "{label: click, dense: [], sparse: [hour, C1, app]}"),
    "ratings.csv": (
        {"user": pick(*range(50)), "movie": ITEMS, "rating": pick(1, 2, 3, 4, 5),
         "timestamp": [964982703 + 61 * n for n in ROWS], "genres": ["|".join(genres) for genres in GENRES]},
        "{label: null, labels: [{name: rating, kind: number, missing: fault}], dense: [timestamp], "
        "sparse: [user, movie, genres], lists: [genres]}"),
    "news.tsv": ({"clicked": CLICKS, "user": pick("u1", "ü2"), "topics": [",".join(each) for each in GENRES], "dwell": PRICES},
        "{label: clicked, dense: [dwell], sparse: [user, topics], lists: [topics], list_delimiter: ','}"),
    "log.parquet": (
        {"user": pick("u1", "u2"), "history": [[len(of_row), 7] for of_row in GENRES], "tags": GENRES, "at": TIMES,
         "price": [float("nan"), *PRICES[1:]], "vector": [[0.5, 0.1]] * len(ROWS), "label": CLICKS},
        "{label: label, dense: [at, price], sparse: [user, history, tags], lists: [history, tags], nan: missing}"),
}  # fmt: skip


def write(path: Path, columns: dict[str, list[Any]], delimiter: str = ",") -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        pa_csv.write_csv(pa.table(columns), path, pa_csv.WriteOptions(delimiter=delimiter, quoting_style="needed"))
    return str(path)


@pytest.mark.parametrize("name", SHAPES)
def test_draft_trains_unchanged(name: str, tmp_path: Path) -> None:
    log, out = write(tmp_path / name, SHAPES[name][0], "\t" if name.endswith(".tsv") else ","), str(tmp_path / "schema.yaml")
    assert cli.run(["schema", log, "--out", out, "-q"]) == 0
    assert yaml.safe_load(Path(out).read_text()) == yaml.safe_load(SHAPES[name][1])
    settings = f"--steps 2 --batch-size 64 --workers 1 --storage-path {tmp_path} --name run -q"
    assert cli.run(["train", "clicks", "--schema", out, "--data", log, *settings.split()]) == 0
    assert recipes.clicks(log, schema=out) == recipes.clicks(log, schema=load_schema(Path(out).read_text(), out))


def test_draft_explains_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = {"is_new": CLICKS, "user": pick("a", "b"), "id": IDS, "click": CLICKS, "bought": CLICKS, "answer": pick("yes", "no")}
    for delimiter, of_lists in ((";", "|"), ("|", ";")):
        text = draft(write(tmp_path / "log.csv", log, delimiter))
        assert "Left out: id (another value in each row), bought (may be another label)." in text
        expected = Schema(label="click", sparse=("is_new", "user", "answer"), delimiter=delimiter, list_delimiter=of_lists)
        assert load_schema(text, "draft") == expected
    monkeypatch.setattr(schema_draft, "_ROWS", 300)
    assert "from 300 rows" in draft(write(tmp_path / "log.parquet", log))
    for file, label, message in (
        ("log.csv", "answer", "labels must be 0 or 1, found no, yes in column answer; derive one, such as answer == 'yes'"),
        ("log.csv", "nope", "no column named nope; it has is_new, user"),
        (write(tmp_path / "a.csv", {"user": pick("a", "b")}), None, "no column of 0 and 1 for the label among user. Add one"),
        (write(tmp_path / "b.csv", {"user": []}), None, "no usable rows"),
    ):
        rejects(message, draft, str(tmp_path / file), label=label)


def test_times_in_text_are_equal_numbers_in_files_and_exports() -> None:
    texts = ["2024-02-29", "2024-02-29 10:00", "2024-02-29T10:00:00.25+02:00", "2024-02-30", "x"]
    values, status = numbers_of(pa.array([*texts, "7"]), "at", lambda name, fix: InputError(name), times=True)
    assert [None if bad else value for value, bad in zip(values, status == REJECTED, strict=True)] == [*map(seconds_of, texts), 7]
