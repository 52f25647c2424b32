"""Training rows among scored rows are counted and reported, and runs are scored on their own
held-out rows.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.faults import rejects
from builders.runs import QUIET, one_worker, train

import rayrec
from rayrec import cli, recipes
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.datasets.criteo import SCHEMA
from rayrec.inference import training_rows
from rayrec.inference.training_rows import count_repeated, row_hashes
from rayrec.metrics.binary import binary_metrics
from rayrec.schema import Schema

ROWS = 6_000
TRAINED = 6_000 - 6_000 // 7
"""Rows of the log, and its training rows: six of seven parts."""
TESTED = (ROWS - TRAINED) // 2


class Trained:
    """A run on a log of its own, and the lines of the log."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log" / "train.txt"
        rayrec.generate(str(self.log.parent), rows=ROWS, console=QUIET)
        self.lines = self.log.read_bytes().splitlines(keepends=True)
        config = one_worker(self.log.parent, folder, steps=4, evaluate_every=4)
        self.run = train(config).folder

    def evaluate(self, data: Any = None, **options: Any) -> dict[str, Any]:
        return rayrec.evaluate(self.run, data, console=QUIET, **options)

    def frame(self, lines: list[bytes]) -> pd.DataFrame:
        columns = list(SCHEMA.columns)
        values = [line.decode().rstrip("\n").split("\t") for line in lines]
        frame = pd.DataFrame(values, columns=columns)
        for name in ("label", *SCHEMA.dense):
            frame[name] = pd.to_numeric(frame[name])
        return frame


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def shuffled(lines: list[bytes]) -> list[bytes]:
    return [lines[number] for number in np.random.default_rng(0).permutation(len(lines))]


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        pytest.param(lambda lines: lines, TRAINED, id="whole log"),
        pytest.param(lambda lines: lines[:TRAINED], TRAINED, id="training rows"),
        pytest.param(lambda lines: lines[:700], 700, id="first rows"),
        pytest.param(
            lambda lines: lines[TRAINED - 300 : TRAINED + 200], 300, id="rows around the split"
        ),
        pytest.param(lambda lines: lines[TRAINED:], 0, id="held-out rows"),
        pytest.param(
            lambda lines: shuffled(lines[:TRAINED])[:500], 500, id="sample of training rows"
        ),
        pytest.param(shuffled, TRAINED, id="another order"),
    ],
)
def test_training_rows_of_part_are_counted(
    choose: Callable[[list[bytes]], list[bytes]], expected: int, trained: Trained, tmp_path: Path
) -> None:
    part = tmp_path / "part.txt"
    part.write_bytes(b"".join(choose(trained.lines)))
    assert trained.evaluate(str(part))["training_rows"] == expected


def test_training_rows_of_same_path_and_copy_are_counted(trained: Trained, tmp_path: Path) -> None:
    copy = shutil.copy(trained.log, tmp_path / "renamed.txt")
    result = [trained.evaluate(str(path))["training_rows"] for path in (trained.log, copy)]
    assert result == [TRAINED, TRAINED]


def test_training_rows_of_other_format_are_counted(trained: Trained, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pandas(trained.frame(trained.lines)), tmp_path / "rows.parquet")
    assert trained.evaluate(str(tmp_path / "rows.parquet"))["training_rows"] == TRAINED


def test_large_log_is_read_only_if_scored(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_rows, "_MAX_LOG_BYTES", trained.log.stat().st_size - 1)
    copy = shutil.copy(trained.log, tmp_path / "renamed.txt")
    result = [trained.evaluate(str(path))["training_rows"] for path in (trained.log, copy)]
    assert result == [TRAINED, None]


def test_new_rows_are_no_training_rows(trained: Trained, tmp_path: Path) -> None:
    rayrec.generate(
        str(tmp_path),
        rows=2_000,
        seed=9,
        console=QUIET,
    )
    assert trained.evaluate(str(tmp_path / "train.txt"))["training_rows"] == 0


