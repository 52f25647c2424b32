"""Rows in groups: what training, evaluation and slices say of the order within them."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from builders.faults import rejects
from builders.runs import QUIET, evaluated_and_predicted, short_run, train
from sklearn.metrics import roc_auc_score

import rayrec
from rayrec import recipes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def test_training_and_evaluation_report_same_metrics(tmp_path: Path) -> None:
    rayrec.generate(str(tmp_path / "log"), rows=3000, seed=0)
    log = str(tmp_path / "log" / "train.txt")
    workload = {"schema": recipes.criteo_demo().workload.schema.replace(group="cat_5")}  # type: ignore[attr-defined]
    config = short_run(recipes.criteo_demo(log), tmp_path, 15, workload=workload, batch_size=64, eval_data={"path": log})
    result = train(config)
    evaluate = partial(rayrec.evaluate, result.checkpoint, console=QUIET)
    metrics = evaluate(log, slice_by=("day",))
    _, predicted = evaluated_and_predicted(result.checkpoint, log, tmp_path / "scores")
    logits, labels = predicted["logit"].to_numpy(), predicted["label"].to_numpy()
    place = config.workload.schema.columns.index("cat_5")  # type: ignore[attr-defined]
    groups = np.array([line.split("\t")[place] for line in Path(log).read_text().splitlines()])
    total, rows = 0.0, 0
    for group in set(groups) - {""}:
        mine = groups == group
        if 0 < labels[mine].sum() < mine.sum():
            total, rows = total + roc_auc_score(labels[mine], logits[mine]) * mine.sum(), rows + mine.sum()
    assert metrics["gauc"] == pytest.approx(total / rows)
    assert metrics["gauc_rows"] == rows > 1000
    assert metrics["hit_rate_at_10"] >= metrics["recall_at_10"] > 0
    assert all(0 < piece["gauc_rows"] < rows for piece in metrics["slices"]["day"])
    assert result.summary["metrics"]["gauc"] == pytest.approx(metrics["gauc"], abs=1e-6)

    at_k = evaluate(log, ranking_k=(1, 10))
    assert at_k["recall_at_10"] == metrics["recall_at_10"] == pytest.approx(result.summary["metrics"]["recall_at_10"])
    assert at_k["ndcg_at_1"] == at_k["hit_rate_at_1"] < at_k["hit_rate_at_10"]

    # A column is also chosen when a checkpoint is evaluated; preprocessed rows have no raw values to group by.
    assert evaluate(log, group="cat_8")["gauc"] != metrics["gauc"]
    ready = str(tmp_path / "ready")
    rayrec.preprocess(log, out=ready, format="parquet", preprocessor=f"{result.folder}/preprocessor", console=QUIET)
    rejects(r"schema\.group: .*ready is preprocessed and has no values of cat_5", evaluate, ready)
    rejects(r"schema\.group: .*ready is preprocessed", train, config, name="ready", eval_data={"path": ready})
