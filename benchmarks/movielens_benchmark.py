"""Benchmark of click prediction on MovieLens-100K: the log alone, with the tables of users and
films, and RecBole's models with the same columns.

All have the same random split (80, 10, 10 %). A rating of at least 4 counts as a click. The tables
are side tables of the schema, and their columns are computed by its formulas; RecBole gets them
joined. Every training has three seeds, but of RecBole's models only the two with the best AUROC on
the validation rows; the others have one.

`--recbole PYTHON` names the interpreter of an environment with RecBole, whose package ships the
data: `pip install recbole==1.2.1 pandas==2.1.4 numpy==1.26.4 scipy==1.11.4 scikit-learn==1.4.2`.
RecBole's models have their default settings, embeddings of 16, and at most 30 epochs with early
stopping after 5.

`--work FOLDER` keeps the metrics of each training, and a later command with this folder continues
after the last one.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import yaml
from rows import Failed, attempt, emit, note
from subprocesses import check_ended

import rayrec
from rayrec.config import InputError
from rayrec.observe.console import Console
from rayrec.recipes.clicks import clicks
from rayrec.schema import Schema, load_schema

PEERS: Final = ("FM", "DeepFM", "DCNV2", "AutoInt", "xDeepFM")
SEEDS: Final = 3
BEST: Final = 2
"""RecBole's models that are trained with all seeds."""
COLUMNS: Final = (
    "user_id",
    "item_id",
    "age",
    "gender",
    "occupation",
    "zip_code",
    "release_year",
    "class",
)
SCHEMA: Final = Schema(
    label="label", dense=(), sparse=COLUMNS, lists=("class",), tokens="any", delimiter=","
)
"""Columns of the joined log."""
FEATURES: Final = {
    "age": "number(lookup(users, user_id, age))",
    "gender": "lookup(users, user_id, gender)",
    "occupation": "lookup(users, user_id, occupation)",
    "zip_code": "lookup(users, user_id, zip_code)",
    "release_year": "number(lookup(items, item_id, release_year))",
    "genres": "split(lookup(items, item_id, `class`), '|')",
}
"""Formulas of the columns of both tables: the plain columns, as RecBole has them."""
OURS: Final[dict[str, dict[str, Any]]] = {
    "defaults": {},
    "6 epochs, 3 cross layers": {"epochs": 6, "workload": {"model": {"cross_layers": 3}}},
}
"""Changes of the recipe: none, and those chosen on the validation rows, among 28 settings with the
tables and 3 of the log alone. RecBole's models are not tuned.
"""

Metrics = dict[str, float]


def main(*, quick: bool) -> None:
    python = recbole_python()
    package = package_of(python)
    with tempfile.TemporaryDirectory() as scratch:
        folder = _work() or scratch
        data = ratings(package)
        write_tables(package, folder)
        _for_recbole(data, folder)
        seeds = 1 if quick else SEEDS
        ours = {
            (name, tables): _trained(folder, name, tables=tables, seeds=seeds)
            for name in (list(OURS)[:1] if quick else OURS)
            for tables in (False, True)
        }
        peers = _peers(python, folder, PEERS[:1] if quick else PEERS, seeds)
        for name in dict.fromkeys(name for name, _ in ours):
            alone = ours[name, False]
            joined = ours[name, True]
            _emit(f"{len(data):,} ratings, {name}", joined, "the log alone", alone)
            for peer, metrics in peers.items():
                _emit(f"{len(data):,} ratings, {name}", joined, f"RecBole 1.2.1, {peer}", metrics)


def _emit(workload: str, ours: Any, peer: str, other: Any) -> None:
    """Print a row of the log with both tables against a peer, by the means over the seeds."""
    auroc = _mean(ours, "auroc")
    peer_auroc = _mean(other, "auroc")
    emit(
        "movielens",
        peer=peer,
        workload=workload,
        unit="auroc",
        value=auroc,
        ratio=(auroc - 0.5) / (peer_auroc - 0.5),
        repeats=len(list(ours)),
        peer_repeats=len(list(other)),
        logloss=round(_mean(ours, "logloss"), 4),
        least_auroc=round(_least(ours), 4),
        validation_auroc=round(_mean(ours, "validation"), 4),
        peer_auroc=round(peer_auroc, 4),
        peer_logloss=round(_mean(other, "logloss"), 4),
        peer_validation_auroc=round(_mean(other, "validation"), 4),
    )


