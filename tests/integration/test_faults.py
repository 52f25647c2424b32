"""Whatever dies, the run finishes with the weights of one that nothing happened to: processes are
killed for real.
"""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders.damage import cut_short, flip_a_bit, remove_file, tear_manifest
from builders.runs import check_no_rows_lost, check_same_run, small_run, threads_of, train
from hosts.ports import free_ports
from hosts.processes import (
    RayCluster,
    Run,
    Session,
    environment_for,
    finished,
    ray_start,
    wait_for_ray,
)

from rayrec.checkpoint import committed
from rayrec.checkpoint.save_retry import PATIENCE_S
from rayrec.models.boosted.lightgbm import LightGBMConfig
from rayrec.storage import read_json
from rayrec.training.stop_monitor import NODE_PREEMPTED
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.distillation import RECORD

pytestmark = [pytest.mark.ray, pytest.mark.slow]

Begin = Callable[..., Run]


@pytest.fixture
def begin(click_log: Path, cache: Path, tmp_path: Path) -> Iterator[Begin]:
    """Start a run, and end what is left of it after the test."""
    with ExitStack() as runs:

        def start(*, storage: str | Path = tmp_path, **changes: Any) -> Run:
            config = small_run(click_log, storage, **changes)
            return runs.enter_context(Run(config, tmp_path / "commands", cache=cache).start())

        yield start


def assert_still_training(run: Run) -> None:
    """A fault that comes when all is over proves nothing."""
    assert not run.events("finish")


def assert_accounted(run: Run, summary: dict[str, Any], *, restarts: int) -> None:
    """The summary and the events report the same restarts."""
    causes = summary["restart_causes"]
    assert summary["restarts"] == len(causes) == restarts
    starts = run.events("start")
    assert len(starts) == restarts + 1
    redone = 0
    for before, start in pairwise(starts):
        steps = [
            event["step"]
            for event in run.events("step")
            if before["time"] <= event["time"] < start["time"]
        ]
        redone += max(0, max(steps, default=before["step"]) - start["step"])
    assert summary["steps_redone"] == sum(cause["steps_redone"] for cause in causes) == redone
    assert summary["lost_s"] == pytest.approx(sum(cause["lost_s"] for cause in causes))
    first, *_, last = run.events()
    assert 0 < summary["lost_s"] < last["time"] - first["time"] or not restarts
    assert all(len(cause["cause"].splitlines()) == 1 for cause in causes)


def finish(run: Run, expected: dict[str, Any], *, restarts: int) -> dict[str, Any]:
    """The summary of a run that ended with the weights of the undisturbed one, after so many
    restarts.
    """
    summary = run.summary()
    check_same_run(summary, expected)
    assert summary["metrics"] == pytest.approx(expected["metrics"], abs=1e-12)
    assert_accounted(run, summary, restarts=restarts)
    return summary


def stop_by_signals(run: Run, resumed: dict[str, Any], *, timeout_s: float = 180) -> dict[str, Any]:
    """SIGTERM, then Ctrl-C, each with the same command after it; returns the event of the last
    start. The step at which the run stops is saved, and nothing is trained twice.
    """
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        run.wait_for_step(resumed["step"] + 20, since=resumed["time"])
        run.session.process.send_signal(number)
        assert run.exit_status(timeout_s=timeout_s) == status, run.session.err
        assert_still_training(run)
        assert "Traceback" not in run.session.err
        stop = run.events("stop")[-1]
        assert (stop["cause"], stop["step"]) == (number.name, committed(run.path)[-1].step)
        run.start()
        resumed = run.wait_for("start", since=stop["time"])
        assert resumed["step"] == stop["step"]
    return resumed


