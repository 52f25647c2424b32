"""Benchmark of next-item models from events, beside RecTools: quality on MovieLens-100K and
published sets, and speed on generated sets as large as ML-1M and Beauty.

`--sets NAME ...` chooses among SETS; default: movielens and the two sizes. `--rectools PYTHON`
names the interpreter of an environment with RecTools 0.19 and pytorch-lightning (peers/
rectools_models.py); without it, rows have no peer. `--recbole PYTHON` names one with RecBole, whose
package ships MovieLens-100K. `--files FOLDER` has the files of published sets, named as in SETS.

MovieLens: one list a user, the last film tests, the one before it validates, seen films are left
out. Model (SASRec, eSASRec) and dropout of either system are chosen on the validation films, by one
seed, and the choice is tested with three. Both have the same width, blocks, heads, length, batch,
Adam, a softmax over all films, and the epoch with the best NDCG@10 of the validation films.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import pandas as pd
from movielens_benchmark import package_of, recbole_python, tables_of
from rows import attempt, emit, note
from subprocesses import FOLDER, run_command

import rayrec
from rayrec.config import InputError
from rayrec.observe.console import Console
from rayrec.recipes.interactions import next_item
from rayrec.schema import Schema, load_schema

LENGTH: Final = 50
SEEDS: Final = 3
WIDTH: Final = 64
MODELS: Final = {"sasrec": "SASRec", "esasrec": "eSASRec"}
"""Names of RecTools' models by rayrec's."""
DROPOUTS: Final = (0.1, 0.3, 0.5)
EPOCHS: Final = 300
PATIENCE: Final = 20


@dataclass(frozen=True)
class Published:
    """Published set, its protocol, and its figure."""

    file: str
    """File in the folder of `--files`."""
    schema: Mapping[str, Any]
    settings: Mapping[str, Any]
    """Changes of the recipe."""
    figure: float
    """NDCG@10 of the paper."""
    source: str
    leaves_out_cold: bool = False
    """Whether rows are left out whose item no training row has."""


def _events(**more: Any) -> dict[str, Any]:
    """Return a schema of users and items in the order of the file."""
    columns = {"user": "user", "item": "item", "time": None, "max_length": LENGTH}
    return {"label": None, "sequence": columns, "split": {"kind": "last_items"}, **more}


# RecTools' reproduction of S3-Rec's sets
_S3_SETTINGS: Final = {
    "batch_size": 128,
    "epochs": 200,
    "early_stopping": {"patience": 50},
    "workload": {
        "model": {
            "class": "sasrec",
            "embedding_dim": 256,
            "blocks": 1,
            "attention_heads": 1,
            "dropout": 0.2,
            "loss": "sampled",
        }
    },
}
_BERT_SETTINGS: Final = {
    "batch_size": 128,
    "epochs": 200,
    "early_stopping": {"patience": 50},
    "workload": {
        "model": {
            "class": "sasrec",
            "embedding_dim": 64,
            "blocks": 2,
            "attention_heads": 1,
            "dropout": 0.1,
        }
    },
}
SETS: Final = {
    "beauty": Published(
        "Beauty.txt", _events(), _S3_SETTINGS, 0.0531, "RecTools, S3 sets", leaves_out_cold=True
    ),
    "sports": Published(
        "Sports_and_Outdoors.txt",
        _events(),
        _S3_SETTINGS,
        0.0323,
        "RecTools, S3 sets",
        leaves_out_cold=True,
    ),
    "toys": Published(
        "Toys_and_Games.txt",
        _events(),
        _S3_SETTINGS,
        0.0580,
        "RecTools, S3 sets",
        leaves_out_cold=True,
    ),
    "bert4rec-beauty": Published(
        "beauty.txt",
        _events(delimiter=" ", header=["user", "item"], list_delimiter="|"),
        _BERT_SETTINGS,
        0.0327,
        "BERT4Rec's files",
    ),
}


@dataclass(frozen=True)
class Size:
    """Size of a generated set, whose speed is measured."""

    users: int
    items: int
    mean_length: float
    batch: int
    ours: Mapping[str, Any]
    """Settings of rayrec's model."""
    peer: Mapping[str, Any]
    """Arguments of RecTools' model."""
    text: str


