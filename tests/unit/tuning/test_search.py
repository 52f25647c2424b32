"""Searches in this process: shared preprocessed rows, pauses, failures, kills, and equality with plain training."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders.faults import fails_with, raising, rejects
from builders.golden_inputs import EVERYTHING, PLAIN, any_rows, write_csv, write_parquet
from builders.runs import QUIET

import rayrec
from rayrec import recipes, storage
from rayrec.data.materialized import writer
from rayrec.data.materialized.dataset import open_preprocessed
from rayrec.observe.events import read_events
from rayrec.schema import Schema
from rayrec.training import trainer
from rayrec.tuning import search as of_searches
from rayrec.tuning import trials as of_trials
from rayrec.workloads.base import TrainConfig

RATE = "workload.dense_optimizer.learning_rate"
HERE: dict[str, Any] = {"early_stopping": {"patience": 0}, "cluster": {"address": "none"}}
HERE["trackers"] = {"prometheus": False, "tensorboard": False}
ALONE: dict[str, Any] = {"scaling": {"num_workers": 1}, "cluster": {"num_cpus": 1}}
SEARCH: dict[str, Any] = {RATE: {"grid": [0.004, 1e30, 0.001, 2e-5]}}
"""Better settings than the recipe's, unstable ones, and others."""


