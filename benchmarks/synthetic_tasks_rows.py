"""Benchmark of models on synthetic logs that need them, compared with DLRM: AUROC on the last
fourteenth of the rows.

For drifting categories, see warm_start_rows.py.
"""

import os
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Any

import synthetic_tasks
from rows import attempt, emit, note

import rayrec
from rayrec.models.base import ClickModelConfig
from rayrec.models.ranking.dcnv2 import DCNv2Config
from rayrec.models.ranking.gdcn import GDCNConfig
from rayrec.models.ranking.mmoe import MMoEConfig
from rayrec.models.ranking.ple import PLEConfig
from rayrec.observe.console import Console
from rayrec.recipes import clicks, clicks_din


@dataclass(frozen=True)
class Contest:
    """DLRM's forms and the models for a task, on one log."""

    truth: str
    label: str
    rows: int
    models: dict[str, ClickModelConfig | str]
    """The recipe's DLRM with an interaction of this name, or a model in its place."""
    recipe: Any = clicks
    epochs: int = 3
    forms: tuple[str, ...] = ("dot", "cross")
    """Interactions of the DLRM peers, of which the better one counts."""


CONTESTS = (
    Contest(
        "crosses",
        "click",
        300_000,
        {
            "dlrm, cross": "cross",
            "dcnv2": DCNv2Config(embedding_dim=16),
            "gdcn": GDCNConfig(embedding_dim=16),
        },
        forms=("dot",),
    ),
    Contest("interests", "click", 600_000, {"din": "recipe"}, clicks_din, epochs=6),
    Contest("returns", "click", 600_000, {"din": "recipe"}, clicks_din),
    Contest(
        "labels",
        "bought",
        400_000,
        {
            "dlrm, both labels": "cross",
            "mmoe": MMoEConfig(embedding_dim=16),
            "ple": PLEConfig(embedding_dim=16),
        },
    ),
)


def main(*, quick: bool) -> None:
    for contest in CONTESTS:
        rows = contest.rows // 10 if quick else contest.rows
        data = synthetic_tasks.TRUTHS[contest.truth](rows)
        with tempfile.TemporaryDirectory() as folder:
            alone = synthetic_tasks.only(data, contest.label) if contest.truth == "labels" else data
            peers = {
                form: attempt(
                    f"dlrm-{form}",
                    partial(_auroc, folder, alone, contest, f"dlrm-{form}", form, clicks),
                )
                for form in contest.forms
            }
            best_peer = max(peers, key=lambda form: peers[form])
            best = data.best(contest.label, rows - rows * 13 // 14)
            note(f"  {contest.truth}: best possible {best:.4f}, DLRM {peers}")
            for name, model in contest.models.items():
                run = name.replace(", ", "-").replace(" ", "-")
                auroc = attempt(
                    name, partial(_auroc, folder, data, contest, run, model, contest.recipe)
                )
                note(f"  {contest.truth}: {name} {auroc:.4f}")
                emit(
                    "synthetic-tasks",
                    peer=f"dlrm, {best_peer}"
                    + (f", {contest.label} alone" if contest.truth == "labels" else ""),
                    workload=f"{contest.truth}, {rows:,} rows, {name}",
                    unit="auroc",
                    value=auroc,
                    ratio=(auroc - 0.5) / (peers[best_peer] - 0.5),
                    repeats=1,
                    peer_auroc=round(peers[best_peer], 4),
                    best_auroc=round(best, 4),
                )


def _auroc(
    folder: str,
    data: synthetic_tasks.Planted,
    contest: Contest,
    name: str,
    model: ClickModelConfig | str,
    recipe: Any,
) -> float:
    """Train and return the test AUROC of the best checkpoint by validation."""
    log = os.path.join(folder, "-".join(["log", *data.logits, name]))
    config = recipe(log, data.write(log))
    if model != "recipe":
        model_config = (
            model
            if isinstance(model, ClickModelConfig)
            else config.workload.model.replace(interaction=model)
        )
        config = config.replace(workload=config.workload.replace(model=model_config))
    config = config.replace(
        epochs=contest.epochs,
        storage_path=os.path.join(folder, "runs"),
        name=os.path.basename(log),
        scaling={"num_workers": 1},
        trackers={"prometheus": False, "tensorboard": False},
    )
    metrics = rayrec.train(config, console=Console(quiet=True)).metrics
    return float(
        metrics["auroc" if data.schema["label"] == contest.label else f"{contest.label}.auroc"]
    )
