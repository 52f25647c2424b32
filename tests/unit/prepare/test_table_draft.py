"""Joins of side tables in drafts, which train unchanged."""

import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from builders.faults import rejects
from builders.runs import LEAN, QUIET

import rayrec
from rayrec import recipes
from rayrec.prepare.feature_table import compute_features
from rayrec.prepare.schema_draft import draft
from rayrec.schema import Schema, load_schema

ROWS = 400


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rng = random.Random(0)
    rows = [
        {
            "click": rng.randrange(2),
            "user_id": f"u{rng.randrange(30)}",
            "item": rng.randrange(20),
            "price": round(rng.uniform(1, 9), 2),
        }
        for _ in range(ROWS)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "log.csv", index=False)
    return tmp_path / "log.csv"


def write_items(path: Path, **columns: Any) -> Path:
    items = range(20)
    table: dict[str, Any] = {
        "item": list(items),
        "genre": [f"g{item % 3}" for item in items],
        "price": [item + 0.5 for item in items],
        "tags": ["|".join("abc"[: item % 4]) for item in items],
    }
    frame = pd.DataFrame({**table, **columns})
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return path


def drafted(log: Path, *tables: Path) -> Schema:
    return load_schema(draft(str(log), tables=[str(table) for table in tables]), "draft")


def formulas(schema: Schema) -> dict[str, str]:
    return {each.name: each.formula for each in schema.features if each.formula is not None}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_draft_with_table_trains(log: Path, tmp_path: Path, suffix: str) -> None:
    schema = drafted(log, write_items(tmp_path / f"items{suffix}"))
    assert [(table.name, table.key) for table in schema.tables] == [("items", "item")]
    assert formulas(schema) == {
        "genre": "lookup(items, item, genre)",
        "items_price": "number(lookup(items, item, price))",
        "tags": "split(lookup(items, item, tags), '|')",
    }
    config = recipes.clicks(schema=schema).replace(
        train_data={"path": str(log)},
        scaling={"num_workers": 1},
        batch_size=50,
        steps=3,
        storage_path=str(tmp_path),
        **LEAN,
    )
    assert rayrec.train(config, console=QUIET).summary["steps"] == 3


def test_values_choose_key_if_names_differ(log: Path, tmp_path: Path) -> None:
    users = tmp_path / "users.csv"
    frame = pd.DataFrame({"row": range(40), "id": [f"u{n}" for n in range(40)]})
    frame.assign(city=[f"c{n % 4}" for n in range(40)]).to_csv(users, index=False)
    schema = drafted(log, users, write_items(tmp_path / "items.csv"))
    assert [(table.name, table.key) for table in schema.tables] == [
        ("users", "id"),
        ("items", "item"),
    ]
    assert formulas(schema)["city"] == "lookup(users, user_id, city)"


def test_form_of_table_is_drafted(log: Path, tmp_path: Path) -> None:
    genres = ["x", "x|y", "z|x|y"]
    prices = ["NA" if n == 3 else n / 4 for n in range(20)]
    rows = [f"{n}::Amélie and {n}::{prices[n]}::{genres[n % 3]}\n" for n in range(20)]
    (tmp_path / "items.dat").write_bytes("".join(rows).encode("latin-1"))
    text = draft(str(log), tables=[str(tmp_path / "items.dat")])
    (table,) = load_schema(text, "draft").tables
    assert "It has no header" in text
    assert (table.key, table.header) == ("c0", ("c0", "c1", "c2", "c3"))
    assert (table.delimiter, table.encoding, table.missing) == ("::", "latin-1", ("NA",))
    assert formulas(load_schema(text, "draft")) == {
        "c1": "lookup(items, item, c1)",
        "c2": "number(lookup(items, item, c2))",
        "c3": "split(lookup(items, item, c3), '|')",
    }
    features = compute_features(load_schema(text, "draft"), str(log), 30)
    assert {(row["item"], row["c2"]) for row in features} >= {("3", None), ("4", 1.0)}


def test_names_by_position_find_no_key(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [f"{rng.randrange(8)}::{n % 20}::{n % 7 // 4}\n" for n in range(ROWS)]
    (tmp_path / "log.dat").write_text("".join(rows))
    (tmp_path / "items.dat").write_text("".join(f"{n}::g{n % 3}\n" for n in range(1, 20)))
    schema = drafted(tmp_path / "log.dat", tmp_path / "items.dat")
    assert formulas(schema) == {"items_c1": "lookup(items, c1, c1)"}


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"item": [3] * 20}, id="repeated keys"),
        pytest.param({"item": [f"x{n}" for n in range(20)]}, id="other keys"),
    ],
)
def test_table_without_key_is_rejected(
    log: Path,
    tmp_path: Path,
    columns: dict[str, list[Any]],
) -> None:
    table = write_items(tmp_path / "items.csv", **columns)
    rejects("items.csv: no column has values of user_id, item in the log", drafted, log, table)
