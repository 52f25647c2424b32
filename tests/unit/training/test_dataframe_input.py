"""Training on a DataFrame or Dataset, equal to training on Parquet files with its rows."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.csv_runs import train, write_days
from builders.digits import write_digits
from builders.faults import fails_with, raising, rejects
from builders.runs import LEAN, QUIET

import rayrec
from rayrec import cli, recipes, storage
from rayrec.config import InputError
from rayrec.data import frame_files, synthetic
from rayrec.recipes.criteo import criteo_demo
from rayrec.recipes.mnist import mnist_resnet18
from rayrec.schema import Schema
from rayrec.training import dataframe_input, resume
from rayrec.training.resume import data_difference
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.data_versions import data_versions

SCHEMA = Schema(
    label="liked", dense=("age",), sparse=("user", "movie"), tokens="any", delimiter=","
)
COLUMNS = {"liked": "int64", "age": "double", "user": "string", "movie": "int64"}


def ratings(rows: int = 600, *, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "unused": [object()] * rows,
            "movie": rng.integers(0, 9, rows),
            "user": [f"u{user}" for user in rng.integers(0, 20, rows)],
            "age": np.where(rng.random(rows) < 0.2, np.nan, 30.0),
            "liked": rng.integers(0, 2, rows),
        },
        index=rng.permutation(rows),
    )


def config(folder: Path | str, **changes: Any) -> TrainConfig:
    return recipes.clicks(schema=SCHEMA).replace(name="run", storage_path=str(folder), **changes)


def write(config: TrainConfig, data: Any, *, resumes: bool = False) -> list[str]:
    notes: list[str] = []
    run = storage.join(config.storage_path, "run")
    placed = dataframe_input.with_paths(config, run, {"train_data": data})
    dataframe_input.write(placed, run, {"train_data": data}, resumes=resumes, note=notes.append)
    assert placed.train_data.path == f"{run}/data/train"
    return notes


def test_dataframe_run_matches_parquet_run(tmp_path: Path) -> None:
    small = config(
        tmp_path, steps=4, batch_size=64, scaling={"num_workers": 1}, evaluate_every=4, **LEAN
    )
    frame = ratings()
    held_out = ratings(200, seed=1)
    result = rayrec.train(small, data=frame, eval_data=held_out, console=QUIET)
    for name, rows in (("train", frame), ("eval", held_out)):
        rows.drop(columns="unused").to_parquet(tmp_path / f"{name}.parquet", index=False)
    paths = {f"{name}_data": {"path": f"{tmp_path}/{name}.parquet"} for name in ("train", "eval")}
    expected = rayrec.train(small.updated({"name": "files", **paths}), console=QUIET)
    assert result.summary["weights_sha256"] == expected.summary["weights_sha256"]
    assert result.metrics == expected.metrics
    longer = small.replace(steps=6)
    rejects(
        r"data/train: the run started with other data \(rows: 600 -> 599\)",
        rayrec.train,
        longer,
        data=frame.iloc[1:],
        console=QUIET,
    )
    resumed = rayrec.train(longer, data=frame, eval_data=held_out, console=QUIET)
    assert (
        resumed.summary["steps"],
        resumed.summary["rows_lost"],
        resumed.summary["rows_repeated"],
    ) == (6, 0, 0)


def test_dataframe_is_written_as_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_files, "_GROUP_ROWS", 100)
    monkeypatch.setattr(frame_files, "_FILE_ROWS", 200)
    (note,) = write(config(tmp_path), ratings())
    place = tmp_path / "run" / "data" / "train"
    assert (
        note
        == f"Wrote 600 rows to {place} as Parquet (once); the run reads its train_data from there"
    )
    assert pq.read_table(place / "part-000000.parquet").column_names == [
        "liked",
        "age",
        "user",
        "movie",
    ]
    files = [pq.ParquetFile(file.path) for file in storage.list_files(str(place))]
    assert [(file.metadata.num_rows, file.num_row_groups) for file in files] == [(200, 2)] * 3
    written = pd.concat([file.read().to_pandas() for file in files], ignore_index=True)
    pd.testing.assert_frame_equal(written, ratings()[list(COLUMNS)].reset_index(drop=True))
    assert storage.read_json(str(place / "written.json")) == {"rows": 600, "columns": COLUMNS}


def test_resumed_run_keeps_written_data(tmp_path: Path) -> None:
    write(config(tmp_path), ratings())
    written = next((tmp_path / "run" / "data" / "train").glob("*.parquet"))
    before = written.read_bytes()
    (note,) = write(config(tmp_path), ratings(seed=1), resumes=True)  # other values are not noticed
    assert note.endswith("the given data is not read again")
    assert written.read_bytes() == before
    retyped = r"columns: {.*'age': 'double'.*} -> {.*'age': 'int64'.*}"
    for changed, message in (
        (ratings(601), r"rows: 600 -> 601"),
        (ratings().assign(age=1), retyped),
    ):
        rejects(
            rf"{tmp_path}/run/data/train: .* other data \({message}\). Use the same",
            write,
            config(tmp_path),
            changed,
            resumes=True,
        )
    write(config(tmp_path), ratings(601))  # nothing is trained yet
    assert pq.read_metadata(written).num_rows == 601


def test_interrupted_data_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves a part of the files at a URL, where folders cannot be renamed."""
    at_url = config(f"file://{tmp_path}")
    written = tmp_path / "run" / "data" / "train"

    def write_half(*_: object) -> None:
        written.mkdir(parents=True)
        (written / "part-000001.parquet").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dataframe_input, "write_rows", write_half)
        fails_with(KeyboardInterrupt, "", write, at_url, ratings())
    write(at_url, ratings(), resumes=True)
    assert sorted(path.name for path in written.iterdir()) == [
        "part-000000.parquet",
        "written.json",
    ]


