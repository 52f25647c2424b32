"""A search on Ray Tune: trials that share one reading of the log, one that fails, and the same call again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rayrec
from rayrec import recipes
from rayrec.config import InputError
from rayrec.observe.console import Console
from rayrec.training.trainer import train
from rayrec.workloads.base import TrainConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

RATE = "workload.dense_optimizer.learning_rate"
SEARCH: dict[str, Any] = {RATE: {"grid": [0.004, 1e30]}}
"""The recipe's own settings, better ones, and some that no run survives."""
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def config(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return recipes.criteo_demo(str(click_log / "train.txt")).replace(
        storage_path=str(tmp_path_factory.mktemp("searches")),
        name="search",
        steps=24,
        evaluate_every=8,
        batch_size=256,
        workload={"dense_optimizer": {"learning_rate": 1e-5}, "schedule": {"decay_fraction": 0.0}},
    )


@pytest.fixture(scope="module")
def found(local_ray: None, config: TrainConfig) -> dict[str, Any]:
    return rayrec.tune(config, search=SEARCH, console=QUIET)


def test_the_best_trial_is_told_from_the_recipes_settings(found: dict[str, Any], config: TrainConfig) -> None:
    folder = Path(found["folder"])
    assert [trial["number"] for trial in found["trials"]] == [1, 0, 2]
    best, own, failed = found["trials"]
    assert (best["state"], own["state"], failed["state"]) == ("finished", "finished", "failed")
    assert "the loss is nan" in failed["error"]
    assert [step for step, _ in best["curve"]] == [8, 16, 24]
    assert found["best"] == {
        "number": 1,
        "values": {RATE: 0.004},
        "auroc": best["best"],
        "checkpoint": best["checkpoint"],
    }
    assert (found["validation_rows"], found["test_rows"]) == (1429, 1428)
    compared = found["compared"]["auroc"]
    assert compared["low"] < compared["difference"] < compared["high"]
    metrics = [
        json.loads((folder / "trials" / f"trial_000{number}" / "summary.json").read_text())["metrics"]
        for number in (1, 0)
    ]
    assert compared["difference"] == pytest.approx(metrics[0]["auroc"] - metrics[1]["auroc"], abs=1e-6)
    assert json.loads((folder / "trials.json").read_text())["best"] == found["best"]
    assert "auroc by workload.dense_optimizer.learning_rate" in (folder / "report.html").read_text()
    winner = recipes.load_config((folder / "best.yaml").read_text())
    assert winner == config.replace(name=None, workload={"dense_optimizer": {"learning_rate": 0.004}})


def test_a_trial_trains_what_the_recipe_does(found: dict[str, Any], config: TrainConfig, tmp_path: Path) -> None:
    """From the preprocessed rows that all trials share."""
    alone = config.replace(
        storage_path=str(tmp_path), name="alone", scaling={"num_workers": 1}, cluster={"address": "none", "num_cpus": 1}
    )
    summary = json.loads(Path(found["folder"], "trials", "trial_0000", "summary.json").read_text())
    assert train(alone, console=QUIET).summary["weights_sha256"] == summary["weights_sha256"]


def test_the_same_call_trains_nothing_twice(
    found: dict[str, Any], config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [Path(found["folder"], "trials", f"trial_000{number}", "events.jsonl") for number in range(3)]
    before = [place.read_bytes() for place in events]
    monkeypatch.setattr("rayrec.tuning.on_ray.run_trials", None)
    again = rayrec.tune(config, search=SEARCH, console=QUIET)
    assert again == found
    assert [place.read_bytes() for place in events] == before
    for changes, message in (
        ({"search": {RATE: {"grid": [0.1]}}}, "holds a search with another space; give the same ones"),
        ({"trials": 3}, "holds a search with another options"),
    ):
        with pytest.raises(InputError, match=message):
            rayrec.tune(config, **{"search": SEARCH, "console": QUIET, **changes})
