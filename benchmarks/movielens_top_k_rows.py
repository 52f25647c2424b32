"""Benchmark of ranking on MovieLens-100K, compared with RecBole's models.

Each user's last film is the test, and the film before it validates. All films that the user has not
rated before are ranked. Ratings of any value count.

`--recbole PYTHON` as in `rayrec benchmark movielens`. RecBole's models have their default settings,
and stop early. rayrec's models train on each rating and four films that the user has not rated.
"""

import os
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from movielens_benchmark import package_of, recbole_python, run_peer, tables_of
from rows import attempt, emit, note

import rayrec
from rayrec.observe.console import Console
from rayrec.recipes import clicks, clicks_din
from rayrec.schema import load_schema

PEERS: Final = ("Pop", "BPR", "NeuMF", "LightGCN", "EASE")
OURS: Final[dict[str, Any]] = {"clicks": clicks, "clicks_din": clicks_din}
NEGATIVES: Final = 4
HISTORY: Final = 20
SCHEMA: Final[dict[str, Any]] = {
    "label": "label",
    "dense": [],
    "sparse": [
        "user_id",
        "item_id",
        "age",
        "gender",
        "occupation",
        "release_year",
        "class",
        "history",
    ],
    "lists": ["class", "history"],
    "group": "user_id",
    "features": [{"name": "history", "vocabulary": "item_id", "max_length": HISTORY}],
}


@dataclass(frozen=True)
class Ratings:
    """Ratings in the order of time."""

    user: np.ndarray
    """User number of each rating, from 0, int64 [ratings]."""
    item: np.ndarray
    """Film number of each rating, from 0, int64 [ratings]."""
    before: np.ndarray
    """Last films of the user before this one, latest first, -1 if none, int64 [ratings,
    HISTORY].
    """
    last: np.ndarray
    """Number of later ratings of the user, int64 [ratings]."""
    users: pd.DataFrame
    items: pd.DataFrame

    def part(self, name: str) -> np.ndarray:
        """Return the numbers of the ratings in a part: train, valid or test."""
        mask = {"train": self.last >= 2, "valid": self.last == 1, "test": self.last == 0}[name]
        return np.flatnonzero(mask)

    def rated(self, *parts: str) -> np.ndarray:
        """Return whether a user has rated an item in these parts, bool [users, items]."""
        is_rated = np.zeros((len(self.users), len(self.items)), bool)
        for name in parts:
            rows = self.part(name)
            is_rated[self.user[rows], self.item[rows]] = True
        return is_rated

    def table(
        self, label: np.ndarray, user: np.ndarray, item: np.ndarray, before: np.ndarray
    ) -> pa.Table:
        """Return rows of a log."""
        users = self.users.iloc[user]
        items = self.items.iloc[item]
        is_present = before >= 0
        offsets = np.concatenate([[0], np.cumsum(is_present.sum(axis=1))]).astype(np.int32)
        named = self.items["item_id"].to_numpy()
        return pa.table(
            {
                "label": label.astype(np.int8),
                "user_id": users["user_id"].to_numpy(),
                "item_id": items["item_id"].to_numpy(),
                **{name: users[name].to_numpy() for name in ("age", "gender", "occupation")},
                "release_year": items["release_year"].to_numpy(),
                "class": pa.array(items["class"].str.split(" ").to_numpy(), pa.list_(pa.string())),
                "history": pa.ListArray.from_arrays(offsets, named[before[is_present]]),
            }
        )


def main(*, quick: bool) -> None:
    python = recbole_python()
    package = package_of(python)
    with tempfile.TemporaryDirectory() as folder:
        ratings = read(package)
        _write_logs(ratings, folder)
        _write_for_recbole(ratings, folder)
        ours: dict[str, Any] = {
            name: attempt(name, partial(_ours, recipe, folder)) for name, recipe in OURS.items()
        }
        for peer in PEERS[:1] if quick else PEERS:
            peer_metrics = attempt(
                f"RecBole {peer}", partial(run_peer, python, peer, folder, "top-k")
            )
            note(f"  RecBole {peer}: {peer_metrics}")
            for name, metrics in ours.items():
                emit(
                    "movielens-top-k",
                    peer=f"RecBole 1.2.1, {peer}",
                    workload=(
                        f"{len(ratings.user):,} ratings, last film of {len(ratings.users)} users, "
                        f"{name}"
                    ),
                    unit="ndcg_at_10",
                    value=metrics["ndcg_at_10"],
                    ratio=metrics["ndcg_at_10"] / peer_metrics["ndcg@10"],
                    repeats=1,
                    recall_at_10=round(metrics["recall_at_10"], 4),
                    peer_ndcg_at_10=peer_metrics["ndcg@10"],
                    peer_recall_at_10=peer_metrics["recall@10"],
                )


