"""Training by command on each kind of split without test rows, which reports validation metrics."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders.csv_runs import train, write_days

from rayrec import cli
from rayrec.data import synthetic


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    write_days(tmp_path, 0, 1, 2, 3)
    return tmp_path


def summary(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "sets"),
    [
        ("kind fraction test 0", {"train": 1440, "validation": 160}),
        ("kind days test-days 0", {"train": 1200, "validation": 400}),
        ("kind named_days validation-names day_3", {"train": 1200, "validation": 400}),
    ],
)
def test_train_without_test_rows_reports_validation(folder: Path, capsys: Any, flags: str, sets: dict[str, int]) -> None:
    names = flags.split()
    assert not train(folder, *(f"--workload.preset.split.{w}" if not place % 2 else w for place, w in enumerate(names)))
    found = summary(capsys)
    assert (found["rows_of_sets"], found["metrics"]) == (sets, found["validation"])
    assert cli.run(["report", str(folder / "run")]) == 0
    assert cli.run(["export", str(folder / "run"), "--out", str(folder / "exported")]) == 0


@pytest.mark.parametrize("by", ["rows", "group --group user", "time"])
def test_train_accepts_split_files_without_test(folder: Path, capsys: pytest.CaptureFixture[str], by: str) -> None:
    paths = [str(folder / "log"), "--out", str(folder / "parts"), "--schema", str(folder / "schema.yaml")]
    assert cli.run(["split", *paths, "--by", *by.split(), "--test", "0"]) == 0
    assert list(summary(capsys)["parts"]) == ["train", "validation"]  # type: ignore[call-overload]
    assert not train(folder, "--workload.preset.split.kind", "named_files", log="parts")
    found = summary(capsys)
    assert list(found["rows_of_sets"]) == ["train", "validation"]  # type: ignore[call-overload]
    assert found["metrics"] == found["validation"]


def test_best_auroc_uses_same_test_rows(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generated log knows the best AUROC only for its own test rows."""
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    synthetic.generate(str(tmp_path / "log"), rows=3_000, seed=1, parallelism=1)
    common = ["--train-data.path", str(tmp_path / "log" / "train.txt"), "--storage-path", str(tmp_path), "-q"]
    short = ["--steps", "1", "--batch-size", "200", "--evaluate-every", "1", "--scaling.num-workers", "1"]
    for name, flags, known in (
        ("same", [], True),
        ("other", ["--workload.preset.split.kind", "fraction"], False),
        ("none", ["--workload.preset.split.kind", "fraction", "--workload.preset.split.test", "0"], False),
    ):
        assert cli.run(["train", "criteo_demo", *common, *short, "--name", name, *flags]) == 0
        assert ("best_auroc" in summary(capsys)) is known, name
