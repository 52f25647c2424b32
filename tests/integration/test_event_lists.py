"""Training, evaluations and predictions on events, whose lists are built once into the cache."""

import signal
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from builders.faults import rejects
from builders.interactions import ITEMS, SMALL, interactions
from builders.runs import LEAN, QUIET, evaluated_and_predicted, short_run, train
from hosts.processes import run_command

import rayrec
from rayrec import recipes, storage
from rayrec.schema import Schema, SequenceColumns
from rayrec.training.result import Result
from rayrec.workloads.base import TrainConfig

USERS = 90
SCHEMA = Schema(
    label=None,
    sequence=SequenceColumns(user="user", item="item", time="time", max_length=8),
)


def events() -> pd.DataFrame:
    """Return the events of users in no order."""
    user, item = interactions(USERS)
    time = [1_700_000_000 + 60 * number for number in range(len(user))]
    frame = pd.DataFrame({"user": user, "item": item, "time": time})
    return frame.sample(frac=1, random_state=1)


def write_csv(folder: Path) -> str:
    events().to_csv(folder / "events.csv", index=False)
    return str(folder / "events.csv")


def config_of(path: str | None, folder: Path, **changes: Any) -> TrainConfig:
    workload = {"model": SMALL["next_item"]}
    config = recipes.next_item(path, SCHEMA)
    return short_run(
        config,
        folder / "runs",
        4,
        batch_size=32,
        workload=workload,
        **LEAN,
        **changes,
    )


def weights(run: Result) -> str:
    return run.summary["weights_sha256"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Result]:
    """Return the folder, the events and the run of a training."""
    folder = tmp_path_factory.mktemp("events")
    path = write_csv(folder)
    return folder, path, train(config_of(path, folder))


def test_evaluation_reads_test_lists(trained: tuple[Path, str, Result]) -> None:
    _, path, run = trained
    own = rayrec.evaluate(run.folder, console=QUIET)
    assert (own["rows"], own["set"], own["targets"]) == (USERS, "test", USERS)
    again = rayrec.evaluate(run.folder, path, console=QUIET)
    assert again.pop("training_rows") is None
    assert again == {name: own[name] for name in again}


def test_predictions_name_users(trained: tuple[Path, str, Result], tmp_path: Path) -> None:
    _, path, run = trained
    _, scores = evaluated_and_predicted(run.folder, path, tmp_path / "scores")
    assert sorted(scores["user"].to_pylist()) == sorted({*map(str, range(USERS))})
    assert len(scores["items"][0]) == SMALL["next_item"]["k"]
    assert {*scores["items"][0].as_py()} <= {*range(100, 100 + ITEMS)}


def test_lists_built_before_train_alike(trained: tuple[Path, str, Result], tmp_path: Path) -> None:
    _, path, run = trained
    rayrec.sequences(path, out=str(tmp_path / "lists"), schema=SCHEMA, console=QUIET)
    lists = str(tmp_path / "lists")
    assert weights(train(config_of(lists, tmp_path))) == weights(run)
    metrics, scores = evaluated_and_predicted(run.folder, lists, tmp_path / "scores")
    assert (metrics["set"], scores.num_rows) == ("test", USERS)
    other = config_of(lists, tmp_path, name="other")
    other = other.replace(workload={"schema": {"sequence": {"min_length": 3}}})
    rejects("sequence.min_length of the schema must match 2.*got 3", train, other)


def test_rows_in_memory_train_alike(trained: tuple[Path, str, Result], tmp_path: Path) -> None:
    *_, run = trained
    result = rayrec.train(config_of(None, tmp_path), data=events(), console=QUIET)
    assert weights(result) == weights(run)
    metrics = rayrec.evaluate(run.folder, events(), console=QUIET)
    assert (metrics["set"], metrics["rows"]) == ("test", USERS)
    rayrec.predict(run.folder, events(), out=str(tmp_path / "scores"), console=QUIET)
    assert pq.read_table(tmp_path / "scores").num_rows == USERS


def test_lists_are_built_once(trained: tuple[Path, str, Result]) -> None:
    folder, path, run = trained
    built = [*(folder / "runs" / ".cache" / "sequences").glob("*/sequences.json")]
    assert len(built) == 1
    before = built[0].stat().st_mtime_ns
    assert weights(train(config_of(path, folder, name="again"))) == weights(run)
    assert built[0].stat().st_mtime_ns == before


def test_edited_log_replaces_older_lists(tmp_path: Path) -> None:
    path = write_csv(tmp_path)
    train(config_of(path, tmp_path))
    with open(path, "a") as file:
        print("900,100,1800000000", file=file)
    run = train(config_of(path, tmp_path, name="later"))
    assert len([*(tmp_path / "runs" / ".cache" / "sequences").glob("*/sequences.json")]) == 1
    _, scores = evaluated_and_predicted(run.folder, path, tmp_path / "scores")
    assert scores.num_rows == USERS + 1


_KILLED = """
import os, signal, sys
from rayrec.data.sequences import build
from rayrec.__main__ import main
def killed(task, *, job):
    os.kill(os.getpid(), signal.SIGKILL)
build.{phase} = killed
sys.argv[0] = "rayrec"
main()
"""


@pytest.mark.parametrize("phase", ["spill_events", "write_lists", "count_items"])
def test_run_killed_in_build_resumes(
    phase: str,
    trained: tuple[Path, str, Result],
    tmp_path: Path,
) -> None:
    _, path, run = trained
    config = config_of(path, tmp_path)
    storage.write_bytes(str(tmp_path / "run.yaml"), config.to_yaml().encode())
    code = _KILLED.format(phase=phase)
    words = ("train", "next_item", "--config", str(tmp_path / "run.yaml"), "-q")
    run_command(sys.executable, "-c", code, *words, status=-signal.SIGKILL)
    assert not [*(tmp_path / "runs" / ".cache" / "sequences").glob("*/sequences.json")]
    assert weights(train(config)) == weights(run)


def test_other_rows_to_evaluate_are_rejected(tmp_path: Path) -> None:
    path = write_csv(tmp_path)
    config = config_of(path, tmp_path, eval_data={"path": path})
    rejects("eval_data.path: must be None with events", train, config)


def test_invalid_events_end_run(tmp_path: Path) -> None:
    path = write_csv(tmp_path)
    with open(path, "a") as file:
        print(",100,1800000000", file=file)
    config = config_of(path, tmp_path)
    rejects("more than max_bad_fraction.*a value is missing in column user", train, config)
    train(config.replace(max_bad_fraction=0.01))
    rejects(
        "1 events are invalid, more than max_bad_fraction",
        train,
        config.replace(name="strict"),
    )
