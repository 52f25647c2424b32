"""Benchmark of next-item models from events, beside RecTools: quality on MovieLens-100K and
published sets, and speed on generated sets as large as ML-1M and Beauty.

`--sets NAME ...` chooses among SETS; default: movielens and the two sizes. `--rectools PYTHON`
names the interpreter of an environment with RecTools 0.19 and pytorch-lightning (peers/
rectools_models.py); without it, rows have no peer. `--recbole PYTHON` names one with RecBole, whose
package ships MovieLens-100K. `--files FOLDER` has the files of published sets, named as in SETS.

MovieLens: one list a user, the last film tests, the one before it validates, seen films are left
out. Model (SASRec, eSASRec) and dropout of either system are chosen on the validation films, by one
seed, and the choice is tested with three. In rayrec the dropout is also that of items. Both have
the same width, blocks, heads, length, batch, Adam, a softmax over all films, and the epoch with the
best NDCG@10 of the validation films.
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
from rayrec.workloads.base import TrainConfig

LENGTH: Final = 50
SEEDS: Final = 3
WIDTH: Final = 64
BATCH: Final = 32
"""Lists of a step of either system on MovieLens, whose users are few."""
MODELS: Final = {"sasrec": "SASRec", "esasrec": "eSASRec"}
"""Names of RecTools' models by rayrec's."""
DROPOUTS: Final = (0.1, 0.3, 0.5)
EPOCHS: Final = 300
PATIENCE: Final = 20


@dataclass(frozen=True)
class Published:
    """Published set, its protocol, and its figures."""

    path: str
    """File, or pattern of files, in the folder of `--files`."""
    schema: Mapping[str, Any]
    settings: Mapping[str, Any]
    """Changes of the recipe."""
    recall: float
    """Recall@k of the source."""
    ndcg: float
    """NDCG@k of the source."""
    source: str
    k: int = 10
    leaves_out_cold: bool = False
    """Whether rows are left out whose item no training row has."""


def _events(**more: Any) -> dict[str, Any]:
    """Return a schema of users and items in the order of the file."""
    columns = {"user": "user", "item": "item", "time": None, "max_length": LENGTH}
    return {"label": None, "sequence": columns, "split": {"kind": "last_items"}, **more}


def _settings(
    model: Mapping[str, Any],
    workload: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the settings of a published set: a constant learning rate, and the best epoch."""
    constant = {"schedule": {"decay_fraction": 0.0}}
    return {
        "batch_size": 128,
        "epochs": 200,
        "early_stopping": {"patience": 50},
        "workload": {**constant, **(workload or {}), "model": model},
        **more,
    }


def _both_optimizers(**settings: Any) -> dict[str, Any]:
    """Return settings of the workload for the optimizers of tables and network."""
    return {f"{kind}_optimizer": settings for kind in ("sparse", "dense")}


# S3-Rec's sets as RecTools 0.13 reproduces them, with negatives that all targets share
_S3: Final = _settings(
    {
        "class": "sasrec",
        "embedding_dim": 256,
        "blocks": 1,
        "attention_heads": 1,
        "dropout": 0.2,
        "item_dropout": 0.2,
        "loss": "sampled",
        "best_metric": "recall",
    },
    {"table_start": {"kind": "xavier"}, **_both_optimizers(betas=(0.9, 0.98))},
)
_s3_set = partial(
    Published,
    schema=_events(format="user_items"),
    settings=_S3,
    source="RecTools, S3 sets",
    leaves_out_cold=True,
)


def _bert4rec(max_length: int, **loss: Any) -> dict[str, Any]:
    """Return the schema and the settings of SASRec on BERT4Rec's files."""
    events = _events(format="csv", delimiter=" ", header=["user", "item"])
    model = {
        "class": "sasrec",
        "embedding_dim": 64,
        "blocks": 2,
        "attention_heads": 1,
        "dropout": 0.1,
        "weight_std": 0.02,
        **loss,
    }
    return {
        "schema": {**events, "sequence": {**events["sequence"], "max_length": max_length}},
        "settings": _settings(model, eval_rows=10_000),
        "source": "SASRec on BERT4Rec's files",
    }


