"""Models of all kinds go the whole road: train, resume, evaluate, predict, export, HTTP."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import own_click_model, shop
from builders.click_models import make_app
from builders.faults import rejects
from builders.interactions import ITEMS, small, write_log
from builders.logs import unlabelled
from builders.requests import ask, score
from builders.runs import (
    QUIET,
    check_same_in_two_parts,
    check_same_run,
    evaluated_and_predicted,
    export,
    short_run,
    train,
)
from hosts.processes import torchrun
from sklearn.metrics import roc_auc_score

import rayrec
from rayrec import recipes
from rayrec.inference.export.write import FROM_RAW, LOADER
from rayrec.inference.model import open_served
from rayrec.metrics.binary import auroc, sigmoid
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.schema import Feature, Label, Schema
from rayrec.serve.config import ServeConfig
from rayrec.serve.deployment import custom_network_class

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

FILE = own_click_model.__file__
ROWS = 3000


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("log")
    rayrec.generate(str(folder), rows=ROWS, seed=0)
    return str(folder / "train.txt")


def test_custom_model_trains_exports_and_serves(log: str, tmp_path: Path) -> None:
    recipe = own_click_model.own_model
    own = own_click_model.OwnConfig
    # one that does not look at the last step
    config = recipe(log).replace(
        workload={"schedule": {"decay_fraction": 0.0}},
        storage_path=str(tmp_path),
        steps=20,
        evaluate_every=10,
        checkpoint={"every": 10},
    )

    # Trained in one go, and in two: with the same weights.
    whole = train(config, name="whole")
    check_same_in_two_parts(config, whole, steps=10)
    schema = config.workload.schema  # type: ignore[attr-defined]
    inputs = config.workload.preset.inputs(schema)  # type: ignore[attr-defined]
    assert "multiply-adds a row" in rayrec.plan(config, tables=[100] * len(inputs.sparse))

    # Evaluated and predicted with: the same scores.
    metrics, predicted = evaluated_and_predicted(
        whole.checkpoint,
        log,
        tmp_path / "scores",
        recipe=recipe,
    )
    assert metrics["rows"] == len(predicted) == ROWS
    assert auroc(predicted["logit"].to_numpy(), predicted["label"].to_numpy()) == pytest.approx(
        metrics["auroc"]
    )

    # Exported as it is and with small tables, and opened again, by its own class alone.
    served = {whole.checkpoint: 1e-5}
    for quantize, tolerance in ((None, 1e-5), ("int8", 0.05)):
        out = str(tmp_path / f"export_{quantize}")
        export(
            whole.checkpoint,
            out,
            recipe=recipe,
            quantize=quantize,
            parity_rows=500,
        )
        rejects(
            r"network must be rayrec's, got .*OwnConfig\. Pass its training recipe",
            open_served,
            out,
        )
        served[out] = tolerance
    text = unlabelled(Path(log).read_bytes().splitlines(keepends=True)[:20])
    for place, tolerance in served.items():
        scores = score(make_app(open_served(place, own=own)), text)["scores"]
        np.testing.assert_allclose(
            scores,
            sigmoid(predicted["logit"].to_numpy()[:20]),
            atol=tolerance,
        )


def test_server_accepts_recipe_of_custom_model() -> None:
    assert custom_network_class(None) is None
    # of the file, which is another module than the one imported here
    own = custom_network_class(f"{FILE}:own_model")
    assert own is not None
    assert own.__qualname__ == own_click_model.OwnConfig.__qualname__
    rejects(
        r"does not train a click model\. Only click and retrieval models can be served",
        custom_network_class,
        f"{FILE}:own_images",
    )
    rejects(r"must be FILE\.py:FUNCTION, got 'criteo_demo'", ServeConfig, recipe="criteo_demo")


# -- Rows in groups: what training, evaluation and slices say of the order within them
def grouped_auroc(groups: np.ndarray, labels: np.ndarray, logits: np.ndarray) -> tuple[float, int]:
    """Return the mean AUROC of groups with both labels, weighted by their rows, and these rows."""
    total = 0.0
    rows = 0
    for group in set(groups) - {""}:
        group_mask = groups == group
        if 0 < labels[group_mask].sum() < group_mask.sum():
            total += roc_auc_score(labels[group_mask], logits[group_mask]) * group_mask.sum()
            rows += group_mask.sum()
    return total / rows, rows


def test_training_and_evaluation_report_same_metrics(tmp_path: Path) -> None:
    rayrec.generate(str(tmp_path / "log"), rows=3000, seed=0)
    log = str(tmp_path / "log" / "train.txt")
    schema = recipes.criteo_demo().workload.schema  # type: ignore[attr-defined]
    # Which would rank all of these rows right
    config = short_run(
        recipes.criteo_demo(log),
        tmp_path,
        15,
        workload={"schema": schema.replace(group="cat_5"), "model": {"first_order": False}},
        batch_size=64,
        eval_data={"path": log},
    )
    result = train(config)
    evaluate = partial(rayrec.evaluate, result.checkpoint, console=QUIET)
    metrics = evaluate(log, slice_by=("day",))
    _, predicted = evaluated_and_predicted(result.checkpoint, log, tmp_path / "scores")
    logits = predicted["logit"].to_numpy()
    labels = predicted["label"].to_numpy()
    place = config.workload.schema.columns.index("cat_5")  # type: ignore[attr-defined]
    groups = np.array([line.split("\t")[place] for line in Path(log).read_text().splitlines()])
    gauc, rows = grouped_auroc(groups, labels, logits)
    assert metrics["gauc"] == pytest.approx(gauc)
    assert metrics["gauc_rows"] == rows > 1000
    assert metrics["hit_rate_at_10"] >= metrics["recall_at_10"] > 0
    assert all(0 < piece["gauc_rows"] < rows for piece in metrics["slices"]["day"])
    for name, value in result.metrics.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name
    assert (metrics["bad_rows"], metrics["checkpoint"]) == (0, result.checkpoint)
    assert metrics["preprocessor"] == result.summary["preprocessor"]

    at_k = evaluate(log, k=(1, 10))
    assert (
        at_k["recall_at_10"]
        == metrics["recall_at_10"]
        == pytest.approx(result.summary["metrics"]["recall_at_10"])
    )
    assert at_k["ndcg_at_1"] == at_k["hit_rate_at_1"] < at_k["hit_rate_at_10"]

    # A column is also chosen when a checkpoint is evaluated; preprocessed rows have no raw values
    # to group by.
    assert evaluate(log, group="cat_8")["gauc"] != metrics["gauc"]
    ready = str(tmp_path / "ready")
    rayrec.preprocess(
        log,
        out=ready,
        format="parquet",
        preprocessor=f"{result.folder}/preprocessor",
        console=QUIET,
    )
    rejects(r"schema\.group: .*ready is preprocessed and has no values of cat_5", evaluate, ready)
    rejects(
        r"schema\.group: .*ready is preprocessed",
        train,
        config,
        name="ready",
        eval_data={"path": ready},
    )


# -- Retrieval models
def recall_of_index(predicted: Any, items: np.ndarray) -> float:
    """Return the recall at 5 of each row's item among all items, by predicted vectors."""
    user_vectors = np.array(predicted["user"].to_pylist())
    item_vectors = np.array(predicted["item"].to_pylist())
    catalog, place = np.unique(items, return_index=True)
    scores = user_vectors @ item_vectors[place].T
    own = scores[np.arange(len(scores)), np.searchsorted(catalog, items)]
    return np.mean((scores > own[:, None] + 1e-6).sum(1) < 5)


