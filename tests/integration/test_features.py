"""Several labels, shared vocabularies, weighted and cut lists: the whole road, from a log to scores by HTTP."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.click_models import make_app
from builders.faults import rejects
from builders.requests import score
from builders.runs import QUIET, check_same_in_two_parts, evaluated_and_predicted, export, short_run, train

import rayrec
from rayrec import recipes
from rayrec.inference.export.readme import FROM_RAW, LOADER
from rayrec.inference.model import open_served
from rayrec.metrics.binary import auroc
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.schema import Feature, Label, Schema

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

ROWS = 3000
NAMES: dict[str, Any] = {"dense": ("price",), "sparse": ("item", "user", "history", "tags"), "lists": ("history", "tags")}
NAMES["labels"] = (Label(name="like"), Label(name="seconds", kind="number"))
NAMES["features"] = (Feature(name="history", vocabulary="item", max_length=4), Feature(name="tags", weights="tag_weights"))
SCHEMA = Schema(label="click", timestamp="at", tokens="any", delimiter=",", **NAMES)


def _rows(seed: int = 0) -> pa.Table:
    """Users click on items that they have in their history; a like needs a click, and half of the likes are not known."""
    rng = np.random.default_rng(seed)
    item, user = rng.integers(0, 30, ROWS), rng.integers(0, 50, ROWS)
    history = [rng.integers(0, 30, rng.integers(0, 7)) for _ in range(ROWS)]
    tags = [rng.integers(0, 8, rng.integers(0, 3)) for _ in range(ROWS)]
    weights = [rng.uniform(-1, 1, len(of_row)) for of_row in tags]
    pull = np.array([float(w[t == 3].sum()) for t, w in zip(tags, weights, strict=True)])
    logit = 2.0 * (item % 3 == 0) - 1 + 3 * pull
    click = (rng.random(ROWS) < 1 / (1 + np.exp(-logit))).astype(np.int8)
    like = np.where(rng.random(ROWS) < 0.5, click & (item % 2 == 0), -1)
    lists = {"history": history, "tags": tags, "tag_weights": weights}
    columns: dict[str, Any] = {
        "click": click,
        "like": pa.array([None if value < 0 else int(value) for value in like], pa.int8()),
        "seconds": click * (1.0 + item % 5),
        "price": rng.random(ROWS),
        "item": item,
        "user": pa.array([f"u{value}" for value in user]),
        "at": pa.array(np.arange(ROWS), pa.timestamp("s")),
    }
    return pa.table({**columns, **{name: _listed(rows) for name, rows in lists.items()}})


def _listed(rows: list[np.ndarray]) -> pa.Array:
    return pa.array([of_row.tolist() for of_row in rows])


def _written(table: pa.Table, folder: Path) -> str:
    pq.write_table(table, folder / "log.parquet")
    return str(folder / "log.parquet")


def _config(recipe: rayrec.TrainConfig, folder: Path, steps: int, model: Any, **workload: Any) -> rayrec.TrainConfig:
    """Return a run that learns in some seconds, at the same rates however long it is."""
    learning = {"preset": {"min_count": 1}, "schedule": {"decay_fraction": 0.0}, "dense_optimizer": {"learning_rate": 0.02}}
    workload = {"model": model, **learning, **workload}
    return short_run(recipe, folder, steps, workload=workload, batch_size=100, min_steps_per_epoch=1)


def _dlrm(path: str, folder: Path) -> rayrec.TrainConfig:
    model = DLRMConfig(interaction="dot", embedding_dim=8, bottom_mlp=(16, 8), top_mlp=(16, 1))
    return _config(recipes.clicks(path, SCHEMA), folder, 120, model, sparse_optimizer={"learning_rate": 0.1})


def test_labels_and_weighted_lists_train_score_and_serve(tmp_path: Path) -> None:
    table = _rows()
    log = _written(table, tmp_path)
    config = _dlrm(log, tmp_path).replace(evaluate_every=60, checkpoint={"every": 60})

    # Trained in one go, and in two on preprocessed data: the same weights.
    whole = train(config, name="whole")
    assert {"auroc", "like.auroc", "like.logloss", "seconds.mse", "seconds.mae"} <= whole.metrics.keys()
    assert whole.metrics["auroc"] > 0.7
    preprocessed, preprocessor = str(tmp_path / "preprocessed"), f"{whole.folder}/preprocessor"
    rayrec.preprocess(log, out=preprocessed, format="parquet", preprocessor=preprocessor, schema=SCHEMA, console=QUIET)
    check_same_in_two_parts(config.replace(train_data={"path": preprocessed}), whole, steps=60)
    assert "table" in rayrec.plan(config.replace(workload={"preprocessor": preprocessor}))

    # Scores of every label; the first keeps the names it has alone.
    metrics, predicted = evaluated_and_predicted(whole.checkpoint, log, tmp_path / "scores")
    names = [f"{kind}{label}" for label in ("", "_like", "_seconds") for kind in ("score", "logit", "label")]
    assert predicted.column_names == ["row", *names]
    columns = {name: predicted[name].to_numpy() for name in names}
    known = ~np.isnan(columns["label_like"])
    assert known.sum() == metrics["like.rows"] == len(table) - table["like"].null_count
    assert auroc(columns["logit_like"][known], columns["label_like"][known]) == pytest.approx(metrics["like.auroc"])
    assert np.mean((columns["score_seconds"] - columns["label_seconds"]) ** 2) == pytest.approx(metrics["seconds.mse"])
    np.testing.assert_array_equal(columns["score_seconds"], columns["logit_seconds"])

    # By HTTP too, of rows with weights; an export would not apply these.
    answer = score(make_app(open_served(whole.checkpoint)), {"rows": table.select(SCHEMA.unlabelled().columns)[:20].to_pylist()})
    for name, column in (("scores", "score"), ("score_like", "score_like"), ("score_seconds", "score_seconds")):
        np.testing.assert_allclose(answer[name], columns[column][:20], atol=1e-5)
    message = r"lists have weights \(tag_weights\), unsupported in exports"
    rejects(message, export, whole.checkpoint, tmp_path / "export", parity_rows=100)


def _interests(seed: int) -> pa.Table:
    """A click depends on whether the item shown is among the last of the user's history."""
    rng = np.random.default_rng(seed)
    item = rng.integers(0, 12, ROWS)
    history = [rng.integers(0, 12, rng.integers(0, 9)) for _ in range(ROWS)]
    seen = np.array([int(shown in of_row[-6:]) for shown, of_row in zip(item, history, strict=True)])
    click = (rng.random(ROWS) < 1 / (1 + np.exp(2 - 4 * seen))).astype(np.int8)
    columns = {"click": click, "price": rng.random(ROWS), "item": item, "user": rng.integers(0, 50, ROWS)}
    return pa.table({**columns, "history": _listed(history)})