@pytest.mark.parametrize("edit", ["removed", "changed"])
def test_training_rows_are_unknown_without_log(edit: str, tmp_path: Path) -> None:
    run = Trained(tmp_path)
    copy = shutil.copy(run.log, tmp_path / "copy.txt")
    if edit == "removed":
        run.log.unlink()
    else:
        run.log.write_bytes(b"".join(run.lines[10:]))
    assert run.evaluate(str(copy))["training_rows"] is None


def test_training_rows_are_reported_even_if_quiet(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["evaluate", trained.run, str(trained.log), "-q"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["training_rows"] == TRAINED
    (line,) = err.splitlines()
    assert line.startswith("warning: ")
    assert f"was trained on {TRAINED:,} of these {ROWS:,} rows" in line


def test_comparison_counts_training_rows_of_each_model(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run(["compare", trained.run, trained.run, str(trained.log), "--resamples", "20", "-q"])
        == 0
    )
    out, err = capsys.readouterr()
    assert [model["training_rows"] for model in json.loads(out)["models"]] == [TRAINED, TRAINED]
    assert len([line for line in err.splitlines() if line.startswith("warning: ")]) == 2


# -- logs whose rows repeat at random

FEW = Schema(
    label="y",
    sparse=("user", "item"),
    tokens="any",
    delimiter=",",
)


def few_categories(rows: int, *, seed: int) -> pd.DataFrame:
    """Rows of which nearly every one has an equal one elsewhere."""
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {name: rng.integers(0, high, rows) for name, high in (("y", 2), ("user", 12), ("item", 12))}
    )


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, pd.DataFrame]:
    frame = few_categories(4_000, seed=0)
    folder = tmp_path_factory.mktemp("repeating")
    config = recipes.clicks(schema=FEW).replace(
        storage_path=str(folder), name="run", epochs=1, min_steps_per_epoch=1
    )
    return rayrec.train(config, data=frame, console=QUIET).folder, frame


def test_accidentally_equal_rows_count_as_new(repeating: tuple[str, pd.DataFrame]) -> None:
    run, frame = repeating
    trained = json.loads(Path(run, "summary.json").read_text())["rows_of_sets"]["train"]
    for rows, expected in (
        (few_categories(1_000, seed=5), 0),
        (frame.iloc[trained:], 0),
        (frame.iloc[100:700], 600),
    ):
        assert rayrec.evaluate(run, rows, console=QUIET)["training_rows"] == expected


def test_random_sample_of_repeating_rows_is_unknown() -> None:
    rng = np.random.default_rng(0)
    train = rng.integers(0, 3_000, 4_000).astype(np.uint64)
    unseen = rng.integers(0, 3_000, 500).astype(np.uint64)
    assert count_repeated(rng.permutation(train)[:800], train=train, unseen=unseen) is None
    assert (
        count_repeated(rng.integers(0, 3_000, 800).astype(np.uint64), train=train, unseen=unseen)
        == 0
    )
    assert count_repeated(train[50:850], train=train, unseen=unseen) == 800
    assert count_repeated(np.arange(9_000, 9_100, dtype=np.uint64), train=train, unseen=unseen) == 0


def test_rows_with_equal_runs_everywhere_are_unknown() -> None:
    equal = np.ones(300, np.uint64)
    assert count_repeated(equal, train=equal, unseen=equal) is None


def test_hash_uses_all_values() -> None:
    dense = np.array(
        [
            [1.0, 2.0],
            [2.0, 1.0],
            [1.0, 2.0],
            [1.0, 2.0],
            [1.0, 2.0],
            [1.0, 2.0],
            [1.0, 2.0],
        ],
        np.float32,
    )
    first = np.array([3, 3, 4, 3, 3, 3, 3], np.int32)
    second = np.array([4, 4, 3, 4, 4, 4, 4], np.int32)
    bags = JaggedIds(
        np.array([7, 8] * 3 + [8] + [7, 8] * 2 + [7, 8], np.int32),
        np.array([2, 2, 2, 1, 2, 2, 2], np.int32),
    )
    labels = {"y": np.array([0, 0, 0, 0, 1, 0, 0], np.uint8)}
    hashes = row_hashes(EncodedRows(dense, [first, second, bags], labels))
    assert len(set(hashes[:5].tolist())) == 5
    assert hashes[0] == hashes[5] == hashes[6]


