"""Prepared data in place of the raw log: the same weights, bit for bit; and logs that are not Criteo's."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.golden_inputs import write_csv
from builders.runs import QUIET

import rayrec
from rayrec import predict, recipes
from rayrec.config import InputError
from rayrec.data.synthetic import generate
from rayrec.schema import Schema, load_schema

BLOCKS = {"block_bytes": 1 << 18, "segments_per_block": 4}
SMALL = {
    "steps": 6,
    "evaluate_every": 6,
    "batch_size": 256,
    "scaling": {"num_workers": 1, "cpus_per_worker": 0.5},
    "train_data": BLOCKS,
    "eval_data": BLOCKS,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path_factory.getbasetemp() / "prepare-cache"))


def trained(path: Path, runs: Path, *, name: str, **changes: Any) -> dict[str, Any]:
    config = recipes.criteo_demo(str(path)).replace(**SMALL, storage_path=str(runs), name=name).updated(changes)
    return rayrec.train(config, console=QUIET).summary


def preprocessed(log: Path, out: Path, format: str = "binary", run: Path | None = None, **options: Any) -> dict[str, Any]:
    """Prepare a log, with the Preprocessor of a run if one is given."""
    given = {} if run is None else {"preprocessor": str(run / "preprocessor")}
    return rayrec.preprocess(str(log), out=str(out), format=format, console=QUIET, **given, **options)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    generate(str(folder), rows=6_000, seed=3, parallelism=1)
    return folder / "train.txt"


@pytest.fixture(scope="module")
def raw_run(log: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the summary of a run on the raw log."""
    runs = tmp_path_factory.mktemp("raw-run")
    return runs / "raw", trained(log, runs, name="raw")


@pytest.mark.parametrize("format", ["binary", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("npy", "parquet"))])
def test_preprocessed_data_trains_same_weights(
    log: Path, raw_run: tuple[Path, dict[str, Any]], tmp_path: Path, format: str
) -> None:
    """The vocabulary is counted from the training rows in both cases, and every batch is the same."""
    _, raw = raw_run
    made = preprocessed(log, tmp_path / format, format, split="sevenths", **BLOCKS)
    assert made["rows"] == 6_000
    in_memory = {"train_data": {"in_memory": format == "npy"}}
    ready = trained(tmp_path / format, tmp_path, name="ready", **in_memory)
    assert ready["preprocessor"] == raw["preprocessor"] == made["preprocessor"]
    assert ready["rows_of_sets"] == raw["rows_of_sets"]
    assert ready["weights_sha256"] == raw["weights_sha256"]
    assert ready["metrics"] == raw["metrics"]