@pytest.mark.extended
def test_run_survives_repeated_faults(undisturbed: dict[str, Any], begin: Begin) -> None:
    """A data task, a train worker and the driver are killed. One run has them all, because
    starting is most of what a run of this size takes.
    """
    run = begin()
    run.wait_for_step(40)
    run.session.kill_data_task()
    saved = run.wait_for_save(80)
    # A data task costs no restart.
    assert [event["kind"] for event in run.events("start", "failure")] == ["start"]
    run.session.kill("train worker")
    assert_still_training(run)
    restarted = run.wait_for("start", step=saved)
    assert "worker" in run.events("failure")[0]["cause"]

    run.wait_for_step(restarted["step"] + 60, since=restarted["time"])
    saved = run.wait_for_save(restarted["step"] + 1)
    run.kill_driver()
    assert_still_training(run)
    run.start()  # what is left of the first command may still run
    resumed = run.wait_for("start", since=restarted["time"])
    assert resumed["step"] >= saved
    summary = finish(run, undisturbed, restarts=2)
    assert "worker" in summary["restart_causes"][0]["cause"]
    assert [event["cause"] for event in run.events("failure")] == [
        summary["restart_causes"][0]["cause"]
    ]


@pytest.mark.exhaustive
def test_failed_worker_continues_in_standby_process(
    undisturbed: dict[str, Any], begin: Begin
) -> None:
    """The workers after a failure take processes that were in standby, and SIGTERM and Ctrl-C stop
    them as they stop the first ones.
    """
    # Not before Ray Data's actors, which a worker starts too, have their processes. Evaluations
    # slow the run, so that it lasts until then.
    run = begin(failure={"standby_after_s": 10.0}, evaluate_every=5)
    run.wait_for_save(80)
    run.session.wait_for_standby(2)
    saved = run.wait_for_save()
    run.session.kill("train worker")
    assert_still_training(run)
    restarted = run.wait_for("start", step=saved)
    assert "worker_process" not in run.wait_for("start_up", since=restarted["time"])["stages"]
    stop_by_signals(run, restarted, timeout_s=240)
    summary = finish(run, undisturbed, restarts=3)
    assert [cause["steps_redone"] for cause in summary["restart_causes"][1:]] == [0, 0]


# -- One worker, in the process of the command
ALONE: dict[str, Any] = {
    "steps": 800,
    "evaluate_every": 400,
    "log_every": 10,
    "scaling": threads_of(1),
    "cluster": {"num_cpus": 2, "address": "none"},
}


