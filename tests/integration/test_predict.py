"""Predictions of a trained run from log to Parquet, in this process and on Ray: ordered, complete,
equal to training.
"""

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data
import torch
from builders.faults import fails_with, flip, rejects
from builders.logs import unlabelled
from builders.runs import QUIET, files_in, short_run, train
from builders.scored_rows import rows_file, scored, trained

import rayrec
from rayrec import recipes
from rayrec.datasets.criteo import SCHEMA
from rayrec.inference import predict as prediction
from rayrec.inference.config import EvaluationConfig, PredictionConfig
from rayrec.inference.evaluate import evaluate
from rayrec.inference.result_tables import evaluation_text
from rayrec.inference.scoring import ScoringJob
from rayrec.metrics.binary import binary_metrics
from rayrec.metrics.significance import METRICS
from rayrec.observe.console import Console
from rayrec.training.result import Result

Columns = dict[str, np.ndarray]


class Model:
    """A trained model and its log; it scores in small blocks, so that a small log has many."""

    def __init__(self, result: Result, log: Path) -> None:
        self.result = result
        self.checkpoint = result.checkpoint
        self.log = str(log)
        self.lines = log.read_bytes().splitlines(keepends=True)
        stored = recipes.load_config(Path(result.checkpoint, "config.yaml").read_text())
        self.config = stored.replace(eval_data={"block_bytes": 1 << 18, "segments_per_block": 2})

    def evaluate(self, path: Path | None = None, **options: Any) -> dict[str, Any]:
        options = {"config": self.config, "console": QUIET, **options}
        return evaluate(self.checkpoint, str(path or self.log), **options)

    def predict_to(self, out: Path, path: Path | None = None, **changes: Any) -> dict[str, Any]:
        options = PredictionConfig(batch_rows=changes.pop("batch_rows", 1000))
        settings = {
            "config": self.config,
            "options": options,
            "console": QUIET,
            **changes,
        }
        return prediction.predict_to(
            settings.pop("checkpoint", self.checkpoint), str(path or self.log), str(out), **settings
        )

    def columns(self, path: Path, **changes: Any) -> Columns:
        out = path.with_name(f"{path.name}-out")
        self.predict_to(out, path, **changes)
        table = pq.read_table(out)
        return {name: table.column(name).to_numpy() for name in table.column_names}