SIZES: Final = {
    "ml-1m-size": Size(
        6040,
        3416,
        165.6,
        32,
        {"embedding_dim": WIDTH, "blocks": 2, "attention_heads": 1},
        {"n_factors": WIDTH, "n_blocks": 2, "n_heads": 1, "loss": "softmax"},
        "6,040 users, 3,416 items, width 64, 2 blocks, length 50, batch 32, softmax over all",
    ),
    "beauty-size": Size(
        22363,
        12101,
        8.9,
        128,
        {
            "embedding_dim": 256,
            "blocks": 1,
            "attention_heads": 1,
            "loss": "sampled",
            "negatives": 2048,
        },
        {"n_factors": 256, "n_blocks": 1, "n_heads": 1, "loss": "softmax"},
        "22,363 users, 12,101 items, width 256, 1 block, length 50, batch 128, 2,048 negatives",
    ),
}


def main(*, quick: bool) -> None:
    chosen = _values("--sets") or ["movielens", *SIZES]
    names = ("movielens", *SIZES, *SETS)
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise InputError(f"--sets: must be among {', '.join(names)}, got {unknown[0]}")
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            if name == "movielens":
                _movielens(folder, quick=quick)
            elif name in SIZES:
                _speed(SIZES[name], folder, quick=quick)
            else:
                _published(name, SETS[name], folder, quick=quick)


# -- Quality
@dataclass(frozen=True)
class Choice:
    """Model and settings that are chosen on the validation items."""

    model: str
    dropout: float
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)


def _movielens(folder: str, *, quick: bool) -> None:
    events = tables_of(package_of(recbole_python()))[0]
    events = events.rename(columns={"user_id": "user", "item_id": "item", "timestamp": "time"})
    events = events[["user", "item", "time"]]
    path = os.path.join(folder, "events.csv")
    events.to_csv(path, index=False)
    schema = load_schema(
        json.dumps({**_events(), "sequence": {**_events()["sequence"], "time": "time"}}),
        "sequences",
    )
    write_parts(events, folder)
    models = list(MODELS)[:1] if quick else list(MODELS)
    dropouts = DROPOUTS[:1] if quick else DROPOUTS
    ours = partial(_ours, path, schema, folder, epochs=2 if quick else EPOCHS)
    peer = partial(_peer, folder, epochs=2 if quick else EPOCHS)
    results = {}
    python = _value("--rectools")
    for system, run in {"rayrec": ours, "RecTools": peer}.items():
        if system == "RecTools" and python is None:
            continue
        tried = [
            Choice(model, dropout, run(model, dropout, seed=0))
            for model, dropout in itertools.product(models, dropouts)
        ]
        best = max(tried, key=lambda choice: choice.metrics["validation"])
        seeds = range(1, 1 if quick else SEEDS)
        runs = [best.metrics, *(run(best.model, best.dropout, seed=seed) for seed in seeds)]
        results[system] = (best, runs)
        note(f"  {system}: {best.model}, dropout {best.dropout}, of {len(tried)} settings")
    best, runs = results["rayrec"]
    value = statistics.mean(each["ndcg"] for each in runs)
    figures = {"recall_at_10": round(statistics.mean(each["recall"] for each in runs), 4)}
    ratio = None
    peer_name = None
    if "RecTools" in results:
        peer_best, peer_runs = results["RecTools"]
        peer_name = f"RecTools 0.19, {MODELS[peer_best.model]}"
        peer_value = statistics.mean(each["ndcg"] for each in peer_runs)
        ratio = value / peer_value
        figures |= {
            "peer_ndcg_at_10": round(peer_value, 4),
            "peer_recall_at_10": round(statistics.mean(each["recall"] for each in peer_runs), 4),
            "peer_dropout": peer_best.dropout,
        }
    emit(
        "sequences",
        peer=peer_name,
        workload=f"MovieLens-100K, {len(events):,} events, lists of {LENGTH}, last item",
        unit="ndcg_at_10",
        value=value,
        ratio=ratio,
        repeats=len(runs),
        model=best.model,
        dropout=best.dropout,
        least_ndcg_at_10=round(min(each["ndcg"] for each in runs), 4),
        **figures,
    )