@pytest.mark.exhaustive
def test_full_shuffle_is_applied_on_request(log: Path, raw_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """The same rows in another order; data that is not mixed so is refused."""
    preprocessed(log, tmp_path / "mixed", run=raw_run[0], split="sevenths", shuffle="full", seed=1, **BLOCKS)
    full = {"train_data": {"shuffle": "full"}}
    mixed = trained(tmp_path / "mixed", tmp_path, name="mixed", **full)
    assert mixed["rows_of_sets"] == raw_run[1]["rows_of_sets"]
    assert mixed["weights_sha256"] != raw_run[1]["weights_sha256"]
    with pytest.raises(InputError, match=r"^train_data\.shuffle: [^\n]* is not fully shuffled[^\n]*$"):
        trained(log, tmp_path, name="raw", **full)


def test_preprocessed_log_with_faulty_rows_is_scored(log: Path, raw_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Its rows are numbered as they stand there."""
    lines = log.read_bytes().splitlines(keepends=True)[:300]
    (tmp_path / "train.txt").write_bytes(b"".join([*lines[:100], b"no row\n", *lines[100:]]))
    preprocessed(tmp_path / "train.txt", tmp_path / "ready", run=raw_run[0], max_bad_fraction=0.1)
    predict(str(raw_run[0]), str(tmp_path / "ready"), out=str(tmp_path / "scores"), max_bad_fraction=0.1)
    assert pq.read_table(tmp_path / "scores")["row"].to_pylist() == list(range(300))


def test_labels_match_their_files(log: Path, tmp_path: Path) -> None:
    """Kaggle's folder: test.txt, which has none, comes first by name."""
    folder = tmp_path / "kaggle"
    folder.mkdir()
    lines = log.read_bytes().splitlines(keepends=True)[:300]
    (folder / "train.txt").write_bytes(b"".join(lines))
    (folder / "test.txt").write_bytes(b"".join(line.partition(b"\t")[2] for line in lines[:50]))
    assert preprocessed(folder, tmp_path / "ready", files=("train",))["rows"] == 300
    with pytest.raises(InputError, match=r"^[^\n]*test\.txt: must have labels [^\n]*--preprocessor$"):
        preprocessed(folder / "test.txt", tmp_path / "x")


@pytest.mark.exhaustive
def test_preprocessor_of_other_log_is_rejected(log: Path, tmp_path: Path) -> None:
    preprocessed(log, tmp_path / "ready", **BLOCKS)
    rayrec.vocabulary(str(log), out=str(tmp_path / "other"), min_count=50, console=QUIET)
    with pytest.raises(InputError, match=r"^[^\n]*: Preprocessor [^\n]* does not match [^\n]*$"):
        trained(tmp_path / "ready", tmp_path, name="run", workload={"preprocessor": str(tmp_path / "other")})


def test_unlabelled_log_is_preprocessed_and_scored(log: Path, raw_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """As Kaggle's test.txt: 39 columns."""
    run = str(raw_run[0])
    lines = log.read_bytes().splitlines(keepends=True)[:500]
    (tmp_path / "test.txt").write_bytes(b"".join(line.partition(b"\t")[2] for line in lines))
    (tmp_path / "labelled.txt").write_bytes(b"".join(lines))
    preprocessed(tmp_path / "test.txt", tmp_path / "ready", "npy", raw_run[0])
    tables = []
    for name in ("test.txt", "labelled.txt", "ready"):
        predict(run, str(tmp_path / name), out=str(tmp_path / f"scores-{name}"))
        tables.append(pq.read_table(tmp_path / f"scores-{name}").select(["row", "score"]))
    assert tables[0] == tables[1] == tables[2]
    assert (np.load(tmp_path / "ready" / "test_labels.npy") == -1).all()


# Run modes -----------------------------------------------------------------------------------------------------------


def days(folder: Path) -> Path:
    """The files of criteo_small, with the rows of a synthetic log."""
    generate(str(folder / "made"), rows=4_000, dialect="terabyte", days=5, seed=4, parallelism=1)
    (folder / "days").mkdir()
    for made, day in enumerate((0, 1, 2, 3, 23)):
        (folder / "made" / f"day_{made}").rename(folder / "days" / f"day_{day}")
    return folder / "days"


def test_criteo_small_reads_days_and_names_missing(tmp_path: Path) -> None:
    folder = days(tmp_path)
    (folder / "day_7").write_text("not one of its files\n")
    workload = {"model": {"embedding_dim": 8, "bottom_mlp": (8,), "top_mlp": (8, 1)}, "preset": {"min_count": 2}}
    config = recipes.criteo_small(str(folder)).replace(
        **SMALL, workload=workload, storage_path=str(tmp_path / "runs"), name="run"
    )
    config = config.replace(scaling={"use_gpu": False})
    summary = rayrec.train(config, console=QUIET).summary
    rows = [len((folder / f"day_{day}").read_bytes().splitlines()) for day in (0, 1, 2, 3, 23)]
    held_out = summary["rows_of_sets"]["validation"] + summary["rows_of_sets"]["test"]
    assert (summary["rows_of_sets"]["train"], held_out) == (sum(rows[:4]), rows[4])
    (folder / "day_2").unlink()
    with pytest.raises(InputError) as caught:
        rayrec.train(config.replace(name="other"), console=QUIET)
    message = str(caught.value)
    assert "\n" not in message
    for told in ("day_2", "196,792,019", "rayrec fetch criteo_small"):
        assert told in message


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["criteo_full", "mlperf_dlrm", "mlperf_dcnv2"])
def test_recipes_of_all_days(tmp_path: Path, recipe: str) -> None:
    """Small models, but their own preset: ids modulo a limit, and for DCNv2 bags of many ids."""
    generate(str(tmp_path / "days"), rows=2_400, dialect="terabyte", days=24, seed=5, parallelism=1)
    config = recipes.ALL[recipe]().replace(
        **{**SMALL, "train_data": {**BLOCKS, "path": str(tmp_path / "days")}, "steps": 3, "evaluate_every": 3},
        storage_path=str(tmp_path / "runs"),
        name="run",
        workload={
            "model": {"embedding_dim": 8, "bottom_mlp": (8,), "top_mlp": (8, 1), "cross_low_rank": 4},
            "sparse_optimizer": {"learning_rate": 0.01},
            "dense_optimizer": {"learning_rate": 0.01},
        },
    )
    config = config.replace(scaling={"use_gpu": False})
    summary = rayrec.train(config, console=QUIET).summary
    assert summary["steps"] == 3
    assert np.isfinite(summary["metrics"]["logloss"])
    scores = rayrec.evaluate(str(tmp_path / "runs" / "run"), str(tmp_path / "days" / "day_23"))
    assert scores["rows"] == summary["rows_of_sets"]["validation"] + summary["rows_of_sets"]["test"]


# Any click log -------------------------------------------------------------------------------------------------------

COLUMNS: dict[str, Any] = {"dense": ("age",), "sparse": ("user.id", "type", "genres"), "lists": ("genres",)}
MOVIES = Schema(label="liked", weight="importance", tokens="any", delimiter=",", **COLUMNS)
GENRES = ("action", "comedy", "drama", "film noir", "war")


def ratings(rows: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    made = []
    for _ in range(rows):
        user, genres = rng.randrange(40), rng.sample(GENRES, rng.randrange(4))
        row = {"liked": rng.randrange(2), "age": 15 + user, "user.id": f"user {user}", "type": rng.randrange(300)}
        made.append({**row, "genres": genres, "importance": rng.choice([0.5, 1.0, 2.0]), "comment": "left, alone"})
    return made


def test_row_numbers_follow_table_order(tmp_path: Path) -> None:
    """Faulty rows have a number but no score, whether the file is read where it is or was written again."""
    rows = ratings(600)
    rows[7]["liked"], rows[300]["importance"] = 5, -1.0
    write_csv(tmp_path / "a.csv", rows)
    write_csv(tmp_path / "b.csv", rows[:50])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=100)
    config = recipes.clicks(str(tmp_path / "a.csv"), MOVIES).replace(
        steps=2, storage_path=str(tmp_path / "runs"), name="run", max_bad_fraction=0.1, scaling={"cpus_per_worker": 0.5}
    )
    summary = rayrec.train(config, console=QUIET).summary
    assert summary["bad_rows"] == 2
    run = str(tmp_path / "runs" / "run")
    predict(run, str(tmp_path / "a.parquet"), out=str(tmp_path / "one"), max_bad_fraction=0.1)
    expected = [row for row in range(600) if row not in (7, 300)]
    assert pq.read_table(tmp_path / "one")["row"].to_pylist() == expected
    predict(run, str(tmp_path / "*.csv"), out=str(tmp_path / "two"), max_bad_fraction=0.1)
    expected += [row for row in range(600, 650) if row != 607]
    assert pq.read_table(tmp_path / "two")["row"].to_pylist() == expected


def test_schema_files(tmp_path: Path) -> None:
    text = json.dumps({**MOVIES.to_dict(), "delimiter": ","})
    assert load_schema(text, "s.yaml") == MOVIES
    assert load_schema("{label: a, sparse: [b]}", "s.yaml") == Schema(label="a", sparse=("b",), delimiter=",")
    with pytest.raises(InputError, match=r"^s\.yaml: [^\n]*lists names b"):
        load_schema("{sparse: [a], lists: [b]}", "s.yaml")
    write_csv(tmp_path / "a.csv", ratings(5))
    with pytest.raises(InputError, match="hexadecimal"):
        rayrec.vocabulary(f"{tmp_path}/a.csv", out=f"{tmp_path}/v", schema=MOVIES, preset="torchrec", console=QUIET)
