"""A whole search in this process: trials that share one reading of the log, that pause, and one that fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import rayrec
from rayrec import recipes
from rayrec.config import InputError
from rayrec.observe.console import Console
from rayrec.observe.events import read_events
from rayrec.training import trainer
from rayrec.tuning import search as of_searches
from rayrec.tuning import trial as of_trials
from rayrec.workloads.base import TrainConfig

RATE = "workload.dense_optimizer.learning_rate"
SEARCH: dict[str, Any] = {RATE: {"grid": [0.004, 1e30, 0.001, 2e-5]}}
"""The recipe's own settings, better ones, some that no run survives, and others."""
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def config(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return recipes.criteo_demo(str(click_log / "train.txt")).replace(
        storage_path=str(tmp_path_factory.mktemp("searches")),
        name="search",
        steps=54,
        evaluate_every=18,
        batch_size=256,
        early_stopping={"patience": 0},
        trackers={"prometheus": False, "tensorboard": False},
        cluster={"address": "none"},
        workload={"dense_optimizer": {"learning_rate": 1e-5}},
    )


@pytest.fixture(scope="module")
def found(config: TrainConfig) -> dict[str, Any]:
    return rayrec.tune(config, search=SEARCH, console=QUIET)


def test_the_best_trial_is_told_from_the_recipes_settings(found: dict[str, Any], config: TrainConfig) -> None:
    folder = Path(found["folder"])
    by_number = {trial["number"]: trial for trial in found["trials"]}
    assert {number: trial["state"] for number, trial in by_number.items()} == {
        0: "finished",
        1: "finished",
        2: "failed",
        3: "stopped",
        4: "stopped",
    }
    assert found["trials"][0]["number"] == 1
    best, own, failed = by_number[1], by_number[0], by_number[2]
    assert "the loss is nan" in failed["error"]
    # Two of four train on after the second step, one after the sixth.
    assert [by_number[number]["step"] for number in range(5)] == [54, 54, 0, 6, 2]
    assert [step for step, _ in best["curve"]] == [2, 6, 18, 36, 54]
    assert [step for step, _ in own["curve"]] == [18, 36, 54]
    assert found["trained_share"] == pytest.approx((54 + 54 + 6 + 2 + 2) / (54 * 5))
    assert found["best"] == {
        "number": 1,
        "values": {RATE: 0.004},
        "auroc": best["best"],
        "checkpoint": best["checkpoint"],
    }
    assert best["best"] == best["curve"][-1][1]
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


def test_a_trial_that_paused_has_the_weights_of_a_run_that_never_did(
    found: dict[str, Any], config: TrainConfig, tmp_path: Path
) -> None:
    """From the raw log, not from the preprocessed rows that all trials share."""
    alone = config.replace(
        storage_path=str(tmp_path),
        name="alone",
        scaling={"num_workers": 1},
        cluster={"num_cpus": 1},
        workload={"dense_optimizer": {"learning_rate": 0.004}},
    )
    place = Path(found["folder"], "trials", "trial_0001")
    summary = json.loads((place / "summary.json").read_text())
    assert trainer.train(alone, console=QUIET).summary["weights_sha256"] == summary["weights_sha256"]
    assert (summary["restarts"], summary["rows_lost"], summary["rows_repeated"]) == (0, 0, 0)
    starts = [event["step"] for event in read_events(place / "events.jsonl") if event["kind"] == "start"]
    assert starts == [0, 2, 6, 18]


def test_the_same_call_trains_nothing_twice(
    found: dict[str, Any], config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [Path(found["folder"], "trials", f"trial_000{number}", "events.jsonl") for number in range(5)]
    before = [place.read_bytes() for place in events]
    monkeypatch.setattr(of_searches, "HerePool", None)
    again = rayrec.tune(config, search=SEARCH, console=QUIET)
    assert again == found
    assert [place.read_bytes() for place in events] == before
    for changes, message in (
        ({"search": {RATE: {"grid": [0.1]}}}, "holds a search with another space; give the same ones"),
        ({"trials": 3}, "holds a search with another options"),
        ({"stop_early": False}, "holds a search with another options and waves"),
    ):
        with pytest.raises(InputError, match=message):
            rayrec.tune(config, **{"search": SEARCH, "console": QUIET, **changes})


def test_a_killed_search_ends_like_one_that_was_not(
    found: dict[str, Any], config: TrainConfig, click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after a trial had paused and before that was written down: no step is trained twice. And no trial reads the log."""
    log, away = tmp_path / "train.txt", tmp_path / "away"
    shutil.copy(click_log / "train.txt", log)
    parts: list[tuple[int, int]] = []
    train_until = of_trials.train_until

    def killed(config: TrainConfig, share: float, **options: Any) -> Any:
        if log.exists():
            log.rename(away)
        result = train_until(config, share, **options)
        parts.append((int(str(config.name)[-1]), round(54 * share)))
        if len(parts) == 3:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(of_trials, "train_until", killed)
    searched = config.replace(name="killed", train_data={"path": str(log)})
    with pytest.raises(KeyboardInterrupt):
        rayrec.tune(searched, search=SEARCH, console=QUIET)
    away.rename(log)
    again = rayrec.tune(searched, search=SEARCH, console=QUIET)
    assert sorted(set(parts)) == [(0, 54), (1, 2), (1, 6), (1, 18), (1, 54), (3, 2), (3, 6), (4, 2)]
    assert len(parts) == len(set(parts)) + 1

    def plain(result: dict[str, Any]) -> list[Any]:
        names = ("number", "state", "error", "step", "rows", "best", "curve")
        return [[trial[name] for name in names] for trial in result["trials"]]

    assert plain(again) == plain(found)
    assert again["compared"] == found["compared"]
