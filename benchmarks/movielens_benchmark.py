"""Benchmark of click prediction on MovieLens-100K, compared with RecBole's models on the same
random split (80, 10, 10 %).

A rating of at least 4 counts as a click.

`--recbole PYTHON` names the interpreter of an environment with RecBole, whose package ships the
data: `pip install recbole==1.2.1 pandas==2.1.4 numpy==1.26.4 scipy==1.11.4 scikit-learn==1.4.2`.
RecBole's models have their default settings, embeddings of 16, and at most 30 epochs with early
stopping after 5.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rows import attempt, emit, note
from subprocesses import check_ended

import rayrec
from rayrec.config import InputError
from rayrec.observe.console import Console
from rayrec.recipes.clicks import clicks
from rayrec.schema import Schema

PEERS = ("FM", "DeepFM", "DCNV2", "AutoInt", "xDeepFM")
COLUMNS = ("user_id", "item_id", "age", "gender", "occupation", "zip_code", "release_year", "class")
SCHEMA = Schema(
    label="label", dense=(), sparse=COLUMNS, lists=("class",), tokens="any", delimiter=","
)
OURS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "6 epochs, batch 256": {"epochs": 6, "batch_size": 256},
}


def main(*, quick: bool) -> None:
    python = recbole_python()
    with tempfile.TemporaryDirectory() as folder:
        data = ratings(package_of(python))
        log = os.path.join(folder, "log")
        os.makedirs(log)
        head, rows = csv_lines(package_of(python))
        Path(log, "train.csv").write_bytes(b"".join(head + rows))
        _for_recbole(data, folder)
        ours: dict[str, Any] = {
            name: attempt(name, partial(_ours, log, folder, name, **changes))
            for name, changes in OURS.items()
        }
        for peer in PEERS[:1] if quick else PEERS:
            peer_metrics = attempt(
                f"RecBole {peer}", partial(run_peer, python, peer, folder, "clicks")
            )
            note(f"  RecBole {peer}: {peer_metrics}")
            for name, metrics in ours.items():
                emit(
                    "movielens",
                    peer=f"RecBole 1.2.1, {peer}",
                    workload=f"{len(data):,} ratings, {name}",
                    unit="auroc",
                    value=metrics["auroc"],
                    ratio=(metrics["auroc"] - 0.5) / (peer_metrics["auroc"] - 0.5),
                    repeats=1,
                    logloss=round(metrics["logloss"], 4),
                    peer_auroc=peer_metrics["auroc"],
                    peer_logloss=peer_metrics["logloss"],
                )


def ratings(package: str) -> pd.DataFrame:
    """Return the ratings joined with user and film features, in random order."""
    rated, users, films = tables_of(package)
    table = rated.merge(users, on="user_id").merge(
        films[["item_id", "release_year", "class"]], on="item_id"
    )
    table = table.fillna({"release_year": "none", "class": "none"})
    table["label"] = (table["rating"].astype(float) >= 4).astype(int)
    order = np.random.default_rng(0).permutation(len(table))
    return table[["label", *COLUMNS]].iloc[order].reset_index(drop=True)


def csv_lines(package: str) -> tuple[list[bytes], list[bytes]]:
    """Return the header and the rows of `ratings` as CSV in SCHEMA."""
    data = ratings(package)
    text = data.assign(**{"class": data["class"].str.replace(" ", "|")}).to_csv(index=False)
    head, *rows = text.encode().splitlines(keepends=True)
    return [head], rows


def _for_recbole(data: pd.DataFrame, folder: str) -> None:
    os.makedirs(os.path.join(folder, "ml"))
    types = {"label": "float", "class": "token_seq"}
    named = data.rename(
        columns={name: f"{name}:{types.get(name, 'token')}" for name in data.columns}
    )
    ends = [0, len(data) * 8 // 10, len(data) * 9 // 10, len(data)]
    for part, begin, end in zip(("train", "valid", "test"), ends, ends[1:], strict=False):
        named[begin:end].to_csv(
            os.path.join(folder, "ml", f"ml.{part}.inter"), sep="\t", index=False
        )


def _ours(log: str, folder: str, name: str, **changes: Any) -> dict[str, Any]:
    config: Any = clicks(log, SCHEMA)
    split = config.workload.preset.split.replace(kind="fraction")
    workload = config.workload.replace(preset=config.workload.preset.replace(split=split))
    config = config.replace(
        workload=workload,
        storage_path=os.path.join(folder, "runs"),
        name=name.replace(", ", "-").replace(" ", "-"),
        scaling={"num_workers": 1},
        trackers={"prometheus": False, "tensorboard": False},
        **changes,
    )
    metrics = rayrec.train(config, console=Console(quiet=True)).metrics
    note(f"  rayrec, {name}: AUROC {metrics['auroc']:.4f}, log loss {metrics['logloss']:.4f}")
    return metrics


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


def run_peer(python: str, model: str, folder: str, task: str) -> Any:
    """Run a RecBole model on FOLDER/ml and return its printed metrics. Writes its logs into the
    folder.
    """
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers", "recbole_models.py")
    return json.loads(
        _run([python, "-W", "ignore", script, model, folder, task], cwd=folder).splitlines()[-1]
    )


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
