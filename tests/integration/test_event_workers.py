"""Runs on events in several processes: as one, after a kill, and with fewer."""

from pathlib import Path
from typing import Any

import pytest
from builders.events import USERS, events_run, write_events
from builders.interactions import SMALL
from builders.runs import check_no_rows_lost, check_same_run, events_of
from ranks.training import train_in_processes, train_until_killed

from rayrec.workloads.base import TrainConfig

pytestmark = [pytest.mark.slow, pytest.mark.extended]

EPOCHS = 4
MODEL = {**SMALL["next_item"], "loss": "mixed", "negatives": 16}


def config_of(path: str, folder: Path, workers: int, **changes: Any) -> TrainConfig:
    """Return a run of steps of 10 users, with a checkpoint every 5 steps."""
    fields = {
        "workload": {"model": MODEL},
        "epochs": EPOCHS,
        "batch_size": 10 // workers,
        "log_every": 1,
        "checkpoint": {"every": 5},
    }
    return events_run(path, folder / "runs", None, **{**fields, **changes})


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """Return the folder, the events and the summary of a run with two workers."""
    folder = tmp_path_factory.mktemp("two")
    path = write_events(folder)
    return folder, path, train_in_processes(2, config_of(path, folder, 2))


@pytest.mark.parametrize(
    "loss",
    ["mixed", pytest.param("gbce", marks=pytest.mark.exhaustive)],
)
def test_two_workers_match_one(loss: str, tmp_path: Path) -> None:
    """In steps with all rows, since two workers have other rows in a step than one. The random
    items are the same. There is no dropout, whose masks differ.
    """
    path = write_events(tmp_path)
    model = {"model": {**MODEL, "loss": loss, "dropout": 0.0}}
    runs = []
    losses = []
    for workers in (1, 2):
        config = config_of(path, tmp_path, workers, name=f"of_{workers}", workload=model)
        runs.append(train_in_processes(workers, config.replace(batch_size=USERS // workers)))
        steps = events_of(tmp_path / "runs" / f"of_{workers}", "step")
        losses.append([event["loss"] for event in steps])
        check_no_rows_lost(runs[-1], restarts=0)
    assert len(losses[0]) == EPOCHS
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert runs[1]["metrics"] == pytest.approx(runs[0]["metrics"], rel=1e-4)


def test_killed_worker_changes_no_weights(two: tuple[Path, str, dict[str, Any]]) -> None:
    folder, path, expected = two
    config = config_of(path, folder, 2, name="killed")
    train_until_killed(2, config, step=13)
    check_same_run(train_in_processes(2, config), expected, "metrics", restarts=1)
    starts = events_of(folder / "runs" / "killed", "start")
    assert [event["step"] for event in starts][1] in (5, 10)


def test_one_worker_resumes_run_of_two(two: tuple[Path, str, dict[str, Any]]) -> None:
    folder, path, expected = two
    train_until_killed(2, config_of(path, folder, 2, name="fewer"), step=13)
    summary = train_in_processes(1, config_of(path, folder, 1, name="fewer"))
    check_no_rows_lost(summary, restarts=1)
    assert summary["rows"] == expected["rows"] == EPOCHS * USERS
    events = events_of(folder / "runs" / "fewer", "start")
    assert [event["world_size"] for event in events] == [2, 1]
    assert summary["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=0.05)