@pytest.mark.parametrize("size", [1, 3])
def test_hash_of_arrays_matches_lists(size: int) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (20, size)).astype(np.int32)
    dense = np.zeros((20, 1), np.float32)
    labels = {"y": np.zeros(20, np.uint8)}
    array = ids[:, 0] if size == 1 else ids
    lists = JaggedIds(ids.reshape(-1), np.full(20, size, np.int32))
    expected = row_hashes(EncodedRows(dense, [array], labels))
    np.testing.assert_array_equal(row_hashes(EncodedRows(dense, [lists], labels)), expected)


# -- a run's own held-out rows


def test_evaluate_without_path_scores_test_rows(trained: Trained, tmp_path: Path) -> None:
    part = tmp_path / "test.txt"
    part.write_bytes(b"".join(trained.lines[-TESTED:]))
    result = trained.evaluate()
    by_file = trained.evaluate(str(part))
    names = (
        "auroc",
        "logloss",
        "calibration",
        "rows",
        "label_rate",
    )
    assert {name: result[name] for name in names} == {name: by_file[name] for name in names}
    summary = json.loads(Path(trained.run, "summary.json").read_text())
    assert result["auroc"] == pytest.approx(summary["metrics"]["auroc"], abs=1e-6)
    assert (result["set"], result["path"], result["training_rows"]) == ("test", str(trained.log), 0)


def test_evaluate_without_test_rows_scores_validation(trained: Trained, tmp_path: Path) -> None:
    rayrec.generate(
        str(tmp_path / "later"),
        rows=900,
        seed=3,
        console=QUIET,
    )
    later = str(tmp_path / "later" / "train.txt")
    config = one_worker(
        trained.log.parent, tmp_path, steps=2, evaluate_every=2, eval_data={"path": later}
    )
    run = train(config).folder
    result = rayrec.evaluate(run, console=QUIET)
    assert (result["set"], result["rows"], result["path"]) == ("validation", 900, later)
    assert result["auroc"] == rayrec.evaluate(run, later, console=QUIET)["auroc"]


def test_evaluate_without_path_rejects_moved_log(tmp_path: Path) -> None:
    run = Trained(tmp_path)
    run.log.rename(tmp_path / "moved.txt")
    rejects(
        f"data {run.log} does not exist from here. Run this in the folder",
        rayrec.evaluate,
        run.run,
        console=QUIET,
    )


def test_baselines_are_scored_beside_model(trained: Trained) -> None:
    result = trained.evaluate(baselines=())
    assert [baseline["name"] for baseline in result["baselines"]] == ["prior", "logistic"]
    prior, logistic = result["baselines"]
    labels = np.array([line[:1] == b"1" for line in trained.lines], np.uint8)
    rate = (labels[:TRAINED].sum() + 1) / (TRAINED + 2)
    tested = labels[-TESTED:]
    expected = binary_metrics(np.full(len(tested), np.log(rate / (1 - rate)), np.float32), tested)
    assert {name: prior[name] for name in expected} == pytest.approx(expected, nan_ok=True)
    assert (prior["auroc"], prior["trained_rows"]) == (0.5, TRAINED)
    assert logistic["auroc"] > 0.6
    compared = rayrec.compare(
        [trained.run], None, baselines=("logistic",), resamples=20, console=QUIET
    )
    assert compared["models"][1]["auroc"] == logistic["auroc"]