def read(package: str) -> Ratings:
    rated, users, items = tables_of(package)
    rated = rated.assign(timestamp=rated["timestamp"].astype(float))
    rated = rated.sort_values(["timestamp", "user_id", "item_id"], kind="stable")
    items = items.fillna({"release_year": "none", "class": "none"}).reset_index(drop=True)
    users = users.reset_index(drop=True)
    user = pd.Index(users["user_id"]).get_indexer(rated["user_id"])
    item = pd.Index(items["item_id"]).get_indexer(rated["item_id"])
    before = np.full((len(rated), HISTORY), -1)
    count = np.bincount(user, minlength=len(users))
    last = np.empty(len(rated), np.int64)
    for number in range(len(users)):
        rows = np.flatnonzero(user == number)
        last[rows] = np.arange(count[number])[::-1]
        for back in range(1, HISTORY + 1):
            before[rows[back:], back - 1] = item[rows[: len(rows) - back]]
    return Ratings(user, item, before, last, users, items)


def _write_logs(ratings: Ratings, folder: str) -> None:
    """Write `train` and `valid`, ratings with four unrated films each, and `test`, all films not
    rated before.
    """
    draw = np.random.default_rng(0)
    for name, rated_parts in (("train", ("train",)), ("valid", ("train", "valid"))):
        rows = ratings.part(name)
        rated = ratings.rated(*rated_parts)
        row_numbers = np.repeat(rows, 1 + NEGATIVES)
        item = draw.integers(0, len(ratings.items), len(row_numbers))
        while (is_rated := rated[ratings.user[row_numbers], item]).any():
            item[is_rated] = draw.integers(0, len(ratings.items), int(is_rated.sum()))
        positive = np.arange(len(row_numbers)) % (1 + NEGATIVES) == 0
        item[positive] = ratings.item[rows]
        order = (
            draw.permutation(len(row_numbers)) if name == "train" else np.arange(len(row_numbers))
        )
        row_numbers, item, positive = row_numbers[order], item[order], positive[order]
        _write(
            ratings.table(positive, ratings.user[row_numbers], item, ratings.before[row_numbers]),
            folder,
            name,
        )
    test = ratings.part("test")
    rated = ratings.rated("train", "valid")
    index, item = np.nonzero(~rated[ratings.user[test]])
    row_numbers = test[index]
    _write(
        ratings.table(
            item == ratings.item[row_numbers],
            ratings.user[row_numbers],
            item,
            ratings.before[row_numbers],
        ),
        folder,
        "test",
    )


def _write(table: pa.Table, folder: str, name: str) -> None:
    os.makedirs(os.path.join(folder, name))
    pq.write_table(table, os.path.join(folder, name, "log.parquet"), row_group_size=1 << 16)


def _write_for_recbole(ratings: Ratings, folder: str) -> None:
    os.makedirs(os.path.join(folder, "ml"))
    for name in ("train", "valid", "test"):
        rows = ratings.part(name)
        frame = pd.DataFrame(
            {
                "user_id:token": ratings.users["user_id"].to_numpy()[ratings.user[rows]],
                "item_id:token": ratings.items["item_id"].to_numpy()[ratings.item[rows]],
            }
        )
        frame.to_csv(os.path.join(folder, "ml", f"ml.{name}.inter"), sep="\t", index=False)


def _ours(recipe: Any, folder: str) -> dict[str, Any]:
    config = recipe(os.path.join(folder, "train"), load_schema(yaml.safe_dump(SCHEMA), "movielens"))
    config = config.replace(
        eval_data={"path": os.path.join(folder, "valid")},
        storage_path=os.path.join(folder, "runs"),
        name=recipe.__name__,
        scaling={"num_workers": 1},
        trackers={"prometheus": False, "tensorboard": False},
    )
    run = rayrec.train(config, console=Console(quiet=True)).folder
    metrics = rayrec.evaluate(
        run,
        os.path.join(folder, "test"),
        group="user_id",
        ranking_k=(10,),
        console=Console(quiet=True),
    )
    note(
        f"  rayrec, {recipe.__name__}: NDCG@10 {metrics['ndcg_at_10']:.4f}, recall@10 "
        f"{metrics['recall_at_10']:.4f}"
    )
    return metrics
