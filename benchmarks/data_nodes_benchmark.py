"""Benchmark of nodes for data tasks: one training node, alone and with 1 and 2 nodes more, compared with `rayrec plan`.

Each node is a network namespace on this machine with a Ray node of two CPUs. A CPU for data tasks is a fraction of a core, by a
control group. The training node has a stand-in for an accelerator, which takes a fixed time for each step. The forecast is that
of `plan --cluster cpus=2,gpus=1,cpu_nodes=N,gpu_rows_per_s=R`, with the stages of a data task measured here and scaled to the
fraction.
"""

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import paced_clicks
from hosts.nodes import Network, Node, missing
from hosts.processes import events_so_far
from logs import preprocessor_of, synthetic_log
from rows import emit, in_turn, median_of, note, part
from run_metrics import warm_speed

from rayrec import recipes
from rayrec.config import InputError
from rayrec.training.forecast import ClusterShape, Forecast, extrapolate, forecast
from rayrec.training.launchers.base import layout_of
from rayrec.workloads.base import TrainConfig

ROWS, REPEATS, MEASUREMENTS = 1_500_000, 3, 5
BATCH, ROWS_PER_S = 8192, 240_000
"""Rows of a step, and speed of the stand-in for an accelerator."""
CORE = 0.1
"""Fraction of a core that a data task gets."""
CPUS = 2
"""CPUs of each node for data tasks. The training node reserves one of its two for the worker."""
BLOCK_BYTES = 8 << 20
WARM_STEPS, SETTLE_S, MEASURED_S = 40, 25.0, 40.0
GROUPS = Path("/sys/fs/cgroup/cpu")


def main(*, quick: bool) -> None:
    if lacks := missing() or _missing_groups():
        raise InputError(f"rayrec benchmark data-nodes: {lacks}")
    path = synthetic_log(ROWS)
    preprocessor = preprocessor_of(path)
    cases = (0, 1, 2)
    forecasts = _forecasts(path, preprocessor, cases)
    speeds = in_turn(
        1 if quick else REPEATS,
        lambda number: {str(more): partial(_trained, path, preprocessor, more) for more in cases},
        shown=lambda speed: f"{speed['rows_per_s']:,.0f} rows/s, blocked {speed['blocked_fraction']:.0%}",
    )
    for more in cases:
        with part("data-nodes", f"{more} data nodes"):
            planned = forecasts[more]
            speed = median_of(speeds[str(more)], lambda one: one["rows_per_s"])
            blocked = median_of(speeds[str(more)], lambda one: one["blocked_fraction"])
            nodes = f"{more} data nodes of {CPUS} CPUs" if more else "its own CPU for data tasks"
            limit = f"{planned.rows_per_s:,.0f} ({planned.bottleneck})"
            note(f"  {nodes}: {speed:,.0f} rows/s, forecast {limit}, blocked {blocked:.0%}")
            emit(
                "data-nodes",
                peer="forecast of rayrec plan",
                workload=f"criteo TSV, accelerator of {ROWS_PER_S:,} rows/s, {nodes}, {CORE:g} of a core each",
                value=speed,
                ratio=speed / planned.rows_per_s,
                repeats=1 if quick else REPEATS,
                forecast_rows_per_s=round(planned.rows_per_s),
                forecast_limit=planned.bottleneck,
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
    (group / "cpu.cfs_period_us").write_text("100000")
    (group / "cpu.cfs_quota_us").write_text(str(round(cores * 100_000)))
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
        scaling={"num_workers": 1, "threads_per_worker": 1},
    )


def _forecasts(path: str, preprocessor: str, cases: Sequence[int]) -> dict[int, Forecast]:
    """Forecast all cases from one measurement of the stages: the fastest of some, as other processes slow down single ones."""
    config = _config(path, preprocessor)
    shapes = {more: ClusterShape(CPUS, gpus=1, cpu_nodes=more, gpu_rows_per_s=ROWS_PER_S) for more in cases}
    trials = [forecast(config, shapes[0]).measured_speed for _ in range(MEASUREMENTS)]
    measured = min(trials, key=lambda trial: sum(trial.stage_wall_s.values()))
    slower = replace(measured, stage_wall_s={stage: wall_s / CORE for stage, wall_s in measured.stage_wall_s.items()})
    config = config.replace(scaling={"use_gpu": True})
    return {
        more: extrapolate(slower, shape, layout_of(config, shape.resources()), threads_per_worker=1)
        for more, shape in shapes.items()
    }


@dataclass(frozen=True)
class _Limited:
    """Node whose data tasks are limited."""

    node: Node
    group: Path

    def add(self) -> None:
        """Move the processes of data tasks, and those that wait for some, into the group."""
        members, training = map(int, self.group.read_text().split()), self.node.processes("ray::RayTrainWorker")
        for pid in set(self.node.processes("ray::")).difference(members, training):
            with contextlib.suppress(OSError):  # it has ended
                self.group.write_text(str(pid))


def _trained(path: str, preprocessor: str, more: int) -> dict[str, float]:
    """Train with so many data nodes -> rows_per_s and blocked_fraction, with limited data tasks and empty buffers."""
    nodes = [{"cpus": CPUS, "accelerator": 1}, *[{"cpus": CPUS}] * more]
    with tempfile.TemporaryDirectory() as runs, Network() as network, contextlib.ExitStack() as groups:
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
            "log-every": 10,
            "scaling.num-workers": 1,
            "scaling.threads-per-worker": 1,
            "scaling.cpus-per-worker": 1,
            "cluster.data-nodes": "separate" if more else "auto",
        }
        settings = [f"--{name}={value}" for name, value in flags.items()]
        recipe = f"{paced_clicks.__file__}:paced"
        command = head.start_rayrec("train", recipe, *settings, "--scaling.resources-per-worker", "accelerator", "1")

        def steps() -> list[dict[str, float]]:
            return events_so_far(f"{runs}/run", "step")

        command.until(lambda: any(event["step"] >= WARM_STEPS for event in steps()), timeout_s=300)
        limited = [
            _Limited(node, groups.enter_context(_limit(node.name, CORE * cpus)))
            for node, cpus in ([(node, CPUS) for node in data] or [(training, CPUS - 1)])
        ]
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.1):
                for one in limited:
                    one.add()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            time.sleep(SETTLE_S)
            first = steps()[-1]["step"]
            time.sleep(MEASURED_S)
            return warm_speed(steps(), warm_steps=int(first))
        finally:
            ended.set()
            thread.join()