def test_data_of_users_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "data" / "train"
    folder.mkdir(parents=True)
    (folder / "a.parquet").write_bytes(b"measured for years")
    rejects(
        f"{folder}: not removed, because rayrec did not write it: it contains a.parquet",
        write,
        config(tmp_path),
        ratings(),
    )
    assert [path.name for path in folder.iterdir()] == ["a.parquet"]


def test_failed_write_leaves_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pq, "write_table", raising(OSError(28, "No space left on device")))
    fails_with(OSError, "No space left", write, config(tmp_path), ratings())
    assert not list((tmp_path / "run" / "data").iterdir())


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        pytest.param(
            {"a": [1]},
            {},
            "^data: must be a path, a DataFrame, a pyarrow.Table or a ray.data.Dataset, got dict",
            id="a-1",
        ),
        pytest.param(
            ratings(),
            {"train_data": {"path": "log"}},
            "^data: cannot use both rows and train_data.path log",
            id="ratings",
        ),
        pytest.param(
            ratings().drop(columns="user"),
            {},
            "^data: has no column named user; did you mean unused",
            id="ratings-.drop-columns-user",
        ),
        pytest.param(
            ratings().assign(user=pd.Timestamp(0)),
            {},
            r"^data: column user is of type timestamp\[ns\]; text or",
            id="ratings-.assign-user",
        ),
        pytest.param(
            ratings(0), {}, "data/train: the DataFrame has no rows to train on", id="ratings-0"
        ),
    ],
)
def test_dataframe_input_rejects_invalid_data(
    data: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rejects(message, write, config(tmp_path, **changes), data)
    assert not list(tmp_path.iterdir())


def test_integer_column_names_are_digits(tmp_path: Path) -> None:
    schema = Schema(label="0", dense=("1",), sparse=("2",))
    frame = pd.DataFrame([[1, 30.0, "u1"], [0, 31.0, "u2"]])
    write(recipes.clicks(schema=schema).replace(name="run", storage_path=str(tmp_path)), frame)
    written = pq.read_table(tmp_path / "run" / "data" / "train" / "part-000000.parquet")
    assert written.to_pydict() == {"0": [1, 0], "1": [30.0, 31.0], "2": ["u1", "u2"]}
    rejects(
        "^data: has no column named liked; it has 0, 1, 2",
        write,
        config(tmp_path / "other"),
        frame,
    )


def test_dataframe_has_no_order_of_lines(tmp_path: Path) -> None:
    placed = dataframe_input.with_paths(
        config(tmp_path), str(tmp_path / "run"), {"train_data": ratings()}
    )
    assert placed.workload.table_schema.header == ()
    declared = config(tmp_path, workload={"schema": {"header": ["liked", "user", "movie", "age"]}})
    placed = dataframe_input.with_paths(declared, str(tmp_path / "run"), {"train_data": ratings()})
    assert placed.workload.table_schema.header == ("liked", "user", "movie", "age")


def test_dataframe_input_accepts_criteo_not_other_recipes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^data: recipe mnist_resnet18 does not train on tables"):
        rayrec.train(recipes.mnist_resnet18().replace(storage_path=str(tmp_path)), data=ratings())
    # Categories of 8 hexadecimal digits, and integers that pandas stores as floats because of
    # missing values.
    recipe = criteo_demo().replace(name="run", storage_path=str(tmp_path))
    schema = recipe.workload.table_schema
    write(
        recipe,
        pd.DataFrame(
            {
                schema.label: [0, 1],
                **{name: [None, 3] for name in schema.dense},
                **dict.fromkeys(schema.sparse, "0000000a"),
            }
        ),
    )
    assert pq.read_schema(tmp_path / "run/data/train/part-000000.parquet").names == list(
        schema.columns
    )


@pytest.mark.ray
def test_dataset_is_written_as_parquet(local_ray: None, tmp_path: Path) -> None:
    import ray.data

    frame = ratings().drop(columns="unused").reset_index(drop=True)
    table = pa.Table.from_pandas(frame)
    dataset = ray.data.from_arrow([table.slice(0, 250), table.slice(250)])
    order, note = write(config(tmp_path), dataset)
    assert order.startswith(
        "preserve_order of Ray Data is off, so the order of row blocks may have changed in "
    )
    assert "Wrote 600 rows to" in note
    place = tmp_path / "run" / "data" / "train"
    files = storage.list_files(str(place))
    written = pd.concat([pd.read_parquet(file.path) for file in files], ignore_index=True)
    written = written.sort_values(list(COLUMNS), ignore_index=True)
    pd.testing.assert_frame_equal(
        written, frame[list(COLUMNS)].sort_values(list(COLUMNS), ignore_index=True)
    )
    write(config(tmp_path), dataset, resumes=True)
    assert storage.list_files(str(place)) == files


def test_interrupted_dataset_at_url_is_written_again(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.data

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    dataset = ray.data.from_arrow(
        pa.Table.from_pandas(ratings().drop(columns="unused"), preserve_index=False)
    )
    at_url = config(f"file://{tmp_path}")
    with monkeypatch.context() as patch:
        patch.setattr(dataframe_input, "_write_manifest", interrupt)
        fails_with(KeyboardInterrupt, "", write, at_url, dataset)
    place = tmp_path / "run" / "data" / "train"
    assert any(path.suffix == ".parquet" for path in place.iterdir())
    write(at_url, dataset)
    assert pq.read_table([str(path) for path in place.glob("*.parquet")]).num_rows == 600
    assert [path.name for path in place.glob("*.json")] == ["written.json"]


def test_resumed_run_does_not_compute_dataset(local_ray: None, tmp_path: Path) -> None:
    import ray.data

    calls = tmp_path / "calls"

    def record(table: pa.Table) -> pa.Table:
        with calls.open("a") as file:
            file.write("computed\n")
        return table

    table = pa.Table.from_pandas(ratings().drop(columns="unused"), preserve_index=False)
    dataset = ray.data.from_arrow(table).map_batches(record, batch_format="pyarrow")
    write(config(tmp_path), dataset)
    assert calls.exists()
    calls.unlink()
    again = ray.data.from_arrow(table).map_batches(record, batch_format="pyarrow")
    (note,) = write(config(tmp_path), again, resumes=True)
    assert note.endswith("the given data is not read again")
    assert not calls.exists()


def test_resumed_run_rejects_other_computed_dataset(local_ray: None, tmp_path: Path) -> None:
    import ray.data

    write(config(tmp_path), ratings())
    other = ray.data.from_arrow(
        pa.Table.from_pandas(ratings(601).drop(columns="unused"), preserve_index=False)
    )
    rejects(r"other data \(rows: 600 -> 601\)", write, config(tmp_path), other, resumes=True)


# -- Finished run under the same name: its summary for unchanged data, else one line and status 2
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
    "renamed file": (
        lambda folder: (folder / "log" / "day_0.csv").rename(folder / "log" / "a.csv"),
        "still has 2 files of",
    ),
    "path that is gone": (
        lambda folder: (folder / "log").rename(folder / "gone"),
        "log: no such file or folder",
    ),
    "no files": (
        lambda folder: [file.unlink() for file in (folder / "log").iterdir()],
        "contains no data files",
    ),
}


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_finished_run_rejects_other_data(
    finished: Path, capsys: pytest.CaptureFixture[str], change: str, quiet: bool
) -> None:
    make, expected = CHANGES[change]
    make(finished)
    assert train(finished, quiet=quiet) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith(f"rayrec train: {finished}/run: finished already, with other data: ")
    assert expected in line
    assert "choose another --name" in line.lower()


def test_finished_run_with_same_data_prints_summary_only(
    finished: Path, capsys: Any, monkeypatch: Any
) -> None:
    (finished / "log" / "_SUCCESS").write_text("")
    assert train(finished) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["data"]["train_data"]["files"] == 2
    (finished / "log").rename(finished / "moved")
    assert train(finished, log="moved") == 0
    assert json.loads(capsys.readouterr().out) == summary
    monkeypatch.setattr(
        "rayrec.workloads.recsys.ClickWorkload.prepare", raising(AssertionError("data was read"))
    )
    assert train(finished, log="moved") == 0


def test_finished_run_rejects_added_evaluation_data(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    schema = Schema(
        label="click", dense=("age",), sparse=("user", "item"), tokens="any", delimiter=","
    )
    for name in ("first", "second"):
        rayrec.preprocess(
            str(trained / "log"),
            out=str(tmp_path / name),
            format="parquet",
            schema=schema,
            split="sevenths",
            console=QUIET,
        )
    before = data_versions(recipes.clicks(str(tmp_path / "first"), schema=schema))
    assert before["train_data"]["files"] > 3  # in folders
    assert (
        data_difference(
            before, data_versions(recipes.clicks(str(tmp_path / "first"), schema=schema))
        )
        is None
    )
    assert data_difference(
        before, data_versions(recipes.clicks(str(tmp_path / "second"), schema=schema))
    )


def test_changed_data_is_rejected_for_images_and_tokens(tmp_path: Path) -> None:
    digits = write_digits(tmp_path / "digits", train=20, test=10)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    rayrec.preprocess(
        str(tmp_path / "text.txt"),
        out=str(tmp_path / "tokens"),
        format="mds",
        console=QUIET,
        vocabulary_size=300,
        block_size=16,
        shard_bytes=2000,
        validation_fraction=0.2,
    )
    shard = next((tmp_path / "tokens" / "validation").glob("*.mds"))
    labels = digits / "t10k-labels-idx1-ubyte.gz"
    text = recipes.gpt2_tiny(str(tmp_path / "tokens"))
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
    rejects(
        "finished already, with other data: table of a database: no such file",
        resume._check_same_data,
        "run",
        config,
        {},
    )


# -- Training by command on each kind of split without test rows, which reports validation metrics
@pytest.fixture
def csv_folder(own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    write_days(tmp_path, 0, 1, 2, 3)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
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
    csv_folder: Path, capsys: Any, flags: str, sets: dict[str, int]
) -> None:
    names = flags.split()
    assert not train(
        csv_folder,
        *(f"--workload.preset.split.{w}" if not place % 2 else w for place, w in enumerate(names)),
    )
    found = printed(capsys)
    assert (found["rows_of_sets"], found["metrics"]) == (sets, found["validation"])
    assert cli.run(["report", str(csv_folder / "run")]) == 0
    assert cli.run(["export", str(csv_folder / "run"), "--out", str(csv_folder / "exported")]) == 0


@pytest.mark.parametrize("by", ["rows", "group --group user", "time"])
def test_train_accepts_split_files_without_test(
    csv_folder: Path, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    assert (
        cli.run(
            [
                "split",
                str(csv_folder / "log"),
                "--out",
                str(csv_folder / "parts"),
                "--schema",
                str(csv_folder / "schema.yaml"),
                "--by",
                *by.split(),
                "--test",
                "0",
            ]
        )
        == 0
    )
    assert list(printed(capsys)["parts"]) == ["train", "validation"]  # type: ignore[call-overload]
    assert not train(csv_folder, "--workload.preset.split.kind", "named_files", log="parts")
    found = printed(capsys)
    assert list(found["rows_of_sets"]) == ["train", "validation"]  # type: ignore[call-overload]
    assert found["metrics"] == found["validation"]


def test_best_auroc_uses_same_test_rows(own_cache: None, tmp_path: Path, capsys: Any) -> None:
    synthetic.generate(str(tmp_path / "log"), rows=3_000, seed=1, parallelism=1)
    common = [
        "--train-data.path",
        str(tmp_path / "log" / "train.txt"),
        "--storage-path",
        str(tmp_path),
        "-q",
    ]
    short = [
        "--steps",
        "1",
        "--batch-size",
        "200",
        "--evaluate-every",
        "1",
        "--scaling.num-workers",
        "1",
    ]
    for name, flags, known in (
        ("same", [], True),
        ("other", ["--workload.preset.split.kind", "fraction"], False),
        (
            "none",
            ["--workload.preset.split.kind", "fraction", "--workload.preset.split.test", "0"],
            False,
        ),
    ):
        assert cli.run(["train", "criteo_demo", *common, *short, "--name", name, *flags]) == 0
        assert ("best_auroc" in printed(capsys)) is known, name


def test_data_version_names_newest_file(tmp_path: Path) -> None:
    for number, name in enumerate(("day_1", "day_0", "day_2")):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (0, 86400 * (10 - number)))
    version = data_versions(recipes.criteo_demo(str(tmp_path)))["train_data"]
    assert (version["newest"], version["files"], version["bytes"]) == ("day_1", 3, 3)
    assert version["modified"].startswith("1970-01-11")
