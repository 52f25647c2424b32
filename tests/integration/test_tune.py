"""Searches on Ray: equality with in-process searches, killed trials, signals."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rayrec
from rayrec import recipes
from rayrec.config import InputError
from rayrec.observe.console import Console
from rayrec.training.stop_monitor import Signals
from rayrec.tuning.ray_pool import RayPool
from rayrec.tuning.space import TuneConfig
from rayrec.tuning.trials import Job, PartResult, trial_folder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

RATE = "workload.dense_optimizer.learning_rate"
# Not from the builders: Ray processes import this file but cannot import them.
QUIET = Console(quiet=True)


def test_ray_search_matches_in_process_search(
    local_ray: None, click_log: Path, tmp_path: Path
) -> None:
    from builders.runs import LEAN

    fields = {
        "early_stopping": {"patience": 0},
        "workload": {"dense_optimizer": {"learning_rate": 1e-5}},
        **LEAN,
    }
    config = recipes.criteo_demo(str(click_log / "train.txt"))
    config = config.replace(storage_path=str(tmp_path), steps=27, batch_size=256, **fields)
    found = []
    for name, address in (("here", "none"), ("ray", None)):
        searched = config.replace(name=name, cluster={"address": address})
        found.append(
            rayrec.tune(searched, search={RATE: {"grid": [0.004, 1e-4, 1e30]}}, console=QUIET)
        )
    names = ("number", "state", "error", "step", "rows", "best", "curve")
    here, there = ([[trial[name] for name in names] for trial in each["trials"]] for each in found)
    assert there == here
    assert {state for _, state, *_ in here} == {"finished", "stopped", "failed"}
    assert found[0]["compared"] == found[1]["compared"]


def jobs(folder: Path, count: int) -> list[Job]:
    config = recipes.criteo_demo("log").replace(storage_path=str(folder))
    return [
        Job(number, config.replace(name=f"trial_{number}"), 0, 1.0, "auroc")
        for number in range(count)
    ]


def pool_of(
    train: Any, signals: Signals | None = None, *, concurrent: int = 1, max_failures: int = 1
) -> RayPool:
    options = TuneConfig(concurrent=concurrent)
    return RayPool(options, signals or Signals(), max_failures=max_failures, train=train)


def dies(job: Job) -> PartResult:
    """Kill this process for trial 0, and once for trial 1. Trial 3 waits for Ctrl-C, the others
    finish.
    """
    folder = Path(trial_folder(job.config))
    folder.mkdir(exist_ok=True)
    (folder / f"{len(list(folder.iterdir()))}").touch()
    if job.number == 0 or (job.number == 1 and len(list(folder.iterdir())) == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if job.number == 3:
        with Signals() as signals, signals.deferred():
            until(lambda: signals.cause == "SIGINT")
            (folder / "stopped").touch()
            signals.throw()
    return PartResult(0.5, finished=True)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def test_killed_trial_resumes_in_new_process(local_ray: None, tmp_path: Path) -> None:
    pool = pool_of(dies, concurrent=2)
    results = {job.number: result for job, result in pool.run(jobs(tmp_path, 3))}
    assert [results[number].finished for number in range(3)] == [False, True, True]
    assert (results[0].error or "").startswith("process killed 2 times")
    assert results[0].can_retry


class Unreadable:
    """Function that no process can unpickle."""

    def __call__(self, *_: object, **__: object) -> None: ...

    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("raise ImportError('no module of this name')",))


def test_unstartable_task_fails_trial(local_ray: None, tmp_path: Path) -> None:
    unreadable = Unreadable()

    def train(job: Job) -> PartResult:
        return PartResult(float(unreadable is None), finished=True)

    pool = pool_of(train, max_failures=-1)
    ((_, result),) = pool.run(jobs(tmp_path, 1))
    assert result.can_retry
    assert "no module of this name" in (result.error or "")


def test_signal_stops_running_trials(local_ray: None, tmp_path: Path) -> None:
    stop_event = threading.Event()
    folder = tmp_path / "trial_3"
    pool = pool_of(dies, Signals(stop_event))

    def request_stop() -> None:
        until(folder.exists)
        time.sleep(0.5)  # Until the trial handles signals
        stop_event.set()

    threading.Thread(target=request_stop).start()
    with pytest.raises(SystemExit):
        list(pool.run(jobs(tmp_path, 4)[3:]))
    assert (folder / "stopped").exists()


def test_pool_rejects_trial_larger_than_nodes(local_ray: None) -> None:
    with pytest.raises(
        InputError, match=r"no node has 1000 CPUs and 0 GPUs for a trial. Lower --tune"
    ):
        RayPool(TuneConfig(cpus_per_trial=1000), Signals(), max_failures=0)
