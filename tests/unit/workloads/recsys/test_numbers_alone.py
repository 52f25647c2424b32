"""Click models on logs without categories, from the log to predictions."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from ranks import click
from ranks.checkpoint import run_ranks

from rayrec import cli, models
from rayrec.checkpoint import Checkpoint, full_tensors
from rayrec.models.base import ModelInputs
from rayrec.models.sharded_model import build_click_model

CLICK_MODELS = [name for name in models.names("ranking") if name != "din"]
SHORT = [
    "--steps",
    "4",
    "--batch-size",
    "64",
    "--workers",
    "1",
    "--trackers.no-tensorboard",
    "-q",
]


@pytest.mark.parametrize("name", CLICK_MODELS)
def test_model_scores_numbers_without_tables(name: str) -> None:
    model_class = models.config_class(name)
    assert model_class is not None
    config = model_class()
    assert not config.needs_categories()
    model = build_click_model(config, ModelInputs(3, ()), num_embeddings=[], embedding_device="cpu")
    model.eval()
    assert model.score(torch.rand(5, 3), None).shape == (5,)
    assert not model.table_modules()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Numeric log log.csv with schema.yaml, in the working directory."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    rows = [(rng.gauss(0, 1), rng.gauss(0, 1)) for _ in range(700)]
    lines = [
        f"{int(a + b > 0)},{a:.3f},{'NA' if number % 50 == 0 else f'{b:.3f}'}"
        for number, (a, b) in enumerate(rows)
    ]
    Path("log.csv").write_text("\n".join(["y,a,b", *lines]) + "\n")
    Path("schema.yaml").write_text("{label: y, dense: [a, b], missing: [NA]}")
    return tmp_path


def run(line: str, *more: str) -> int:
    return cli.run([*line.split(), *more])


def train(*more: str, data: str = "log.csv") -> int:
    return run(
        f"train clicks --schema schema.yaml --data {data} --storage-path runs", *more, *SHORT
    )


def test_numeric_log_trains_evaluates_and_predicts(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--name", "a") == 0
    capsys.readouterr()
    assert run("evaluate runs/a log.csv -q") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 700
    assert run("predict runs/a log.csv --out scores -q") == 0
    assert pq.read_table(log / "scores").num_rows == 700


@pytest.mark.parametrize("format", ["parquet", "npy"])
def test_numeric_log_trains_preprocessed(format: str, log: Path) -> None:
    assert run(f"preprocess log.csv --schema schema.yaml --out ready --format {format} -q") == 0
    assert train("--name", "a", data="ready") == 0


def test_numeric_log_has_vocabulary_and_plan(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("vocabulary log.csv --schema schema.yaml --out vocabulary -q") == 0
    assert json.loads(capsys.readouterr().out)["num_embeddings"] == {}
    assert (
        run("plan clicks --schema schema.yaml --data log.csv --workload.preprocessor vocabulary -q")
        == 0
    )


def test_numeric_run_starts_from_another(log: Path) -> None:
    assert train("--name", "a") == 0
    assert train("--name", "b", "--init-from", "runs/a") == 0


def test_model_of_categories_is_rejected_before_indexing(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unread(*_: Any, **__: Any) -> None:
        raise AssertionError("the log must not be read")

    monkeypatch.setattr("rayrec.data.log_source.index_tables", unread)
    assert train("--name", "a", "--model", "din") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must have a sparse column for DINConfig" in line
    names = sorted([*CLICK_MODELS, "lightgbm"])
    assert line.endswith(f"learns from numbers alone: {', '.join(names)}.")


def test_preprocessed_numbers_reject_model_of_categories(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("preprocess log.csv --schema schema.yaml --out ready --format npy -q") == 0
    capsys.readouterr()
    assert train("--name", "a", "--model", "din", data="ready") == 2
    assert "must have a sparse column for DINConfig" in capsys.readouterr().err


def _train_numbers(folder: str, rank: int) -> None:
    click.train(f"{folder}/{torch.distributed.get_world_size()}", click.NUMBERS, rank)


def test_two_workers_match_one_without_tables(tmp_path: Path) -> None:
    for size in (1, 2):
        run_ranks(_train_numbers, size, str(tmp_path))
    alone, together = (
        dict(full_tensors(Checkpoint(str(tmp_path / str(size) / "end")))) for size in (1, 2)
    )
    torch.testing.assert_close(together, alone)