# Pairs without an order: each user's items, up to 1,000, predict one another. The test set is read
# once, and the epoch chosen by 5 % of the training pairs.
_gowalla = partial(
    Published,
    "Gowalla_m1/t*.txt",
    schema={
        "label": None,
        "format": "user_items",
        "sequence": {"user": "user", "item": "item", "max_length": 1000, "user_input": True},
        "split": {"kind": "files", "validation": "5%"},
    },
    source="BARS, Gowalla_m1",
    k=20,
)
_PAIRS: Final = {"embedding_dim": 64, "k": 20, "best_metric": "recall"}
_FEW_EPOCHS: Final = {
    "batch_size": 32,
    "epochs": 60,
    "plateau": {"patience": 2},
    "early_stopping": {"patience": 6},
}
SETS: Final = {
    "beauty": _s3_set("Beauty.txt", recall=0.0928, ndcg=0.0531),
    "sports": _s3_set("Sports_and_Outdoors.txt", recall=0.0569, ndcg=0.0323),
    "toys": _s3_set("Toys_and_Games.txt", recall=0.0970, ndcg=0.0580),
    "bert4rec-beauty": Published("beauty.txt", recall=0.0533, ndcg=0.0327, **_bert4rec(50)),
    "bert4rec-ml-1m": Published("ml-1m.txt", recall=0.3152, ndcg=0.1821, **_bert4rec(200)),
    "bert4rec-ml-1m-sampled": Published(
        "ml-1m.txt",
        recall=0.3159,
        ndcg=0.1857,
        **_bert4rec(200, loss="sampled", negatives=3000),
    ),
    "gowalla-youtube-dnn": _gowalla(
        settings=_settings(
            {"class": "youtube_dnn", **_PAIRS},
            {"sparse_optimizer": {"weight_decay": 1e-6}, "table_start": {"std": 1e-4}},
            **_FEW_EPOCHS,
        ),
        recall=0.1754,
        ndcg=0.1473,
    ),
    "gowalla-simplex": _gowalla(
        settings=_settings(
            {
                "class": "simplex",
                "user_weight": 0.8,
                "pooling": "attention",
                "ccl_margin": 0.9,
                "ccl_weight": 250.0,
                **_PAIRS,
            },
            {"sparse_optimizer": {"weight_decay": 1e-7}, "table_start": {"std": 1e-4}},
            **_FEW_EPOCHS,
        ),
        recall=0.1872,
        ndcg=0.1557,
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
                "item_dropout": dropout,
            },
            "schedule": {"decay_fraction": 0.0},
        },
        epochs=epochs,
        early_stopping={"patience": PATIENCE},
        batch_size=BATCH,
        min_steps_per_epoch=1,  # Otherwise batches would be smaller than the peer's
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


def _trained(config: Any, text: str, *, k: int = 10) -> dict[str, float]:
    quiet = Console(quiet=True)
    run = rayrec.train(config, console=quiet)
    test = rayrec.evaluate(run.folder, console=quiet)
    metrics = {
        "validation": run.summary["validation"][f"ndcg_at_{k}"],
        "ndcg": test[f"ndcg_at_{k}"],
        "recall": test[f"recall_at_{k}"],
        "known": 1 - test["unknown_targets"] / test["targets"],
    }
    note(f"  {text}: NDCG@{k} {metrics['ndcg']:.4f}, validation {metrics['validation']:.4f}")
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
        "batch_size": BATCH,
    }
    settings = {"model": MODELS[model], "seed": seed, "epochs": epochs, "patience": PATIENCE}
    metrics: dict[str, float] = run_rectools("quality", folder, settings, arguments)
    note(
        f"  RecTools, {MODELS[model]}, dropout {dropout}, seed {seed}: NDCG@10 "
        f"{metrics['ndcg']:.4f}, validation {metrics['validation']:.4f}"
    )
    return metrics


def published_config(name: str, files: str, folder: str, *, seed: int) -> TrainConfig:
    """Return the run of a published set, whose files are in folder `files`."""
    published = SETS[name]
    schema = load_schema(json.dumps(published.schema), name)
    path = os.path.join(files, published.path)
    plain = _plain(folder, f"{name}-{seed}", seed)
    return next_item(path, schema).replace(**{**published.settings, **plain})


def _published(name: str, published: Published, folder: str, *, quick: bool) -> None:
    files = _value("--files")
    if files is None:
        raise InputError(f"--files: FOLDER with {published.path} is needed for --sets {name}")
    runs = []
    for seed in range(1 if quick else SEEDS):
        config = published_config(name, files, folder, seed=seed)
        if quick:
            config = config.replace(epochs=1)
        run = partial(_trained, config, f"{name}, {seed}", k=published.k)
        runs.append(attempt(f"{name}, seed {seed}", run))
    # Sums and quotients, because a run may have failed
    factors = [each["known"] if published.leaves_out_cold else 1.0 for each in runs]
    values = [each["ndcg"] / factor for each, factor in zip(runs, factors, strict=True)]
    recalls = [each["recall"] / factor for each, factor in zip(runs, factors, strict=True)]
    value = sum(values) / len(runs)
    k = published.k
    emit(
        "sequences",
        peer=published.source,
        workload=name,
        unit=f"ndcg_at_{k}",
        value=value,
        ratio=value / published.ndcg,
        repeats=len(runs),
        **{
            f"least_ndcg_at_{k}": round(min(values), 4),
            f"recall_at_{k}": round(sum(recalls) / len(runs), 4),
            f"peer_ndcg_at_{k}": published.ndcg,
            f"peer_recall_at_{k}": published.recall,
        },
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
