"""Searches in this process: shared preprocessed rows, pauses, failures, kills, and equality with
plain training.
"""

import errno
import json
import math
import random
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.faults import fails_with, raising, rejects
from builders.own_click_model import OwnConfig
from builders.runs import QUIET
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from pyarrow import csv

import rayrec
from rayrec import recipes, storage
from rayrec.config import InputError, error_line
from rayrec.data.encoding.preprocessor import stored_schema
from rayrec.data.materialized import writer
from rayrec.data.materialized.dataset import open_preprocessed
from rayrec.schema import Feature, Label, Schema
from rayrec.training import trainer
from rayrec.tuning import search as search_module
from rayrec.tuning import trials, waves
from rayrec.tuning.space import Space, TuneConfig, with_values
from rayrec.tuning.study import Study
from rayrec.tuning.trials import PartResult
from rayrec.workloads.base import TrainConfig

RATE = "workload.dense_optimizer.learning_rate"
HERE: dict[str, Any] = {"early_stopping": {"patience": 0}, "cluster": {"address": "none"}}
HERE["trackers"] = {"prometheus": False, "tensorboard": False}
ALONE: dict[str, Any] = {"scaling": {"num_workers": 1}, "cluster": {"num_cpus": 1}}
SEARCH: dict[str, Any] = {RATE: {"grid": [0.004, 1e30, 0.001, 2e-5]}}
"""Better settings than the recipe's, unstable ones, and others."""


