"""Permutation importance of features of click models, regression and retrieval."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from builders.click_models import DLRM, hashed_preprocessor, make_preprocessor, save_clicks
from builders.faults import rejects
from builders.runs import QUIET
from builders.scored_rows import rows_file, scored, trained

import rayrec
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn
from rayrec.inference.config import EvaluationConfig
from rayrec.inference.evaluate import evaluate
from rayrec.inference.importance import InputFeature, input_features
from rayrec.inference.result_tables import evaluation_text
from rayrec.models.retrieval.two_tower import TwoTowerConfig
from rayrec.schema import Feature, Label, Schema

SCHEMA = Schema(
    label="click",
    dense=("age", "price"),
    sparse=("user", "friend", "seen"),
    lists=("seen",),
    delimiter=",",
    list_delimiter="|",
    features=(
        Feature(name="friend", vocabulary="user"),
        Feature(name="seen", weights="factors"),
    ),
)
ROWS = 3000


def preprocessor_for(schema: Schema) -> Preprocessor:
    numbers = (DenseColumn(mean=20.0, scale=0.1, indicator=True), DenseColumn(mean=5, scale=0.5))
    sizes = [40 + number for number in range(len(schema.sparse))]
    if schema.feature("friend").vocabulary:
        sizes[1] = sizes[0]
    return hashed_preprocessor(sizes, schema, dense=numbers)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    save_clicks(folder, model=DLRM, preprocessor=preprocessor_for(SCHEMA), scale=100.0)
    return str(folder)


@pytest.fixture(scope="module")
def log(run: str, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Return rows that a model trained for, whose clicks follow its scores."""
    rng = np.random.default_rng(0)
    lists = [[str(item) for item in rng.integers(0, 9, rng.integers(0, 4))] for _ in range(ROWS)]
    frame = pd.DataFrame(
        {
            "age": rng.integers(0, 50, ROWS).astype(float),
            "price": rng.integers(0, 10, ROWS) / 2,
            "user": [f"u{number}" for number in rng.integers(0, 30, ROWS)],
            "friend": [f"u{number}" for number in rng.integers(0, 30, ROWS)],
            "seen": ["|".join(items) for items in lists],
            "factors": ["|".join(["0.5", "2", "1"][: len(items)]) for items in lists],
        }
    )
    frame.loc[rng.random(ROWS) < 0.2, "age"] = np.nan
    folder = tmp_path_factory.mktemp("log")
    rayrec.predict(run, frame, out=str(folder / "scores"), cluster_address="none", console=QUIET)
    logits = pq.read_table(folder / "scores").column("logit").to_numpy()
    noisy = logits + rng.normal(size=ROWS) * logits.std()
    return frame.assign(click=(noisy > np.median(noisy)).astype(int))


def measured(run: str, data: Any, **options: Any) -> dict[str, Any]:
    return rayrec.evaluate(run, data, cluster_address="none", console=QUIET, **options)


def by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {feature["feature"]: feature for feature in result["importance"]["features"]}


def test_loss_matches_permuted_log(run: str, log: pd.DataFrame) -> None:
    result = measured(run, log, importance=True, importance_repeats=1, seed=3)
    features = by_name(result)
    assert set(features) == {"age", "price", "user", "friend", "seen"}
    columns = [["age"], ["price"], ["user"], ["friend"], ["seen", "factors"]]
    for number, names in enumerate(columns):
        order = np.random.default_rng([3, number, 0]).permutation(ROWS)
        permuted = measured(run, log.assign(**{n: log[n].to_numpy()[order] for n in names}))
        for metric, sign in (("auroc", 1), ("logloss", -1)):
            loss = sign * (result[metric] - permuted[metric])
            assert features[names[0]][metric]["loss"] == pytest.approx(loss, abs=1e-6), names
    assert features["user"]["auroc"]["loss"] > 0.01


def test_features_are_sorted_and_intervals_contain_loss(run: str, log: pd.DataFrame) -> None:
    importance = measured(run, log, importance=True)["importance"]
    losses = [feature["auroc"] for feature in importance["features"]]
    assert [loss["loss"] for loss in losses] == sorted(
        (loss["loss"] for loss in losses), reverse=True
    )
    assert all(loss["low"] < loss["loss"] < loss["high"] for loss in losses)
    assert (importance["rows"], importance["repeats"]) == (ROWS, 5)


def test_result_depends_on_seed_alone(run: str, log: pd.DataFrame) -> None:
    first, second, third = (
        measured(run, log, importance=True, importance_rows=1000, seed=seed, batch_rows=batch_rows)
        for seed, batch_rows in ((1, 100), (1, 8192), (2, 100))
    )
    assert first["importance"]["rows"] == 1000
    assert first["importance"] == second["importance"]
    assert by_name(first)["user"]["auroc"] != by_name(third)["user"]["auroc"]


