"""Images through the whole of it: training with one worker and two, killed and resumed, and put to
use.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from builders.digits import write_digits
from builders.runs import (
    QUIET,
    TWO_WORKERS,
    check_no_rows_lost,
    check_same_run,
    events_of,
    losses,
    short_run,
    threads_of,
    train,
)
from hosts.processes import Run, finished

import rayrec
from rayrec.checkpoint import Checkpoint, weights_sha256
from rayrec.checkpoint.safetensors import read_weights
from rayrec.data.numbered_rows import read_labels
from rayrec.recipes.mnist import mnist_resnet18
from rayrec.training.result import Result
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.vision import ResNetConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

TRAIN_ROWS = 410
TEST_ROWS = 90
EPOCHS = 4
ALONE: dict[str, Any] = {
    "scaling": threads_of(1),
    "cluster": {"num_cpus": 2, "address": "none"},
    "batch_size": 32,
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits"), train=TRAIN_ROWS, test=TEST_ROWS)


def small(
    digits: Path, storage_path: Path, *, workload: dict[str, Any] | None = None, **changes: Any
) -> TrainConfig:
    own = {
        "model": {"blocks": (1, 1, 1, 1)},
        "optimizer": {"learning_rate": 1e-3},
        "label_smoothing": 0.05,
    }
    own |= {"augmentation": {"max_shift": 1.0, "max_rotation_degrees": 3.0}, **(workload or {})}
    fields = {
        **TWO_WORKERS,
        "epochs": EPOCHS,
        "batch_size": 16,
        "eval_batch_size": 20,
        "evaluate_every": 20,
        "log_every": 1,
    }
    return short_run(
        mnist_resnet18(str(digits)),
        storage_path,
        **{
            "steps": None,
            **fields,
            "workload": own,
            **changes,
        },
    )


@pytest.fixture(scope="module")
def two(local_ray: None, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(small(digits, tmp_path_factory.mktemp("runs")))


def test_run_learns_and_writes_complete_folder(two: Result) -> None:
    summary = two.summary
    assert summary["metrics"].keys() >= {"accuracy", "loss"}
    assert summary["metrics"]["accuracy"] > 0.7  # of ten classes
    assert (summary["rows"], summary["steps"]) == (
        EPOCHS * TRAIN_ROWS,
        EPOCHS * math.ceil(TRAIN_ROWS / 32),
    )
    check_no_rows_lost(summary, restarts=0)
    assert summary["rows_of_sets"] == {
        "train": TRAIN_ROWS,
        "validation": TEST_ROWS,
        "test": TEST_ROWS,
    }
    assert summary["weights_sha256"] == weights_sha256(Checkpoint(summary["checkpoint"]))
    curve = losses(two.folder)
    assert len(curve) == summary["steps"]
    assert abs(curve[0] - math.log(10)) < 1
    assert sum(curve[-5:]) < 0.6 * sum(curve[:5])
    [samples] = [event["samples"] for event in events_of(two.folder, "samples")]
    assert [len(sample["pixels"]) for sample in samples] == [28] * 9
    assert sum(sample["label"] == sample["prediction"] for sample in samples) >= 5


def test_metrics_cover_all_rows_of_all_workers(two: Result, digits: Path, tmp_path: Path) -> None:
    """An evaluation in one process, and the predictions themselves, agree with what two workers
    found.
    """
    metrics = rayrec.evaluate(two.folder, str(digits), cluster_address="none", console=QUIET)
    assert metrics["rows"] == TEST_ROWS
    for name in ("accuracy", "loss"):
        assert metrics[name] == pytest.approx(two.summary["metrics"][name], rel=1e-4)
    images = digits / "t10k-images-idx3-ubyte.gz"
    rayrec.predict(
        two.folder, str(images), out=str(tmp_path / "out"), cluster_address="none", console=QUIET
    )
    table = pq.read_table(tmp_path / "out")
    labels = read_labels(str(digits / "t10k-labels-idx1-ubyte.gz"), num_classes=10)
    assert (table["row"].to_pylist(), table["label"].to_pylist()) == (
        list(range(TEST_ROWS)),
        labels.tolist(),
    )
    right = table["prediction"].to_numpy() == labels
    assert right.mean() == pytest.approx(two.summary["metrics"]["accuracy"], abs=1e-9)
    assert np.all((table["probability"].to_numpy() > 0.1) & (table["probability"].to_numpy() <= 1))


def test_export_matches_predictions(two: Result, digits: Path, tmp_path: Path) -> None:
    rayrec.export(two.folder, out=str(tmp_path / "out"))
    weights = read_weights(str(tmp_path / "out" / "model.safetensors"))
    model = ResNetConfig(blocks=(1, 1, 1, 1)).build()
    model.load_state_dict(weights)
    # Going on from it: weights by torchvision's names, which the first step's loss shows.
    workload = {
        "weights": str(tmp_path / "out" / "model.safetensors"),
        "augmentation": {"max_shift": 0.0},
    }
    assert (
        losses(
            train(
                small(
                    digits,
                    tmp_path,
                    steps=1,
                    workload=workload,
                    **ALONE,
                )
            ).folder
        )[0]
        < 0.7 * losses(two.folder)[0]
    )
    assert all(torch.isfinite(value).all() for value in weights.values())


@pytest.mark.exhaustive
def test_killed_worker_preserves_weights(digits: Path, tmp_path: Path) -> None:
    """Neither rows nor chance: images are moved at random, and a step that is done again moves them
    as before.
    """
    fields: dict[str, Any] = {"epochs": 12, "evaluate_every": 60, "checkpoint": {"every": 10}}
    expected = finished(
        small(digits, tmp_path / "undisturbed", **fields),
        tmp_path / "commands_1",
        cache=tmp_path / "cache",
    )
    killed = small(digits, tmp_path / "killed", **fields)
    with Run(killed, tmp_path / "commands_2", cache=tmp_path / "cache").start() as run:
        run.wait_for_step(35, timeout_s=400)
        run.wait_for_save(10, timeout_s=400)
        run.session.kill("train worker")
        assert not run.events("finish")
        check_same_run(run.summary(), expected, restarts=1)
        assert run.events("start")[1]["step"] >= 10
    assert expected["rows"] == 12 * TRAIN_ROWS