@pytest.fixture(scope="module")
def config(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    plain = recipes.criteo_demo(str(click_log / "train.txt")).replace(
        steps=54, evaluate_every=18, batch_size=256, **HERE
    )
    storage_path = str(tmp_path_factory.mktemp("searches"))
    workload = {"dense_optimizer": {"learning_rate": 1e-5}}
    return plain.replace(storage_path=storage_path, name="search", workload=workload)


@pytest.fixture(scope="module")
def result(config: TrainConfig) -> dict[str, Any]:
    return rayrec.tune(config, search=SEARCH, console=QUIET)


def outcomes(result: dict[str, Any]) -> list[list[Any]]:
    names = ("number", "state", "error", "step", "rows", "best", "curve")
    return [[trial[name] for name in names] for trial in result["trials"]]


def summaries_of(result: dict[str, Any], *numbers: int) -> list[dict[str, Any]]:
    """Read the summaries of a search's trials."""
    trials = f"{result['folder']}/trials"
    return [storage.read_json(f"{trials}/trial_000{number}/summary.json") for number in numbers]


def test_tune_stops_weak_trials(result: dict[str, Any]) -> None:
    by_number = {trial["number"]: trial for trial in result["trials"]}
    states = [by_number[number]["state"] for number in range(5)]
    assert (len(by_number), states) == (5, ["finished", "finished", "failed", "stopped", "stopped"])
    assert result["trials"][0]["number"] == 1
    assert "the loss is nan" in by_number[2]["error"]
    # Two of four continue after step 2, one after step 6.
    assert [by_number[number]["step"] for number in range(5)] == [54, 54, 0, 6, 2]
    for number in (0, 1):
        assert [step for step, _ in by_number[number]["curve"]] == [2, 6, 18, 36, 54]
    assert result["trained_share"] == pytest.approx((54 + 54 + 6 + 2 + 2) / (54 * 5))


def test_tune_compares_best_trial_with_recipe(result: dict[str, Any], config: TrainConfig) -> None:
    folder = Path(result["folder"])
    best = result["trials"][0]
    assert result["best"] == {
        "number": 1,
        "values": {RATE: 0.004},
        "auroc": best["best"],
        "checkpoint": best["checkpoint"],
    }
    assert best["best"] == best["curve"][-1][1]
    assert (result["validation_rows"], result["test_rows"]) == (1429, 1428)
    compared = result["compared"]["auroc"]
    assert compared["low"] < compared["difference"] < compared["high"]
    one, other = (trial["metrics"]["auroc"] for trial in summaries_of(result, 1, 0))
    assert compared["difference"] == pytest.approx(one - other, abs=1e-6)
    assert json.loads((folder / "trials.json").read_text())["best"] == result["best"]
    assert "auroc by workload.dense_optimizer.learning_rate" in (folder / "report.html").read_text()
    winner = recipes.load_config((folder / "best.yaml").read_text())
    assert winner == config.replace(
        name=None, workload={"dense_optimizer": {"learning_rate": 0.004}}
    )


def test_repeated_tune_call_trains_nothing(
    result: dict[str, Any], config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [
        Path(result["folder"], "trials", f"trial_000{number}", "events.jsonl")
        for number in range(5)
    ]
    before = [place.read_bytes() for place in events]
    monkeypatch.setattr(search_module, "train_parts", None)
    assert rayrec.tune(config, search=SEARCH, console=QUIET) == result
    assert [place.read_bytes() for place in events] == before
    for changes, message in (
        ({"search": {RATE: {"grid": [0.1]}}}, "has a search with a different space. Use the same"),
        ({"trials": 3}, "has a search with a different options"),
        ({"stop_early": False}, "has a search with a different options and waves"),
    ):
        rejects(message, rayrec.tune, config, **{"search": SEARCH, "console": QUIET, **changes})


@pytest.mark.extended
def test_killed_search_matches_uninterrupted_one(
    result: dict[str, Any],
    config: TrainConfig,
    click_log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed after a trial paused, before its state was saved: no step is trained twice, and no
    trial reads the log.
    """
    log = tmp_path / "train.txt"
    away = tmp_path / "away"
    shutil.copy(click_log / "train.txt", log)
    parts: list[tuple[int, int]] = []
    train_until = trials.train_until

    def killed(config: TrainConfig, share: float, **options: Any) -> Any:
        if log.exists():
            log.rename(away)
        result = train_until(config, share, **options)
        parts.append((int(str(config.name)[-1]), round(54 * share)))
        if len(parts) == 3:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(trials, "train_until", killed)
    searched = config.replace(name="killed", train_data={"path": str(log)})
    fails_with(KeyboardInterrupt, "", rayrec.tune, searched, search=SEARCH, console=QUIET)
    away.rename(log)
    again = rayrec.tune(searched, search=SEARCH, console=QUIET)
    assert sorted(set(parts)) == [
        (0, 2),
        (0, 6),
        (0, 18),
        (0, 54),
        (1, 2),
        (1, 6),
        (1, 18),
        (1, 54),
        (3, 2),
        (3, 6),
        (4, 2),
    ]
    assert len(parts) == len(set(parts)) + 1
    assert outcomes(again) == outcomes(result)
    assert again["compared"] == result["compared"]


def test_tune_rejects_baselines_for_one_seed(config: TrainConfig) -> None:
    rejects(
        r"^tune\.baselines: require several seeds",
        rayrec.tune,
        config,
        search={RATE: {"grid": [0.004, 0.008]}},
        console=QUIET,
        baselines=["logistic"],
    )


def check_spread(group: dict[str, Any], metric: str, values: list[float]) -> None:
    expected = statistics.mean(values), statistics.stdev(values)
    assert (group[metric], group[f"{metric}_std"]) == pytest.approx(expected, abs=1e-6)


def check_setting(result: dict[str, Any], position: int, name: str, numbers: list[int]) -> None:
    """Check a setting of 18 steps against the summaries of its trials, one for each seed."""
    group = result["groups"][position]
    assert (group["name"], group["trials"], group["seconds"] > 0) == (name, numbers, True)
    runs = summaries_of(result, *numbers)
    assert [(run["steps"], run["metrics"]["rows"]) for run in runs] == [
        (18, result["test_rows"])
    ] * 2
    check_spread(group, "auroc", [run["metrics"]["auroc"] for run in runs])
    check_spread(group, "logloss", [run["metrics"]["logloss"] for run in runs])
    check_spread(group, "validation", [run["validation"]["auroc"] for run in runs])


def test_seeds_compare_models_on_test_rows(config: TrainConfig) -> None:
    """With a model of user code, and the recipe's own settings in the grid. Baselines are added
    later.
    """
    searched = config.replace(
        name="seeds", steps=18, seed=5, workload={"dense_optimizer": {"learning_rate": 0.004}}
    )
    own = f"{OwnConfig.__module__}.OwnConfig"
    models = "workload.model.class"
    options: dict[str, Any] = {
        "search": {models: {"grid": [own, "dlrm"]}},
        "seeds": 2,
        "console": QUIET,
    }
    result = rayrec.tune(searched, **options)
    assert sorted((trial["number"], trial["values"]["seed"]) for trial in result["trials"]) == [
        (0, 5),
        (1, 6),
        (2, 5),
        (3, 6),
    ]
    check_setting(result, 0, "dlrm", [0, 1])
    check_setting(result, 1, own, [2, 3])
    again = rayrec.tune(searched, **options, baselines=["logistic"])
    dlrm, other, logistic = again["groups"]
    assert [dlrm["auroc"], other["auroc"]] == [group["auroc"] for group in result["groups"]]
    assert other["difference"] == pytest.approx(other["auroc"] - dlrm["auroc"])
    assert other["low"] < other["difference"] < other["high"]
    assert 0 < logistic["p_value"] <= logistic["corrected_p_value"] <= 1
    assert (logistic["auroc_std"], logistic["logloss_std"], "seeds" in logistic) == (
        None,
        None,
        False,
    )
    lines = search_module.table_text(again).splitlines()
    assert [line.split()[0] for line in lines[-4:-1]] == ["dlrm", own, "logistic"]
    assert ["±" in line for line in lines[-4:-1]] == [True, True, False]
    assert (lines[-1], lines[-1] in Path(again["report"]).read_text()) == (
        search_module.SEEDS_NOTE,
        True,
    )


def test_best_trial_is_compared_with_recipe(config: TrainConfig) -> None:
    """The recipe's own settings are neither the best nor the worst."""
    searched = config.replace(name="middle", workload={"dense_optimizer": {"learning_rate": 1e-3}})
    result = rayrec.tune(
        searched, search={RATE: {"grid": [0.004, 1e-5]}}, stop_early=False, console=QUIET
    )
    assert [trial["number"] for trial in result["trials"]] == [1, 0, 2]
    summaries = [
        storage.read_json(f"{result['folder']}/trials/trial_000{number}/summary.json")
        for number in (1, 0)
    ]
    best, recipe = (summary["metrics"]["auroc"] for summary in summaries)
    assert result["compared"]["auroc"]["difference"] == pytest.approx(best - recipe, abs=1e-6)


@pytest.mark.parametrize("test_first", [False, True])
def test_seeds_score_test_rows_alone(test_first: bool, config: TrainConfig, tmp_path: Path) -> None:
    """Also if validation rows follow the test rows."""
    preset = {"split": {"test_first": test_first}}
    searched = config.replace(name=f"first_{test_first}", steps=9, workload={"preset": preset})
    result = rayrec.tune(
        searched, search={RATE: {"grid": [0.004]}}, seeds=2, stop_early=False, console=QUIET
    )
    lines = Path(str(config.train_data.path)).read_text().splitlines(keepends=True)
    first, stop = open_preprocessed(f"{result['folder']}/data").sets["test"]
    assert (stop - first, stop == len(lines)) == (result["test_rows"], not test_first)
    test_rows = tmp_path / "test.txt"
    test_rows.write_text("".join(lines[first:stop]))
    for group in result["groups"]:
        checkpoints = [
            trial["checkpoint"] for trial in result["trials"] if trial["number"] in group["trials"]
        ]
        alone = [
            rayrec.evaluate(checkpoint, str(test_rows), console=QUIET) for checkpoint in checkpoints
        ]
        assert [metrics["rows"] for metrics in alone] == [result["test_rows"]] * 2
        for name in ("auroc", "logloss"):
            assert group[name] == pytest.approx(
                statistics.mean(metrics[name] for metrics in alone), abs=1e-6
            )


def test_tpe_search_resumes_and_trains_each_group(config: TrainConfig) -> None:
    searched = config.replace(name="tpe", steps=9)
    options = {"algorithm": "tpe", "trials": 3, "console": QUIET}
    space = {RATE: {"loguniform": [1e-4, 0.03]}}
    result = rayrec.tune(searched, search=space, **options)
    rates = {trial["values"][RATE] for trial in result["trials"] if trial["number"]}
    assert len(rates) == 2
    # Each group trains its best trial to the end.
    assert {trial["state"] for trial in result["trials"]} == {"finished"}
    assert rayrec.tune(searched, search=space, **options) == result


def test_tpe_rejects_several_seeds(config: TrainConfig) -> None:
    rejects(
        r"^tune\.seeds: .* got tune\.algorithm tpe\. Use --tune\.algorithm random or grid",
        rayrec.tune,
        config,
        search=SEARCH,
        algorithm="tpe",
        seeds=2,
        console=QUIET,
    )


def test_tpe_fails_trial_with_incompatible_values(config: TrainConfig) -> None:
    """The trial is drawn when the search has begun, in a later group."""
    dim = config.workload.model.embedding_dim  # type: ignore[attr-defined]
    mlp = config.workload.model.bottom_mlp  # type: ignore[attr-defined]
    space = {
        "workload.model.embedding_dim": {"grid": [dim, 2 * dim]},
        "workload.model.bottom_mlp": {"grid": [list(mlp)]},
    }
    searched = config.replace(name="incompatible", steps=9)
    result = rayrec.tune(searched, search=space, algorithm="tpe", stop_early=False, console=QUIET)
    trials = sorted(result["trials"], key=lambda trial: trial["number"])
    assert [trial["state"] for trial in trials] == ["finished", "finished", "failed"]
    assert "bottom_mlp" in trials[2]["error"]
    again = rayrec.tune(searched, search=space, algorithm="tpe", stop_early=False, console=QUIET)
    assert again == result


ONE_LABEL = Schema(
    label="click",
    dense=("price",),
    sparse=("item", "user", "day"),
    group="user",
    tokens="any",
    delimiter=",",
)
TWO_LABELS = ONE_LABEL.replace(
    labels=(Label(name="seconds", kind="number"),),
    sparse=(*ONE_LABEL.sparse, "tags"),
    lists=("tags",),
    features=(Feature(name="tags", weights="tag_weights"),),
    weight="weight",
    timestamp="at",
)
OWN_SEARCH: dict[str, Any] = {"workload.dense_optimizer.learning_rate": {"grid": [0.03]}}


def own_log(path: str) -> str:
    """Write a log with numbers, strings, dates, weighted lists, row weights and two labels, as CSV
    or Parquet.
    """
    rng = np.random.default_rng(0)
    rows = 2100
    item = rng.integers(0, 30, 2100)
    click = (rng.random(rows) < np.where(item % 3 == 0, 0.8, 0.2)).astype(np.int8)
    tags = [rng.integers(0, 8, count).tolist() for count in rng.integers(0, 3, rows)]
    weights = [[0.5] * len(row_values) for row_values in tags]
    is_csv = path.endswith(".csv")
    joined = (lambda lists: ["|".join(map(str, each)) for each in lists]) if is_csv else pa.array
    table = pa.table(
        {
            "click": click,
            "seconds": click * (1.5 + item % 5),
            "price": 3e9 * rng.random(rows),
            "item": item,
            "user": [f"u{number}" for number in rng.integers(0, 50, rows)],
            "day": [f"2026-01-{number:02d}" for number in 1 + np.arange(rows) // 100],
            "tags": joined(tags),
            "tag_weights": joined(weights),
            "weight": rng.integers(1, 3, rows),
            "at": pa.array(np.arange(rows), pa.timestamp("s")),
        }
    )
    (csv.write_csv if is_csv else pq.write_table)(table, path)
    return path


def own_config(log: str, schema: Schema, storage_path: str) -> TrainConfig:
    workload = {
        "schema": schema,
        "preset": {"min_count": 1},
        "dense_optimizer": {"learning_rate": 1e-6},
    }
    # Both learn at the tables' rate.
    workload["model"] = {"first_order": False, "piecewise_numbers": False, "top_dropout": 0.0}
    plain = recipes.clicks(log).replace(steps=27, batch_size=64, **HERE)
    return plain.replace(storage_path=storage_path, name="own", workload=workload)


@pytest.mark.parametrize(
    ("name", "schema", "format"),
    [
        ("log.csv", TWO_LABELS, "parquet"),
        ("log.parquet", TWO_LABELS, "parquet"),
        ("log.csv", ONE_LABEL, "npy"),
    ],
)
def test_search_matches_training_from_raw_rows(
    tmp_path: Path, monkeypatch: Any, name: str, schema: Schema, format: str
) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    config = own_config(own_log(str(tmp_path / name)), schema, str(tmp_path / "runs"))
    result = rayrec.tune(config, search=OWN_SEARCH, console=QUIET)
    assert [trial["error"] for trial in result["trials"]] == [None, None]
    assert open_preprocessed(f"{result['folder']}/data").format == format
    assert result["best"]["number"] == 1
    trials = summaries_of(result, 0, 1)
    difference = trials[1]["metrics"]["auroc"] - trials[0]["metrics"]["auroc"]
    assert result["compared"]["auroc"]["difference"] == pytest.approx(difference, abs=1e-6)
    best = recipes.load_config(Path(result["best_config"]).read_text())
    assert (
        best.workload
        == config.replace(workload={"dense_optimizer": {"learning_rate": 0.03}}).workload
    )
    assert best.workload.schema.group == "user"
    alone = trainer.train(best.replace(name="alone", **ALONE), console=QUIET)
    assert alone.summary["weights_sha256"] == trials[1]["weights_sha256"]
    header = stored_schema(f"{result['folder']}/data/preprocessor").header
    assert header is not None
    assert " ".join(header) == "click seconds price item user day tags tag_weights weight at", (
        "served lines have this order"
    )
    # CSV is converted once, inside the storage path.
    converted = list(tmp_path.glob("**/tables/**/*.parquet"))
    assert len(converted) == (1 if name == "log.csv" else 0)
    assert all(path.is_relative_to(tmp_path / "runs") for path in converted)


@pytest.mark.extended
def test_search_in_s3_resumes_and_matches_local_search(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    log = own_log(str(tmp_path / "log.csv"))
    here, there = (
        own_config(log, ONE_LABEL, path) for path in (str(tmp_path / "runs"), f"{bucket}/runs")
    )
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_manifest", raising(KeyboardInterrupt()))
        fails_with(
            KeyboardInterrupt,
            "",
            rayrec.tune,
            there,
            search=OWN_SEARCH,
            stop_early=False,
            console=QUIET,
        )
    result = [
        rayrec.tune(config, search=OWN_SEARCH, stop_early=False, console=QUIET)
        for config in (here, there)
    ]
    assert open_preprocessed(f"{result[1]['folder']}/data").format == "parquet"
    assert outcomes(result[1]) == outcomes(result[0])
    assert result[1]["compared"] == result[0]["compared"]
    assert storage.exists(result[1]["best_config"])


# -- Successive halving
THIRDS = TuneConfig()


def test_random_search_has_one_shuffled_group() -> None:
    (order,) = waves.groups_of(50, TuneConfig())
    assert order[0] == 0
    assert sorted(order) == list(range(50))
    assert [order] == waves.groups_of(50, TuneConfig())
    assert [order] != waves.groups_of(50, TuneConfig(seed=1))


def test_tpe_search_has_groups_in_turn() -> None:
    groups = waves.groups_of(12, TuneConfig(algorithm="tpe"))
    assert [sorted(group) for group in groups] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]]


def test_wave_fractions_follow_keep_fraction() -> None:
    assert waves.wave_fractions(THIRDS) == pytest.approx((1 / 27, 1 / 9, 1 / 3, 1))
    assert waves.wave_fractions(TuneConfig(stop_early=False)) == (1.0,)
    assert waves.wave_fractions(TuneConfig(keep_fraction=0.5))[0] == 1 / 32


def test_rank_best_excludes_failed_trials() -> None:
    values = {1: 0.7, 2: 0.9, 3: None, 4: 0.9, 5: 0.8, 6: None}
    assert waves.rank_best(values, 0.5, sign=1.0) == [2, 4, 5]
    assert waves.rank_best(values, 0.5, sign=-1.0) == [1, 5, 2]
    assert waves.rank_best({1: None, 2: None}, 0.5, sign=1.0) == []


class Pool:
    """Fake pool that saves a fixed metric for each trial and wave, in random order among the
    submitted jobs.
    """

    def __init__(
        self, seed: int, *, killed_after: int | None = None, disk_is_full: bool = False
    ) -> None:
        self.trained: list[tuple[int, int]] = []
        self._chance = random.Random(seed)
        self._killed_after = killed_after
        self._disk_is_full = disk_is_full

    def __call__(self, jobs: Sequence[trials.Job]) -> Iterator[tuple[trials.Job, PartResult]]:
        waiting = list(jobs)
        while waiting:
            if len(self.trained) == self._killed_after:
                raise KeyboardInterrupt
            job = waiting.pop(self._chance.randrange(len(waiting)))
            self.trained.append((job.number, job.wave))
            yield job, self._result(job)

    def _result(self, job: trials.Job) -> PartResult:
        if job.number == 5 or (job.number, job.wave) == (17, 1):
            return PartResult(error="it is wrong")
        if self._disk_is_full and (job.number, job.wave) in [(0, 3), (16, 1), (18, 0)]:
            return PartResult(error="no space left", can_retry=True)
        if job.number == 9:  # Stops early.
            return PartResult(0.645, finished=True)
        if job.number == 6:
            return PartResult(None)
        value = (0.5, 0.7, 0.7, 0.7)[job.wave] + job.number / 100 * (-1) ** (job.wave == 1)
        return PartResult(value, finished=job.fraction == 1)


def configs(folder: Path, count: int) -> list[TrainConfig]:
    config = recipes.criteo_demo("log").replace(storage_path=str(folder))
    return [config.replace(name=f"trial_{number:04d}") for number in range(count)]


def searched(folder: Path, pool: Pool | None) -> dict[int, tuple[str, str | None, float | None]]:
    """Train 19 trials with the journal in this folder, and return their outcomes."""
    space = Space.parse({"seed": {"integers": [0, 1000]}}, source="s")
    study = Study(str(folder / "journal.log"), space, THIRDS)

    def opened() -> Pool:
        assert pool is not None, "nothing is left to train"
        return pool

    for number in range(len(study), 19):
        study.create_trial(number, {})
    study.save()
    (group,) = waves.groups_of(19, THIRDS)
    waves.train_waves(
        group, configs(folder, 19), study, opened, options=THIRDS, note=lambda text: None
    )
    study.stop_paused(group)
    return {
        number: (study.outcome(number), study.error(number), study.last_metric(number))
        for number in range(19)
    }


def parse_numbers(
    outcomes: dict[int, tuple[str, str | None, float | None]], state: str
) -> set[int]:
    return {number for number, outcome in outcomes.items() if outcome[0] == state}


def test_selection_does_not_depend_on_completion_order(tmp_path: Path) -> None:
    pools = [Pool(seed) for seed in range(5)]
    result = [searched(tmp_path / str(number), pool) for number, pool in enumerate(pools)]
    assert all(each == result[0] for each in result)
    assert all(sorted(pool.trained) == sorted(pools[0].trained) for pool in pools)
    # Of 18, six continue after the first wave. Number 9 has finished by then. Number 17 fails in
    # the second wave.
    trained = [{number for number, wave in pools[0].trained if wave == each} for each in range(4)]
    assert trained == [set(range(19)), {0, 18, 17, 16, 15, 14}, {0, 14}, {0, 14}]
    assert parse_numbers(result[0], "finished") == {0, 9, 14}
    assert parse_numbers(result[0], "failed") == {5, 17}
    assert result[0][6] == ("stopped", None, None)


@pytest.mark.parametrize("killed_after", [0, 1, 7, 18, 19, 22, 25])
def test_killed_waves_resume_without_repeating(tmp_path: Path, killed_after: int) -> None:
    whole = Pool(0)
    expected = searched(tmp_path / "whole", whole)
    first = Pool(1, killed_after=killed_after)
    second = Pool(2)
    fails_with(KeyboardInterrupt, "", searched, tmp_path / "killed", first)
    assert searched(tmp_path / "killed", second) == expected
    assert sorted(first.trained + second.trained) == sorted(whole.trained)
    assert searched(tmp_path / "killed", None) == expected


def test_search_retries_trials_after_outside_failures(tmp_path: Path) -> None:
    expected = searched(tmp_path / "whole", Pool(0))
    first = Pool(1, disk_is_full=True)
    second = Pool(2)
    before = searched(tmp_path / "full", first)
    assert parse_numbers(before, "failed") == {0, 5, 16, 17, 18}
    assert searched(tmp_path / "full", second) == expected | {13: before[13]}  # 13 replaced 18.
    assert {(0, 3), (16, 1), (18, 0)} <= set(second.trained)
    assert not {5, 17} & {number for number, _ in second.trained}


@pytest.mark.parametrize(
    ("error", "cause", "can_retry"),
    [
        (InputError("no space left"), OSError(errno.ENOSPC, "full"), True),
        (OSError("Input/output error"), None, True),
        (InputError("the loss is nan"), None, False),
    ],
)
def test_failed_trial_records_retry(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    cause: Exception | None,
    can_retry: bool,
) -> None:
    error.__cause__ = cause
    monkeypatch.setattr(trials, "train_until", raising(error))
    (config,) = configs(tmp_path, 1)
    result = trials.train_part(trials.Job(0, config, 0, 1.0, "auroc"))
    assert result == PartResult(error=error_line(error), can_retry=can_retry)


def test_selected_metric_skips_earlier_pauses() -> None:
    config = recipes.criteo_demo("log").replace(early_stopping={"patience": 2})
    events = [
        {"auroc": value, "logloss": 0.5, "counted": value != 0.8}
        for value in (0.7, 0.74, 0.8, 0.75, 0.74, 0.74)
    ]
    assert trials.selected_metric(events, config, "auroc") == 0.75
    # It pauses there, so these weights exist.
    assert trials.selected_metric(events[:3], config, "auroc") == 0.8
    assert (
        trials.selected_metric([{**event, "counted": False} for event in events], config, "auroc")
        == 0.74
    )
    assert (
        trials.selected_metric(
            [{"auroc": event["auroc"], "logloss": 0.5} for event in events], config, "auroc"
        )
        == 0.8
    )


@pytest.mark.parametrize(("patience", "expected"), [(0, 0.71), (2, 0.74)])
def test_selected_metric_matches_final_weights(patience: int, expected: float) -> None:
    config = recipes.criteo_demo("log").replace(early_stopping={"patience": patience})
    events: list[dict[str, Any]] = [
        {"auroc": value, "logloss": 0.5} for value in (0.7, 0.74, None, 0.71)
    ]
    assert trials.selected_metric(events, config, "auroc") == expected
    assert (
        trials.selected_metric(events[:3], config.replace(early_stopping={"patience": 0}), "auroc")
        is None
    )
    assert trials.selected_metric([], config, "auroc") is None


# -- Search spaces: files, settings of trials, and errors
RATE = "workload.dense_optimizer.learning_rate"
TOWER = "workload.model.top_mlp"
BATCH = "batch_size"
TEXT = f"""
{RATE}: {{loguniform: [1e-4, 1.0e-2]}}
{TOWER}: {{choice: [[64, 1], [32, 1]]}}
{BATCH}: {{grid: [256, 512]}}
"""


def read_column(space: Space, **options: Any) -> list[dict[str, Any]]:
    """Return the values of all trials before any result."""
    tuned = TuneConfig(**options)
    study = Study("unused", space, tuned)
    config = recipes.criteo_demo("log")
    for setting, fixed in enumerate(space.settings(config, tuned)):
        study.create_trial(setting, fixed)
    return [study.values(number) for number in range(len(study))]


def test_space_file_defines_trials() -> None:
    space = Space.read(TEXT, source="space.yaml")
    space.check(recipes.criteo_demo("log"))
    trials = read_column(space, trials=9)
    assert (trials[0], len(trials)) == ({}, 9)
    assert [trial[BATCH] for trial in trials[1:]] == [256, 512] * 4
    assert all(1e-4 <= trial[RATE] <= 1e-2 for trial in trials[1:])
    assert {tuple(trial[TOWER]) for trial in trials[1:]} == {(64, 1), (32, 1)}
    assert all(list(trial) == [RATE, TOWER, BATCH] for trial in trials[1:])
    assert read_column(space, trials=9) == trials != read_column(space, trials=9, seed=1)
    config = with_values(recipes.criteo_demo("log"), trials[1])
    tower = config.workload.model.top_mlp  # type: ignore[attr-defined]
    assert (config.batch_size, tower) == (256, tuple(trials[1][TOWER]))
    assert Space.parse(space.plain(), source="again") == space


@pytest.mark.parametrize("recipe", [recipes.clicks, recipes.criteo_demo])
def test_embedding_dim_search_keeps_bottom_mlp_consistent(
    recipe: Callable[[str], TrainConfig],
) -> None:
    config = recipe("log")
    space = Space.parse({"workload.model.embedding_dim": {"grid": [8, 32]}}, source="s")
    space.check(config)
    workloads = [with_values(config, values).workload.to_dict() for values in read_column(space)]
    own = config.workload.to_dict()["model"]
    expected = [
        {**own, "embedding_dim": dim, "bottom_mlp": [*own["bottom_mlp"][:-1], dim]}
        for dim in (8, 32)
    ]
    assert [workload["model"] for workload in workloads] == [own, *expected]


def test_grids_are_tried_once() -> None:
    space = Space.parse({"batch_size": {"grid": [1, 2, 3]}, "seed": {"grid": [0, 1]}}, source="s")
    assert read_column(space, trials=100) == [
        {},
        *({"batch_size": size, "seed": seed} for size in (1, 2, 3) for seed in (0, 1)),
    ]


def test_grid_algorithm_tries_all_choices() -> None:
    space = Space.parse(
        {"batch_size": {"grid": [1, 2]}, TOWER: {"choice": [[8, 1], [4, 1]]}}, source="s"
    )
    expected = [{"batch_size": size, TOWER: tower} for size in (1, 2) for tower in ([8, 1], [4, 1])]
    assert read_column(space, algorithm="grid") == [{}, *expected]


def test_grid_algorithm_rejects_ranges() -> None:
    space = Space.parse({"seed": {"integers": [0, 9]}}, source="s")
    rejects(
        "search: seed: integers has no list of values, required by tune.algorithm grid",
        read_column,
        space,
        algorithm="grid",
    )


def test_draws_cover_ranges() -> None:
    space = Space.parse(
        {"a": {"loguniform": [1e-6, 1.0]}, "b": {"integers": [1, 3]}, "c": {"uniform": [2, 4]}},
        source="s",
    )
    trials = read_column(space, trials=501, seed=3)[1:]
    assert sum(math.log10(trial["a"]) for trial in trials) / 500 == pytest.approx(-3, abs=0.25)
    assert {trial["b"] for trial in trials} == {1, 2, 3}
    assert sum(trial["c"] for trial in trials) / 500 == pytest.approx(3, abs=0.1)


# -- Values that depend on results
def values_tried(
    folder: Path, *, algorithm: Any = "tpe", seed: int = 0, stops_after: int = 31
) -> list[dict[str, Any]]:
    """Search the minimum of (a - 0.3)**2 and return the values of all trials."""
    folder.mkdir(exist_ok=True)
    space = Space.parse({"a": {"uniform": [0, 1]}, "b": {"choice": [[1], [2]]}}, source="s")
    options = TuneConfig(algorithm=algorithm, metric="logloss", seed=seed, trials=31)
    study = Study(str(folder / "journal.log"), space, options)
    for group in waves.groups_of(31, options):
        for number in range(len(study), max(group) + 1):
            study.create_trial(number, {})
        study.save()
        if max(group) >= stops_after:
            break
        for number in group:
            if not study.has_ended(number, 0):
                loss = (study.values(number).get("a", 0.0) - 0.3) ** 2
                study.record(number, 0, PartResult(loss, finished=True))
    return [study.values(number) for number in range(1, len(study))]


def test_tpe_values_approach_best_trial(tmp_path: Path) -> None:
    values = [trial["a"] for trial in values_tried(tmp_path)]
    first, *_, last = (values[start : start + 6] for start in range(0, 30, 6))
    distances = [statistics.mean(abs(value - 0.3) for value in group) for group in (first, last)]
    assert distances[1] < 0.5 * distances[0]


@pytest.mark.parametrize("algorithm", ["random", "tpe"])
def test_search_repeats_with_one_seed(tmp_path: Path, algorithm: str) -> None:
    one = values_tried(tmp_path / "one", algorithm=algorithm)
    assert values_tried(tmp_path / "again", algorithm=algorithm) == one
    assert values_tried(tmp_path / "other", algorithm=algorithm, seed=1) != one


def test_stopped_tpe_search_resumes(tmp_path: Path) -> None:
    expected = values_tried(tmp_path / "whole")
    assert len(values_tried(tmp_path, stops_after=15)) == 18
    assert values_tried(tmp_path) == expected


def test_optuna_reads_journal(tmp_path: Path) -> None:
    values_tried(tmp_path)
    backend = JournalFileBackend(str(tmp_path / "journal.log"))
    study = optuna.load_study(study_name="search", storage=JournalStorage(backend))
    assert len(study.trials) == 31
    assert study.best_params["a"] == pytest.approx(0.3, abs=0.1)


def test_space_rejects_invalid_files() -> None:
    for given, message in (
        ("", "must map fields to values"),
        ("a: [", "invalid YAML"),
        ("a: 3", "a: must be one of grid, choice, uniform, loguniform, integers"),
        ("a: {normal: [0, 1]}", "a: must be one of .*, got normal"),
        ("a: {choice: []}", "a.choice: must be a list of values"),
        ("a: {choice: abc}", "a.choice: must be a list of values"),
        (
            "a: {uniform: [1, 0]}",
            r"a.uniform: must be two numbers \(minimum, maximum\), got \[1, 0\]",
        ),
        ("a: {integers: [0.5, 2]}", r"a.integers: must be two integers"),
        ("a: {uniform: [0, .inf]}", "must be two numbers"),
        ("a: {loguniform: [0, 1]}", "a.loguniform: must be above 0, got 0"),
    ):
        rejects(message, Space.read, given, source="space.yaml")


def test_space_rejects_shared_and_invalid_fields() -> None:
    for field, values, message in (
        (
            "workload.model.top_mpl",
            [[1]],
            "search: workload.model.top_mpl: .* did you mean 'top_mlp'",
        ),
        (
            "workload.model.top_mlp",
            [[8, 0]],
            r"DLRMConfig.top_mlp: must each be at least 1, got \(8, 0\)",
        ),
        (
            "workload.preset.min_count",
            [2, 10],
            "cannot be searched: all trials share one Preprocessor",
        ),
        ("train_data.path", ["a"], "cannot be searched: all trials read the same rows"),
        ("scaling", [{}], "cannot be searched: a trial trains in one process"),
    ):
        rejects(
            message,
            Space.parse({field: {"choice": values}}, source="s").check,
            recipes.criteo_demo("log"),
        )


def test_tune_config_rejects_invalid_values() -> None:
    for wrong, message in (
        ({"trials": 0}, "trials: must be at least 1, got 0"),
        ({"concurrent": 0}, "concurrent: must be at least 1, got 0"),
        ({"keep_fraction": 0.6}, "keep_fraction: must be above 0 and at most 0.5, got 0.6"),
        ({"gpus_per_trial": -1.0}, "gpus_per_trial: must be at least 0, got -1.0"),
    ):
        rejects(message, TuneConfig, **wrong)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            {"train_data": {"path": "log"}, "eval_data": {"path": "other"}}, id="log for validation"
        ),
        pytest.param({"train_data": {"path": "dataset"}}, id="preprocessed"),
    ],
)
def test_tune_rejects_other_data_than_one_log(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "dataset.json").write_text("{}")
    rejects(
        "tune: requires one raw log",
        rayrec.tune,
        recipes.criteo_demo().replace(**data),
        search={"seed": {"choice": [1, 2]}},
        console=QUIET,
    )