def test_table_lists_features(run: str, log: pd.DataFrame) -> None:
    result = measured(run, log, importance=True, importance_repeats=2, confidence=0.9, resamples=2)
    text = evaluation_text(result)
    assert "importance on 3,000 rows, 2 permutations of each feature, intervals of 90%:" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("friend"))
    assert f"{by_name(result)['friend']['auroc']['loss']:+.5f}" in row


def test_page_shows_result(run: str, log: pd.DataFrame, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = rayrec.evaluate(
        run,
        log,
        importance=True,
        importance_rows=500,
        importance_repeats=1,
        slice_by=("user",),
        slice_top=2,
        confidence=0.9,
        resamples=20,
        report=str(page),
        console=QUIET,
    )
    shown = page.read_text()
    for feature in result["importance"]["features"]:
        assert shown.count(f">{feature['feature']}<") == 3  # Chart, its numbers, and table
        assert f"{feature['auroc']['loss']:+.5f}" in shown
    assert f"{result['auroc']:.5f}" in shown
    low, high = result["intervals"]["auroc"]
    assert f"{low:.5f} to {high:.5f}" in shown
    assert 'id="by-user"' in shown


def test_unwritable_page_is_rejected_before_scoring(run: str, tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    rejects(
        f"{folder}/page.html: cannot write the report there",
        lambda: rayrec.evaluate(run, "/no/log", report=f"{folder}/page.html", console=QUIET),
    )


def test_inputs_of_one_feature_are_permuted_together() -> None:
    aligned = SCHEMA.replace(
        sparse=("user", "friend", "seen", "shops"),
        lists=("seen", "shops"),
        features=(Feature(name="shops", aligned_with="seen"),),
    )
    assert input_features(preprocessor_for(aligned)) == [
        InputFeature("age", "dense", dense=(0, 2)),
        InputFeature("price", "dense", dense=(1,)),
        InputFeature("user", "sparse", sparse=(0,)),
        InputFeature("friend", "sparse", sparse=(1,)),
        InputFeature("seen + shops", "list", sparse=(2, 3)),
    ]


@pytest.mark.parametrize(("kind", "metrics"), [("number", ["mse", "mae"]), ("count", ["deviance"])])
def test_regression_reports_error_metrics(
    tmp_path: Path, log: pd.DataFrame, kind: Any, metrics: list[str]
) -> None:
    schema = SCHEMA.replace(label=None, labels=(Label(name="views", kind=kind, missing="fault"),))
    save_clicks(tmp_path, model=DLRM, preprocessor=preprocessor_for(schema))
    result = measured(str(tmp_path), log.assign(views=log["click"] * 3), importance=True)
    for feature in result["importance"]["features"]:
        assert [name for name in feature if name not in ("feature", "kind")] == metrics


def test_other_recipe_is_rejected(tmp_path: Path) -> None:
    checkpoint, _ = trained(tmp_path / "run")
    rejects(
        "importance: recipe scored has no features",
        evaluate,
        checkpoint,
        rows_file(tmp_path, 5),
        config=scored(),
        options=EvaluationConfig(importance=True),
        console=QUIET,
    )


def test_single_feature_is_rejected(tmp_path: Path) -> None:
    schema = Schema(label="click", sparse=("user",), delimiter=",")
    save_clicks(tmp_path, model=DLRM, preprocessor=hashed_preprocessor([9], schema))
    data = pd.DataFrame({"click": [0, 1], "user": ["a", "b"]})
    rejects("a single feature, user, whose", measured, str(tmp_path), data, importance=True)


def test_retrieval_reports_objective(tmp_path: Path) -> None:
    schema = Schema(label=None, sparse=("user", "item"), delimiter=",")
    preprocessor = make_preprocessor(schema)
    save_clicks(tmp_path, model=TwoTowerConfig(k=2), preprocessor=preprocessor)
    data = pd.DataFrame({name: [f"{name}{row % 4}" for row in range(40)] for name in schema.sparse})
    features = by_name(measured(str(tmp_path), data, importance=True))
    assert set(features) == {"user", "item"}
    assert set(features["item"]) == {"feature", "kind", "ndcg_at_2", "loss"}


def test_ensemble_has_importance(run: str, log: pd.DataFrame, tmp_path: Path) -> None:
    both = str(tmp_path / "both")
    rayrec.ensemble([run, run], out=both)
    options: dict[str, Any] = {"importance": True, "importance_repeats": 1}
    alone = by_name(measured(run, log, **options))
    merged = by_name(measured(both, log, **options))
    assert merged["user"]["auroc"]["loss"] == pytest.approx(alone["user"]["auroc"]["loss"])
