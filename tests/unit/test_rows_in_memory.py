"""Rows in memory in place of paths in the Python interface."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data
from builders.click_models import DLRM, hashed_preprocessor, save_clicks
from builders.faults import rejects
from builders.runs import LEAN, QUIET

import rayrec
from rayrec.commands.data import schema as draft_text
from rayrec.prepare.schema_draft import draft
from rayrec.schema import Schema

SCHEMA = Schema(label="click", dense=("age",), sparse=("user",), delimiter=",")
ROWS = 200
HERE: dict[str, Any] = {"cluster_address": "none", "console": QUIET}
KINDS = ["frame", "table"]


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "click": rng.integers(0, 2, ROWS),
            "age": rng.normal(40, 9, ROWS),
            "user": [f"u{number}" for number in rng.integers(0, 20, ROWS)],
        }
    )


@pytest.fixture(scope="module")
def log(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    pq.write_table(table, path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    save_clicks(folder, model=DLRM, preprocessor=hashed_preprocessor([9], SCHEMA))
    return str(folder)


def rows(table: pa.Table, kind: str) -> Any:
    return table.to_pandas() if kind == "frame" else table


@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_and_compare_accept_rows(run: str, table: pa.Table, log: Path, kind: str) -> None:
    data = rows(table, kind)
    expected = rayrec.evaluate(run, log, **HERE)
    assert rayrec.evaluate(run, data, **HERE)["auroc"] == expected["auroc"]
    compared = rayrec.compare([run, run], data, resamples=2, **HERE)
    assert compared["models"][1]["auroc"] == expected["auroc"]


@pytest.mark.parametrize("kind", KINDS)
def test_predict_and_transform_accept_rows(
    run: str, table: pa.Table, log: Path, tmp_path: Path, kind: str
) -> None:
    data = rows(table, kind)
    for source, out in ((data, tmp_path / "rows"), (log, tmp_path / "log")):
        rayrec.predict(run, source, out=str(out), **HERE)
    assert pq.read_table(tmp_path / "rows") == pq.read_table(tmp_path / "log")
    [checkpoint] = Path(run, "checkpoints").iterdir()
    inputs = rayrec.transform(checkpoint / "preprocessor", data)
    assert isinstance(inputs, type(data))
    assert len(inputs) == ROWS


@pytest.mark.parametrize("kind", KINDS)
def test_schema_accepts_rows(table: pa.Table, log: Path, kind: str) -> None:
    data = rows(table, kind)
    assert draft(data) == draft(str(log))
    assert draft_text(data) == draft_text(log)
    drafted = rayrec.draft_schema(data)
    assert (drafted.label, drafted.dense, drafted.sparse) == ("click", ("age",), ("user",))


@pytest.mark.extended
def test_schema_accepts_dataset(local_ray: None, table: pa.Table, log: Path) -> None:
    dataset = ray.data.from_arrow([table.slice(0, 50), table.slice(50)])
    assert draft(dataset) == draft(str(log))


def test_schema_names_argument_of_unusable_rows(table: pa.Table) -> None:
    rejects("^path: has no rows", rayrec.draft_schema, table.slice(0, 0))
    rejects("^path: .*users", rayrec.draft_schema, table, label="users")
    rejects("^path: must be a path, a DataFrame.*got dict", rayrec.draft_schema, {})


def test_train_accepts_rows_and_path_objects(table: pa.Table, log: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "schema": rayrec.draft_schema(table),
        "steps": 2,
        "batch_size": 50,
        "storage_path": str(tmp_path),
        "console": QUIET,
        "scaling.num_workers": 1,
        "cluster.address": "none",
        "model": "linear",
        **LEAN,
    }
    by_rows = rayrec.train("clicks", data=table, eval_data=table, name="rows", **settings)
    by_path = rayrec.train("clicks", data=log, eval_data=log, name="paths", **settings)
    assert by_rows.metrics["auroc"] == by_path.metrics["auroc"]
    unlabelled = table.drop_columns(["click"])
    for name, argument in (("data", "data"), ("eval_data", "eval_data")):
        message = f"^{argument}: has no column named click"
        given = {"data": table, name: unlabelled}
        rejects(message, rayrec.train, "clicks", name=f"no-{name}", **given, **settings)


@pytest.mark.parametrize("function", [rayrec.evaluate, rayrec.compare, rayrec.predict])
def test_scoring_names_argument_of_other_types(run: str, function: Any) -> None:
    rejects("^path: must be a path, a DataFrame.*got dict", function, run, {}, **HERE)