def test_command_lists_baselines(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["evaluate", trained.run, "--baselines", "-q"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [baseline["name"] for baseline in result["baselines"]] == ["prior", "logistic"]
    assert result["rows"] == TESTED


def test_compare_without_path_scores_test_rows(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["compare", trained.run, trained.run, "--resamples", "20", "-q"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], len(result["models"])) == (TESTED, 2)
    assert result["models"][0]["auroc"] == trained.evaluate()["auroc"]
    assert cli.run(["compare", trained.run, "--baselines", "prior", "--resamples", "20", "-q"]) == 0
    assert [model["name"] for model in json.loads(capsys.readouterr().out)["models"]] == [
        "run",
        "prior",
    ]


def test_models_with_other_test_rows_are_rejected(trained: Trained, tmp_path: Path) -> None:
    other = Trained(tmp_path)
    other.log.write_bytes(b"".join(trained.lines[1:]))
    config = one_worker(
        other.log.parent,
        tmp_path,
        steps=2,
        evaluate_every=2,
        name="other",
    )
    run = train(config).folder
    rejects("its test rows are not those of", rayrec.compare, [trained.run, run], console=QUIET)
    rejects("its test rows are not those of", trained.evaluate, compare=run)


def test_models_with_copies_of_test_rows_are_compared(trained: Trained, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    shutil.copy(trained.log, log / "train.txt")
    run = train(
        one_worker(
            log,
            tmp_path,
            steps=2,
            evaluate_every=2,
            name="copy",
        )
    ).folder
    assert rayrec.compare([trained.run, run], resamples=20, console=QUIET)["rows"] == TESTED


# -- rows in memory


@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(lambda frame: frame, id="pandas"),
        pytest.param(pa.Table.from_pandas, id="arrow"),
    ],
)
def test_rows_in_memory_score_like_their_file(
    convert: Callable[[pd.DataFrame], Any], trained: Trained, tmp_path: Path
) -> None:
    lines = trained.lines[:900]
    part = tmp_path / "part.txt"
    part.write_bytes(b"".join(lines))
    data = convert(trained.frame(lines))
    by_path = trained.evaluate(str(part))
    result = trained.evaluate(data)
    assert {name: result[name] for name in ("auroc", "logloss", "rows")} == {
        name: by_path[name] for name in ("auroc", "logloss", "rows")
    }
    compared = rayrec.compare([trained.run, trained.run], data, resamples=20, console=QUIET)
    assert compared["models"][0]["auroc"] == by_path["auroc"]
    rayrec.predict(trained.run, str(part), out=str(tmp_path / "of_path"), console=QUIET)
    rayrec.predict(trained.run, data, out=str(tmp_path / "of_rows"), console=QUIET)
    expected, predicted = (
        pq.read_table(tmp_path / name).sort_by("row") for name in ("of_path", "of_rows")
    )
    assert predicted.column("score").equals(expected.column("score"))


def test_unlabelled_rows_in_memory_are_predicted(trained: Trained, tmp_path: Path) -> None:
    frame = trained.frame(trained.lines[:50]).drop(columns="label")
    rayrec.predict(trained.run, frame, out=str(tmp_path / "out"), console=QUIET)
    assert pq.read_table(tmp_path / "out").num_rows == 50
    rejects("has no column named label", trained.evaluate, frame)


def test_files_of_rows_in_memory_are_removed(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    trained.evaluate(trained.frame(trained.lines[:50]))
    assert list((tmp_path / "cache" / "frames").iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"a": 1}, id="dict"),
        pytest.param([1], id="list"),
        pytest.param(3, id="number"),
    ],
)
def test_other_types_are_rejected(data: Any, trained: Trained, tmp_path: Path) -> None:
    expected = (
        "path: must be a path, a DataFrame, a pyarrow.Table or a ray.data.Dataset, got "
        f"{type(data).__name__}"
    )
    rejects(expected, trained.evaluate, data)
    rejects(expected, rayrec.compare, [trained.run, trained.run], data, console=QUIET)
    rejects(expected, rayrec.predict, trained.run, data, out=str(tmp_path / "out"), console=QUIET)
    rejects(expected, rayrec.predict, trained.run, data, console=QUIET)


def test_path_objects_are_paths(trained: Trained) -> None:
    assert trained.evaluate(trained.log)["rows"] == ROWS
