"""Predictions of a trained run from log to Parquet, in this process and on Ray: ordered, complete, equal to training."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.faults import flip
from builders.runs import QUIET, train

from rayrec import recipes
from rayrec.config import InputError
from rayrec.inference import predict as prediction
from rayrec.inference import prediction_files
from rayrec.inference.config import EvaluationConfig, ScoringConfig
from rayrec.inference.evaluate import evaluate
from rayrec.inference.result_tables import evaluation_text
from rayrec.inference.scoring import ScoringJob
from rayrec.metrics.binary import binary_metrics
from rayrec.metrics.significance import METRICS
from rayrec.observe.console import Console

if TYPE_CHECKING:
    from rayrec.training.trainer import Result
    from rayrec.workloads.base import TrainConfig

THOUSAND = ScoringConfig(batch_rows=1000)


@pytest.fixture(scope="module")
def result(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    model = {"embedding_dim": 4, "bottom_mlp": (16, 4), "top_mlp": (16, 1)}
    config = recipes.criteo_demo(path=str(click_log / "train.txt")).replace(
        workload={"model": model},
        steps=5,
        batch_size=256,
        name="tiny",
        storage_path=str(tmp_path_factory.mktemp("runs")),
        scaling={"num_workers": 1},
        cluster={"num_cpus": 2, "address": "none"},
    )
    return train(config)


@pytest.fixture(scope="module")
def config(result: Result) -> TrainConfig:
    """Return the checkpoint's configuration with small blocks, so that a small log has many."""
    text = Path(result.checkpoint, "config.yaml").read_text()
    return recipes.load_config(text).replace(eval_data={"block_bytes": 1 << 18, "segments_per_block": 2})


@pytest.fixture(scope="module")
def lines(click_log: Path) -> list[bytes]:
    return (click_log / "train.txt").read_bytes().splitlines(keepends=True)


def _unlabelled(lines: list[bytes]) -> bytes:
    return b"".join(line.split(b"\t", 1)[1] for line in lines)


def _columns(checkpoint: str, path: Path, config: TrainConfig) -> dict[str, np.ndarray]:
    """Predict in this process."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        prediction.predict_to(checkpoint, str(path), out, config=config, options=THOUSAND, console=QUIET)
        table = pq.read_table(out)
    return {name: table.column(name).to_numpy() for name in table.column_names}


@pytest.fixture(scope="module")
def whole(local_ray: None, result: Result, click_log: Path, config: TrainConfig) -> dict[str, np.ndarray]:
    """Predict the full log as a Dataset on Ray."""
    on_ray = config.replace(cluster={"address": "local"})
    log = str(click_log / "train.txt")
    dataset = prediction.predict(result.checkpoint, log, config=on_ray, options=THOUSAND, console=QUIET)
    batches = list(dataset.iter_batches(batch_size=None))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def test_evaluate_matches_training_metrics(result: Result, config: TrainConfig, lines: list[bytes], tmp_path: Path) -> None:
    rows = result.summary["rows_of_sets"]["test"]
    (tmp_path / "test.tsv").write_bytes(b"".join(lines[-rows:]))
    metrics = evaluate(result.checkpoint, str(tmp_path / "test.tsv"), config=config, console=QUIET)
    assert metrics["rows"] == rows
    for name, value in result.metrics.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name
    assert metrics["bad_rows"] == 0
    assert metrics["checkpoint"] == result.checkpoint
    assert metrics["preprocessor"] == result.summary["preprocessor"]


def test_predictions_are_in_order(
    whole: dict[str, np.ndarray], lines: list[bytes], result: Result, config: TrainConfig, click_log: Path
) -> None:
    assert list(whole) == ["row", "score", "logit", "label"]
    assert [whole[name].dtype for name in whole] == [np.int64, np.float32, np.float32, np.float32]
    assert whole["row"].tolist() == list(range(len(lines)))
    assert whole["label"].tolist() == [float(line[:1]) for line in lines]
    np.testing.assert_allclose(whole["score"], 1 / (1 + np.exp(-whole["logit"].astype(float))), rtol=1e-6)
    assert len(np.unique(whole["logit"])) > 10_000
    metrics = evaluate(result.checkpoint, str(click_log), config=config, console=QUIET)
    by_hand = binary_metrics(whole["logit"], whole["label"])
    assert {name: metrics[name] for name in by_hand} == pytest.approx(by_hand, abs=1e-6)


def test_scores_ignore_labels_packing_and_neighbours(
    whole: dict[str, np.ndarray], lines: list[bytes], result: Result, config: TrainConfig, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    (log / "part_2.txt.gz").write_bytes(gzip.compress(_unlabelled(lines[:700])))
    (log / "part_10.txt.gz").write_bytes(gzip.compress(_unlabelled(lines[700:1500])))
    got = _columns(result.checkpoint, log, config)
    assert list(got) == ["row", "score", "logit"]
    assert got["row"].tolist() == list(range(1500))
    np.testing.assert_allclose(got["logit"], whole["logit"][:1500], atol=1e-6)
    (tmp_path / "single.txt").write_bytes(lines[3].rstrip(b"\n"))
    single = _columns(result.checkpoint, tmp_path / "single.txt", config)
    assert single["row"].tolist() == [0]
    np.testing.assert_allclose(single["logit"], whole["logit"][3:4], atol=1e-6)


def test_invalid_lines_keep_row_numbers(
    whole: dict[str, np.ndarray], lines: list[bytes], result: Result, config: TrainConfig, tmp_path: Path
) -> None:
    count = 6000  # several blocks, one of them all good
    faulty = [place for place in range(count) if place % 7 == 0 and place < 2500] + [count - 1]
    text = [lines[place] if place not in set(faulty) else b"nonsense\n" for place in range(count)]
    (tmp_path / "faulty.txt").write_bytes(b"".join(text))
    with pytest.raises(InputError, match=r"invalid, more than max_bad_fraction.*too few columns"):
        _columns(result.checkpoint, tmp_path / "faulty.txt", config)
    lenient = config.replace(max_bad_fraction=0.5)
    got = _columns(result.checkpoint, tmp_path / "faulty.txt", lenient)
    expected = np.delete(np.arange(count), faulty)
    np.testing.assert_array_equal(got["row"], expected)
    np.testing.assert_allclose(got["logit"], whole["logit"][expected], atol=1e-6)
    metrics = evaluate(result.checkpoint, str(tmp_path / "faulty.txt"), config=lenient, console=QUIET)
    assert (metrics["rows"], metrics["bad_rows"]) == (len(expected), len(faulty))


@pytest.fixture(scope="module")
def scores(result: Result, config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Write the log's predictions as files of 7000 rows, and return the folder and report."""
    out = tmp_path_factory.mktemp("scores") / "scores"
    with pytest.MonkeyPatch.context() as patch:
        _small_parts(patch)
        return out, _predict_to(result.folder, config, out)  # of the run's folder: its newest checkpoint


