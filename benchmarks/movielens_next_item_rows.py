"""Benchmark of next-item prediction on MovieLens-100K: SASRec and RecBole's SASRec.

Each user's last film is the test, and the film before it validates. All films are ranked, given the
LENGTH films before.

`--recbole PYTHON` as in `rayrec benchmark movielens`. Both have the same width, blocks, heads,
dropout and Adam, a softmax over all films, and the dropout of the grid with the best validation.
RecBole has a constant learning rate, stops early after 5 epochs without a better NDCG@10, and
trains on each prefix and its next film, with one seed. rayrec has the recipe's schedule and trains
on windows of LENGTH + 1 films that overlap by half, with a target at each position; its metrics are
means of SEEDS. The schedule was chosen on this split, and RecBole's was not tuned.
"""

import os
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from movielens_benchmark import package_of, recbole_python, run_peer
from movielens_top_k_rows import Ratings, read
from rows import attempt, emit, note

import rayrec
from rayrec.observe.console import Console
from rayrec.recipes.interactions import PLACEHOLDER_OF_LISTS, next_item
from rayrec.schema import Feature

LENGTH: Final = 20
DROPOUTS: Final = (0.5, 0.2)
SEEDS: Final = (0, 1, 2)
MAX_EPOCHS_OF_PEER: Final = 100
SCHEMA: Final = PLACEHOLDER_OF_LISTS.replace(
    features=(Feature(name="item", max_length=LENGTH + 1),)
)


def main(*, quick: bool) -> None:
    python = recbole_python()
    with tempfile.TemporaryDirectory() as folder:
        ratings = read(package_of(python))
        write_logs(ratings, folder)
        _write_for_recbole(ratings, folder)
        epochs, dropouts, seeds = (1, DROPOUTS[:1], SEEDS[:1]) if quick else (None, DROPOUTS, SEEDS)
        ours = [
            attempt(
                f"next_item, {dropout}",
                partial(_mean_of_seeds, folder, dropout, seeds=seeds, epochs=epochs),
            )
            for dropout in dropouts
        ]
        tasks = [f"next-item {dropout} {epochs or MAX_EPOCHS_OF_PEER}" for dropout in dropouts]
        peers = [
            attempt(f"RecBole {task}", partial(run_peer, python, "SASRec", folder, task))
            for task in tasks
        ]
        for dropout, metrics in zip(dropouts, peers, strict=True):
            note(f"  RecBole, SASRec, dropout {dropout}: {metrics}")
        best, peer = (
            max(candidates, key=lambda metrics: metrics["validation"])
            for candidates in (ours, peers)
        )
        emit(
            "movielens-next-item",
            peer="RecBole 1.2.1, SASRec",
            workload=(
                f"{len(ratings.user):,} ratings, last film of {len(ratings.users)} users, lists "
                f"of {LENGTH}"
            ),
            unit="ndcg_at_10",
            value=best["ndcg_at_10"],
            ratio=best["ndcg_at_10"] / peer["ndcg@10"],
            repeats=len(seeds),
            dropout=best["dropout"],
            least_ndcg_at_10=round(best["least_ndcg_at_10"], 4),
            recall_at_10=round(best["recall_at_10"], 4),
            peer_ndcg_at_10=peer["ndcg@10"],
            peer_recall_at_10=peer["recall@10"],
        )


def write_logs(ratings: Ratings, folder: str) -> None:
    """Write `train`, windows of all films except each user's last two, and `valid` and `test`, the
    films up to the last but one and all.
    """
    order = np.argsort(ratings.user, kind="stable")
    ends = np.cumsum(np.bincount(ratings.user, minlength=len(ratings.users)))
    films = np.split(ratings.items["item_id"].to_numpy()[ratings.item[order]], ends[:-1])
    window = LENGTH + 1
    stride = LENGTH // 2
    windows = []
    for user_films in films:
        history = user_films[:-2]
        stops = range(len(history), min(window, len(history)) - 1, -stride)
        windows += [history[max(stop - window, 0) : stop] for stop in stops]
        if stops and stops[-1] > window:
            windows.append(history[:window])
    shuffled = np.random.default_rng(0).permutation(len(windows))
    parts = {
        "train": [windows[number] for number in shuffled],
        "valid": [user_films[:-1][-window:] for user_films in films],
        "test": [user_films[-window:] for user_films in films],
    }
    for name, lists in parts.items():
        os.makedirs(os.path.join(folder, name))
        path = os.path.join(folder, name, "log.parquet")
        pq.write_table(
            pa.table({"item": pa.array([list(each) for each in lists])}),
            path,
            row_group_size=1 << 12,
        )


def _write_for_recbole(ratings: Ratings, folder: str) -> None:
    os.makedirs(os.path.join(folder, "ml"))
    frame = pd.DataFrame(
        {
            "user_id:token": ratings.users["user_id"].to_numpy()[ratings.user],
            "item_id:token": ratings.items["item_id"].to_numpy()[ratings.item],
            "timestamp:float": np.arange(len(ratings.user)),
        }
    )
    frame.to_csv(os.path.join(folder, "ml", "ml.inter"), sep="\t", index=False)


def _mean_of_seeds(
    folder: str, dropout: float, *, seeds: Sequence[int], epochs: int | None
) -> dict[str, Any]:
    runs = [_ours(folder, dropout, seed=seed, epochs=epochs) for seed in seeds]
    means = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
    return {**means, "least_ndcg_at_10": min(run["ndcg_at_10"] for run in runs), "dropout": dropout}


def _ours(folder: str, dropout: float, *, seed: int, epochs: int | None) -> dict[str, float]:
    recipe = next_item(os.path.join(folder, "train"), SCHEMA)
    config = recipe.replace(
        workload={"model": {"dropout": dropout}},
        eval_data={"path": os.path.join(folder, "valid")},
        storage_path=os.path.join(folder, "runs"),
        name=f"dropout_{dropout}_seed_{seed}",
        seed=seed,
        scaling={"num_workers": 1},
        trackers={"prometheus": False, "tensorboard": False},
        epochs=epochs or recipe.epochs,
    )
    run = rayrec.train(config, console=Console(quiet=True))
    metrics = rayrec.evaluate(run.folder, os.path.join(folder, "test"), console=Console(quiet=True))
    names = ("ndcg_at_10", "recall_at_10")
    note(
        f"  rayrec, next_item, dropout {dropout}, seed {seed}: "
        + ", ".join(f"{name} {metrics[name]:.4f}" for name in names)
    )
    return {**{name: metrics[name] for name in names}, "validation": run.metrics["ndcg_at_10"]}