@pytest.fixture(scope="module")
def expected_alone(
    click_log: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The summary of the run in one process that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed_alone")
    return finished(small_run(click_log, folder, **ALONE), folder / "commands", cache=cache)


@pytest.mark.extended
def test_process_run_survives_repeated_faults(expected_alone: dict[str, Any], begin: Begin) -> None:
    """The process is killed, stopped by SIGTERM and by Ctrl-C, and killed once more before its
    newest checkpoints are damaged.
    """
    run = begin(**ALONE)
    saved = run.wait_for_save(80)
    run.kill_driver()
    assert_still_training(run)
    assert not run.session.processes()  # nothing else was started
    resumed = run.start().wait_for("start", step=1)
    assert resumed["step"] >= saved
    resumed = stop_by_signals(run, resumed)
    run.session.until(
        lambda: len(found := committed(run.path)) >= 5 and found[-1].step > resumed["step"]
    )
    run.kill_driver()
    damage = Damage(run)
    run.start()
    summary = finish(run, expected_alone, restarts=4)
    damage.assert_passed_over(number=4)
    assert [cause["steps_redone"] for cause in summary["restart_causes"][1:3]] == [0, 0]


@pytest.mark.extended
@pytest.mark.parametrize(
    "sample", [None, pytest.param({"label": 0, "keep": 0.5}, marks=pytest.mark.exhaustive)]
)
def test_killed_boosting_resumes_with_equal_trees(
    click_log: Path, tmp_path: Path, begin: Begin, sample: dict[str, float] | None
) -> None:
    changes: dict[str, Any] = {
        **ALONE,
        "steps": 400,
        "evaluate_every": 100,
        "checkpoint": {"every": 20, "num_to_keep": 5},
        "workload": {
            "model": LightGBMConfig(trees=400, columns_per_tree=0.7, rows_per_tree=0.8),
            "schema": {"sample": sample},
        },
    }
    whole = train(small_run(click_log, tmp_path / "whole", **changes))
    run = begin(**changes)
    run.wait_for_save(40)
    run.kill_driver()
    assert_still_training(run)
    check_same_run(run.start().summary(), whole.summary, restarts=1)


@pytest.mark.extended
@pytest.mark.parametrize("workers", ["one", pytest.param("two", marks=pytest.mark.exhaustive)])
def test_run_survives_store_outage(
    workers: str, request: pytest.FixtureRequest, begin: Begin, s3_server: Any
) -> None:
    """For longer than cleaning and one attempt at a save wait for it; the run trains on, on Ray
    slowed down by evaluations.
    """
    is_alone = workers == "one"
    expected = request.getfixturevalue("expected_alone" if is_alone else "undisturbed")
    pace = ALONE if is_alone else {"evaluate_every": 1, "log_every": 3}
    run = begin(
        storage=s3_server.url(workers),
        checkpoint={"every": 20 if is_alone else 6, "num_to_keep": 5},
        **pace,
    )
    run.wait_for_save()
    s3_server.kill()
    time.sleep(2 * PATIENCE_S + 5)
    s3_server.start()
    back = time.time()
    finish(run, expected, restarts=0)
    assert any(
        "the store was unavailable for" in event["cause"] for event in run.events("checkpoint_late")
    )
    assert is_alone or any(event["time"] > back for event in run.events("step"))


# -- On Ray
@pytest.mark.exhaustive
def test_the_train_controller(undisturbed: dict[str, Any], begin: Begin) -> None:
    run = begin()
    run.wait_for_step(100)
    run.session.kill("controller")
    assert_still_training(run)
    assert "controller" in finish(run, undisturbed, restarts=1)["restart_causes"][0]["cause"]


@pytest.mark.exhaustive
def test_head_with_driver_and_worker_is_lost(undisturbed: dict[str, Any], begin: Begin) -> None:
    run = begin()
    run.wait_for_step(100)
    run.session.kill("gcs")
    run.session.end()
    assert_still_training(run)
    finish(run.start(), undisturbed, restarts=1)


@pytest.mark.exhaustive
def test_second_ctrl_c_exits_at_once(begin: Begin) -> None:
    run = begin(failure={"grace_s": 600.0})
    run.wait_for_step(20)
    for worker in run.session.find("train worker"):
        os.kill(worker.pid, signal.SIGSTOP)  # so that the save asked for by the first never comes
    run.session.process.send_signal(signal.SIGINT)
    time.sleep(10)
    assert run.session.process.poll() is None
    run.session.process.send_signal(signal.SIGINT)
    assert run.exit_status(timeout_s=240) == 130
    assert "Traceback" not in run.session.err


@pytest.mark.exhaustive
def test_damaged_checkpoints_are_named_and_skipped(
    undisturbed: dict[str, Any], begin: Begin
) -> None:
    run = begin()
    run.session.until(lambda: len(found := committed(run.path)) >= 5 and found[-1].step >= 200)
    run.session.end()
    damage = Damage(run)
    finish(run.start(), undisturbed, restarts=1)
    damage.assert_passed_over(number=1)


class Damage:
    """Done to the four newest checkpoints of a run, each in another way."""

    def __init__(self, run: Run) -> None:
        assert_still_training(run)
        self._run, (self.good, *newest) = run, committed(run.path)[-5:]
        ways = (flip_a_bit, cut_short, remove_file, tear_manifest)
        self._harmed = [(each.path, harm(each)) for harm, each in zip(ways, newest, strict=True)]

    def assert_passed_over(self, *, number: int) -> None:
        """By start `number`, from 0, each with its file named."""
        causes = {event["path"]: event["cause"] for event in self._run.events("checkpoint_damaged")}
        for checkpoint, path in self._harmed:
            assert path in causes[checkpoint]
            assert "\n" not in causes[checkpoint]
        assert self._run.events("start")[number]["step"] == self.good.step


def fill(disk: Path) -> Path:
    """Leaves room for events, and none for a checkpoint."""
    path = disk / "filling"
    with open(path, "wb") as file:
        while True:
            space = os.statvfs(disk)
            try:
                os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - (400 << 10))
                return path
            except OSError as error:
                # which a save that writes meanwhile is a reason for
                if error.errno != errno.ENOSPC:
                    raise