def _mean(results: Any, field: str) -> Any:
    """Return the mean of a metric over the seeds, or the failure."""
    if isinstance(results, Failed):
        return results
    return statistics.mean(metrics[field] for metrics in results)


def _least(results: Any) -> Any:
    if isinstance(results, Failed):
        return results
    return min(metrics["auroc"] for metrics in results)


def ratings(package: str) -> pd.DataFrame:
    """Return the ratings joined with user and film features, in random order."""
    rated, users, films = tables_of(package)
    table = rated.merge(users, on="user_id").merge(
        films[["item_id", "release_year", "class"]], on="item_id"
    )
    table = table.fillna({"release_year": "none", "class": "none"})
    table["label"] = (table["rating"].astype(float) >= 4).astype(int)
    return table[["label", *COLUMNS]].iloc[_order(table)].reset_index(drop=True)


def _order(table: pd.DataFrame) -> Any:
    return np.random.default_rng(0).permutation(len(table))


def csv_lines(package: str) -> tuple[list[bytes], list[bytes]]:
    """Return the header and the rows of `ratings` as CSV in SCHEMA."""
    data = ratings(package)
    text = data.assign(**{"class": data["class"].str.replace(" ", "|")}).to_csv(index=False)
    head, *rows = text.encode().splitlines(keepends=True)
    return [head], rows


def write_tables(package: str, folder: str) -> None:
    """Write log/ratings.csv in the order of `ratings`, users.csv and items.csv."""
    rated, users, films = tables_of(package)
    os.makedirs(os.path.join(folder, "log"), exist_ok=True)
    ordered = rated.iloc[_order(rated)]
    ordered.to_csv(os.path.join(folder, "log", "ratings.csv"), index=False)
    users.to_csv(os.path.join(folder, "users.csv"), index=False)
    # A few years are words
    year = pd.to_numeric(films["release_year"], errors="coerce").astype("Int64")
    genres = films["class"].str.replace(" ", "|")
    films = films.assign(**{"release_year": year, "class": genres})
    films.to_csv(os.path.join(folder, "items.csv"), index=False)


def schema(folder: str, *, tables: bool) -> Schema:
    """Return the schema of log/ratings.csv: users and films only, or with the columns of both
    tables.
    """
    columns: dict[str, Any] = {
        "label": {"name": "rating", "at_least": 4},
        "delimiter": ",",
        "sparse": ["user_id", "item_id"],
    }
    if tables:
        columns["tables"] = {
            "users": {"path": os.path.join(folder, "users.csv"), "key": "user_id"},
            "items": {"path": os.path.join(folder, "items.csv"), "key": "item_id"},
        }
        columns["features"] = [
            {"name": name, "from": formula} for name, formula in FEATURES.items()
        ]
    return load_schema(yaml.safe_dump(columns), "movielens")


