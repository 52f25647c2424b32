"""Benchmark of the cost of observing a run.

The same training runs with every phase timed, rows counted and the driver's views updated, and
without, in turn within one process. Two processes would differ by more than the cost.
"""

import dataclasses
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pyarrow as pa
from logs import synthetic_log
from observing_driver import driver
from paired_timing import Comparison, Spent, compare, median_interval
from rows import emit, note
from subprocesses import child, run_task

BATCH = 4096
STEPS = 20
"""Rows of a step; steps of a block, which is one interval between two logs: about half a second."""
WARM_BLOCKS: Final = 20
MAX_S: Final = 720.0
ENOUGH: Final = 0.004
"""Half width of the ratio's interval that ends the measurement. Shows a cost of 1 %."""


# -- training, as a worker's loop does it


class Cycled:
    """Repeated batches in memory, so that no data task runs. With a `table`, counts its rows once
    per round, like those from a data task with timed stages.
    """

    def __init__(self, batches: list[Any], *, table: pa.Table | None) -> None:
        from rayrec.data.stage_times import StageTimes

        self.steps = self.steps_per_epoch = 10**9
        self._batches = cycle(batches)
        self._left = 0
        self._table = table
        self._round = len(batches)
        if table is not None:
            self.stages = StageTimes(cpus=2.0)

    def rows(self, batches: int) -> int:
        return batches * BATCH

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._table is not None:
            if not self._left:
                self._left = self._round
                self._count(self._table)
            self._left -= 1
        return next(self._batches)

    def _count(self, table: pa.Table) -> None:
        from rayrec.data.stage_times import times_of

        times = times_of(table)
        assert times is not None
        self.stages.add(times)


@dataclass(frozen=True)
class Lane:
    """One way of training the model; all ways train the same one."""

    setup: Any
    training: Any
    account: Any
    driver: Callable[[int], None]
    """Is sent SIGCONT or SIGSTOP."""
    observed: bool

    def block(self, progress: Any) -> Spent:
        """Train up to the next log."""
        from rayrec.training import loop
        from rayrec.workloads.step_timer import time_collective_waits

        self.driver(signal.SIGCONT if self.observed else signal.SIGSTOP)
        with time_collective_waits(self.setup.clock):
            begin_s = time.perf_counter()
            begin_cpu_s = time.process_time()
            loop._train(self.training, self.account, progress.step + STEPS)
            spent = Spent(time.perf_counter() - begin_s, time.process_time() - begin_cpu_s)
        self.setup.clock.stop()
        return spent


def make_setup(config: Any, folder: str) -> tuple[Any, list[Any], float, Any]:
    """Set up the demo's network on one worker with all cores, as `rayrec plan` does.

    Returns the setup, real batches, the share of a block's CPU time spent on measuring its stages,
    and the stages of the block.
    """
    import torch

    from rayrec.data.engine import ThreadEngine
    from rayrec.native import keep_freed_memory
    from rayrec.workloads.base import WorkerContext
    from rayrec.workloads.recsys.planning import SliceRows, _read_slice

    keep_freed_memory()
    torch.set_num_threads(os.cpu_count() or 1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
    )
    data = _read_slice(config.workload, config)
    preprocessor = data.preprocessor
    index = data.index
    preprocessor.save(f"{folder}/preprocessor")
    rows = SliceRows(f"{folder}/preprocessor", index, preprocessor.num_embeddings, data.rows_of_log)
    setup, batches = rows.set_up(WorkerContext(config, 0, 1, torch.device("cpu"), ThreadEngine(1)))
    assert setup.described["batch_size"] == BATCH
    setup.model.train()
    return setup, batches, *measuring_stages(config, index, preprocessor)


def measuring_stages(config: Any, index: Any, preprocessor: Any) -> tuple[float, pa.Table]:
    """Return the CPU time of measuring a block's stages as a share of the block's CPU time, and an
    empty table with the stage times.

    Data tasks spend this time, so the measured training does not include it.
    """
    from rayrec.data import stage_times
    from rayrec.ingest.block_order import BlockOrder, SegmentRange
    from rayrec.ingest.stream import encoded_block

    parts = tuple(SegmentRange(segment, 0, segment.rows) for segment in index.segments)
    (block, *_) = BlockOrder(parts, config.train_data.shuffle, config.seed, len(parts)).blocks(0)

    def make() -> pa.Table:
        return encoded_block((block, 0, block.rows), preprocessor)

    with mock.patch.object(
        stage_times._Clock, "now", autospec=True, side_effect=stage_times._Clock.now
    ) as looks:
        table, times = stage_times.measured(make, rows_of=lambda table: table.num_rows)
    entries = looks.call_count // 2

    def measure() -> None:
        def enter() -> None:
            for _ in range(entries):
                with stage_times.stage("parse"):
                    pass

        stage_times.with_times(table, stage_times.measured(enter, rows_of=lambda _: 0)[1])

    making_s = min(_cpu_s(make) for _ in range(3))
    measuring_s = min(_cpu_s(measure, times=100) for _ in range(3))
    return measuring_s / making_s, stage_times.with_times(table.slice(0, 0), times)


def _cpu_s(work: Callable[[], Any], *, times: int = 1) -> float:
    begin_s = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - begin_s) / times