# -- Table and page of a search
def search_result(**changes: Any) -> dict[str, Any]:
    def trial(
        number: int, values: dict[str, Any], best: float | None, **others: Any
    ) -> dict[str, Any]:
        curve = [] if best is None else [[10, best - 0.01], [20, best]]
        reported = {
            "state": "finished",
            "error": None,
            "step": 20,
            "rows": 2000,
            "seconds": 3.4,
            "checkpoint": "c",
        }
        return {
            "number": number,
            "values": values,
            "best": best,
            "curve": curve,
            **reported,
            **others,
        }

    values = {"workload.model.dropout": 0.25, "batch_size": 512}
    failed = trial(
        2, {**values, "batch_size": 1024}, None, state="failed", error="InputError: <too> large"
    )
    result = {
        "metric": "auroc",
        "best": {"number": 1, "values": values, "auroc": 0.75, "checkpoint": "c"},
    }
    result |= {"validation_rows": 1429, "test_rows": 1428, "trained_share": 0.1353, "groups": []}
    result["compared"] = {
        "auroc": {"difference": 0.012, "low": 0.002, "high": 0.022, "p_value": 0.0123}
    }
    return {**result, "trials": [trial(1, values, 0.75), trial(0, {}, 0.74), failed], **changes}


def test_search_table_shows_trials() -> None:
    lines = search_module.table_text(search_result()).splitlines()
    assert lines[0].split() == [
        "trial",
        "dropout",
        "batch_size",
        "auroc",
        "step",
        "rows",
        "seconds",
        "state",
    ]
    assert lines[1].split() == ["1", "0.25", "512", "0.75000", "20", "2,000", "3", "finished"]
    assert lines[2].split()[:4] == ["0", "recipe", "recipe", "0.74000"]
    assert lines[3].endswith("InputError: <too> large")
    assert "Trial 1 is best: auroc 0.75000 on 1,429 validation rows" in lines[4]
    assert "workload.model.dropout 0.25, batch_size 512" in lines[4]
    assert lines[5] == "Trained 13.5% of the rows of these trials: weak trials were stopped early."
    assert "On 1,428 test rows, its AUROC differs by +0.01200 from" in lines[6]
    assert "(+0.00200 to +0.02200, p = 0.0123)" in lines[6]


def test_search_table_shows_recipe_as_best() -> None:
    text = search_module.table_text(
        search_result(
            best={"number": 0, "values": {}, "auroc": 0.74, "checkpoint": "c"},
            compared=None,
            trained_share=1.0,
        )
    )
    assert "It has the settings of the recipe." in text
    assert "differs by" not in text
    assert "stopped early" not in text
    nothing = dict.fromkeys(("difference", "low", "high", "p_value"))
    assert "1,428 test rows are too few" in search_module.table_text(
        search_result(compared={"auroc": nothing})
    )


def test_search_page_shows_trials() -> None:
    page = search_module.render("first", search_result())
    words = [
        "Search first",
        "Validation auroc",
        "auroc by workload.model.dropout",
        "InputError: &lt;too&gt; large",
    ]
    assert [text for text in words if text not in page] == []
    assert "<script" not in page