@pytest.fixture(scope="module")
def model(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    network = {"embedding_dim": 4, "bottom_mlp": (16, 4), "top_mlp": (16, 1)}
    log = click_log / "train.txt"
    config = short_run(
        recipes.criteo_demo(str(log)),
        tmp_path_factory.mktemp("runs"),
        5,
        batch_size=256,
        cluster={"num_cpus": 2, "address": "none"},
    )
    return Model(train(config, workload={"model": network}), log)


@pytest.fixture(scope="module")
def predicted_rows(local_ray: None, model: Model) -> Columns:
    """Predict the full log as a Dataset on Ray."""
    batches = list(
        prediction.predict(
            model.checkpoint,
            model.log,
            console=QUIET,
            config=model.config.replace(cluster={"address": "local"}),
            options=PredictionConfig(batch_rows=1000),
        ).iter_batches(batch_size=None)
    )
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def test_predictions_are_in_order(predicted_rows: Columns, model: Model, click_log: Path) -> None:
    assert list(predicted_rows) == ["row", "score", "logit", "label"]
    assert [predicted_rows[name].dtype for name in predicted_rows] == [
        np.int64,
        np.float32,
        np.float32,
        np.float32,
    ]
    assert predicted_rows["row"].tolist() == list(range(len(model.lines)))
    assert predicted_rows["label"].tolist() == [float(line[:1]) for line in model.lines]
    np.testing.assert_allclose(
        predicted_rows["score"], 1 / (1 + np.exp(-predicted_rows["logit"].astype(float))), rtol=1e-6
    )
    assert len(np.unique(predicted_rows["logit"])) > 10_000
    metrics = model.evaluate(click_log)
    by_hand = binary_metrics(predicted_rows["logit"], predicted_rows["label"])
    assert {name: metrics[name] for name in by_hand} == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.extended
def test_datasets_score_like_their_file(local_ray: None, model: Model, tmp_path: Path) -> None:
    """Blocks of Arrow and of pandas, here with a category type, which Ray Data cannot name in
    Arrow's types.
    """
    values = list(
        zip(*(line.decode().rstrip("\n").split("\t") for line in model.lines[:900]), strict=True)
    )
    columns = dict(zip(SCHEMA.columns, values, strict=True))
    frame = pd.DataFrame(
        {name: pd.to_numeric(pd.Series(columns[name])) for name in ("label", *SCHEMA.dense)}
    ).assign(**{name: pd.Categorical(columns[name]) for name in SCHEMA.sparse})
    part = tmp_path / "part.txt"
    part.write_bytes(b"".join(model.lines[:900]))
    options: dict[str, Any] = {"cluster_address": "auto", "console": QUIET}
    expected = rayrec.evaluate(model.result.folder, part, **options)
    logits = model.columns(part)["logit"]
    for dataset in (ray.data.from_pandas(frame), ray.data.from_arrow(pa.Table.from_pandas(frame))):
        result = rayrec.evaluate(model.result.folder, dataset, **options)
        assert {name: result[name] for name in ("auroc", "rows")} == {
            name: expected[name] for name in ("auroc", "rows")
        }
        out = str(tmp_path / f"scores_{len(list(tmp_path.iterdir()))}")
        rayrec.predict(model.result.folder, dataset.drop_columns(["label"]), out=out, **options)
        np.testing.assert_allclose(pq.read_table(out).column("logit").to_numpy(), logits, atol=1e-6)


def test_scores_ignore_labels_packing_and_neighbours(
    predicted_rows: Columns, model: Model, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    (log / "part_2.txt.gz").write_bytes(gzip.compress(unlabelled(model.lines[:700])))
    (log / "part_10.txt.gz").write_bytes(gzip.compress(unlabelled(model.lines[700:1500])))
    (tmp_path / "single.txt").write_bytes(model.lines[3].rstrip(b"\n"))
    got = model.columns(log)
    single = model.columns(tmp_path / "single.txt")
    assert list(got) == ["row", "score", "logit"]
    assert (got["row"].tolist(), single["row"].tolist()) == (list(range(1500)), [0])
    np.testing.assert_allclose(got["logit"], predicted_rows["logit"][:1500], atol=1e-6)
    np.testing.assert_allclose(single["logit"], predicted_rows["logit"][3:4], atol=1e-6)


def test_invalid_lines_keep_row_numbers(
    predicted_rows: Columns, model: Model, tmp_path: Path
) -> None:
    # several blocks, one of them all good
    count = 6000
    path = tmp_path / "faulty.txt"
    faulty = [place for place in range(count) if place % 7 == 0 and place < 2500] + [count - 1]
    path.write_bytes(
        b"".join(
            model.lines[place] if place not in set(faulty) else b"nonsense\n"
            for place in range(count)
        )
    )
    rejects(r"invalid, more than max_bad_fraction.*too few columns", model.columns, path)
    lenient = {"config": model.config.replace(max_bad_fraction=0.5)}
    got = model.columns(path, **lenient)
    expected = np.delete(np.arange(count), faulty)
    np.testing.assert_array_equal(got["row"], expected)
    np.testing.assert_allclose(got["logit"], predicted_rows["logit"][expected], atol=1e-6)
    metrics = model.evaluate(path, **lenient)
    assert (metrics["rows"], metrics["bad_rows"]) == (len(expected), len(faulty))


@pytest.fixture(scope="module")
def scores(model: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Write the log's predictions as files of 7000 rows, and return the folder and report."""
    out = tmp_path_factory.mktemp("scores") / "scores"
    with pytest.MonkeyPatch.context() as patch:
        _small_parts(patch)
        # of the run's folder: its newest checkpoint
        return out, model.predict_to(out, checkpoint=model.result.folder)


def _small_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prediction, "PART_ROWS", 7000)


def test_predict_writes_parquet(
    predicted_rows: Columns, scores: tuple[Path, dict[str, Any]], model: Model
) -> None:
    out, done = scores
    assert (done["rows"], done["bad_rows"], done["out"]) == (20_000, 0, str(out))
    assert done["rows_per_s"] > 0
    parts = {part.name: pq.read_metadata(part).num_rows for part in sorted(out.iterdir())}
    assert parts == {
        "part-00000.parquet": 7000,
        "part-00001.parquet": 7000,
        "part-00002.parquet": 6000,
    }
    table = pq.read_table(out)
    for name, values in predicted_rows.items():
        np.testing.assert_array_equal(table.column(name).to_numpy(), values, name)
    rejects("exists already", model.predict_to, out)


def test_killed_predict_resumes(
    scores: tuple[Path, dict[str, Any]], model: Model, tmp_path: Path, monkeypatch: Any
) -> None:
    _small_parts(monkeypatch)
    out = tmp_path / "out"
    tables = ScoringJob.tables
    begun = []

    def watched(self: ScoringJob, console: Console, *, first_row: int = 0) -> Iterator[pa.Table]:
        begun.append(first_row)
        for table in tables(self, console, first_row=first_row):
            if len(begun) == 1 and table.column("row")[0].as_py() > 9000:
                raise KeyboardInterrupt
            yield table

    monkeypatch.setattr(ScoringJob, "tables", watched)
    fails_with(KeyboardInterrupt, "", model.predict_to, out)
    assert not out.exists()
    assert [path.name for path in Path(f"{out}.partial").glob("*.parquet")] == [
        "part-00000.parquet"
    ]
    rejects("with a different batch_rows; use the same", model.predict_to, out, batch_rows=999)
    assert model.predict_to(out)["rows"] == 20_000
    assert begun[0] == 0
    assert 7000 < begun[1] <= 11_000
    assert files_in(out) == files_in(scores[0])
    assert not Path(f"{out}.partial").exists()


@pytest.fixture(scope="module")
def sliced(model: Model) -> dict[str, Any]:
    """An evaluation with slices and intervals, compared with the same checkpoint."""
    checkpoints = sorted((Path(model.result.folder) / "checkpoints").iterdir())
    options = EvaluationConfig(
        confidence=0.9,
        resamples=20,
        compare=str(checkpoints[-1]),
        batch_rows=1000,
        slice_by=("day", "cat_0", "frequency:cat_2", "int_1"),
        slice_top=3,
    )
    return model.evaluate(options=options, other=model.config)


@pytest.mark.exhaustive
def test_evaluation_has_intervals_and_differences(
    sliced: dict[str, Any], predicted_rows: Columns
) -> None:
    metrics = binary_metrics(predicted_rows["logit"], predicted_rows["label"])
    assert {name: sliced[name] for name in metrics} == metrics
    for name in METRICS:
        low, high = sliced["intervals"][name]
        assert low < sliced[name] < high
        assert sliced["compared"][name] == sliced[name]
        assert sliced["compared"]["differences"][name]["p_value"] == 1  # it is the same checkpoint
    assert json.loads(json.dumps(sliced, allow_nan=False)) == sliced


@pytest.mark.exhaustive
def test_evaluation_slices_by_category(
    model: Model, sliced: dict[str, Any], predicted_rows: Columns
) -> None:
    tokens = np.array([line.rstrip(b"\n").split(b"\t")[14].decode() for line in model.lines])
    values, counts = np.unique(tokens, return_counts=True)
    frequent = [value or "(missing)" for value in values[np.argsort(-counts)][:4].tolist()]
    assert {piece["value"] for piece in sliced["slices"]["cat_0"]} <= {
        *frequent,
        "(others)",
        "(missing)",
    }
    piece = sliced["slices"]["cat_0"][0]
    expected = binary_metrics(
        predicted_rows["logit"][tokens == piece["value"]],
        predicted_rows["label"][tokens == piece["value"]],
    )
    assert piece["rows"] == expected["rows"]
    assert piece["logloss"] == pytest.approx(expected["logloss"], rel=1e-12)


@pytest.mark.exhaustive
def test_evaluation_slices_by_frequency(sliced: dict[str, Any]) -> None:
    frequencies = [piece["value"] for piece in sliced["slices"]["frequency:cat_2"]]
    known = [
        "1",
        "2-9",
        "10-99",
        "100-999",
        "1,000-9,999",
        "10,000-99,999",
        "(not in the vocabulary)",
        "(missing)",
    ]
    assert frequencies == [name for name in known if name in frequencies]
    assert len(frequencies) > 3
    assert "by int_1:\n" in evaluation_text(sliced)


def test_unsupported_evaluation_options_are_rejected(model: Model, click_log: Path) -> None:
    for by, message in (
        ("cat5", "no column 'cat5'; did you mean 'cat_5'"),
        ("user", "no column 'user'; there are day"),
    ):
        rejects(message, model.evaluate, options=EvaluationConfig(slice_by=(by,)))
    options = EvaluationConfig(compare=str(click_log))
    rejects("contains no complete checkpoint", model.evaluate, options=options, other=model.config)


def test_invalid_predictions_are_rejected(model: Model, tmp_path: Path) -> None:
    without = tmp_path / "unlabelled.txt"
    mixed = tmp_path / "mixed.txt"
    out = tmp_path / "scores"
    without.write_bytes(unlabelled(model.lines[:100]))
    rejects("has no labels to evaluate against", model.evaluate, without)
    mixed.write_bytes(unlabelled(model.lines[:2]) + model.lines[2])
    rejects("too many columns", model.predict_to, tmp_path / "out", mixed)

    damaged = Path(shutil.copytree(model.checkpoint, tmp_path / "step_00000005"))
    flip(max(damaged.glob("data_*.safetensors"), key=lambda path: path.stat().st_size))
    rejects("damaged, the checksum", model.predict_to, out, without, checkpoint=str(damaged))
    assert not list(tmp_path.glob("scores*"))


# -- Rows of a custom workload, in this process and on Ray: evaluated, predicted, and rejected in
# one line
def test_rows_are_evaluated_and_predicted(local_ray: None, tmp_path: Path) -> None:
    checkpoint, model = trained(tmp_path / "run")
    path = rows_file(tmp_path, 333)
    arrays = np.load(path)
    with torch.no_grad():
        logits = model(torch.from_numpy(arrays["x"]))
        losses = torch.nn.functional.cross_entropy(
            logits, torch.from_numpy(arrays["label"]), reduction="none"
        )
    here = {"recipe": scored, "cluster_address": "none", "console": QUIET}
    reported = rayrec.evaluate(str(tmp_path / "run"), path, **here)
    assert reported.pop("loss") == pytest.approx(losses.double().mean().item(), rel=1e-6)
    assert reported.pop("perplexity") == pytest.approx(
        np.exp(losses.double().mean().item()), rel=1e-6
    )
    assert reported == {
        "bits": 32.0,
        "rows": 333,
        "training_rows": None,
        "checkpoint": checkpoint,
    }

    out = tmp_path / "out"
    reported = rayrec.predict(
        checkpoint,
        path,
        out=str(out),
        batch_rows=7,
        **here,
    )
    assert (reported["rows"], reported["out"], reported["checkpoint"]) == (
        333,
        str(out),
        checkpoint,
    )
    table = pq.read_table(out)
    assert table.column_names == ["row", "logits", "best", "named"]
    assert table.column("row").to_pylist() == list(range(333))
    np.testing.assert_allclose(
        np.array(table.column("logits").to_pylist()), logits.numpy(), atol=1e-6
    )
    rows = rayrec.predict(checkpoint, path, recipe=scored, console=QUIET).take_all()
    assert [row["best"] for row in rows] == table.column("best").to_pylist()
