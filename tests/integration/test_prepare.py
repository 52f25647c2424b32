"""Prepared data in place of the raw log: the same weights, bit for bit; and logs that are not
Criteo's.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.faults import rejects
from builders.golden_inputs import WITH_LISTS, any_rows, write_csv, write_parquet
from builders.logs import unlabelled
from builders.runs import QUIET, check_same_run, short_run, train

import rayrec
from rayrec import recipes
from rayrec.data.synthetic import generate

BLOCKS = {"block_bytes": 1 << 18, "segments_per_block": 4}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path_factory.getbasetemp() / "prepare-cache"))


def small(
    recipe: rayrec.TrainConfig, runs: Path, steps: int = 6, **changes: Any
) -> rayrec.TrainConfig:
    return short_run(
        recipe, runs, steps, batch_size=256, train_data=BLOCKS, eval_data=BLOCKS
    ).replace(**changes)


def trained(path: Path, runs: Path, *, name: str, **changes: Any) -> dict[str, Any]:
    return train(small(recipes.criteo_demo(str(path)), runs, name=name, **changes)).summary


def preprocessed(
    log: Path, out: Path, format: str = "binary", run: Path | None = None, **options: Any
) -> dict[str, Any]:
    """Prepare a log, with the Preprocessor of a run if one is given."""
    given = {} if run is None else {"preprocessor": str(run / "preprocessor")}
    return rayrec.preprocess(
        str(log), out=str(out), format=format, console=QUIET, **given, **options
    )


def predicted(run: Path, log: Path) -> pa.Table:
    with tempfile.TemporaryDirectory() as folder:
        rayrec.predict(str(run), str(log), out=f"{folder}/out", max_bad_fraction=0.1)
        return pq.read_table(f"{folder}/out")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    generate(
        str(folder),
        rows=6_000,
        seed=3,
        parallelism=1,
    )
    return folder / "train.txt"


@pytest.fixture(scope="module")
def raw_run(log: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    runs = tmp_path_factory.mktemp("raw-run")
    return runs / "raw", trained(log, runs, name="raw")


@pytest.mark.parametrize(
    "format",
    ["binary", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("npy", "parquet"))],
)
def test_preprocessed_data_trains_same_weights(
    log: Path, raw_run: Any, tmp_path: Path, format: str
) -> None:
    """The vocabulary is counted from the training rows in both cases, and every batch is the
    same.
    """
    made = preprocessed(log, tmp_path / format, format, split="sevenths", **BLOCKS)
    ready = trained(
        tmp_path / format, tmp_path, name="ready", train_data={"in_memory": format == "npy"}
    )
    assert (made["rows"], made["preprocessor"]) == (6_000, ready["preprocessor"])
    check_same_run(ready, raw_run[1], "preprocessor", "rows_of_sets", "metrics")


@pytest.mark.exhaustive
def test_full_shuffle_is_applied_on_request(
    log: Path, raw_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    preprocessed(
        log, tmp_path / "mixed", run=raw_run[0], split="sevenths", shuffle="full", seed=1, **BLOCKS
    )
    full = {"train_data": {"shuffle": "full"}}
    raw = raw_run[1]
    mixed = trained(tmp_path / "mixed", tmp_path, name="mixed", **full)
    assert mixed["rows_of_sets"] == raw["rows_of_sets"]
    assert mixed["weights_sha256"] != raw["weights_sha256"]
    rejects(
        r"^train_data\.shuffle: [^\n]* is not fully shuffled[^\n]*$",
        trained,
        log,
        tmp_path,
        name="raw",
        **full,
    )


def test_preprocessed_log_with_faulty_rows_is_scored(
    log: Path, raw_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    lines = log.read_bytes().splitlines(keepends=True)[:300]
    (tmp_path / "train.txt").write_bytes(b"".join([*lines[:100], b"no row\n", *lines[100:]]))
    preprocessed(tmp_path / "train.txt", tmp_path / "ready", run=raw_run[0], max_bad_fraction=0.1)
    assert predicted(raw_run[0], tmp_path / "ready")["row"].to_pylist() == list(range(300))


def test_labels_match_their_files(log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kaggle"
    folder.mkdir()
    lines = log.read_bytes().splitlines(keepends=True)[:300]
    (folder / "train.txt").write_bytes(b"".join(lines))
    (folder / "test.txt").write_bytes(unlabelled(lines[:50]))
    assert preprocessed(folder, tmp_path / "ready", files=("train",))["rows"] == 300
    rejects(
        r"^[^\n]*test\.txt: must have labels [^\n]*--preprocessor$",
        preprocessed,
        folder / "test.txt",
        tmp_path / "x",
    )


@pytest.mark.exhaustive
def test_preprocessor_of_other_log_is_rejected(log: Path, tmp_path: Path) -> None:
    preprocessed(log, tmp_path / "ready", **BLOCKS)
    rayrec.vocabulary(
        str(log),
        out=str(tmp_path / "other"),
        min_count=50,
        console=QUIET,
    )
    rejects(
        ": Preprocessor .* does not match ",
        trained,
        tmp_path / "ready",
        tmp_path,
        name="run",
        workload={"preprocessor": str(tmp_path / "other")},
    )


def test_unlabelled_log_is_preprocessed_and_scored(
    log: Path, raw_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    lines = log.read_bytes().splitlines(keepends=True)[:500]
    (tmp_path / "test.txt").write_bytes(unlabelled(lines))
    (tmp_path / "labelled.txt").write_bytes(b"".join(lines))
    preprocessed(tmp_path / "test.txt", tmp_path / "ready", "npy", raw_run[0])
    tables = [
        predicted(raw_run[0], tmp_path / name).select(["row", "score"])
        for name in ("test.txt", "labelled.txt", "ready")
    ]
    assert tables[0] == tables[1] == tables[2]
    assert (np.load(tmp_path / "ready" / "test_labels.npy") == -1).all()


# -- Run modes
def days(folder: Path) -> Path:
    """The files of criteo_small, with the rows of a synthetic log."""
    generate(
        str(folder / "made"),
        rows=4_000,
        dialect="terabyte",
        days=5,
        seed=4,
        parallelism=1,
    )
    (folder / "days").mkdir()
    for made, day in enumerate((0, 1, 2, 3, 23)):
        (folder / "made" / f"day_{made}").rename(folder / "days" / f"day_{day}")
    return folder / "days"


def test_criteo_small_reads_days_and_names_missing(tmp_path: Path) -> None:
    folder = days(tmp_path)
    (folder / "day_7").write_text("not one of its files\n")
    config = small(
        recipes.criteo_small(str(folder)),
        tmp_path / "runs",
        workload={
            "model": {"embedding_dim": 8, "bottom_mlp": (8,), "top_mlp": (8, 1)},
            "preset": {"min_count": 2},
        },
        scaling={"use_gpu": False},
    )
    sets = train(config).summary["rows_of_sets"]
    rows = [len((folder / f"day_{day}").read_bytes().splitlines()) for day in (0, 1, 2, 3, 23)]
    assert (sets["train"], sets["validation"] + sets["test"]) == (sum(rows[:4]), rows[4])
    (folder / "day_2").unlink()
    rejects(
        r"day_2.*196,792,019.*rayrec fetch criteo_small",
        rayrec.train,
        config.replace(name="other"),
        console=QUIET,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["criteo_full", "mlperf_dlrm", "mlperf_dcnv2"])
def test_recipes_of_all_days(tmp_path: Path, recipe: str) -> None:
    """Small models, but their own preset: ids modulo a limit, and for DCNv2 bags of many ids."""
    generate(
        str(tmp_path / "days"),
        rows=2_400,
        dialect="terabyte",
        days=24,
        seed=5,
        parallelism=1,
    )
    workload: dict[str, Any] = {
        f"{kind}_optimizer": {"learning_rate": 0.01} for kind in ("sparse", "dense")
    }
    workload["model"] = {
        "embedding_dim": 8,
        "bottom_mlp": (8,),
        "top_mlp": (8, 1),
        "cross_low_rank": 4,
    }
    config = small(
        recipes.ALL[recipe](), tmp_path / "runs", 3, workload=workload, scaling={"use_gpu": False}
    )
    summary = train(config, train_data={"path": str(tmp_path / "days")}).summary
    assert summary["steps"] == 3
    assert np.isfinite(summary["metrics"]["logloss"])
    scores = rayrec.evaluate(str(tmp_path / "runs" / "run"), str(tmp_path / "days" / "day_23"))
    assert scores["rows"] == summary["rows_of_sets"]["validation"] + summary["rows_of_sets"]["test"]


# -- Any click log
def test_row_numbers_follow_table_order(tmp_path: Path) -> None:
    """Faulty rows have a number but no score, whether the file is read where it is or was written
    again.
    """
    rows = any_rows(600, seed=0)
    rows[7]["click"] = 5
    rows[300]["importance"] = -1.0
    write_csv(tmp_path / "a.csv", rows)
    write_csv(tmp_path / "b.csv", rows[:50])
    write_parquet(tmp_path / "a.parquet", rows, row_group_size=100)
    schema = WITH_LISTS.replace(weight="importance")
    run = train(
        short_run(
            recipes.clicks(str(tmp_path / "a.csv"), schema),
            tmp_path / "runs",
            2,
            max_bad_fraction=0.1,
        )
    )
    assert run.summary["bad_rows"] == 2
    expected = [row for row in range(600) if row not in (7, 300)]
    assert predicted(Path(run.folder), tmp_path / "a.parquet")["row"].to_pylist() == expected
    expected += [row for row in range(600, 650) if row != 607]
    assert predicted(Path(run.folder), tmp_path / "*.csv")["row"].to_pylist() == expected
