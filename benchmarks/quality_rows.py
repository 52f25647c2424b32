"""Benchmark of criteo_demo's quality, compared with a hashed logistic regression on the same time
split.

`--data PATH`: log in Criteo's format. Default: a synthetic log of 20,000 rows.
"""

import statistics
import sys
import tempfile

from logs import synthetic_log
from peers.hashed_regression import fit_and_score, read
from rows import emit, note, part

from rayrec.observe.console import Console
from rayrec.recipes import criteo_demo
from rayrec.training.trainer import train


def main(*, quick: bool) -> None:
    arguments = sys.argv[1:]
    path = (
        arguments[arguments.index("--data") + 1] if "--data" in arguments else synthetic_log(20_000)
    )
    seeds = range(1 if quick else 5)
    metrics = []
    with tempfile.TemporaryDirectory() as storage:
        for seed in seeds:
            config = criteo_demo(path).replace(
                storage_path=storage, seed=seed, name=f"seed-{seed}", cluster={"num_cpus": 2}
            )
            summary = train(config, console=Console(quiet=True)).summary
            metrics.append(
                (
                    summary["validation"]["auroc"],
                    summary["metrics"]["auroc"],
                    summary["metrics"]["logloss"],
                )
            )
            note(
                f"  seed {seed}: validation {metrics[-1][0]:.4f}, test {metrics[-1][1]:.4f}, "
                f"logloss {metrics[-1][2]:.4f}"
            )
        sizes = summary["rows_of_sets"]
    train_rows = sizes["train"]
    validation_end = sizes["train"] + sizes["validation"]
    ours = [statistics.mean(values) for values in zip(*metrics, strict=True)]
    rows = read(path)
    for peer, strengths in (
        ("C 1 (default)", (1.0,)),
        ("C by validation", (0.003, 0.01, 0.03, 0.1, 0.3)),
    ):
        with part("quality", f"hashed logistic regression, {peer}"):
            strength, validation, test = fit_and_score(rows, train_rows, validation_end, strengths)
            note(
                f"  regression, C {strength:g}: validation {validation['auroc']:.4f}, test "
                f"{test['auroc']:.4f}"
            )
            emit(
                "quality",
                peer=f"hashed logistic regression, {peer}",
                workload=f"{len(rows):,} rows, time split, {sizes['test']} test rows",
                unit="auroc",
                value=ours[1],
                ratio=(ours[1] - 0.5) / (test["auroc"] - 0.5),
                repeats=len(metrics),
                peer_auroc=round(test["auroc"], 4),
                logloss=round(ours[2], 4),
                peer_logloss=round(test["logloss"], 4),
                validation_auroc=round(ours[0], 4),
                peer_validation_auroc=round(validation["auroc"], 4),
            )