def _small_parts(patch: pytest.MonkeyPatch) -> None:
    for module in (prediction_files, prediction):
        patch.setattr(module, "PART_ROWS", 7000)


def _predict_to(checkpoint: str, config: TrainConfig, out: Path, *, batch_rows: int = 1000) -> dict[str, Any]:
    assert config.train_data.path is not None
    options = ScoringConfig(batch_rows=batch_rows)
    return prediction.predict_to(checkpoint, config.train_data.path, str(out), config=config, options=options, console=QUIET)


def test_predict_writes_parquet(
    whole: dict[str, np.ndarray], scores: tuple[Path, dict[str, Any]], result: Result, config: TrainConfig
) -> None:
    out, done = scores
    assert (done["rows"], done["bad_rows"], done["out"]) == (20_000, 0, str(out))
    assert done["rows_per_s"] > 0
    parts = sorted(out.iterdir())
    assert [part.name for part in parts] == [f"part-0000{number}.parquet" for number in range(3)]
    assert [pq.read_metadata(part).num_rows for part in parts] == [7000, 7000, 6000]
    table = pq.read_table(out)
    for name, values in whole.items():
        np.testing.assert_array_equal(table.column(name).to_numpy(), values, name)
    with pytest.raises(InputError, match="exists already"):
        _predict_to(result.folder, config, out)


