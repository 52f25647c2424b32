"""Models of logs with numbers: gaps, times after the training rows, warm starts, and the counts of
numbers beyond the range.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.runs import LEAN, QUIET, events_of, threads_of, train

import rayrec
from rayrec import recipes
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.observe.console import Console
from rayrec.schema import Schema
from rayrec.training import trainer
from rayrec.training.result import Result

NUMBERS = ("seen", "year", "price", "age")
SCHEMA = Schema(label="click", dense=NUMBERS, sparse=("user", "movie"))
DAY_S = 86400.0
WEEK_ROWS = 9000
TEST_ROWS = 12_000


def rows(count: int, seed: int) -> dict[str, np.ndarray]:
    """Return a week of rows in time order. The user, the movie and the age matter, the other
    numbers do not.
    """
    rng = np.random.default_rng(seed)
    effects = np.random.default_rng(0)
    user_rows = effects.normal(size=60)
    movie_effect = effects.normal(size=40)
    user = rng.integers(0, 60, count)
    movie = rng.integers(0, 40, count)
    age = rng.integers(18, 90, count)
    logits = user_rows[user] + movie_effect[movie] + (age - 54) / 40 - 0.5
    return {
        "click": (rng.uniform(size=count) < 1 / (1 + np.exp(-logits))).astype(np.int8),
        "seen": np.sort(1.7e9 + rng.uniform(0, 7 * DAY_S, count)),
        "year": rng.integers(1950, 2021, count).astype(float),
        "price": np.exp(rng.normal(3, 1, count)),
        "age": age.astype(float),
        "user": user,
        "movie": movie,
    }


def write(
    path: Path, columns: dict[str, np.ndarray], *, gaps: float = 0.0, later_s: float = 0.0
) -> str:
    rng = np.random.default_rng(5)
    values = {**columns, "seen": columns["seen"] + later_s}
    has_gap = {
        name: (rng.uniform(size=len(column)) < gaps) & (name in NUMBERS)
        for name, column in values.items()
    }
    masked = {name: pa.array(column, mask=has_gap[name]) for name, column in values.items()}
    pq.write_table(pa.table(masked), path)
    return str(path)


def fitted(folder: Path, log: str, name: str, **changes: Any) -> Result:
    config = recipes.clicks(log, SCHEMA).replace(
        min_steps_per_epoch=1, batch_size=128, epochs=3, scaling=threads_of(1), **LEAN
    )
    return train(
        config,
        storage_path=str(folder),
        name=name,
        **changes,
    )


def select_metrics(result: Result, log: str) -> dict[str, Any]:
    return rayrec.evaluate(str(result.checkpoint), log, console=QUIET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("numbers")


@pytest.fixture(scope="module")
def complete(folder: Path) -> Result:
    return fitted(folder, write(folder / "week.parquet", rows(WEEK_ROWS, 1)), "complete")


@pytest.fixture(scope="module")
def with_gaps(folder: Path) -> Result:
    return fitted(folder, write(folder / "gaps.parquet", rows(WEEK_ROWS, 1), gaps=0.05), "gaps")


@pytest.fixture(scope="module")
def test_log(folder: Path) -> str:
    return write(folder / "test.parquet", rows(TEST_ROWS, 2))


def test_gaps_in_numbers_hardly_cost_auroc(
    folder: Path, complete: Result, with_gaps: Result, test_log: str
) -> None:
    expected = select_metrics(complete, test_log)["auroc"]
    assert expected > 0.75
    assert select_metrics(with_gaps, test_log)["auroc"] == pytest.approx(expected, abs=0.005)
    holes = write(folder / "holes.parquet", rows(TEST_ROWS, 2), gaps=0.05)
    # The age of 5 % of the rows is gone, which no rule brings back.
    assert select_metrics(with_gaps, holes)["auroc"] == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("days", [30, 180])
def test_later_times_keep_auroc_and_calibration(
    folder: Path, complete: Result, test_log: str, days: int
) -> None:
    expected = select_metrics(complete, test_log)
    later = select_metrics(
        complete, write(folder / "later.parquet", rows(TEST_ROWS, 2), later_s=days * DAY_S)
    )
    assert later["auroc"] == pytest.approx(expected["auroc"], abs=0.01)
    assert 0.8 < later["calibration"] < 1.25
    assert later["clipped"]["seen"] == {"clipped": TEST_ROWS, "share": 1.0}


def test_evaluation_warns_of_clipped_columns(
    folder: Path, complete: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(folder / "next.parquet", rows(500, 3), later_s=30 * DAY_S)
    rayrec.evaluate(str(complete.checkpoint), log, console=Console())
    assert (
        "Numbers are beyond the range of the training rows, and used as its end: seen (100.0% of "
        "its values)"
    ) in capsys.readouterr().err


def test_prediction_summary_counts_clipped_numbers(folder: Path, complete: Result) -> None:
    log = write(folder / "scored.parquet", rows(500, 3), later_s=30 * DAY_S)
    summary = rayrec.predict(
        str(complete.checkpoint), log, out=str(folder / "scores"), console=QUIET
    )
    assert summary["clipped"]["seen"] == {"clipped": 500, "share": 1.0}
    assert pq.read_table(folder / "scores").column_names == ["row", "score", "logit", "label"]


def test_run_events_count_clipped_numbers(complete: Result) -> None:
    samples = events_of(complete.folder, "samples")[-1]["samples"]
    training, test = (sample for sample in samples if sample["kind"] == "numbers")
    assert (training["set"], test["set"]) == ("training", "test")
    assert {column["column"]: column["clipped"] for column in training["columns"]} == dict.fromkeys(
        NUMBERS, 0
    )
    # The run's test rows are the last hours of the week.
    assert test["columns"][0]["clipped"] == test["columns"][0]["values"]
    (warning,) = events_of(complete.folder, "data_warning")
    assert warning["warning"].startswith(
        "Numbers of the test rows are beyond the range of the training rows"
    )


def test_piecewise_numbers_keep_auroc_with_gaps_and_later_times(
    folder: Path, complete: Result, test_log: str
) -> None:
    gaps = write(folder / "piecewise.parquet", rows(WEEK_ROWS, 1), gaps=0.05)
    run = fitted(folder, gaps, "piecewise", workload={"model": {"first_order": True}})
    expected = select_metrics(complete, test_log)["auroc"]
    holes = write(folder / "later_holes.parquet", rows(TEST_ROWS, 2), gaps=0.05, later_s=30 * DAY_S)
    metrics = select_metrics(run, holes)
    assert metrics["auroc"] == pytest.approx(expected, abs=0.01)
    assert 0.8 < metrics["calibration"] < 1.25


@pytest.mark.parametrize("format", ["npy", "parquet"])
def test_preprocessed_gaps_score_as_log(folder: Path, with_gaps: Result, format: str) -> None:
    log = write(folder / f"{format}.parquet", rows(500, 3), gaps=0.05, later_s=30 * DAY_S)
    ready = str(folder / f"ready_{format}")
    stored = f"{with_gaps.checkpoint}/preprocessor"
    rayrec.preprocess(
        log, out=ready, format=format, preprocessor=stored, schema=SCHEMA, console=QUIET
    )
    names = ("auroc", "logloss", "clipped")
    log_result = select_metrics(with_gaps, log)
    folder_metrics = select_metrics(with_gaps, ready)
    assert {name: folder_metrics[name] for name in names} == {
        name: log_result[name] for name in names
    }
    assert log_result["clipped"]["seen"]["share"] == 1.0


def test_ensemble_keeps_gap_inputs_and_bounds(
    folder: Path, with_gaps: Result, test_log: str
) -> None:
    out = str(folder / "ensemble")
    rayrec.ensemble([str(with_gaps.checkpoint), str(with_gaps.checkpoint)], out=out)
    stored = Preprocessor.load(f"{out}/preprocessor")
    assert stored.hash() == Preprocessor.load(f"{with_gaps.checkpoint}/preprocessor").hash()
    assert rayrec.evaluate(out, test_log, console=QUIET)["auroc"] == pytest.approx(
        select_metrics(with_gaps, test_log)["auroc"]
    )


def test_gaps_add_named_inputs_to_model_and_export(folder: Path, with_gaps: Result) -> None:
    preprocessor = Preprocessor.load(f"{with_gaps.checkpoint}/preprocessor")
    names = [*NUMBERS, *(f"{name} is missing" for name in NUMBERS)]
    assert list(preprocessor.inputs.dense) == names
    report = rayrec.export(str(with_gaps.checkpoint), out=str(folder / "export"))
    assert report["parity"]["failure"] is None
    model = json.loads((folder / "export" / "manifest.json").read_text())["model"]
    assert (model["num_dense"], model["dense"]) == (8, names)


def test_graph_has_inputs_of_gaps(folder: Path, with_gaps: Result) -> None:
    pytest.importorskip("onnxruntime")
    report = rayrec.export(str(with_gaps.checkpoint), out=str(folder / "graph"), triton=True)
    assert report["triton"]["max_relative_difference"] < 1e-5
    config = (folder / "graph" / "triton" / "click_model" / "config.pbtxt").read_text()
    assert 'name: "dense" data_type: TYPE_FP32 dims: [ 8 ]' in config


def test_training_notes_growing_columns(
    folder: Path, complete: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipes.clicks(str(folder / "week.parquet"), SCHEMA).replace(
        steps=1, scaling=threads_of(1), **LEAN
    )
    trainer.train(config.replace(storage_path=str(folder), name="noted"), console=Console())
    printed = " ".join(capsys.readouterr().err.split())
    assert "week.parquet: column seen only grows from row to row" in printed
    assert "declare a time as `timestamp`" in printed
    assert "column price only" not in printed


def test_warm_start_keeps_old_inputs(
    folder: Path, complete: Result, with_gaps: Result, test_log: str
) -> None:
    gaps = str(folder / "gaps.parquet")
    continued = fitted(folder, gaps, "continued", init_from=str(complete.checkpoint), epochs=1)
    assert Preprocessor.load(f"{continued.checkpoint}/preprocessor").inputs.dense == NUMBERS
    assert (
        select_metrics(continued, test_log)["auroc"]
        > select_metrics(complete, test_log)["auroc"] - 0.01
    )
    week = str(folder / "week.parquet")
    repeated = fitted(folder, week, "kept", init_from=str(with_gaps.checkpoint), epochs=1)
    assert len(Preprocessor.load(f"{repeated.checkpoint}/preprocessor").inputs.dense) == 8


def test_earlier_checkpoint_continues(folder: Path, complete: Result, test_log: str) -> None:
    """A run without bounds and with raw 0 for missing numbers, as an earlier version wrote it."""
    stored = Preprocessor.load(f"{complete.checkpoint}/preprocessor")
    plain = [
        dataclasses.replace(
            rule,
            lower=None,
            upper=None,
            mean_low=0.0,
            missing_value=-5.0,
        )
        for rule in stored.dense
    ]
    dataclasses.replace(stored, dense=tuple(plain)).save(str(folder / "earlier"))
    run = fitted(
        folder,
        str(folder / "week.parquet"),
        "earlier_run",
        workload={"preprocessor": str(folder / "earlier")},
    )
    assert "clipped" not in select_metrics(run, test_log)
    continued = fitted(
        folder, str(folder / "gaps.parquet"), "after_it", init_from=str(run.checkpoint), epochs=1
    )
    rules = Preprocessor.load(f"{continued.checkpoint}/preprocessor").dense
    assert [(rule.missing_value, rule.indicator, rule.lower is None) for rule in rules] == [
        (0.0, False, False)
    ] * 4