def test_sequence_ensemble_trains_exports_and_serves(tmp_path: Path) -> None:
    table = _interests(0)
    log = _written(table, tmp_path)
    history = Feature(name="history", vocabulary="item", max_length=6)
    names = {"sparse": ("item", "user", "history"), "lists": ("history",)}
    schema = SCHEMA.replace(labels=(), features=(history,), timestamp=None, **names)
    model = {"embedding_dim": 8, "attention": (16,), "mlp": (16,), "members": 2}
    config = _config(recipes.clicks_din(log, schema), tmp_path, 150, model)
    run = train(config, name="whole", checkpoint={"every": 100})
    assert run.metrics["auroc"] > 0.75

    check_same_in_two_parts(config, run, steps=90)
    metrics, predicted = evaluated_and_predicted(run.checkpoint, log, tmp_path / "scores")
    logits = predicted["logit"].to_numpy()
    assert auroc(logits, table["click"].to_numpy()) == pytest.approx(metrics["auroc"])
    rows = table.select(schema.unlabelled().columns)[:50].to_pylist()
    for quantization, tolerance in ((None, 1e-4), ("int8", 0.2)):
        out = str(tmp_path / f"{quantization}")
        export(run.checkpoint, out, parity_rows=500, quantize=quantization, max_auroc_loss=0.01)
        np.testing.assert_allclose(score(make_app(open_served(out)), {"rows": rows})["logits"], logits[:50], atol=tolerance)
    # The history's table is the item's, and stored once.
    manifest = json.loads((tmp_path / "None" / "manifest.json").read_text())
    assert manifest["model"]["tables"] == ["item", "user", "item"]
    plain, checkpoint = open_served(f"{tmp_path}/None"), open_served(run.checkpoint)
    assert plain.scorer.weight_bytes == checkpoint.scorer.weight_bytes
    program: dict[str, Any] = {}
    exec(f"{LOADER}{FROM_RAW}".replace('"."', repr(f"{tmp_path}/None")).replace("[{}, {}]", repr(rows)), program)
    dense, ids = program["encoder"].encode(rows)
    np.testing.assert_allclose(program["score"](dense, ids), logits[:50], atol=1e-4)
    message = "column history has a varying number of ids"
    rejects(message, export, run.checkpoint, tmp_path / "triton", parity_rows=100, triton=True)


def test_unsupported_model_is_rejected_before_training(tmp_path: Path) -> None:
    config = _dlrm("nowhere.parquet", tmp_path).replace(workload={"model": FinalNetConfig()})
    rejects(r"schema.labels: must be one label for FinalNetConfig, got click, like, seconds", train, config)