@pytest.mark.exhaustive
def test_run_survives_full_disk(
    undisturbed: dict[str, Any], begin: Begin, small_disk: Path
) -> None:
    run = begin(storage=small_disk)
    run.wait_for_save(40)
    filling = fill(small_disk)
    run.wait_for_step(run.wait_for("checkpoint_late")["step"] + 20)  # training continues
    assert_still_training(run)
    filling.unlink()
    finish(run, undisturbed, restarts=0)
    assert committed(run.path)[-1].step == run.config.steps


@pytest.mark.exhaustive
def test_full_disk_ends_run_in_one_line(begin: Begin, small_disk: Path) -> None:
    run = begin(storage=small_disk, failure={"max_outage_s": 2.0}, steps=20_000)
    run.wait_for_save(40)
    fill(small_disk)
    assert run.exit_status(timeout_s=240) == 2, run.session.err
    assert_still_training(run)
    assert re.match(
        "rayrec train: .*no space left", run.session.err.strip().splitlines()[-1], re.IGNORECASE
    )
    assert "Traceback" not in run.session.err


IN_SLOTS = {"resources_per_worker": {"slot": 1.0}}


@pytest.fixture
def cluster(tmp_path: Path, cache: Path) -> Iterator[RayCluster]:
    with RayCluster(tmp_path, cache=cache) as started:
        yield started


@pytest.mark.exhaustive
def test_loss_of_node_with_workers_resumes(
    undisturbed: dict[str, Any], begin: Begin, cluster: RayCluster
) -> None:
    for _ in range(2):
        address = cluster.add_node(num_cpus=1, resources={"slot": 2})
    run = begin(
        cluster={"address": address},
        scaling={**IN_SLOTS, **threads_of(2), "placement_strategy": "STRICT_PACK"},
    )
    run.wait_for_step(100)
    cluster.kill_node_of(cluster.find("train worker")[0])
    assert_still_training(run)
    finish(run, undisturbed, restarts=1)


@pytest.mark.exhaustive
def test_workers_shrink_and_grow_again(
    begin: Begin, cluster: RayCluster, tmp_path: Path, cache: Path
) -> None:
    """As on spot machines: a pod gets SIGTERM, another node joins, then one is lost without
    notice.
    """
    address = cluster.add_node(num_cpus=1, resources={"slot": 1})
    # As KubeRay starts it: `ray start --block` is the process that gets SIGTERM first.
    command = ray_start(
        "--address",
        address,
        "--num-cpus",
        1,
        "--resources",
        '{"slot": 1}',
        "--object-store-memory",
        200_000_000,
    )
    command += ["--dashboard-agent-listen-port", str(free_ports(1))]
    environment = environment_for(cache, RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="15")
    with Session(command, environment=environment, output=tmp_path / "pod") as pod:
        wait_for_ray(pod)
        run = begin(
            cluster={"address": address},
            scaling={**IN_SLOTS, **threads_of((1, 2)), "resize_interval_s": 1.0},
            steps=None,
            epochs=12,
            checkpoint={"every": 1_000_000, "num_to_keep": 2},
            failure={"max_failures": 1, "node_wait_s": 60},
        )
        both = run.wait_for("start")
        run.wait_for_step(60)
        pod.process.send_signal(signal.SIGTERM)
        alone = run.wait_for("start", since=both["time"])
        pod.process.wait(timeout=60)
    assert alone["step"] > 0  # no save was due but the one that the announcement asked for

    cluster.add_node(num_cpus=1, resources={"slot": 1})
    again = run.wait_for("start", since=alone["time"])
    assert [start["world_size"] for start in (both, alone, again)] == [2, 1, 2]
    assert again["step"] > alone["step"]  # saved before the restart

    run.wait_for_step(again["step"] + 40, since=again["time"])
    cluster.kill_node_of(cluster.find("train worker")[0])
    last = run.wait_for("start", since=again["time"])
    assert (last["world_size"], last["step"]) == (1, again["step"])
    assert_still_training(run)
    summary = run.summary(timeout_s=400)
    check_no_rows_lost(summary)
    assert summary["rows"] == 12 * summary["rows_of_sets"]["train"]
    assert_accounted(run, summary, restarts=3)
    announced, grown, _ = summary["restart_causes"]
    assert announced["cause"] == f"stopped: {NODE_PREEMPTED}"
    assert "more workers" in grown["cause"]
    assert (announced["steps_redone"], grown["steps_redone"]) == (0, 0)