def write_parts(events: pd.DataFrame, folder: str) -> None:
    """Write `train.csv`, `valid.csv` and `test.csv`, lines of user, item and position in the
    user's list: her last item tests, and the one before it validates.
    """
    time = events["time"].astype(float)
    ordered = events.assign(time=time).sort_values(["user", "time"], kind="stable")
    position = ordered.groupby("user").cumcount()
    left = ordered.groupby("user")["item"].transform("size") - position
    parts = {"test": left == 1, "valid": left == 2, "train": left > 2}
    for name, mask in parts.items():
        table = ordered.loc[mask, ["user", "item"]].assign(position=position[mask])
        table.to_csv(os.path.join(folder, f"{name}.csv"), index=False, header=False)


def _ours(
    path: str,
    schema: Schema,
    folder: str,
    model: str,
    dropout: float,
    *,
    seed: int,
    epochs: int,
) -> dict[str, float]:
    config = next_item(path, schema).replace(
        workload={
            "model": {
                "class": model,
                "embedding_dim": WIDTH,
                "blocks": 2,
                "attention_heads": 2,
                "dropout": dropout,
            },
            "schedule": {"decay_fraction": 0.0},
        },
        epochs=epochs,
        early_stopping={"patience": PATIENCE},
        batch_size=128,
        **_plain(folder, f"{model}-{dropout}-{seed}", seed),
    )
    return _trained(config, f"rayrec, {model}, dropout {dropout}, seed {seed}")


def _plain(folder: str, name: str, seed: int) -> dict[str, Any]:
    """Return the changes of a run in this process."""
    return {
        "storage_path": os.path.join(folder, "runs"),
        "name": name,
        "seed": seed,
        "scaling": {"num_workers": 1},
        "trackers": {"prometheus": False, "tensorboard": False},
    }


def _trained(config: Any, text: str) -> dict[str, float]:
    quiet = Console(quiet=True)
    run = rayrec.train(config, console=quiet)
    test = rayrec.evaluate(run.folder, console=quiet)
    metrics = {
        "validation": run.metrics["ndcg_at_10"],
        "ndcg": test["ndcg_at_10"],
        "recall": test["recall_at_10"],
        "known": 1 - test["unknown_targets"] / test["targets"],
    }
    note(f"  {text}: NDCG@10 {metrics['ndcg']:.4f}, validation {metrics['validation']:.4f}")
    return metrics


def _peer(folder: str, model: str, dropout: float, *, seed: int, epochs: int) -> dict[str, float]:
    arguments = {
        "n_factors": WIDTH,
        "n_blocks": 2,
        "n_heads": 2,
        "session_max_len": LENGTH,
        "dropout_rate": dropout,
        "loss": "softmax",
        "lr": 0.001,
        "batch_size": 128,
    }
    settings = {"model": MODELS[model], "seed": seed, "epochs": epochs, "patience": PATIENCE}
    metrics: dict[str, float] = run_rectools("quality", folder, settings, arguments)
    note(
        f"  RecTools, {MODELS[model]}, dropout {dropout}, seed {seed}: NDCG@10 "
        f"{metrics['ndcg']:.4f}, validation {metrics['validation']:.4f}"
    )
    return metrics


