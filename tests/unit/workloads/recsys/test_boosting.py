"""Boosted trees from an own log to answers: training, resuming, scoring, and what is refused."""

import importlib.util
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders.click_models import make_app
from builders.faults import rejects
from builders.requests import post
from builders.runs import QUIET, check_no_rows_lost, check_same_in_two_parts, events_of, train

import rayrec
from rayrec.data.encoded_rows import JaggedIds
from rayrec.inference.model import open_served
from rayrec.models.boosted.lightgbm import LightGBMConfig
from rayrec.models.ranking.linear import LinearConfig
from rayrec.recipes.clicks import clicks
from rayrec.schema import Feature, Label, Schema
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.category_statistics import FOLDS, CategoryStatistics, folds

SCHEMA = Schema(
    label="click",
    dense=("price",),
    sparse=("user", "item", "tags"),
    lists=("tags",),
    features=(Feature(name="tags", vocabulary="item", list_delimiter="|"),),
)
NUM_ROWS = 3000
SMALL: dict[str, Any] = {"trees": 40, "leaves": 8, "min_leaf_rows": 5}


def write_log(path: Path, *, label: str = "click") -> Path:
    """A log whose label depends on price, user, item and tags."""
    draw = random.Random(5)
    users = {f"u{number}": draw.gauss(0, 1.5) for number in range(40)}
    items = {f"i{number}": draw.gauss(0, 1.5) for number in range(20)}
    lines = [f"{label},price,user,item,tags"]
    for _ in range(NUM_ROWS):
        user = draw.choice(list(users))
        item = draw.choice(list(items))
        tags = draw.choices(list(items), k=draw.randrange(4))
        price = draw.expovariate(0.1)
        logit = users[user] + items[item] + sum(items[tag] for tag in tags) / 2 + (price < 5)
        value: float = int(draw.random() < 1 / (1 + math.exp(-logit)))
        if label == "visits":
            value = min(9, round(math.exp(logit / 2)))
        elif label == "spent":
            value = round(logit + draw.gauss(0, 0.3), 3)
        lines.append(f"{value},{price:.2f},{user},{item},{'|'.join(tags)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def config_of(log: Path, storage: Path, **changes: Any) -> TrainConfig:
    fields = {"name": "run", "storage_path": str(storage), "early_stopping": {"patience": 0}}
    model = LightGBMConfig(**SMALL)
    return clicks(str(log), SCHEMA).replace(**fields, workload={"model": model}).replace(**changes)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.csv")


@pytest.fixture(scope="module")
def trained(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of a run of 40 trees."""
    return train(config_of(log, tmp_path_factory.mktemp("runs")))


def test_run_counts_each_row_once_per_tree(trained: Any) -> None:
    summary = trained.summary
    check_no_rows_lost(summary, restarts=0)
    assert summary["steps"] == SMALL["trees"]
    assert summary["rows"] == SMALL["trees"] * summary["rows_of_sets"]["train"]
    assert summary["metrics"]["auroc"] > 0.8
    steps = [event["step"] for event in events_of(trained.path, "evaluate")]
    assert steps == [10, 20, 30, 40]
    losses = [event["loss"] for event in events_of(trained.path, "step")]
    assert losses == sorted(losses, reverse=True)


def test_early_stopping_chooses_trees_by_validation_rows(log: Path, tmp_path: Path) -> None:
    workload = {"model": LightGBMConfig(**{**SMALL, "trees": 300, "learning_rate": 0.5})}
    config = config_of(log, tmp_path, workload=workload, early_stopping={"patience": 2})
    summary = train(config).summary
    assert summary["chosen_step"] < summary["steps"] < 300
    chosen = open_served(summary["checkpoint"]).scorer.parts()[0].network
    assert chosen.trees.count == summary["chosen_step"]


@pytest.mark.parametrize(
    "drawn",
    [
        {},
        {"rows_per_tree": 0.7},
        pytest.param({"columns_per_tree": 0.5}, marks=pytest.mark.extended),
        pytest.param({"rows_per_tree": 0.3}, marks=pytest.mark.extended),
    ],
)
def test_resumed_run_has_equal_trees(drawn: dict[str, Any], log: Path, tmp_path: Path) -> None:
    workload = {"model": LightGBMConfig(**SMALL, **drawn)}
    config = config_of(log, tmp_path, workload=workload)
    whole = train(config, name="whole")
    check_same_in_two_parts(config, whole, steps=17)


def test_draws_differ_between_seeds(log: Path, tmp_path: Path) -> None:
    workload = {"model": LightGBMConfig(**SMALL, rows_per_tree=0.7)}
    config = config_of(log, tmp_path, workload=workload, train_data={"shuffle": "none"}, steps=3)
    hashes = {
        train(config, name=f"seed{seed}", seed=seed).summary["weights_sha256"] for seed in (0, 1)
    }
    assert len(hashes) == 2


def test_more_threads_change_no_tree(log: Path, tmp_path: Path) -> None:
    hashes = {
        train(
            config_of(log, tmp_path), name=f"threads{count}", scaling={"threads_per_worker": count}
        ).summary["weights_sha256"]
        for count in (1, 2)
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("label", "kind", "metric"), [("visits", "count", "deviance"), ("spent", "number", "mse")]
)
def test_other_labels_are_learned(label: str, kind: str, metric: str, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", label=label)
    schema = SCHEMA.replace(label=None, labels=(Label(name=label, kind=kind, missing="fault"),))
    config = config_of(log, tmp_path, workload={"schema": schema})
    train(config)
    first, *_, last = (event[metric] for event in events_of(tmp_path / "run", "evaluate"))
    assert last < 0.9 * first


def test_export_scores_alike(trained: Any, tmp_path: Path) -> None:
    report = rayrec.export(trained.path, out=str(tmp_path / "export"))
    assert report["parity"]["max_logit_difference"] == 0
    assert report["program_parity"]["max_logit_difference"] < 1e-6


def test_predictions_and_answers_agree(trained: Any, log: Path, tmp_path: Path) -> None:
    rayrec.predict(trained.path, str(log), out=str(tmp_path / "scores"), console=QUIET)
    expected = pq.read_table(tmp_path / "scores")["logit"].to_numpy()[:20]
    app = make_app(open_served(trained.path))
    head, *lines = log.read_text().splitlines()[:21]
    rows = []
    for line in lines:
        row: dict[str, Any] = dict(zip(head.split(",")[1:], line.split(",")[1:], strict=True))
        rows.append({**row, "price": float(row["price"]), "tags": row["tags"].split("|")})
    tabs = "\n".join(lines).replace(",", "\t").encode()
    for content in ({"rows": rows}, tabs):
        found = post(app, content).json()["logits"]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_ensemble_averages_trees_and_network(trained: Any, log: Path, tmp_path: Path) -> None:
    linear = train(
        config_of(log, tmp_path).replace(
            steps=4,
            evaluate_every=None,
            workload={
                "model": LinearConfig(),
                "preprocessor": f"{trained.summary['checkpoint']}/preprocessor",
            },
        )
    )
    rayrec.ensemble([trained.path, linear.path], out=str(tmp_path / "both"))
    logits = []
    for checkpoint in (trained.path, linear.path, tmp_path / "both"):
        out = tmp_path / f"scores{len(logits)}"
        rayrec.predict(str(checkpoint), str(log), out=str(out), console=QUIET)
        logits.append(pq.read_table(out)["logit"].to_numpy())
    np.testing.assert_allclose(logits[2], (logits[0] + logits[1]) / 2, atol=1e-5)


# -- Rejected before anything starts
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scaling": {"num_workers": 2}}, "scaling.num_workers: must be 1 for LightGBM.*got 2"),
        ({"scaling": {"use_gpu": True}}, "scaling.use_gpu: must be False for LightGBM"),
        ({"plateau": {"patience": 1}}, "plateau.patience: must be 0 for LightGBM"),
        ({"init_from": "runs/other"}, "init_from: must be None for LightGBM"),
        ({"steps": 41}, "steps: must be at most workload.model.trees 40"),
    ],
)
def test_unsupported_settings_are_rejected(
    changes: dict[str, Any], message: str, log: Path, tmp_path: Path
) -> None:
    rejects(message, train, config_of(log, tmp_path, **changes))
    assert not (tmp_path / "run").exists()


def test_joint_training_with_network_is_rejected(log: Path, tmp_path: Path) -> None:
    models = {"model": {"class": "ensemble", "models": [{"class": "lightgbm"}, {"class": "dlrm"}]}}
    config = clicks(str(log), SCHEMA).updated({"workload": models, "storage_path": str(tmp_path)})
    rejects("model: LightGBM trains no ensemble with networks", train, config)


def test_missing_package_is_named(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "lightgbm" else found(name, *rest),
    )
    message = r"lightgbm is not installed\. Run pip install 'rayrec\[lightgbm\]'\."
    rejects(message, train, config_of(log, tmp_path))


def test_plan_is_rejected(log: Path, tmp_path: Path) -> None:
    config = config_of(log, tmp_path)
    rejects("plan: LightGBM's trees are not sharded", config.workload.plan, config)


# -- Statistics of categories
def statistics(lists: tuple[str, ...] = ()) -> CategoryStatistics:
    return CategoryStatistics(
        {"one": "table", "more": "table"}, [4, 4], lists=lists, smoothing=2.0, is_binary=False
    )


def bags(*rows: list[int]) -> JaggedIds:
    values = np.array([each for row in rows for each in row], np.int32)
    return JaggedIds(values, np.array([len(row) for row in rows], np.int32))


def test_rows_get_statistics_of_other_folds() -> None:
    found = statistics(lists=("more",))
    fold = np.array([0, 0, 1])
    columns = [bags([1], [1], [1]), bags([], [2, 3], [2])]
    found.add(columns, fold, np.ones(3, np.float32), np.array([1.0, 1.0, 0.0], np.float32))
    summed = found.summed(columns, fold)
    mean = 2 / 3
    # Row 2 sees rows 0 and 1, and they see row 2 alone
    assert summed[:, 0, 0] == pytest.approx(
        [(0 + 2 * mean) / 3 - mean] * 2 + [(2 + 2 * mean) / 4 - mean]
    )
    assert summed[:, 0, 1] == pytest.approx([np.log1p(3)] * 2 + [np.log1p(2 * 3 / 2)])
    # `one` has one id per row, so that the shared table counts it alone
    assert summed[:, 1, :2].tolist() == [[0.0, 0.0]] * 3
    assert summed[:, 1, 2].tolist() == [0, 2, 1]


def test_table_has_statistics_of_all_rows() -> None:
    found = statistics()
    columns = [bags([1], [2]), bags([1, 1], [])]
    found.add(columns, np.array([0, 4]), np.array([1, 3], np.float32), np.array([1, 0], np.float32))
    table = np.full((4, 4), -1.0, np.float32)
    found.fill("table", table)
    mean = 1 / 4
    effects = [0, (3 + 2 * mean) / 5 - mean, (2 * mean) / 5 - mean, 0]
    assert table[:, 0] == pytest.approx(effects)
    assert table[:, 1] == pytest.approx(np.log1p([0, 3, 3, 0]))
    assert table[:, 2:].tolist() == [[1, 0]] * 4


def test_folds_depend_only_on_row_numbers() -> None:
    numbers = np.arange(10_000)
    found = folds(numbers)
    np.testing.assert_array_equal(folds(numbers[::-1]), found[::-1])
    assert np.bincount(found, minlength=FOLDS).min() > 1800
