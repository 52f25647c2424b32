"""Search spaces: files, settings of trials, and errors."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from builders.faults import rejects

from rayrec import recipes
from rayrec.tuning.report import render, table_text
from rayrec.tuning.space import Space, TuneConfig, with_values
from rayrec.workloads.base import TrainConfig

RATE, TOWER, BATCH = "workload.dense_optimizer.learning_rate", "workload.model.top_mlp", "batch_size"
TEXT = f"""
{RATE}: {{loguniform: [1e-4, 1.0e-2]}}
{TOWER}: {{choice: [[64, 1], [32, 1]]}}
{BATCH}: {{grid: [256, 512]}}
"""


def test_space_file_defines_trials() -> None:
    space = Space.read(TEXT, source="space.yaml")
    space.check(recipes.criteo_demo("log"))
    trials = space.trials(9, seed=0)
    assert (trials[0], len(trials)) == ({}, 9)
    assert [trial[BATCH] for trial in trials[1:]] == [256, 512] * 4
    assert all(1e-4 <= trial[RATE] <= 1e-2 for trial in trials[1:])
    assert {tuple(trial[TOWER]) for trial in trials[1:]} == {(64, 1), (32, 1)}
    assert all(list(trial) == [RATE, TOWER, BATCH] for trial in trials[1:])
    assert space.trials(9, seed=0) == trials != space.trials(9, seed=1)
    config = with_values(recipes.criteo_demo("log"), trials[1])
    assert (config.batch_size, config.workload.model.top_mlp) == (256, tuple(trials[1][TOWER]))  # type: ignore[attr-defined]
    assert Space.of(space.plain(), source="again") == space


@pytest.mark.parametrize("recipe", [recipes.clicks, recipes.criteo_demo])
def test_embedding_dim_search_keeps_bottom_mlp_consistent(recipe: Callable[[str], TrainConfig]) -> None:
    config = recipe("log")
    space = Space.of({"workload.model.embedding_dim": {"grid": [8, 32]}}, source="s")
    space.check(config)
    workloads = [with_values(config, values).workload.to_dict() for values in space.trials(3, seed=0)]
    own = config.workload.to_dict()["model"]
    expected = [{**own, "embedding_dim": dim, "bottom_mlp": [*own["bottom_mlp"][:-1], dim]} for dim in (8, 32)]
    assert [workload["model"] for workload in workloads] == [own, *expected]


def test_grids_are_tried_once_and_draws_cover_ranges() -> None:
    space = Space.of({"batch_size": {"grid": [1, 2, 3]}, "seed": {"grid": [0, 1]}}, source="s")
    assert space.trials(100, seed=0) == [{}, *({"batch_size": size, "seed": seed} for size in (1, 2, 3) for seed in (0, 1))]
    space = Space.of({"a": {"loguniform": [1e-6, 1.0]}, "b": {"integers": [1, 3]}, "c": {"uniform": [2, 4]}}, source="s")
    trials = space.trials(2001, seed=3)[1:]
    assert sum(math.log10(trial["a"]) for trial in trials) / 2000 == pytest.approx(-3, abs=0.15)
    assert {trial["b"] for trial in trials} == {1, 2, 3}
    assert sum(trial["c"] for trial in trials) / 2000 == pytest.approx(3, abs=0.05)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "must map fields to values"),
        ("a: [", "invalid YAML"),
        ("a: 3", "a: must be one of grid, choice, uniform, loguniform, integers"),
        ("a: {normal: [0, 1]}", "a: must be one of .*, got normal"),
        ("a: {choice: []}", "a.choice: must be a list of values"),
        ("a: {choice: abc}", "a.choice: must be a list of values"),
        ("a: {uniform: [1, 0]}", r"a.uniform: must be two numbers \(minimum, maximum\), got \[1, 0\]"),
        ("a: {integers: [0.5, 2]}", r"a.integers: must be two integers"),
        ("a: {uniform: [0, .inf]}", "must be two numbers"),
        ("a: {loguniform: [0, 1]}", "a.loguniform: must be above 0, got 0"),
    ],
)
def test_space_rejects_invalid_files(given: str, message: str) -> None:
    rejects(message, Space.read, given, source="space.yaml")


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("workload.model.top_mpl", [[1]], "search: workload.model.top_mpl: .* did you mean 'top_mlp'"),
        ("workload.model.top_mlp", [[8, 0]], r"DLRMConfig.top_mlp: must each be at least 1, got \(8, 0\)"),
        ("workload.preset.min_count", [2, 10], "cannot be searched: all trials share one Preprocessor"),
        ("train_data.path", ["a"], "cannot be searched: all trials read the same rows"),
        ("scaling", [{}], "cannot be searched: a trial trains in one process"),
    ],
)
def test_space_rejects_shared_and_invalid_fields(field: str, values: list[Any], message: str) -> None:
    rejects(message, Space.of({field: {"choice": values}}, source="s").check, recipes.criteo_demo("log"))


def test_tune_config_rejects_invalid_values() -> None:
    for wrong, message in (
        ({"trials": 0}, "trials: must be at least 1, got 0"),
        ({"concurrent": 0}, "concurrent: must be at least 1, got 0"),
        ({"keep_fraction": 0.6}, "keep_fraction: must be above 0 and at most 0.5, got 0.6"),
        ({"gpus_per_trial": -1.0}, "gpus_per_trial: must be at least 0, got -1.0"),
    ):
        rejects(message, TuneConfig, **wrong)


# Table and page of a search -------------------------------------------------------------------------------------------
def search_result(**changes: Any) -> dict[str, Any]:
    def trial(number: int, values: dict[str, Any], best: float | None, **others: Any) -> dict[str, Any]:
        curve = [] if best is None else [[10, best - 0.01], [20, best]]
        told = {"state": "finished", "error": None, "step": 20, "rows": 2000, "seconds": 3.4, "checkpoint": "c"}
        return {"number": number, "values": values, "best": best, "curve": curve, **told, **others}

    values = {"workload.model.dropout": 0.25, "batch_size": 512}
    failed = trial(2, {**values, "batch_size": 1024}, None, state="failed", error="InputError: <too> large")
    result = {"metric": "auroc", "best": {"number": 1, "values": values, "auroc": 0.75, "checkpoint": "c"}}
    result |= {"validation_rows": 1429, "test_rows": 1428, "trained_share": 0.1353}
    result["compared"] = {"auroc": {"difference": 0.012, "low": 0.002, "high": 0.022, "p_value": 0.0123}}
    return {**result, "trials": [trial(1, values, 0.75), trial(0, {}, 0.74), failed], **changes}


def test_table_has_one_line_per_trial() -> None:
    lines = table_text(search_result()).splitlines()
    assert lines[0].split() == ["trial", "dropout", "batch_size", "auroc", "step", "rows", "seconds", "state"]
    assert lines[1].split() == ["1", "0.25", "512", "0.75000", "20", "2,000", "3", "finished"]
    assert lines[2].split()[:4] == ["0", "recipe", "recipe", "0.74000"]
    assert lines[3].endswith("InputError: <too> large")
    assert "Trial 1 is best: auroc 0.75000 on 1,429 validation rows" in lines[4]
    assert "workload.model.dropout 0.25, batch_size 512" in lines[4]
    assert lines[5] == "Trained 13.5% of the rows of these trials, because weak trials were stopped early."
    assert "On 1,428 test rows, its AUROC differs by +0.01200 from" in lines[6]
    assert "(+0.00200 to +0.02200, p = 0.0123)" in lines[6]


def test_search_table_omits_unknown_values_and_page_shows_trials() -> None:
    text = table_text(
        search_result(best={"number": 0, "values": {}, "auroc": 0.74, "checkpoint": "c"}, compared=None, trained_share=1.0)
    )
    assert "It has the settings of the recipe." in text
    assert "differs by" not in text
    assert "stopped early" not in text
    nothing = dict.fromkeys(("difference", "low", "high", "p_value"))
    assert "1,428 test rows are too few" in table_text(search_result(compared={"auroc": nothing}))
    page = render("first", search_result())
    words = ["Search first", "Validation auroc", "auroc by workload.model.dropout", "InputError: &lt;too&gt; large"]
    assert [text for text in words if text not in page] == []
    assert "<script" not in page