@pytest.fixture(scope="module")
def config(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    plain = recipes.criteo_demo(str(click_log / "train.txt")).replace(steps=54, evaluate_every=18, batch_size=256, **HERE)
    storage_path, workload = str(tmp_path_factory.mktemp("searches")), {"dense_optimizer": {"learning_rate": 1e-5}}
    return plain.replace(storage_path=storage_path, name="search", workload=workload)


@pytest.fixture(scope="module")
def found(config: TrainConfig) -> dict[str, Any]:
    return rayrec.tune(config, search=SEARCH, console=QUIET)


def outcomes(result: dict[str, Any]) -> list[list[Any]]:
    names = ("number", "state", "error", "step", "rows", "best", "curve")
    return [[trial[name] for name in names] for trial in result["trials"]]


def test_tune_compares_best_trial_with_recipe(found: dict[str, Any], config: TrainConfig) -> None:
    folder = Path(found["folder"])
    by_number = {trial["number"]: trial for trial in found["trials"]}
    states = [by_number[number]["state"] for number in range(5)]
    assert (len(by_number), states) == (5, ["finished", "finished", "failed", "stopped", "stopped"])
    assert found["trials"][0]["number"] == 1
    best, own, failed = by_number[1], by_number[0], by_number[2]
    assert "the loss is nan" in failed["error"]
    # Two of four continue after step 2, one after step 6.
    assert [by_number[number]["step"] for number in range(5)] == [54, 54, 0, 6, 2]
    assert [step for step, _ in best["curve"]] == [2, 6, 18, 36, 54]
    assert [step for step, _ in own["curve"]] == [18, 36, 54]
    assert found["trained_share"] == pytest.approx((54 + 54 + 6 + 2 + 2) / (54 * 5))
    assert found["best"] == {"number": 1, "values": {RATE: 0.004}, "auroc": best["best"], "checkpoint": best["checkpoint"]}
    assert best["best"] == best["curve"][-1][1]
    assert (found["validation_rows"], found["test_rows"]) == (1429, 1428)
    compared = found["compared"]["auroc"]
    assert compared["low"] < compared["difference"] < compared["high"]
    trials = [storage.read_json(f"{folder}/trials/trial_000{number}/summary.json") for number in (1, 0)]
    one, other = (trial["metrics"]["auroc"] for trial in trials)
    assert compared["difference"] == pytest.approx(one - other, abs=1e-6)
    assert json.loads((folder / "trials.json").read_text())["best"] == found["best"]
    assert "auroc by workload.dense_optimizer.learning_rate" in (folder / "report.html").read_text()
    winner = recipes.load_config((folder / "best.yaml").read_text())
    assert winner == config.replace(name=None, workload={"dense_optimizer": {"learning_rate": 0.004}})


def test_paused_trial_matches_uninterrupted_run(found: dict[str, Any], config: TrainConfig, tmp_path: Path) -> None:
    """The uninterrupted run reads the raw log instead of the preprocessed rows."""
    rate = {"dense_optimizer": {"learning_rate": 0.004}}
    alone = config.replace(storage_path=str(tmp_path), name="alone", **ALONE, workload=rate)
    place = Path(found["folder"], "trials", "trial_0001")
    summary = json.loads((place / "summary.json").read_text())
    assert trainer.train(alone, console=QUIET).summary["weights_sha256"] == summary["weights_sha256"]
    assert (summary["restarts"], summary["rows_lost"], summary["rows_repeated"]) == (0, 0, 0)
    assert [event["step"] for event in read_events(place / "events.jsonl") if event["kind"] == "start"] == [0, 2, 6, 18]


def test_repeated_tune_call_trains_nothing(found: dict[str, Any], config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [Path(found["folder"], "trials", f"trial_000{number}", "events.jsonl") for number in range(5)]
    before = [place.read_bytes() for place in events]
    monkeypatch.setattr(of_searches, "InProcessPool", None)
    assert rayrec.tune(config, search=SEARCH, console=QUIET) == found
    assert [place.read_bytes() for place in events] == before
    for changes, message in (
        ({"search": {RATE: {"grid": [0.1]}}}, "has a search with a different space. Use the same"),
        ({"trials": 3}, "has a search with a different options"),
        ({"stop_early": False}, "has a search with a different options and waves"),
    ):
        rejects(message, rayrec.tune, config, **{"search": SEARCH, "console": QUIET, **changes})


def test_killed_search_matches_uninterrupted_one(
    found: dict[str, Any], config: TrainConfig, click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after a trial paused, before its state was saved: no step is trained twice, and no trial reads the log."""
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
    fails_with(KeyboardInterrupt, "", rayrec.tune, searched, search=SEARCH, console=QUIET)
    away.rename(log)
    again = rayrec.tune(searched, search=SEARCH, console=QUIET)
    assert sorted(set(parts)) == [(0, 54), (1, 2), (1, 6), (1, 18), (1, 54), (3, 2), (3, 6), (4, 2)]
    assert len(parts) == len(set(parts)) + 1
    assert outcomes(again) == outcomes(found)
    assert again["compared"] == found["compared"]


ONE_LABEL = PLAIN.replace(group="user")
OWN_SEARCH: dict[str, Any] = {"workload.dense_optimizer.learning_rate": {"grid": [0.03]}}


def own_log(path: str) -> str:
    """Write a log in which clicks depend on the item, as CSV or Parquet."""
    rows = [{**row, "click": int((row["item"] or 0) % 3 == 0)} for row in any_rows(2100, seed=0)]
    (write_csv if path.endswith(".csv") else write_parquet)(Path(path), rows)
    return path


def own_config(log: str, schema: Schema, storage_path: str) -> TrainConfig:
    workload = {"schema": schema, "preset": {"min_count": 1}, "dense_optimizer": {"learning_rate": 1e-6}}
    plain = recipes.clicks(log).replace(steps=27, batch_size=64, **HERE)
    return plain.replace(storage_path=storage_path, name="own", workload=workload)


@pytest.mark.parametrize(
    ("name", "schema", "format"),
    [("log.csv", EVERYTHING, "parquet"), ("log.parquet", EVERYTHING, "parquet"), ("log.csv", ONE_LABEL, "npy")],
)
def test_search_matches_training_from_raw_rows(tmp_path: Path, monkeypatch: Any, name: str, schema: Schema, format: str) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    config = own_config(own_log(str(tmp_path / name)), schema, str(tmp_path / "runs"))
    found = rayrec.tune(config, search=OWN_SEARCH, console=QUIET)
    assert [trial["error"] for trial in found["trials"]] == [None, None]
    assert open_preprocessed(f"{found['folder']}/data").format == format
    assert found["best"]["number"] == 1
    trials = [storage.read_json(f"{found['folder']}/trials/trial_000{number}/summary.json") for number in (0, 1)]
    difference = trials[1]["metrics"]["auroc"] - trials[0]["metrics"]["auroc"]
    assert found["compared"]["auroc"]["difference"] == pytest.approx(difference, abs=1e-6)
    best = recipes.load_config(Path(found["best_config"]).read_text())
    assert best.workload == config.replace(workload={"dense_optimizer": {"learning_rate": 0.03}}).workload
    assert best.workload.schema.group == "user"
    alone = trainer.train(best.replace(name="alone", **ALONE), console=QUIET)
    assert alone.summary["weights_sha256"] == trials[1]["weights_sha256"]
    # CSV is converted once, inside the storage path.
    converted = list(tmp_path.glob("**/tables/**/*.parquet"))
    assert len(converted) == (1 if name == "log.csv" else 0)
    assert all(path.is_relative_to(tmp_path / "runs") for path in converted)


@pytest.mark.extended
def test_search_in_s3_resumes_and_matches_local_search(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first search is interrupted while it writes the rows."""
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    log = own_log(str(tmp_path / "log.csv"))
    here, there = (own_config(log, ONE_LABEL, path) for path in (str(tmp_path / "runs"), f"{bucket}/runs"))
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_manifest", raising(KeyboardInterrupt()))
        fails_with(KeyboardInterrupt, "", rayrec.tune, there, search=OWN_SEARCH, stop_early=False, console=QUIET)
    found = [rayrec.tune(config, search=OWN_SEARCH, stop_early=False, console=QUIET) for config in (here, there)]
    assert open_preprocessed(f"{found[1]['folder']}/data").format == "parquet"
    assert outcomes(found[1]) == outcomes(found[0])
    assert found[1]["compared"] == found[0]["compared"]
    assert storage.exists(found[1]["best_config"])
