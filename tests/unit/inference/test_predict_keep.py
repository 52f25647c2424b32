"""Predictions next to columns of their input."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from builders.click_models import DLRM, hashed_preprocessor, save_clicks
from builders.faults import fails_with, rejects
from builders.runs import QUIET, files_in
from builders.scored_rows import rows_file, scored, trained

import rayrec
from rayrec import cli
from rayrec.inference import predict as prediction
from rayrec.inference.config import PredictionConfig
from rayrec.inference.scoring import ScoringJob, ScoringRequest
from rayrec.observe.console import Console
from rayrec.schema import Schema

SCHEMA = Schema(label="click", dense=("age",), sparse=("user", "item"), delimiter=",")
ROWS = 12_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    save_clicks(
        folder,
        model=DLRM,
        preprocessor=hashed_preprocessor((11, 13), SCHEMA),
        eval_data={"block_bytes": 1 << 16, "segments_per_block": 4},
    )
    return str(folder)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rows = np.arange(ROWS)
    return pa.table(
        {
            "click": rows % 2,
            "age": rows % 90 / 2,
            "user": [f"u{row % 50}" for row in range(ROWS)],
            "item": [f"i{row % 70}" for row in range(ROWS)],
            "request": [f"r{row}" for row in range(ROWS)],
            "at": pa.array(rows, pa.timestamp("s")),
        }
    )


@pytest.fixture(scope="module")
def log(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("log") / "log.csv"
    arrow_csv.write_csv(table, path)
    return str(path)


def predict(run: str, path: Any, out: Path, *keep: str, **options: Any) -> pa.Table:
    rayrec.predict(
        run,
        path,
        out=str(out),
        keep=keep,
        cluster_address="none",
        console=QUIET,
        **options,
    )
    return pq.read_table(out)


def test_columns_follow_scores(run: str, log: str, table: pa.Table, tmp_path: Path) -> None:
    plain = predict(run, log, tmp_path / "plain")
    assert plain.column_names == ["row", "score", "logit", "label"]
    kept = predict(run, log, tmp_path / "kept", "request", "user", "age")
    assert kept.column_names == [*plain.column_names, "request", "user", "age"]
    assert kept.select(plain.column_names) == plain
    assert kept.column("request").to_pylist() == table.column("request").to_pylist()
    assert kept.column("user").to_pylist() == table.column("user").to_pylist()
    assert kept.column("age")[:3].to_pylist() == ["0", "0.5", "1"]


def test_invalid_rows_are_dropped(run: str, log: str, tmp_path: Path) -> None:
    lines = Path(log).read_text().splitlines()
    for row in range(1, ROWS, 100):
        lines[1 + row] = lines[1 + row].replace(",", ",x", 1)
    damaged = tmp_path / "damaged.csv"
    damaged.write_text("\n".join(lines))
    kept = predict(run, str(damaged), tmp_path / "out", "request", max_bad_fraction=0.1)
    good = [row for row in range(ROWS) if row % 100 != 1]
    assert kept.column("row").to_pylist() == good
    assert kept.column("request").to_pylist() == [f"r{row}" for row in good]


@pytest.mark.parametrize("kind", ["frame", "table"])
def test_rows_in_memory_keep_columns(run: str, table: pa.Table, tmp_path: Path, kind: str) -> None:
    rows = table.slice(0, 100)
    data = rows.to_pandas() if kind == "frame" else rows
    kept = predict(run, data, tmp_path / "out", "at", "request")
    assert kept.column("request").to_pylist() == rows.column("request").to_pylist()
    assert pa.types.is_timestamp(kept.schema.field("at").type)
    assert pd.Series(kept.column("at")).tolist() == rows.column("at").to_pylist()
    message = "keep: path has no column requests; did you mean request?"
    rejects(message, predict, run, data, tmp_path / "other", "requests")


def test_interrupted_prediction_resumes_aligned(
    run: str,
    log: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prediction, "PART_ROWS", 5000)
    expected = tmp_path / "expected"
    predict(run, log, expected, "request")
    tables = ScoringJob.tables
    begun = []

    def watched(self: ScoringJob, console: Console, *, first_row: int = 0) -> Iterator[pa.Table]:
        begun.append(first_row)
        for scores in tables(self, console, first_row=first_row):
            if len(begun) == 1 and scores.column("row")[0].as_py() > 6000:
                raise KeyboardInterrupt
            yield scores

    monkeypatch.setattr(ScoringJob, "tables", watched)
    out = tmp_path / "out"
    fails_with(KeyboardInterrupt, "", predict, run, log, out, "request")
    rejects("with a different rows, keep; use the same", predict, run, log, out, "user")
    predict(run, log, out, "request")
    assert begun[1] > 5000
    assert files_in(out) == files_in(expected)


def test_unknown_column_is_rejected_first(run: str, log: str, tmp_path: Path) -> None:
    message = f"keep: {log} has no column users; did you mean user?"
    rejects(message, predict, run, log, tmp_path / "out", "users")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["row", "score", "logit", "label"])
def test_names_of_predictions_are_rejected(run: str, log: str, tmp_path: Path, name: str) -> None:
    message = f"keep: predictions have a column {name} already"
    rejects(message, predict, run, log, tmp_path / "out", name)


def test_repeated_column_is_rejected(run: str, log: str, tmp_path: Path) -> None:
    rejects("keep: values must be unique", predict, run, log, tmp_path / "out", "user", "user")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep": ("x",)}, "keep: recipe scored does not score rows with columns"),
        ({"k": 3}, "k: recipe scored does not recommend items"),
        ({"exclude_seen": False}, "exclude_seen: recipe scored does not recommend items"),
    ],
)
def test_other_recipe_is_rejected(fields: Any, message: str, tmp_path: Path) -> None:
    checkpoint, _ = trained(tmp_path / "run")
    options = PredictionConfig(**fields)
    request = ScoringRequest(checkpoint, rows_file(tmp_path, 5), scored(), options, QUIET)
    rejects(message, request.open, evaluating=False, spare_cpus=0, predicting=options)


def test_click_model_rejects_k(run: str, log: str, tmp_path: Path) -> None:
    for name, value in (("k", 3), ("exclude_seen", False)):
        rejects(
            f"{name}: the model scores rows and does not recommend items",
            rayrec.predict,
            run,
            log,
            out=str(tmp_path / "out"),
            **{name: value},
        )


def test_flag_takes_several_columns(run: str, log: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    words = ["predict", run, log, "--out", out, "--keep", "user", "item", "--cluster.address"]
    assert cli.run([*words, "none", "-q"]) == 0
    assert pq.read_table(out).column_names[-2:] == ["user", "item"]
