"""Benchmark of nodes for data tasks: one training node, alone and with 1 and 2 nodes more, compared
with `rayrec plan`.

Each node is a network namespace on this machine with a Ray node of two CPUs. A CPU for data tasks
is a fraction of a core, by a control group of their processes. Together these take less than one of
two cores. The trainer and Ray's other processes have the rest. The training node has a stand-in for
an accelerator, which takes a fixed time for each step. The forecast is that of `plan --cluster
cpus=2,gpus=1,cpu_nodes=N,gpu_rows_per_s=R`. The stages of a data task are measured on a whole core
while the run continues. On an idle machine a row takes less CPU time. That time is scaled to the
fraction.
"""

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import paced_clicks
from hosts.nodes import Network, Node, missing
from hosts.processes import events_so_far
from logs import build_preprocessor, synthetic_log
from rows import emit, in_turn, median_of, part
from run_metrics import warm_speed

from rayrec import recipes
from rayrec.config import InputError
from rayrec.training.forecast import ClusterShape, Forecast, extrapolate, forecast
from rayrec.training.launchers.base import compute_layout
from rayrec.workloads.base import MeasuredSpeed, TrainConfig

ROWS = 1_500_000
REPEATS = 3
MEASUREMENTS = 3
BATCH = 32_768
ROWS_PER_S = 700_000
"""Rows of a step, and speed of the stand-in for an accelerator: more than one data node makes, and
less than two.
"""
CORE = 0.2
"""Fraction of a core that a data task gets."""
WAITING = 0.007
"""Fraction that a process of Ray takes even if it waits, in addition."""
CPUS = 2
"""CPUs of each node for data tasks. The training node reserves one of its two for the worker."""
BLOCK_BYTES = 8 << 20
WARM_STEPS = 40
SETTLE_S = 10.0
MEASURED_S = 40.0
PERIOD_US = 500_000
"""Period in which a group may use its fraction. With 100 ms, a row takes a seventh more CPU time:
each pause cools the caches.
"""
GROUPS = Path("/sys/fs/cgroup/cpu")


def main(*, quick: bool) -> None:
    if lacks := missing() or _missing_groups():
        raise InputError(f"data nodes: {lacks}")
    path = synthetic_log(ROWS)
    preprocessor = build_preprocessor(path)
    cases = (0, 1, 2)
    runs = in_turn(
        1 if quick else REPEATS,
        lambda number: {str(more): partial(_run, path, preprocessor, more) for more in cases},
        shown=lambda run: (
            f"{run.rows_per_s:,.0f} rows/s, forecast {run.forecast.rows_per_s:,.0f}, blocked "
            f"{run.blocked:.0%}"
        ),
    )
    for more in cases:
        with part("data-nodes", f"{more} data nodes"):
            speed = median_of(runs[str(more)], lambda run: run.rows_per_s)
            blocked = median_of(runs[str(more)], lambda run: run.blocked)
            planned = median_of(runs[str(more)], lambda run: run.forecast.rows_per_s)
            nodes = f"{more} data nodes of {CPUS} CPUs" if more else "its own CPU for data tasks"
            emit(
                "data-nodes",
                peer="forecast of rayrec plan",
                workload=(
                    f"criteo TSV, accelerator of {ROWS_PER_S:,} rows/s, {nodes}, {CORE:g} of a "
                    "core each"
                ),
                value=speed,
                ratio=speed / planned,
                repeats=1 if quick else REPEATS,
                forecast_rows_per_s=round(planned),
                forecast_limit="data" if planned < ROWS_PER_S else "model",
                blocked_fraction=round(blocked, 3),
            )


def _missing_groups() -> str | None:
    """Return why CPU time cannot be limited here; None if it can."""
    try:
        with _limit("trial", CORE):
            return None
    except OSError as error:
        return f"needs root, and control groups of version 1 with CPU quotas at {GROUPS} ({error})"


@contextlib.contextmanager
def _limit(name: str, cores: float) -> Iterator[Path]:
    """Make a control group of so many cores, and yield the file that takes its processes."""
    group = GROUPS / f"rayrec-{name}"
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD_US)))
    try:
        yield group / "cgroup.procs"
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (GROUPS / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):  # processes that end just now
            group.rmdir()