def _published(name: str, published: Published, folder: str, *, quick: bool) -> None:
    files = _value("--files")
    if files is None:
        raise InputError(f"--files: FOLDER with {published.file} is needed for --sets {name}")
    schema = load_schema(json.dumps(published.schema), "sequences")
    runs = []
    for seed in range(1 if quick else SEEDS):
        config = next_item(os.path.join(files, published.file), schema).replace(
            **published.settings, **_plain(folder, f"{name}-{seed}", seed)
        )
        if quick:
            config = config.replace(epochs=1)
        runs.append(attempt(f"{name}, seed {seed}", partial(_trained, config, f"{name}, {seed}")))
    counted = statistics.mean(each["known"] for each in runs) if published.leaves_out_cold else 1.0
    value = statistics.mean(each["ndcg"] for each in runs) / counted
    emit(
        "sequences",
        peer=published.source,
        workload=name,
        unit="ndcg_at_10",
        value=value,
        ratio=value / published.figure,
        repeats=len(runs),
        recall_at_10=round(statistics.mean(each["recall"] for each in runs) / counted, 4),
        peer_ndcg_at_10=published.figure,
    )


# -- Speed
def _speed(size: Size, folder: str, *, quick: bool) -> None:
    users = size.users // (20 if quick else 1)
    events = generate(users, size.items, size.mean_length)
    path = os.path.join(folder, "events.csv")
    events[["user", "item", "time"]].to_csv(path, index=False)
    write_parts(events, folder)
    columns = {**_events()["sequence"], "time": "time"}
    schema = load_schema(json.dumps({**_events(), "sequence": columns}), "sequences")
    lengths = np.minimum(events.groupby("user").size().to_numpy() - 2, LENGTH + 1) - 1
    positions = int(lengths.clip(min=0).sum())
    config = next_item(path, schema).replace(
        workload={"model": {"class": "sasrec", "dropout": 0.2, **size.ours}},
        batch_size=size.batch,
        epochs=3,
        evaluations_per_epoch=1,
        early_stopping={"patience": 0},
        **_plain(folder, "speed", 0),
    )
    run = rayrec.train(config, console=Console(quiet=True))
    seconds = users / run.summary["rows_per_s"]
    arguments = {
        **size.peer,
        "session_max_len": LENGTH,
        "dropout_rate": 0.2,
        "lr": 0.001,
        "batch_size": size.batch,
    }
    ratio = None
    figures = {"seconds_per_epoch": round(seconds, 2)}
    if _value("--rectools") is not None:
        settings = {"model": "SASRec", "seed": 0, "epochs": 1, "patience": 1}
        peer = run_rectools("speed", folder, settings, arguments)
        ratio = peer["seconds"] / seconds
        figures["peer_seconds_per_epoch"] = round(peer["seconds"], 2)
    emit(
        "sequences",
        peer=None if ratio is None else "RecTools 0.19, SASRec",
        workload=size.text,
        unit="positions_per_s",
        value=positions / seconds,
        ratio=ratio,
        repeats=1,
        **figures,
    )


def generate(users: int, items: int, mean_length: float) -> pd.DataFrame:
    """Return events of users, with lengths from 5 on and items by popularity, in order of time."""
    rng = np.random.default_rng(0)
    lengths = 5 + rng.geometric(1 / max(mean_length - 4, 1), users) - 1
    user = np.repeat(np.arange(users), lengths)
    popularity = 1 / np.arange(1, items + 1) ** 0.8
    item = rng.choice(items, len(user), p=popularity / popularity.sum())
    return pd.DataFrame({"user": user, "item": item, "time": np.arange(len(user))})


def run_rectools(
    task: str, folder: str, settings: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Any:
    """Run a model of RecTools on the CSV files of a folder, and return what it prints."""
    script = str(FOLDER / "peers" / "rectools_models.py")
    stated = {**settings, "threads": os.cpu_count(), "arguments": dict(arguments)}
    python = _value("--rectools")
    assert python is not None
    return run_command("RecTools", [python, script, task, folder, json.dumps(stated)])


def _value(flag: str) -> str | None:
    values = _values(flag)
    return values[0] if values else None


def _values(flag: str) -> Sequence[str]:
    """Return the arguments behind a flag, up to the next one."""
    arguments = sys.argv[1:]
    if flag not in arguments:
        return []
    rest = arguments[arguments.index(flag) + 1 :]
    return list(itertools.takewhile(lambda value: not value.startswith("--"), rest))
