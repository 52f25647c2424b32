"""Benchmark of preemptions with notice, by the protocol of Ray's own benchmark
(ray-project/ray#65047), on one machine.

Eight workers run on eight Ray nodes, one on each. Four times, at random steps from a seed, a node
gets a preemption notice, is killed at its deadline, and another joins some seconds later. The
baseline ignores notices, so that only periodic checkpoints count. The weights are compared with an
undisturbed run.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import stamped_clicks
from builders.runs import small_run
from hosts.processes import RayCluster, Run
from logs import synthetic_log
from rows import emit, part

WORKERS = 8
NOTICE_S = 20.0
"""Seconds from a notice to the kill."""
REPLACEMENT_S = 5.0
"""Seconds from a kill to the start of another node."""
PACE_S = 0.4
"""Minimum seconds per step, so that there are as many steps between notice and kill as on other
machines.
"""
WAIT_S = 1800.0
NODE: dict[str, Any] = {"num_cpus": 1, "resources": {"slot": 1}}
UNDISTURBED = "no preemption"
PERIODIC = "notices ignored, periodic checkpoints alone"
UNSEEN = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
"""Makes Ray Train keep notices from its workers."""


@dataclass(frozen=True)
class AttemptSteps:
    """Steps of one attempt, `begin` to `end` - 1, and the Unix times at which the first and last
    one began.
    """

    begin: int
    end: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Loss:
    """Cost of one preemption."""

    steps_redone: int
    idle_s: float
    """Seconds from the start of the last step before a restart to the first step after it, summed
    over the restarts it caused.
    """
    after_kill_s: float
    """Part of `idle_s` after the kill."""


def parse_attempts(stamps: str) -> list[AttemptSteps]:
    """Parse the file of `stamped_clicks` into attempts, in order. Skips an incomplete line.
    Pure.
    """
    lines = [line.split() for line in stamps.splitlines(keepends=True) if line.endswith("\n")]
    attempts = []
    for _, since_process_start in groupby(lines, key=lambda line: line[0]):
        (_, first, first_s), *_ = entries = list(since_process_start)
        _, last, last_s = entries[-1]
        attempts.append(AttemptSteps(int(first), int(last) + 1, float(first_s), float(last_s)))
    return attempts


def losses(
    attempts: Sequence[AttemptSteps], preemptions: Sequence[tuple[float, float]]
) -> list[Loss]:
    """Return the loss of each preemption. `preemptions`: (notice, kill) in Unix time, in order.

    Restarts between a notice and the next one belong to the first. Pure.
    """
    results = []
    for number, (notice_s, kill_s) in enumerate(preemptions):
        end_s = preemptions[number + 1][0] if number + 1 < len(preemptions) else float("inf")
        restarts = [
            (before, after)
            for before, after in pairwise(attempts)
            if notice_s <= after.begin_s < end_s
        ]
        results.append(
            Loss(
                steps_redone=sum(before.end - after.begin for before, after in restarts),
                idle_s=sum(after.begin_s - before.end_s for before, after in restarts),
                after_kill_s=sum(
                    max(0.0, after.begin_s - max(kill_s, before.end_s))
                    for before, after in restarts
                ),
            )
        )
    return results


def moments(steps: int, number: int, *, seed: int) -> list[int]:
    """Draw notice steps: random steps in the first two fifths of each of `number` equal parts.
    Pure.
    """
    generator = random.Random(seed)
    part = steps // number
    return [part * each + generator.randrange(2 * part // 5) for each in range(number)]


class Arm:
    """One run on eight nodes for workers and one for data tasks, and what happens to its nodes."""

    def __init__(
        self,
        cluster: RayCluster,
        folder: Path,
        log: Path,
        *,
        steps: int,
        every: int,
        seen: bool = True,
        min_workers: int = WORKERS,
    ) -> None:
        """Start the nodes. `seen`: whether workers receive notices. `min_workers`: minimum number
        of workers to continue with.
        """
        self._stamps = folder / "stamps"
        self._cluster = cluster
        self._cluster.add_node(num_cpus=2)
        for _ in range(WORKERS):
            address = self._cluster.add_node(**NODE)
        self._hosts = list(range(1, WORKERS + 1))
        workers = WORKERS if min_workers == WORKERS else (min_workers, WORKERS)
        config = small_run(
            log,
            str(folder),
            steps=steps,
            evaluate_every=steps,
            log_every=100,
            checkpoint={"every": every, "num_to_keep": 2},
            cluster={"address": address, "data_nodes": "separate"},
            scaling={
                "num_workers": workers,
                "threads_per_worker": 1,
                "resources_per_worker": {"slot": 1.0},
            },
            failure={"standby_after_s": 15.0},
        )
        recipe = stamped_clicks.stamped().replace(
            workload={"stamps": str(self._stamps), "pace_s": PACE_S}
        )
        config = config.replace(recipe=recipe.recipe, workload=recipe.workload)
        source = f"{stamped_clicks.__file__}:stamped"
        quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self.run = Run(
            config,
            folder / "commands",
            cache=folder / "cache",
            recipe=source,
            **quiet,
            **({} if seen else UNSEEN),
        )

    def attempts(self) -> list[AttemptSteps]:
        return parse_attempts(self._stamps.read_text()) if self._stamps.exists() else []

    def measure(self, notices: Sequence[int], *, seed: int) -> dict[str, Any]:
        """Run to the end, with a preemption at each of these steps -> `losses`, `attempts`,
        `wall_s` and the run's `summary`.
        """
        generator = random.Random(seed)
        preemptions = []
        begin_s = time.time()
        self.run.start()
        for step in notices:
            self._wait_for(step)
            host = self._hosts.pop(generator.randrange(len(self._hosts)))
            self._cluster.drain_node(NOTICE_S, node=host)
            notice_s = time.time()
            time.sleep(NOTICE_S)
            self._cluster.kill_node(host)
            preemptions.append((notice_s, time.time()))
            assert self.run.session.process.poll() is None, "the run was over before the kill"
            time.sleep(REPLACEMENT_S)
            self._cluster.add_node(**NODE)
            self._hosts.append(max(self._hosts) + 1)
            self._wait_for(step, since_s=preemptions[-1][1])
        summary = self.run.summary(timeout_s=1800)
        attempts = self.attempts()
        return {
            "losses": losses(attempts, preemptions),
            "attempts": attempts,
            "wall_s": time.time() - begin_s,
            "summary": summary,
        }

    def _wait_for(self, step: int, *, since_s: float = 0.0) -> None:
        """Wait until the newest attempt has started this step, and a step after the Unix time
        `since_s`.
        """
        deadline_s = time.monotonic() + WAIT_S
        while not (
            (attempts := self.attempts())
            and attempts[-1].end > step
            and attempts[-1].end_s > since_s
        ):
            assert self.run.session.process.poll() is None, self.run.session.err[-4000:]
            assert time.monotonic() < deadline_s, self.run.session.err[-4000:]
            time.sleep(0.1)


def measured(log: Path, notices: Sequence[int], *, seed: int, **arm: Any) -> dict[str, Any]:
    """Run `Arm.measure` of an arm in a separate folder."""
    with tempfile.TemporaryDirectory(prefix="preempt-") as name:
        folder = Path(name)
        with RayCluster(folder, cache=folder / "cache") as cluster:
            new_arm = Arm(cluster, folder, log, **arm)
            with new_arm.run:
                return new_arm.measure(notices, seed=seed)


def main(*, quick: bool) -> None:
    steps, number, seed = (200, 2, 0) if quick else (400, 4, 0)
    every = steps // number * 4 // 5  # so that kills come at all places between two saves
    notices = moments(steps, number, seed=seed)
    log = Path(synthetic_log(20_000)).parent
    arms: dict[str, dict[str, Any]] = {
        UNDISTURBED: {"notices": ()},
        PERIODIC: {"notices": notices, "seen": False},
        "notices heeded": {"notices": notices},
    }
    if not quick:
        arms["notices heeded, 4 to 8 workers"] = {"notices": notices, "min_workers": WORKERS // 2}
    results: dict[str, dict[str, Any]] = {}
    for name, arm in arms.items():
        workload = f"criteo_demo network, 8 workers on 8 nodes, {steps} steps, saved every {every}"
        with part("preempt", f"{workload}; {name}"):
            results[name] = measured(log, seed=seed, **{"steps": steps, "every": every, **arm})
            report(name, results, workload=workload)


def report(name: str, results: dict[str, dict[str, Any]], *, workload: str) -> None:
    """Emit the row of an arm; the two that others are compared with were measured before."""
    result = results[name]
    expected = results[UNDISTURBED]
    baseline = results.get(PERIODIC)
    summary = result["summary"]
    lost = result["losses"]
    attempts = result["attempts"]
    num_started = sum(attempt.end - attempt.begin for attempt in attempts)
    redone = num_started - summary["steps"]
    assert redone == sum(loss.steps_redone for loss in lost), (num_started, lost)
    peer = (
        sum(loss.steps_redone for loss in baseline["losses"])
        if baseline and baseline is not result
        else None
    )
    emit(
        "preempt",
        peer=None if peer is None else PERIODIC,
        workload=f"{workload}; {name}",
        unit="steps_redone",
        value=redone,
        ratio=redone / peer if peer else None,
        repeats=1,
        config_hash=summary["config_hash"],
        preemptions=len(lost),
        notice_s=NOTICE_S,
        replacement_s=REPLACEMENT_S,
        steps_redone_each=[loss.steps_redone for loss in lost],
        idle_s_each=[round(loss.idle_s, 1) for loss in lost],
        after_kill_s_each=[round(loss.after_kill_s, 1) for loss in lost],
        step_s=round(
            statistics.median(
                (each.end_s - each.begin_s) / (each.end - each.begin) for each in attempts
            ),
            2,
        ),
        goodput=round(summary["steps"] / num_started, 4),
        wall_s=round(result["wall_s"]),
        restarts=summary["restarts"],
        rows_lost=summary["rows_lost"],
        rows_repeated=summary["rows_repeated"],
        same_weights=summary["weights_sha256"] == expected["summary"]["weights_sha256"],
        peer_steps_redone=peer,
    )