_HOLDER = """
import sys, ray
from ray.util.placement_group import placement_group

ray.init(address=sys.argv[1], log_to_driver=False)
ray.get(placement_group([{"slot": 1}]).ready())
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.exhaustive
def test_busy_cluster_is_waited_for(
    click_log: Path, cache: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    address = cluster.add_node(num_cpus=2, resources={"slot": 2})
    config = small_run(
        click_log,
        tmp_path,
        steps=40,
        cluster={"address": address},
        scaling={**IN_SLOTS, **threads_of(2)},
    )
    holder = [sys.executable, "-u", "-c", _HOLDER, address]
    holding = Session(
        holder,
        environment=environment_for(cache),
        output=tmp_path / "holder",
        stdin=subprocess.PIPE,
    )
    with (
        holding,
        Run(
            config, tmp_path / "run", cache=cache, RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="5"
        ) as run,
    ):
        holding.until(lambda: "holds" in holding.out)
        run.start().session.until(
            lambda: (
                "Waiting for resources in use by other jobs: " in run.session.err + run.session.out
            )
        )
        assert not run.events("start", "failure")
        assert holding.process.stdin is not None
        holding.process.stdin.close()
        summary = run.summary()
        assert (summary["steps"], summary["restarts"], len(run.events("attempt"))) == (40, 0, 2)


# -- A student's run, which is the same after a crash
@pytest.mark.exhaustive
def test_killed_student_resumes_with_equal_weights(click_log: Path, tmp_path: Path) -> None:
    def distilled(name: str, teacher: str | None, weight: float = 0.5) -> tuple[TrainConfig, Path]:
        return small_run(
            click_log,
            tmp_path / name,
            steps=160,
            workload={
                "model": {"embedding_dim": 4, "bottom_mlp": (8, 4), "top_mlp": (16, 1)},
                "teacher": {"checkpoint": teacher, "weight": weight},
            },
        ), tmp_path / f"{name}_commands"

    # As wide as the student: what is looked at here is whom it learns from, not how much.
    cache = tmp_path / "cache"
    teacher = finished(*distilled("teacher", None, weight=0.0), cache=cache)
    checkpoint = teacher["checkpoint"]
    whole = finished(*distilled("whole", checkpoint), cache=cache)
    with Run(*distilled("again", checkpoint), cache=cache).start() as run:
        run.wait_for_step(60)
        run.kill_driver()
        assert not run.events("finish")
        again = run.start().summary()
        assert len(run.events("start")) == 2
    assert again["weights_sha256"] == whole["weights_sha256"] != teacher["weights_sha256"]
    assert whole["preprocessor"] == teacher["preprocessor"]
    assert whole["metrics"]["auroc"] > 0.5
    # labels are evaluated, not targets
    assert whole["metrics"]["label_rate"] == teacher["metrics"]["label_rate"]
    (record,) = (tmp_path / "whole").glob(f"*/{RECORD}")
    assert read_json(str(record))["checkpoint"] == checkpoint
