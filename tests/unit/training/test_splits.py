"""Training by command on each kind of split without test rows, which reports validation metrics."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pytest

from rayrec import cli
from rayrec.data import synthetic

ROWS, DAYS = 400, 4
SCHEMA = "{label: click, dense: [age], sparse: [user, item], tokens: any, timestamp: at, delimiter: ','}"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a folder with a CSV file per day, and its schema next to it."""
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    rng = np.random.default_rng(0)
    (tmp_path / "log").mkdir()
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    for day in range(DAYS):
        table = pa.table(
            {
                "click": rng.integers(0, 2, ROWS),
                "age": rng.integers(0, 90, ROWS),
                "user": rng.integers(0, 30, ROWS),
                "item": rng.integers(0, 20, ROWS),
                "at": pa.array((day * ROWS + np.arange(ROWS)) * 1_000_000, pa.timestamp("us")),
            }
        )
        arrow_csv.write_csv(table, tmp_path / "log" / f"day_{day}.csv")
    return tmp_path / "log"


def trained(path: Path, *flags: str) -> None:
    """Run `rayrec train` for two steps as run `run`, in the parent of the log's folder."""
    folder = path.parent
    arguments = ["--schema", str(folder / "schema.yaml"), "--train-data.path", str(path), "--storage-path", str(folder)]
    length = ["--name", "run", "--steps", "2", "--batch-size", "200", "--evaluate-every", "2", "-q"]
    model = ["--model", "linear", "--trackers.no-tensorboard", "--min-steps-per-epoch", "1"]
    assert cli.run(["train", "clicks", *arguments, *length, *model, *flags]) == 0


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
def test_train_without_test_rows_reports_validation(
    log: Path, capsys: pytest.CaptureFixture[str], flags: str, sets: dict[str, int]
) -> None:
    names = flags.split()
    trained(log, *(f"--workload.preset.split.{word}" if not place % 2 else word for place, word in enumerate(names)))
    found = summary(capsys)
    assert found["rows_of_sets"] == sets
    assert found["metrics"] == found["validation"]
    assert cli.run(["report", str(log.parent / "run")]) == 0
    assert cli.run(["export", str(log.parent / "run"), "--out", str(log.parent / "exported")]) == 0


@pytest.mark.parametrize("by", ["rows", "group --group user", "time"])
def test_train_accepts_split_files_without_test(log: Path, capsys: pytest.CaptureFixture[str], by: str) -> None:
    out = log.parent / "parts"
    schema = ["--schema", str(log.parent / "schema.yaml")]
    assert cli.run(["split", str(log), "--out", str(out), "--by", *by.split(), "--test", "0", *schema]) == 0
    assert list(summary(capsys)["parts"]) == ["train", "validation"]  # type: ignore[call-overload]
    trained(out, "--workload.preset.split.kind", "named_files")
    found = summary(capsys)
    assert list(found["rows_of_sets"]) == ["train", "validation"]  # type: ignore[call-overload]
    assert found["metrics"] == found["validation"]


def test_best_auroc_uses_same_test_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