def make_lanes(
    config: Any, folder: str, progress: Any, driver: Callable[[int], None]
) -> tuple[Any, list[Lane], float]:
    """Return the event writer, the lanes (observed, not observed, again not observed), and the
    share of measuring stages.
    """
    import torch

    from rayrec.observe.events import EventWriter
    from rayrec.training.progress import Training
    from rayrec.training.step_log import StepAccounting
    from rayrec.workloads.recsys.worker import TimedBase
    from rayrec.workloads.step_timer import HostTimer, StepTimer

    class Entered(torch.nn.Module):
        """Wrapper of the model with separate hooks."""

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Any) -> Any:
            return self.model(batch)

    plain = config.replace(observe={"times": False})
    setup, batches, stage_fraction, table = make_setup(plain, folder)
    writer = EventWriter(os.path.join(folder, "events.jsonl"))
    writer.write("run", recipe=config.recipe, name="observed", config_hash="", versions={})
    writer.write("start", step=0, steps=10**9, rows=0, world_size=1, checkpoint=None)
    stop_signal = SimpleNamespace(
        poll=lambda: (False, False), preempted=lambda: False, urgent=lambda: False
    )
    lanes = []
    for observed in (True, False, False):
        clock = HostTimer() if observed else StepTimer()
        pipeline = TimedBase(Entered(setup.model), setup.optimizer, torch.device("cpu"), clock)
        peak = 1e12 if observed else None  # the worker measures it once, before it trains
        lane_setup = dataclasses.replace(
            setup, clock=clock, pipeline=pipeline, peak_multiply_adds_per_s=peak
        )
        loader: Any = Cycled(batches, table=table if observed else None)
        log = (
            (lambda kind, fields: writer.write(kind, **fields))
            if observed
            else (lambda kind, fields: None)
        )
        training = Training(
            config=config if observed else plain,
            setup=lane_setup,
            loader=loader,
            progress=progress,
            log=log,
            save=lambda *_, **__: None,
            stop_signal=stop_signal,
        )
        lanes.append(Lane(lane_setup, training, StepAccounting(training), driver, observed))
    return writer, lanes, stage_fraction


# -- both ways, in turn


def measure(*, path: str, quick: bool) -> dict[str, Any]:
    """Train blocks in one process, observed and not, until the interval of the ratio is narrow
    enough.
    """
    from rayrec.recipes import criteo_demo
    from rayrec.training.progress import Progress
    from rayrec.training.resume import run_hash

    config = criteo_demo(path).replace(
        steps=10**9,
        log_every=STEPS,
        batch_size=BATCH,
        min_steps_per_epoch=1,
        scaling={"num_workers": 1},
    )
    progress = Progress()
    with tempfile.TemporaryDirectory() as folder, driver(folder) as process:
        writer, lanes, stage_fraction = make_lanes(config, folder, progress, process.signal)
        for number in range(WARM_BLOCKS):
            lanes[number % len(lanes)].block(progress)
        process.begin()
        observed, plain, same = (partial(lane.block, progress) for lane in lanes)
        limits = {"max_quartets": 8} if quick else {}
        comparison = compare(observed, plain, same, enough=ENOUGH, max_s=MAX_S, **limits)
        writer.close()
        process.signal(signal.SIGCONT)
        used_s = process.end()
    on_s = sum(spent.wall_s for spent in comparison.ours)
    return {
        **figures(comparison),
        "driver_cpu_share": used_s / (on_s * (os.cpu_count() or 1)),
        "stage_share": stage_fraction,
        "config_hash": run_hash(config),
    }


def figures(comparison: Comparison) -> dict[str, Any]:
    """Return the fields of a comparison's row."""
    ratio, cpu, null = map(
        median_interval, (comparison.ratios, comparison.cpu_ratios, comparison.null_ratios)
    )
    rows_per_s, peer = (
        BATCH * STEPS / statistics.median(spent.wall_s for spent in spents)
        for spents in (comparison.ours, comparison.theirs)
    )
    return {
        "rows_per_s": rows_per_s,
        "peer_rows_per_s": peer,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "cpu_ratio": cpu.median,
        "cpu_ratio_low": cpu.low,
        "cpu_ratio_high": cpu.high,
        "null_low": null.low,
        "null_high": null.high,
        "below_1_percent": ratio.low >= 0.99 and 1.0 in null,
        "quartets": comparison.quartets,
    }


def main(*, quick: bool) -> None:
    result = child(
        __file__, "measure", path=synthetic_log(200_000 if quick else 1_000_000), quick=quick
    )
    rounded = {
        name: round(value, 5) if isinstance(value, float) else value
        for name, value in result.items()
    }
    for name in ("rows_per_s", "ratio", "config_hash"):
        rounded.pop(name)
    emit(
        "observe",
        peer="the same training in the same process, not observed",
        workload=(
            f"criteo_demo network, batch {BATCH}, 1 worker, rows ready, {STEPS} steps between two "
            "logs"
        ),
        value=result["rows_per_s"],
        ratio=result["ratio"],
        repeats=result["quartets"],
        config_hash=result["config_hash"],
        **{**rounded, "peer_rows_per_s": round(result["peer_rows_per_s"])},
    )
    note(
        f"  observed: {result['ratio']:.4f} of the speed ({result['ratio_low']:.4f} to "
        f"{result['ratio_high']:.4f}); nothing looks like {result['null_low']:.4f} to "
        f"{result['null_high']:.4f}; that it costs less than 1 % is "
        f"{'shown' if result['below_1_percent'] else 'not shown'}"
    )


if __name__ == "__main__":
    run_task(measure)
