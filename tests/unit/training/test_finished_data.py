"""Finished run under the same name: its summary for unchanged data, else one line and status 2."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.csv_runs import train, write_days
from builders.digits import write_digits
from builders.faults import raising, rejects
from builders.runs import QUIET

import rayrec
from rayrec import recipes
from rayrec.recipes.mnist import mnist_resnet18
from rayrec.schema import Schema
from rayrec.training import resume
from rayrec.training.resume import data_difference, data_versions


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_days(folder, 0, 1)
    os.utime(folder / "log" / "day_0.csv", (1e9, 1e9))  # day_1 is the newest
    assert train(folder) == 0
    return folder


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """Copy the folder with all file times, like a moved log."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def same_size(folder: Path) -> None:
    file = folder / "log" / "day_0.csv"
    file.write_text(file.read_text().replace(",1", ",2"))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "grown folder": (lambda folder: write_days(folder, 2), "train_data has 3 files of"),
    "grown file": (lambda folder: write_days(folder, 1, rows=401), "train_data has 2 files of"),
    "bytes of the same size": (same_size, "train_data has 2 files of"),
    "renamed file": (lambda folder: (folder / "log" / "day_0.csv").rename(folder / "log" / "a.csv"), "still has 2 files of"),
    "path that is gone": (lambda folder: (folder / "log").rename(folder / "gone"), "log: no such file or folder"),
    "no files": (lambda folder: [file.unlink() for file in (folder / "log").iterdir()], "contains no data files"),
}


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_finished_run_rejects_other_data(finished: Path, capsys: pytest.CaptureFixture[str], change: str, quiet: bool) -> None:
    make, expected = CHANGES[change]
    make(finished)
    assert train(finished, quiet=quiet) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith(f"rayrec train: {finished}/run: finished already, with other data: ")
    assert expected in line
    assert "choose another --name" in line.lower()


def test_finished_run_with_same_data_prints_summary_and_reads_nothing(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its old or another path; other readers of the folder do not matter."""
    (finished / "log" / "_SUCCESS").write_text("")
    assert train(finished) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["data"]["train_data"]["files"] == 2
    (finished / "log").rename(finished / "moved")
    assert train(finished, log="moved") == 0
    assert json.loads(capsys.readouterr().out) == summary
    monkeypatch.setattr("rayrec.workloads.recsys.ClickWorkload.prepare", raising(AssertionError("data was read")))
    assert train(finished, log="moved") == 0


def test_finished_run_rejects_added_evaluation_data(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_days(finished / "other", 5)
    assert train(finished, "--eval-data.path", str(finished / "other" / "log")) == 2
    assert "eval_data has 1 file of" in capsys.readouterr().err


def test_summary_without_data_versions_is_accepted(finished: Path) -> None:
    path = finished / "run" / "summary.json"
    summary = json.loads(path.read_text())
    del summary["data"]
    path.write_text(json.dumps(summary))
    write_days(finished, 2)
    assert train(finished) == 0  # nothing to compare with
    (finished / "log").rename(finished / "gone")
    assert train(finished) == 2


def test_changed_data_is_rejected_for_preprocessed_rows(trained: Path, tmp_path: Path) -> None:
    schema = Schema(label="click", dense=("age",), sparse=("user", "item"), tokens="any", delimiter=",")
    for name in ("first", "second"):
        options = {"schema": schema, "split": "sevenths", "console": QUIET}
        rayrec.preprocess(str(trained / "log"), out=str(tmp_path / name), format="parquet", **options)
    before = data_versions(recipes.clicks(str(tmp_path / "first"), schema=schema))
    assert before["train_data"]["files"] > 3  # in folders
    assert data_difference(before, data_versions(recipes.clicks(str(tmp_path / "first"), schema=schema))) is None
    assert data_difference(before, data_versions(recipes.clicks(str(tmp_path / "second"), schema=schema)))


def test_changed_data_is_rejected_for_images_and_tokens(tmp_path: Path) -> None:
    digits = write_digits(tmp_path / "digits", train=20, test=10)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    small = {"vocabulary_size": 300, "block_size": 16, "shard_bytes": 2000, "validation_fraction": 0.2}
    rayrec.preprocess(str(tmp_path / "text.txt"), out=str(tmp_path / "tokens"), format="mds", console=QUIET, **small)
    shard = next((tmp_path / "tokens" / "validation").glob("*.mds"))
    labels, text = digits / "t10k-labels-idx1-ubyte.gz", recipes.gpt2_tiny(str(tmp_path / "tokens"))
    for config, file in ((mnist_resnet18(str(digits)), labels), (text, shard)):
        before = data_versions(config)
        assert data_difference(before, data_versions(config)) is None
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
        assert data_difference(before, data_versions(config)).startswith("train_data still has ")
        file.unlink()
        assert data_difference(before, data_versions(config))


def test_data_without_files_has_no_version(tmp_path: Path) -> None:
    """A custom workload may interpret its path freely. Its finished runs are not compared."""
    config = recipes.clicks("table of a database").replace(storage_path=str(tmp_path), name="run")
    assert resume.listed_data(config) == {}
    resume._check_same_data("run", config, {"data": {}})
    rejects("finished already, with other data: table of a database: no such file", resume._check_same_data, "run", config, {})