def check_served(path: str, rows: pa.Table, predicted: Any, columns: Sequence[str]) -> None:
    """Check that the first rows are answered with their predictions."""
    app = make_app(open_served(path))
    asked = [{key: value for key, value in row.items() if value} for row in rows.to_pylist()]
    answer = score(app, {"rows": asked})
    for column in columns:
        expected = predicted[column].to_pylist()[: len(asked)]
        if column == "items":
            assert [row[:1] for row in answer[column]] == [row[:1] for row in expected]
        else:
            np.testing.assert_allclose(answer[column], expected, atol=0.2)
    described = ask(app, "GET", "/openapi.json").json()
    assert set(columns) <= set(json.dumps(described).replace('"', " ").split())


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("next_item", "sasrec"),
        pytest.param("next_item", "esasrec", marks=pytest.mark.exhaustive),
        pytest.param("next_item", "hstu", marks=pytest.mark.exhaustive),
        ("next_item", "fuxi"),
        ("two_tower", "two_tower"),
    ],
)
def test_retrieval_model_trains_exports_and_serves(name: str, model: str, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", name)
    config = small(name, log, tmp_path, 60, checkpoint={"every": 30})
    if model not in ("sasrec", "two_tower"):
        config = config.replace(workload={"model": {"class": model, "dropout": 0.1, "k": 5}})
    whole = train(config, name="whole")
    check_same_in_two_parts(config, whole, steps=30)

    # It learned which item comes next; a user's items are some of the six next to each other that
    # it began with.
    # `/v1/score` ranks all items, as the evaluation of these lists does
    metrics, predicted = evaluated_and_predicted(
        whole.checkpoint, log, tmp_path / "predicted", exclude_seen=False
    )
    assert metrics["recall_at_5"] == pytest.approx(whole.metrics["recall_at_5"], abs=1e-6)
    assert metrics["ndcg_at_5"] > (0.8 if name == "next_item" else 0.25)  # 0.12 at random
    rows = pq.read_table(log)
    if name == "next_item":
        last = np.array([items[-1] for items in rows["item"].to_pylist()])
        first = np.array([items[0] for items in predicted["items"].to_pylist()])
        assert np.mean(first == 100 + (last - 99) % ITEMS) > 0.8
        columns = ("items", "scores")
    else:
        # The evaluation ranks the table, the index ranks the predicted vectors.
        recall = recall_of_index(predicted, rows["item"].to_numpy())
        assert recall == pytest.approx(metrics["recall_at_5"], abs=1e-6)
        columns = ("user", "item")

    # Exported, with small tables too, and served: the answers are the predictions.
    assert (
        export(whole.checkpoint, tmp_path / "plain")["program_parity"]["max_logit_difference"]
        < 1e-4
    )
    paths = [whole.checkpoint, f"{tmp_path}/plain"]
    # An AUROC of labels drawn by the scores, which are all high in eSASRec
    if model != "esasrec":
        export(whole.checkpoint, tmp_path / "int8", quantize="int8", max_auroc_loss=0.01)
        paths.append(f"{tmp_path}/int8")
    for path in paths:
        check_served(path, rows.slice(0, 8), predicted, columns)


def test_commands_for_labels_reject_retrieval_models(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", "two_tower", users=20)
    config = small("two_tower", log, tmp_path, 2)
    rejects("members", train, config, name="two", workload={"model": {"members": 2}})
    rejects(
        r"teacher\.checkpoint: must be None for TwoTowerConfig",
        train,
        config,
        name="student",
        workload={"teacher": {"checkpoint": "run", "weight": 0.5}},
    )


@pytest.mark.exhaustive  # Of next_item, test_event_workers.py has one without new processes
@pytest.mark.parametrize("name", ["next_item", "shop", "two_tower"])
def test_killed_worker_of_two_changes_no_weights(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    changes = {"batch_size": 8, "checkpoint": {"every": 20}, "scaling": {"num_workers": 2}}
    if name == "shop":  # Formulas, and tables that both workers build
        config = shop.config_of(shop.write_shop(tmp_path), tmp_path, steps=80, **changes)
    else:
        config = small(name, write_log(tmp_path / "log", name), tmp_path, 200, **changes)
    path.write_text(config.to_yaml())
    whole, killed = (
        torchrun(tmp_path, run, path, kill=run == "killed") for run in ("whole", "killed")
    )
    check_same_run(killed, whole, restarts=1)


# -- Several labels, shared vocabularies, weighted and cut lists
NAMES: dict[str, Any] = {
    "dense": ("price",),
    "sparse": ("item", "user", "history", "tags"),
    "lists": ("history", "tags"),
    "labels": (Label(name="like"), Label(name="seconds", kind="number")),
    "features": (
        Feature(name="history", vocabulary="item", max_length=4),
        Feature(name="tags", weights="tag_weights"),
    ),
}
SCHEMA = Schema(
    label="click",
    timestamp="at",
    tokens="any",
    delimiter=",",
    **NAMES,
)


def _rows(seed: int = 0) -> pa.Table:
    """Users click on items that they have in their history; a like needs a click, and half of the
    likes are not known.
    """
    rng = np.random.default_rng(seed)
    item = rng.integers(0, 30, ROWS)
    user = rng.integers(0, 50, ROWS)
    history = [rng.integers(0, 30, rng.integers(0, 7)) for _ in range(ROWS)]
    tags = [rng.integers(0, 8, rng.integers(0, 3)) for _ in range(ROWS)]
    weights = [rng.uniform(-1, 1, len(row_values)) for row_values in tags]
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
    return pa.array([row_values.tolist() for row_values in rows])


def _written(table: pa.Table, folder: Path) -> str:
    pq.write_table(table, folder / "log.parquet")
    return str(folder / "log.parquet")


def _config(
    recipe: rayrec.TrainConfig,
    folder: Path,
    steps: int,
    model: Any,
    **workload: Any,
) -> rayrec.TrainConfig:
    """Return a run that learns in some seconds, at the same rates however long it is."""
    workload = {
        "model": model,
        "preset": {"min_count": 1},
        "schedule": {"decay_fraction": 0.0},
        "dense_optimizer": {"learning_rate": 0.02},
        **workload,
    }
    return short_run(
        recipe,
        folder,
        steps,
        workload=workload,
        batch_size=100,
        min_steps_per_epoch=1,
    )


def _dlrm(path: str, folder: Path) -> rayrec.TrainConfig:
    model = DLRMConfig(
        interaction="dot",
        embedding_dim=8,
        bottom_mlp=(16, 8),
        top_mlp=(16, 1),
    )
    return _config(
        recipes.clicks(path, SCHEMA),
        folder,
        120,
        model,
        sparse_optimizer={"learning_rate": 0.1},
    )


def test_labels_and_weighted_lists_train_score_and_serve(tmp_path: Path) -> None:
    table = _rows()
    log = _written(table, tmp_path)
    config = _dlrm(log, tmp_path).replace(evaluate_every=60, checkpoint={"every": 60})

    # Trained in one go, and in two on preprocessed data: the same weights.
    whole = train(config, name="whole")
    assert {
        "auroc",
        "like.auroc",
        "like.logloss",
        "seconds.mse",
        "seconds.mae",
    } <= whole.metrics.keys()
    assert whole.metrics["auroc"] > 0.7
    preprocessed = str(tmp_path / "preprocessed")
    preprocessor = f"{whole.folder}/preprocessor"
    rayrec.preprocess(
        log,
        out=preprocessed,
        format="parquet",
        preprocessor=preprocessor,
        schema=SCHEMA,
        console=QUIET,
    )
    check_same_in_two_parts(config.replace(train_data={"path": preprocessed}), whole, steps=60)
    assert "table" in rayrec.plan(config.replace(workload={"preprocessor": preprocessor}))

    # Scores of every label; the first keeps the names it has alone.
    metrics, predicted = evaluated_and_predicted(whole.checkpoint, log, tmp_path / "scores")
    names = [
        f"{kind}{label}"
        for label in ("", "_like", "_seconds")
        for kind in ("score", "logit", "label")
    ]
    assert predicted.column_names == ["row", *names]
    columns = {name: predicted[name].to_numpy() for name in names}
    known = ~np.isnan(columns["label_like"])
    assert known.sum() == metrics["like.rows"] == len(table) - table["like"].null_count
    assert auroc(columns["logit_like"][known], columns["label_like"][known]) == pytest.approx(
        metrics["like.auroc"]
    )
    assert np.mean((columns["score_seconds"] - columns["label_seconds"]) ** 2) == pytest.approx(
        metrics["seconds.mse"]
    )
    np.testing.assert_array_equal(columns["score_seconds"], columns["logit_seconds"])

    # By HTTP and by an export too, of rows with weights.
    answer = score(
        make_app(open_served(whole.checkpoint)),
        {"rows": table.select(SCHEMA.unlabelled().columns)[:20].to_pylist()},
    )
    for name, column in (
        ("scores", "score"),
        ("score_like", "score_like"),
        ("score_seconds", "score_seconds"),
    ):
        np.testing.assert_allclose(answer[name], columns[column][:20], atol=1e-5)
    export(whole.checkpoint, tmp_path / "export", parity_rows=100)
    rejects(
        r"lists have weights \(tag_weights\), which --triton does not support",
        rayrec.export,
        whole.checkpoint,
        out=str(tmp_path / "triton"),
        triton=True,
    )


def _interests(seed: int) -> pa.Table:
    """A click depends on whether the item shown is among the last of the user's history."""
    rng = np.random.default_rng(seed)
    item = rng.integers(0, 12, ROWS)
    history = [rng.integers(0, 12, rng.integers(0, 9)) for _ in range(ROWS)]
    seen = np.array(
        [int(shown in row_values[-6:]) for shown, row_values in zip(item, history, strict=True)]
    )
    click = (rng.random(ROWS) < 1 / (1 + np.exp(2 - 4 * seen))).astype(np.int8)
    columns = {
        "click": click,
        "price": rng.random(ROWS),
        "item": item,
        "user": rng.integers(0, 50, ROWS),
    }
    return pa.table({**columns, "history": _listed(history)})


@pytest.mark.extended
def test_sequence_ensemble_trains_exports_and_serves(tmp_path: Path) -> None:
    table = _interests(0)
    log = _written(table, tmp_path)
    history = Feature(name="history", vocabulary="item", max_length=6)
    schema = SCHEMA.replace(
        labels=(),
        features=(history,),
        timestamp=None,
        sparse=("item", "user", "history"),
        lists=("history",),
    )
    config = _config(
        recipes.clicks_din(log, schema),
        tmp_path,
        150,
        {
            "embedding_dim": 8,
            "attention": (16,),
            "mlp": (16,),
            "members": 2,
        },
    )
    run = train(config, name="whole", checkpoint={"every": 100})
    assert run.metrics["auroc"] > 0.75

    check_same_in_two_parts(config, run, steps=90)
    metrics, predicted = evaluated_and_predicted(run.checkpoint, log, tmp_path / "scores")
    logits = predicted["logit"].to_numpy()
    assert auroc(logits, table["click"].to_numpy()) == pytest.approx(metrics["auroc"])
    rows = table.select(schema.unlabelled().columns)[:50].to_pylist()
    for quantization, tolerance in ((None, 1e-4), ("int8", 0.2)):
        out = str(tmp_path / f"{quantization}")
        export(
            run.checkpoint,
            out,
            parity_rows=500,
            quantize=quantization,
            max_auroc_loss=0.01,
        )
        np.testing.assert_allclose(
            score(make_app(open_served(out)), {"rows": rows})["logits"],
            logits[:50],
            atol=tolerance,
        )
    # The history's table is the item's, and stored once.
    manifest = json.loads((tmp_path / "None" / "manifest.json").read_text())
    assert manifest["model"]["tables"] == ["item", "user", "item"]
    plain = open_served(f"{tmp_path}/None")
    checkpoint = open_served(run.checkpoint)
    assert plain.scorer.weight_bytes == checkpoint.scorer.weight_bytes
    program: dict[str, Any] = {}
    exec(
        f"{LOADER}{FROM_RAW}".replace('"."', repr(f"{tmp_path}/None")).replace(
            "[{}, {}]",
            repr(rows),
        ),
        program,
    )
    dense, ids = program["encoder"].encode(rows)
    np.testing.assert_allclose(program["score"](dense, ids), logits[:50], atol=1e-4)
    rejects(
        "column history has a varying number of ids",
        export,
        run.checkpoint,
        tmp_path / "triton",
        parity_rows=100,
        triton=True,
    )


def test_unsupported_model_is_rejected_before_training(tmp_path: Path) -> None:
    config = _dlrm("nowhere.parquet", tmp_path).replace(workload={"model": FinalNetConfig()})
    rejects(
        r"schema.labels: must be one label for FinalNetConfig, got click, like, seconds",
        train,
        config,
    )
