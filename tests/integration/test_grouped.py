"""Rows in groups: what training, evaluation and slices say of the order within them."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders.runs import QUIET, train
from sklearn.metrics import roc_auc_score

import rayrec
from rayrec import recipes
from rayrec.config import InputError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def test_training_and_evaluation_report_same_metrics(tmp_path: Path) -> None:
    rayrec.generate(str(tmp_path / "log"), rows=3000, seed=0)
    log = str(tmp_path / "log" / "train.txt")
    config = recipes.criteo_demo(log)
    workload = config.workload.replace(schema=config.workload.schema.replace(group="cat_5"))  # type: ignore[attr-defined]
    config = config.replace(
        name="grouped", workload=workload, storage_path=str(tmp_path), steps=15, evaluate_every=15, batch_size=64,
        scaling={"num_workers": 1}, eval_data={"path": log},
    )  # fmt: skip
    result = train(config)
    metrics = rayrec.evaluate(result.checkpoint, log, slice_by=("day",), console=QUIET)
    rayrec.predict(result.checkpoint, log, out=str(tmp_path / "scores"), console=QUIET)

    predicted = pq.read_table(tmp_path / "scores").sort_by("row")
    logits, labels = predicted["logit"].to_numpy(), predicted["label"].to_numpy()
    place = config.workload.schema.columns.index("cat_5")  # type: ignore[attr-defined]
    groups = np.array([line.split("\t")[place] for line in Path(log).read_text().splitlines()])
    total, rows = 0.0, 0
    for group in set(groups) - {""}:
        mine = groups == group
        if 0 < labels[mine].sum() < mine.sum():
            total, rows = total + roc_auc_score(labels[mine], logits[mine]) * mine.sum(), rows + mine.sum()
    assert rows > 1000
    assert metrics["gauc"] == pytest.approx(total / rows)
    assert metrics["gauc_rows"] == rows
    assert metrics["hit_rate_at_10"] >= metrics["recall_at_10"] > 0
    assert all(0 < piece["gauc_rows"] < rows for piece in metrics["slices"]["day"])
    assert result.summary["metrics"]["gauc"] == pytest.approx(metrics["gauc"], abs=1e-6)

    at_k = rayrec.evaluate(result.checkpoint, log, ranking_k=(1, 10), console=QUIET)
    assert at_k["recall_at_10"] == metrics["recall_at_10"] == pytest.approx(result.summary["metrics"]["recall_at_10"])
    assert at_k["ndcg_at_1"] == at_k["hit_rate_at_1"] < at_k["hit_rate_at_10"]

    # A column is also chosen when a checkpoint is evaluated; preprocessed rows have no raw values to group by.
    assert rayrec.evaluate(result.checkpoint, log, group="cat_8", console=QUIET)["gauc"] != metrics["gauc"]
    ready = str(tmp_path / "ready")
    rayrec.preprocess(log, out=ready, format="parquet", preprocessor=str(tmp_path / "grouped" / "preprocessor"), console=QUIET)
    with pytest.raises(InputError, match=r"schema\.group: .*ready is preprocessed and has no values of cat_5"):
        rayrec.evaluate(result.checkpoint, ready, console=QUIET)
    with pytest.raises(InputError, match=r"schema\.group: .*ready is preprocessed"):
        train(config, name="ready", eval_data={"path": ready})
