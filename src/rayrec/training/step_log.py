"""Step accounting of a worker: rows, losses, times, data pipeline statistics and peak device
speed.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, final

import torch

from rayrec import host_resources
from rayrec.batch import StepOutput
from rayrec.checkpoint.communicator import Communicator
from rayrec.collectives import Collectives, num_workers, over_workers
from rayrec.compat.torch_compat import linear_pointwise
from rayrec.config import InputError
from rayrec.data.stage_times import STAGES, StageTimes
from rayrec.layers.mlp import Precision, uses_bfloat16
from rayrec.optim.config import learning_rates
from rayrec.trained_rows import RowNumbers
from rayrec.training.progress import Cut, Training
from rayrec.workloads.step_timer import StepTimer

_MEMORY_FIELDS = ("memory_bytes", "device_memory_bytes")
"""Fields of a step event: largest resident memory per worker, and peak GPU memory for tensors since
the last log.
"""
_POLL_S = 5.0
"""Seconds between two polls for reasons to save, rounded to full steps. They reduce the time left
of `failure.grace_s`.
"""
_PREEMPTED_POLL_S = 1.0
"""The same after a preemption notice; it determines how long before the deadline the run ends."""
_MAX_LOSS: Final = 1e9
"""Loss that no initial weights have, in any common unit of labels."""
TRAINING_COST = 3
"""Cost of a step in forward passes: the backward pass has two products for each forward product."""

_MIN_EVENT_S: Final = 1.0
"""Minimum seconds between two events: a block lasts for many steps, so most intervals between two
logs have no new block.
"""
_MAX_EVENT_S: Final = 10.0
"""Seconds after which an event is logged even without a new block."""


@final
class DataStats:
    """Sums of all workers' `StageTimes`. One instance per worker; all workers make the same
    calls.
    """

    def __init__(self, loader: Any) -> None:
        """Read `loader.stages`; loaders without it are not reported."""
        self._account: StageTimes | None = getattr(loader, "stages", None)
        self._since_s = time.monotonic() if self._account is None else self._account.begin_s
        self._sums = dict.fromkeys(StageTimes.FIELDS, 0.0)

    def take(self) -> list[float]:
        """Return this worker's numbers since the last call, equally many on each worker, to be
        averaged for `log_means`.
        """
        return [] if self._account is None else self._account.take()

    def log_means(
        self, means: Sequence[float], *, step: int, log: Callable[[str, dict[str, Any]], None]
    ) -> None:
        """Log a data event if one is due."""
        if self._account is None:
            return
        workers = num_workers()
        for name, mean in zip(StageTimes.FIELDS, means, strict=True):
            self._sums[name] = mean * workers + (0.0 if name == "cpus" else self._sums[name])
        if self._sums["new_nodes"]:  # A sum, so all workers gather.
            nodes = set().union(*Communicator.all().all_gather(self._account.nodes))
            log("data_nodes", {"step": step, **host_resources.node_fields(sorted(nodes))})
            self._sums["new_nodes"] = 0.0
        seconds = time.monotonic() - self._since_s
        if seconds < _MIN_EVENT_S or (seconds < _MAX_EVENT_S and not self._sums["blocks"]):
            return
        log("data", {"step": step, **data_fields(self._sums, seconds=seconds)})
        self._since_s += seconds
        self._sums = dict.fromkeys(StageTimes.FIELDS, 0.0)


def data_fields(sums: Mapping[str, float], *, seconds: float) -> dict[str, Any]:
    """Return the fields of a data event from the sums of all workers' `StageTimes` over `seconds`.
    Pure. For each stage: `rows_per_s`, if all CPUs did only this stage; `busy`, its share of the
    CPUs' time; `cpu_share` and `queue_share`, the shares of its own time in which it computed and
    waited for a CPU (the rest waits for storage). The backlog is a mean over time.
    """
    cpus = sums["cpus"]
    rows = sums["rows"]
    stages = [
        {
            "stage": name,
            "rows_per_s": rows * cpus / wall_s,
            "busy": wall_s / (seconds * cpus),
            "cpu_share": sums[f"{name}_cpu_s"] / wall_s,
            "queue_share": sums[f"{name}_queue_s"] / wall_s,
        }
        for name in STAGES
        if (wall_s := sums[f"{name}_wall_s"])
    ]
    busy_s = sum(sums[f"{name}_wall_s"] for name in STAGES)
    return {
        "seconds": seconds,
        "rows": round(rows),
        "rows_per_s": rows / seconds,
        "cpus": cpus,
        "busy": busy_s / (seconds * cpus),
        "capacity_rows_per_s": rows * cpus / busy_s if busy_s else None,
        "backlog_rows": sums["waited_row_s"] / seconds,
        "backlog_blocks": sums["waited_block_s"] / seconds,
        "stages": stages,
    }


_WINDOW_S: Final = 0.04
"""Duration of a CPU measurement. It suffices for a core's clock to rise, and must not delay a
worker's start.
"""

_logger = logging.getLogger(__name__)


def multiply_adds_per_s_or_zero(device: torch.device, *, precision: Precision) -> float:
    """Return `multiply_adds_per_s`, or 0 with a warning if the measurement fails, which must not
    stop training.
    """
    try:
        return multiply_adds_per_s(device, precision=precision)
    except Exception as error:  # kernels and allocators raise various errors
        _logger.warning("Cannot measure the peak of %s (%s)", device, error)
        return 0.0


def multiply_adds_per_s(device: torch.device, *, precision: Precision) -> float:
    """Measure the fastest matrix product in torch for this device and precision ("fp32" or "bf16"),
    with the current number of threads. Raises torch's error if no product works.
    """
    dtype = torch.bfloat16 if uses_bfloat16(precision, device) else torch.float32
    if device.type == "cuda":
        return _measure_cuda(device, dtype)
    rows = 1024
    inner = 512
    columns = 512
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, inner, generator=generator).to(dtype)
    right = torch.randn(columns, inner, generator=generator).to(dtype)
    products: list[Callable[[], torch.Tensor]] = [lambda: torch.nn.functional.linear(left, right)]
    if torch.backends.mkldnn.is_available():
        products.append(lambda: linear_pointwise(left, right, None, "none"))
    with torch.no_grad():
        return rows * inner * columns / _time_fastest(products)


def _time_fastest(products: list[Callable[[], torch.Tensor]]) -> float:
    """Return the seconds of the fastest product. Raises the last error if no product works."""
    times_s: list[float] = []
    for number, product in enumerate(products, start=1):
        try:
            times_s.append(_shortest_s(product))
        except (
            Exception
        ) as error:  # e.g. another torch's private operation, a dtype without CPU product
            if number == len(products) and not times_s:
                raise
            _logger.info("Skipping an unsupported matrix product (%s)", error)
    return min(times_s)


def _shortest_s(product: Callable[[], torch.Tensor]) -> float:
    shortest_s = float("inf")
    deadline_s = time.perf_counter() + _WINDOW_S
    while time.perf_counter() < deadline_s:
        start_s = time.perf_counter()
        product()
        shortest_s = min(shortest_s, time.perf_counter() - start_s)
    return shortest_s


def _measure_cuda(device: torch.device, dtype: torch.dtype) -> float:
    size = 4096
    repeats = 10
    left = torch.ones(size, size, device=device, dtype=dtype)
    # Kernels run after their calls return. Events take the device's own time between them.
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.no_grad():
        left @ left
        start.record()
        for _ in range(repeats):
            left @ left
        stop.record()
    stop.synchronize()
    return repeats * size**3 / (start.elapsed_time(stop) / 1e3)


class Batches:
    """Batches of one segment. Counts them, keeps their rows until they are trained, sums the
    waiting time, and can end early.
    """

    def __init__(self, source: Iterator[Any], clock: StepTimer) -> None:
        self._source = source
        self._clock = clock
        self.num_pulled = 0
        self.blocked_s = 0.0
        self._in_flight: deque[RowNumbers | None] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            with self._clock.phase("data"):
                batch = next(self._source)
        finally:
            self.blocked_s += time.perf_counter() - start
        self.num_pulled += 1
        self._in_flight.append(getattr(batch, "row_numbers", None))
        return batch

    def trained(self) -> RowNumbers | None:
        """Return the rows of the oldest untrained batch, or None if unknown. Pipelines train in the
        order in which they pull.
        """
        return self._in_flight.popleft()

    def end(self) -> None:
        """Stop the iteration. Batches already pulled by a pipeline are still trained."""
        self._source = iter(())


class StepAccounting:
    """Accounting and logging of steps, rows, losses and time; detects reasons to end a segment
    early.
    """

    def __init__(self, training: Training) -> None:
        config = training.config
        setup = training.setup
        loader = training.loader
        progress = training.progress
        self._config = config
        self._loader = loader
        self._progress = progress
        self._by_worker = config.observe.by_worker
        self._first_step_done = training.first_step
        self._clock = setup.clock
        self._cost = setup.multiply_adds_per_row
        self._peak = setup.peak_multiply_adds_per_s
        self._log = training.log
        self._stop_signal = training.stop_signal
        self._optimizer = setup.optimizer
        self._data = DataStats(loader) if config.observe.times else None
        self._first_step = progress.step
        self._rows_before = progress.counters.rows
        self._count_correct = setup.count_correct if config.observe.accuracy else None
        self._correct: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []
        self._start_s = 0.0
        self._num_rows = 0
        """Rows trained by this worker since the last log."""
        self._next_poll_step = progress.step + 1
        """Step of the next poll for reasons to save. The first step takes longest, so its time
        predicts nothing.
        """
        self._poll_s = _POLL_S
        self._first_loss: float | None = None
        self._is_diverging = False
        self.total = progress.step + loader.steps
        self.cut: Cut = "none"

    def begin(self) -> None:
        self.cut = "none"
        self._losses = []
        self._correct = []
        self._start_s = time.perf_counter()
        self._clock.start()

    def count(self, output: StepOutput, batches: Batches, *, stop: int) -> bool:
        """Count a step and return whether the segment must end before `stop`. Collective if a log
        or a poll is due.
        """
        if self._first_step_done is not None:
            self._first_step_done(batches.blocked_s, time.perf_counter() - self._start_s)
            self._first_step_done = None
        progress = self._progress
        rows = batches.trained()
        progress.count(rows)
        self._num_rows += 0 if rows is None else len(rows.numbers)
        self._losses.append(output.loss)
        if self._count_correct is not None:
            self._correct.append(self._count_correct(output))
        progress.counters.step += 1
        due = progress.step % self._config.log_every == 0 or progress.step >= stop
        if not due and (progress.step < self._next_poll_step or not self._poll()):
            return False
        self._clock.cut()
        loss_mean = self._mean_loss()  # the only device synchronization between two logs
        correct = float(torch.stack(self._correct).sum()) if self._correct else 0.0
        now_s = time.perf_counter()
        times_s = self._clock.read()
        memory = [host_resources.resident_bytes(), *_device_bytes()]
        values = [
            loss_mean,
            batches.blocked_s,
            now_s - self._start_s,
            self._num_rows,
            correct,
            *times_s.values(),
            *memory,
        ]
        workers = (
            Collectives(None).gather_floats([loss_mean, self._num_rows, correct])
            if self._by_worker
            else []
        )
        data = self._data.take() if self._data else []
        # One collective for all numbers of a log and the stop request. Its maxima decide, so that
        # all workers act on a request at the same step.
        means, maxima = over_workers(*values, *data, *self._stop_signal.poll())
        *_, stop_requested, poll_preemption = maxima
        times_max_s = dict(zip(times_s, maxima[5:], strict=False))
        times_s = dict(zip(times_s, means[5:], strict=False))
        max_memory = maxima[len(values) - len(memory) : len(values)]
        self._log_steps(means, times_s, times_max_s, max_memory, workers)
        if self._data:
            self._data.log_means(
                means[len(values) : len(values) + len(data)], step=progress.step, log=self._log
            )
        self._schedule_poll(elapsed_s=means[2])
        self._losses = []
        self._correct = []
        self._start_s = now_s
        self._num_rows = 0
        batches.blocked_s = 0.0
        if due:
            self._handle_stop_request(stop_requested, poll_preemption)
        return progress.step < stop and self.cut != "none"

    def _mean_loss(self) -> float:
        """Return the mean of this worker's losses since the last log, weighted by each step's rows
        of all workers.
        """
        losses = torch.stack(self._losses)
        done = self._progress.step - self._first_step
        rows_until = [self._loader.rows(step) for step in range(done - len(self._losses), done + 1)]
        rows = [stop - start for start, stop in pairwise(rows_until)]
        if len(set(rows)) == 1:
            return losses.mean().item()
        weights = torch.tensor(rows, dtype=losses.dtype, device=losses.device)
        return float((losses * weights).sum() / weights.sum())

    def _learned(self, loss: float, rows: float, correct: float) -> dict[str, float]:
        """Return the event fields on loss and accuracy, of all workers or of one."""
        accuracy = {"accuracy": correct / rows} if self._count_correct is not None and rows else {}
        return {"loss": loss, **accuracy}

    def _poll(self) -> bool:
        """Poll between logs; return whether the cut changed; collective. Exchanges three numbers.
        NCCL waits for the device.
        """
        # Without a log, only the clock and the requests are exchanged.
        (elapsed_s, *_), (_, stop_requested, poll_preemption) = over_workers(
            time.perf_counter() - self._start_s, *self._stop_signal.poll()
        )
        before = self.cut
        self._schedule_poll(elapsed_s)
        self._handle_stop_request(stop_requested, poll_preemption)
        return self.cut != before

    def _schedule_poll(self, elapsed_s: float) -> None:
        """Schedule the next poll from numbers shared by all workers: the mean step time since the
        last log. The interval never exceeds the attempt's number of steps so far, because its first
        steps are not representative.
        """
        step_s = elapsed_s / len(self._losses)
        so_far = self._progress.step - self._first_step
        self._next_poll_step = self._progress.step + max(
            1, min(int(self._poll_s / max(step_s, 1e-6)), so_far)
        )

    def _handle_stop_request(self, stop_requested: float, poll_preemption: float) -> None:
        if stop_requested:
            self.cut = "stop"
        elif poll_preemption and self._stop_signal.preempted():
            self._poll_s = _PREEMPTED_POLL_S
            self._next_poll_step = self._progress.step + 1
            self.cut = "save" if self.cut == "none" else self.cut

    def _log_steps(
        self,
        means: Sequence[float],
        times_s: dict[str, float],
        times_max_s: dict[str, float],
        max_memory: Sequence[float],
        workers: Sequence[Sequence[float]],
    ) -> None:
        progress = self._progress
        loss, blocked_s, elapsed_s, num_rows, correct = means[:5]
        elapsed_s = sum(times_s.values()) or elapsed_s
        if progress.trained is None:  # count as the loader reports
            trained = self._rows_before + self._loader.rows(progress.step - self._first_step)
            rows = trained - progress.counters.rows
        else:
            rows = round(num_rows * num_workers())
        progress.counters.update(rows=rows, train_s=elapsed_s, blocked_s=blocked_s)
        fields: dict[str, Any] = {
            "step": progress.step,
            "steps": self.total,
            **self._learned(loss, num_rows, correct),
            "rows": progress.counters.rows,
            "rows_per_s": rows / elapsed_s,
            "blocked_fraction": blocked_s / elapsed_s,
            "learning_rate": max(learning_rates(self._optimizer), default=0.0),
            **{
                name: int(size)
                for name, size in zip(_MEMORY_FIELDS, max_memory, strict=False)
                if size
            },
        }
        if workers:
            fields["workers"] = [self._learned(*worker) for worker in workers]
        if times_s:
            fields["times_s"] = times_s
            if num_workers() > 1:  # with one worker, max equals mean
                fields["times_max_s"] = times_max_s
        if self._cost is not None:
            done = TRAINING_COST * self._cost * rows / elapsed_s
            fields["multiply_adds_per_s"] = done
            if self._peak is not None:
                fields["peak_fraction"] = done / self._peak
        self._log("step", fields)
        if not math.isfinite(loss):
            raise InputError(
                f"the loss is {loss} at step {progress.step}. Lower the learning rates "
                "(--learning-rate)"
            )
        if self._first_loss is None:
            self._first_loss = loss
        if not self._is_diverging and diverges(loss, first=self._first_loss):
            self._is_diverging = True
            self._log(
                "diverging", {name: fields[name] for name in ("step", "loss", "learning_rate")}
            )


def diverges(loss: float, *, first: float) -> bool:
    """Return whether a finite loss shows that training diverges, given the attempt's first logged
    one. Losses of regressions have any unit, so the limit is relative to the first, or beyond any
    that a model starts with.
    """
    return loss > 1000.0 * max(first, 1.0) or loss > _MAX_LOSS


def _device_bytes() -> list[float]:
    """Return the peak memory of tensors on this worker's GPU since the last call."""
    if not torch.cuda.is_initialized():
        return []
    peak_bytes = float(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return [peak_bytes]