def _config(path: str, preprocessor: str) -> TrainConfig:
    return recipes.criteo_demo(path).replace(
        workload={"preprocessor": preprocessor},
        train_data={"block_bytes": BLOCK_BYTES},
        batch_size=BATCH,
        min_steps_per_epoch=1,
        scaling={"num_workers": 1, "threads_per_worker": 1},
    )


@dataclass(frozen=True)
class _Run:
    rows_per_s: float
    blocked: float
    """Fraction of the time."""
    forecast: Forecast


def _run(path: str, preprocessor: str, more: int) -> _Run:
    """Train with so many data nodes, and forecast the speed by the median of measurements before
    and after the measured time.
    """
    speed, trials = _trained(path, preprocessor, more)
    measured = sorted(trials, key=lambda trial: sum(trial.stage_cpu_s.values()))[len(trials) // 2]
    slower = replace(
        measured,
        stage_wall_s={stage: cpu_s / CORE for stage, cpu_s in measured.stage_cpu_s.items()},
    )
    shape = _shape(more)
    config = _config(path, preprocessor).replace(scaling={"use_gpu": True})
    planned = extrapolate(
        slower, shape, compute_layout(config, shape.resources()), threads_per_worker=1
    )
    return _Run(speed["rows_per_s"], speed["blocked_fraction"], planned)


def _shape(more: int) -> ClusterShape:
    return ClusterShape(CPUS, gpus=1, cpu_nodes=more, gpu_rows_per_s=ROWS_PER_S)


def _measurements(path: str, preprocessor: str) -> list[MeasuredSpeed]:
    return [
        forecast(_config(path, preprocessor), _shape(0)).measured_speed for _ in range(MEASUREMENTS)
    ]


@dataclass(frozen=True)
class _Limited:
    """Node whose data tasks are limited."""

    node: Node
    group: Path

    def add(self) -> None:
        """Move the processes that run data tasks into the group, where they stay."""
        for pid in self.node.processes("ray::Read"):  # Ray Data's title of a process in a read task
            with contextlib.suppress(OSError):  # it has ended
                self.group.write_text(str(pid))


def _trained(
    path: str, preprocessor: str, more: int
) -> tuple[dict[str, float], list[MeasuredSpeed]]:
    """Train with so many data nodes -> rows_per_s and blocked_fraction, with limited data tasks and
    empty buffers, and the stages as measured before and after that time.
    """
    nodes = [{"cpus": CPUS, "accelerator": 1}, *[{"cpus": CPUS}] * more]
    with (
        tempfile.TemporaryDirectory() as runs,
        Network() as network,
        contextlib.ExitStack() as groups,
    ):
        head, training, *data = network.cluster({"cpus": 0}, *nodes)
        flags = {
            "train-data.path": path,
            "train-data.block-bytes": BLOCK_BYTES,
            "workload.preprocessor": preprocessor,
            "workload.pace-s": BATCH / ROWS_PER_S,
            "storage-path": runs,
            "name": "run",
            "steps": 1_000_000,
            "evaluate-every": 1_000_000,
            "batch-size": BATCH,
            "min-steps-per-epoch": 1,
            "log-every": 10,
            "scaling.num-workers": 1,
            "scaling.threads-per-worker": 1,
            "scaling.cpus-per-worker": 1,
            "cluster.data-nodes": "separate" if more else "auto",
        }
        settings = [f"--{name}={value}" for name, value in flags.items()]
        recipe = f"{paced_clicks.__file__}:paced"
        command = head.start_rayrec(
            "train", recipe, *settings, "--scaling.resources-per-worker", "accelerator", "1"
        )

        def steps() -> list[dict[str, float]]:
            return events_so_far(f"{runs}/run", "step")

        command.until(lambda: any(event["step"] >= WARM_STEPS for event in steps()), timeout_s=300)
        limited = [
            _Limited(node, groups.enter_context(_limit(node.name, (CORE + WAITING) * cpus)))
            for node, cpus in ([(node, CPUS) for node in data] or [(training, CPUS - 1)])
        ]
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.5):
                for one in limited:
                    one.add()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            time.sleep(SETTLE_S)
            before = _measurements(path, preprocessor)
            first = steps()[-1]["step"]
            time.sleep(MEASURED_S)
            return warm_speed(steps(), warm_steps=int(first)), before + _measurements(
                path, preprocessor
            )
        finally:
            ended.set()
            thread.join()