def test_killed_predict_resumes(
    scores: tuple[Path, dict[str, Any]], result: Result, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are equal, and complete rows are not scored again."""
    _small_parts(monkeypatch)
    out, tables, begun = tmp_path / "out", ScoringJob.tables, []

    def watched(self: ScoringJob, console: Console, *, first_row: int = 0) -> Iterator[pa.Table]:
        begun.append(first_row)
        for table in tables(self, console, first_row=first_row):
            if len(begun) == 1 and table.column("row")[0].as_py() > 9000:
                raise KeyboardInterrupt
            yield table

    monkeypatch.setattr(ScoringJob, "tables", watched)
    with pytest.raises(KeyboardInterrupt):
        _predict_to(result.checkpoint, config, out)
    assert not out.exists()
    assert [path.name for path in Path(f"{out}.partial").glob("*.parquet")] == ["part-00000.parquet"]
    with pytest.raises(InputError, match="with a different batch_rows; use the same"):
        _predict_to(result.checkpoint, config, out, batch_rows=999)
    assert _predict_to(result.checkpoint, config, out)["rows"] == 20_000
    assert begun[0] == 0
    assert 7000 < begun[1] <= 11_000
    expected = {path.name: path.read_bytes() for path in scores[0].iterdir()}
    assert {path.name: path.read_bytes() for path in out.iterdir()} == expected
    assert not Path(f"{out}.partial").exists()


@pytest.mark.exhaustive
def test_evaluate_slices_intervals_and_comparison(
    result: Result, config: TrainConfig, click_log: Path, whole: dict[str, np.ndarray], lines: list[bytes]
) -> None:
    checkpoints = sorted((Path(result.folder) / "checkpoints").iterdir())
    log = str(click_log / "train.txt")
    slices: dict[str, Any] = {"slice_by": ("day", "cat_0", "frequency:cat_2", "int_1"), "slice_top": 3}
    options = EvaluationConfig(confidence=0.9, resamples=20, compare=str(checkpoints[-1]), batch_rows=1000, **slices)
    found = evaluate(result.checkpoint, log, config=config, options=options, other=config, console=QUIET)
    metrics = binary_metrics(whole["logit"], whole["label"])
    assert {name: found[name] for name in metrics} == metrics
    for name in METRICS:
        low, high = found["intervals"][name]
        assert low < found[name] < high
        assert found["compared"][name] == found[name]
        assert found["compared"]["differences"][name]["p_value"] == 1  # it is the same checkpoint
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    for slices in found["slices"].values():
        assert sum(piece["rows"] for piece in slices) == len(lines)
    assert [piece["value"] for piece in found["slices"]["day"]] == [f"seventh {number}" for number in range(1, 8)]
    last = slice(len(lines) - found["slices"]["day"][-1]["rows"], None)
    last_day = binary_metrics(whole["logit"][last], whole["label"][last])
    assert found["slices"]["day"][-1]["auroc"] == pytest.approx(last_day["auroc"], abs=1e-12)

    tokens = np.array([line.rstrip(b"\n").split(b"\t")[14].decode() for line in lines])
    values, counts = np.unique(tokens, return_counts=True)
    most = [value or "(missing)" for value in values[np.argsort(-counts)][:4].tolist()]
    assert {piece["value"] for piece in found["slices"]["cat_0"]} <= {*most, "(others)", "(missing)"}
    piece = found["slices"]["cat_0"][0]
    expected = binary_metrics(whole["logit"][tokens == piece["value"]], whole["label"][tokens == piece["value"]])
    assert piece["rows"] == expected["rows"]
    assert piece["logloss"] == pytest.approx(expected["logloss"], rel=1e-12)
    frequencies = [piece["value"] for piece in found["slices"]["frequency:cat_2"]]
    known = ["1", "2-9", "10-99", "100-999", "1,000-9,999", "10,000-99,999", "(not in the vocabulary)", "(missing)"]
    assert frequencies == [name for name in known if name in frequencies]
    assert len(frequencies) > 3
    assert "by int_1:\n" in evaluation_text(found)


def test_unsupported_evaluation_options_are_rejected(result: Result, config: TrainConfig, click_log: Path) -> None:
    log = str(click_log / "train.txt")
    for by, message in (("cat5", "no column 'cat5'; did you mean 'cat_5'"), ("user", "no column 'user'; there are day")):
        with pytest.raises(InputError, match=message):
            evaluate(result.checkpoint, log, config=config, options=EvaluationConfig(slice_by=(by,)), console=QUIET)
    options = EvaluationConfig(compare=str(click_log))
    with pytest.raises(InputError, match="contains no complete checkpoint"):
        evaluate(result.checkpoint, log, config=config, options=options, other=config, console=QUIET)


def test_invalid_predictions_are_rejected(result: Result, config: TrainConfig, lines: list[bytes], tmp_path: Path) -> None:
    unlabelled, mixed = tmp_path / "unlabelled.txt", tmp_path / "mixed.txt"
    unlabelled.write_bytes(_unlabelled(lines[:100]))
    with pytest.raises(InputError, match="has no labels to evaluate against"):
        evaluate(result.checkpoint, str(unlabelled), config=config, console=QUIET)
    mixed.write_bytes(_unlabelled(lines[:2]) + lines[2])
    with pytest.raises(InputError, match=r"too many columns"):
        prediction.predict_to(result.checkpoint, str(mixed), str(tmp_path / "out"), config=config, console=QUIET)

    damaged = Path(shutil.copytree(result.checkpoint, tmp_path / "step_00000005"))
    weights = max(damaged.glob("data_*.safetensors"), key=lambda path: path.stat().st_size)
    flip(weights)
    out = tmp_path / "scores"
    with pytest.raises(InputError, match="damaged, the checksum"):
        prediction.predict_to(str(damaged), str(unlabelled), str(out), config=config, console=QUIET)
    assert not out.exists()
    assert not list(tmp_path.glob("scores*"))