def _for_recbole(data: pd.DataFrame, folder: str) -> None:
    os.makedirs(os.path.join(folder, "ml"), exist_ok=True)
    types = {"label": "float", "class": "token_seq"}
    named = data.rename(
        columns={name: f"{name}:{types.get(name, 'token')}" for name in data.columns}
    )
    ends = [0, len(data) * 8 // 10, len(data) * 9 // 10, len(data)]
    for part, begin, end in zip(("train", "valid", "test"), ends, ends[1:], strict=False):
        named[begin:end].to_csv(
            os.path.join(folder, "ml", f"ml.{part}.inter"), sep="\t", index=False
        )


def _trained(folder: str, name: str, *, tables: bool, seeds: int) -> Any:
    """Train recipe clicks with each seed. Returns the metrics, or Failed."""
    kind = "with tables" if tables else "log alone"
    return attempt(
        f"{name}, {kind}",
        lambda: [
            _stored_metrics(
                folder,
                f"rayrec, {name}, {kind}, seed {seed}",
                partial(_ours, folder, name, tables=tables, seed=seed),
            )
            for seed in range(seeds)
        ],
    )


def _peers(python: str, folder: str, names: Sequence[str], seeds: int) -> dict[str, Any]:
    """Train RecBole's models with one seed, and the best ones of the validation rows with the
    others.
    """
    by_name = {name: _peer(python, folder, name, 1) for name in names}
    trained = [name for name, metrics in by_name.items() if not isinstance(metrics, Failed)]
    trained.sort(key=lambda name: _mean(by_name[name], "validation"), reverse=True)
    best = {name: _peer(python, folder, name, seeds) for name in trained[:BEST]}
    return {**by_name, **best}


def _peer(python: str, folder: str, name: str, seeds: int) -> Any:
    """Train a model of RecBole with each seed. Returns the metrics, or Failed."""
    return attempt(
        f"RecBole {name}",
        lambda: [
            _stored_metrics(
                folder,
                f"RecBole, {name}, seed {seed}",
                partial(run_peer, python, name, folder, "clicks", seed=seed),
            )
            for seed in range(seeds)
        ],
    )


def _work() -> str | None:
    """Return the folder of `--work`, made if it is missing, or None."""
    arguments = sys.argv[1:]
    if "--work" not in arguments:
        return None
    folder = os.path.abspath(arguments[arguments.index("--work") + 1])
    os.makedirs(folder, exist_ok=True)
    return folder


def _stored_metrics(folder: str, name: str, train: Callable[[], Metrics]) -> Metrics:
    """Return the metrics of a training, which FOLDER/metrics has if it is finished."""
    path = Path(folder, "metrics", name.replace(", ", "-").replace(" ", "-") + ".json")
    if path.exists():
        stored: Metrics = json.loads(path.read_text())
        return stored
    metrics = train()
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(metrics))
    note(f"  {name}: AUROC {metrics['auroc']:.4f}, log loss {metrics['logloss']:.4f}")
    return metrics


def _ours(folder: str, name: str, *, tables: bool, seed: int) -> Metrics:
    config: Any = clicks(os.path.join(folder, "log"), schema(folder, tables=tables))
    split = config.workload.preset.split.replace(kind="fraction")
    workload = config.workload.replace(preset=config.workload.preset.replace(split=split))
    config = config.replace(workload=workload).replace(**OURS[name])
    with tempfile.TemporaryDirectory() as runs:
        config = config.replace(
            storage_path=runs,
            name="run",
            seed=seed,
            scaling={"num_workers": 1},
            trackers={"prometheus": False, "tensorboard": False},
        )
        summary = rayrec.train(config, console=Console(quiet=True)).summary
    return {
        "auroc": summary["metrics"]["auroc"],
        "logloss": summary["metrics"]["logloss"],
        "validation": summary["validation"]["auroc"],
    }


def tables_of(package: str) -> list[pd.DataFrame]:
    """Read ratings, users and films as text. Column names in the files end with `:type`."""
    tables = [
        pd.read_csv(
            os.path.join(package, "dataset_example", "ml-100k", f"ml-100k.{kind}"),
            sep="\t",
            dtype=str,
        )
        for kind in ("inter", "user", "item")
    ]
    return [table.rename(columns=lambda name: name.split(":")[0]) for table in tables]


def recbole_python() -> str:
    """Return the interpreter of `--recbole`. Raises InputError without it."""
    arguments = sys.argv[1:]
    if "--recbole" not in arguments:
        raise InputError(
            f"rayrec benchmark {arguments[0]}: --recbole PYTHON names the interpreter of an "
            "environment with RecBole"
        )
    return arguments[arguments.index("--recbole") + 1]


def run_peer(python: str, model: str, folder: str, task: str, *, seed: int = 0) -> Any:
    """Run a RecBole model on FOLDER/ml and return its printed metrics. Writes its logs into the
    folder.
    """
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers", "recbole_models.py")
    command = [python, "-W", "ignore", script, model, folder, task, str(seed)]
    return json.loads(_run(command, cwd=folder).splitlines()[-1])


def package_of(python: str) -> str:
    """Return the folder of the RecBole package. Raises InputError if RecBole cannot be imported."""
    try:
        return os.path.dirname(
            _run([python, "-c", "import recbole; print(recbole.__file__)"]).strip()
        )
    except RuntimeError as error:
        raise InputError(f"--recbole: {error}") from None


def _run(command: list[str], cwd: str | None = None) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    check_ended(command[0], done.returncode, done.stderr)
    return done.stdout
