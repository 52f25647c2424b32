"""Training worker, from its process group's start to its last checkpoint."""

import contextlib
import gc
import logging
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import torch

from rayrec import storage
from rayrec.checkpoint import (
    SUMMARY,
    Checkpoint,
    DamagedError,
    Retention,
    Saver,
    acquire_lease,
    check_shared,
    folder_of,
    latest_valid_checkpoint,
    step_of,
    weights_sha256,
)
from rayrec.checkpoint.communicator import Communicator
from rayrec.checkpoint.format import UnreadableError
from rayrec.checkpoint.save_retry import log_cleanup_errors, retry_write
from rayrec.checkpoint.state import all_tensors, restore_all, restore_model, start_from
from rayrec.checkpoint.writer import repair
from rayrec.collectives import over_workers
from rayrec.config import InputError
from rayrec.data.engine import StopToken
from rayrec.host_resources import node_fields, this_node
from rayrec.layers.kernel_threads import CpuWatch
from rayrec.native import keep_freed_memory
from rayrec.observe.events import EventWriter
from rayrec.observe.timing import Stopwatch
from rayrec.trained_rows import TrainedRows
from rayrec.training import loop
from rayrec.training.launchers.base import AttemptContext
from rayrec.training.progress import (
    Progress,
    StopSignal,
    Training,
    target_fields,
    with_lowered_rates,
)
from rayrec.training.step_log import multiply_adds_per_s_or_zero
from rayrec.training.step_profiler import make_profiler, profiled
from rayrec.training.stop_monitor import RESUMES, PreemptionInfo, StopMonitor, report_saves
from rayrec.workloads.base import TrainConfig, TrainLoader, WorkerContext, WorkerSetup
from rayrec.workloads.run_config import ScalingConfig
from rayrec.workloads.step_timer import time_collective_waits
from rayrec.workloads.worker_setup import memory_errors

Log = Callable[[str, dict[str, Any]], None]
_logger = logging.getLogger(__name__)


def run_worker(
    attempt: AttemptContext,
    worker: WorkerContext,
    *,
    stopwatch: Stopwatch,
    preemption: Callable[[], PreemptionInfo | None] = lambda: None,
    object_store: Callable[[], Mapping[str, int]] = dict,
) -> dict[str, Any]:
    """Train as one worker of an attempt, in its process group. Returns the driver's input, or
    {"stopped": cause}. `preemption` returns the current preemption notice, and `object_store` the
    usage of Ray's object store, for data events. `stopwatch` times the stages since the driver
    began the attempt.
    """
    config = attempt.config
    folder = attempt.folder
    keep_freed_memory()
    if worker.device.type == "cpu":
        torch.set_num_threads(threads_of_worker(config.scaling, node_cpus=worker.cpus))
    else:
        allow_tf32(config.tf32)
    torch.manual_seed(config.seed)
    with contextlib.ExitStack() as stack:
        # Entered in this order, so that an error of any later part ends the threads and files of
        # those before it.
        stack.enter_context(contextlib.closing(CpuWatch(partial(_log_contention, folder, worker))))
        events = (
            stack.enter_context(EventWriter(storage.join(folder, "events.jsonl")))
            if worker.rank == 0
            else None
        )
        monitor = StopMonitor(
            attempt.channel, rank=worker.rank, stop=stop_token(worker), preemption=preemption
        )
        stack.enter_context(contextlib.closing(monitor))

        def log(kind: str, fields: dict[str, Any]) -> None:
            if events is not None:
                events.write(kind, **fields, **(object_store() if kind == "data" else {}))

        return WorkerRun(worker, attempt, log, monitor, stopwatch).run()


def stop_token(worker: WorkerContext) -> StopToken | None:
    """Return the token of the worker's data tasks, or None if it reads without an engine."""
    return getattr(worker.engine, "stop", None)


def _log_contention(folder: str, worker: WorkerContext, waiting: float) -> None:
    """Log, on any rank, that other processes use the CPUs of its node."""
    with EventWriter(storage.join(folder, "events.jsonl")) as events:
        events.write(
            "cpu_contention", rank=worker.rank, node=platform.node(), waiting_share=waiting
        )


def allow_tf32(allowed: bool) -> None:
    """Set whether fp32 matrix products and convolutions on NVIDIA GPUs may use TF32 (torch's
    default: only convolutions).
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def threads_of_worker(scaling: ScalingConfig, *, node_cpus: int) -> int:
    """Return the number of threads for CPU operators: threads_per_worker, else the CPUs reserved by
    cpus_per_worker, else `node_cpus`, the worker's share of its node. Pure.
    """
    reserved = None if scaling.cpus_per_worker is None else int(scaling.cpus_per_worker)
    return scaling.threads_per_worker or max(
        1, node_cpus if reserved is None else min(node_cpus, reserved)
    )


@final
class WorkerRun:
    """Part of one worker in an attempt: it resumes, trains and tests."""

    def __init__(
        self,
        worker: WorkerContext,
        attempt: AttemptContext,
        log: Log,
        monitor: StopMonitor,
        stopwatch: Stopwatch,
    ) -> None:
        self._worker = worker
        self._attempt = attempt
        self._monitor = monitor
        self._stopwatch = stopwatch
        self._log_event = log
        self._damaged: set[int] = set()
        self._evaluated_step: int | None = None
        """Step of the weights that this process evaluated last."""

    def run(self) -> dict[str, Any]:
        """Return the driver's input, or {"stopped": cause}; collective."""
        attempt = self._attempt
        # ends before the final test: data tasks and saves take its CPUs and memory
        with contextlib.ExitStack() as stack:
            training = self._begin(stack)
            with time_collective_waits(training.setup.clock), self._memory_errors(training.setup):
                is_finished = _loop(attempt.config)(training)
            self._saver.wait()
        result = is_finished and finish(
            attempt,
            training.setup,
            training.progress,
            evaluated_step=self._evaluated_step,
            expected=training.loader.trained_rows(),
            log=self._log_event,
            stop_signal=self._monitor,
        )
        return result or _stopped(self._monitor.cause, training.progress.step, self._log_event)

    def _memory_errors(self, setup: WorkerSetup) -> contextlib.AbstractContextManager[None]:
        return memory_errors(setup.described, rank=self._worker.rank, device=self._worker.device)

    def _begin(self, stack: contextlib.ExitStack) -> Training:
        """Restore or start the run, and enter its loader, saver, profiler and reporting thread in
        `stack`.
        """
        config = self._attempt.config
        folder = self._attempt.folder
        worker = self._worker
        attempt = self._attempt
        peak = _measured_peak(worker, self._stopwatch) if config.observe.times else 0.0
        # a start may wait as long as a save
        with storage.retry_timeout(config.failure.max_outage_s):
            check_shared(attempt.storage_token, Communicator.all())
            # Retries like saves: a full disk may have room again.
            lease = (
                retry_write(
                    partial(acquire_lease, folder),
                    path=folder,
                    max_outage_s=config.failure.max_outage_s,
                )
                if worker.rank == 0
                else None
            )
            candidates = _Candidates(attempt, self._log_event, self._damaged)
            checkpoint, setup, loader, progress = _resume(
                worker, attempt, candidates, self._stopwatch, stack
            )
        self._monitor.begin()
        if config.observe.times:
            setup.peak_multiply_adds_per_s = peak_of_all(peak, world_size=worker.world_size)
        saver = Saver(
            folder,
            lease=lease,
            retention=Retention(
                config.checkpoint.num_to_keep,
                config.checkpoint.keep_best,
                config.checkpoint.keep_every,
            ),
            extra_files=_extra_files(attempt) if lease else {},
            max_outage_s=config.failure.max_outage_s,
            log=saver_log(folder, self._log_event, grace_s=config.failure.grace_s),
            damaged=self._damaged,
        )
        self._saver = stack.enter_context(contextlib.closing(saver))
        self._monitor.write_s = lambda: saver.write_s
        stack.enter_context(
            report_saves(attempt.channel, lambda: saver.written_bytes, rank=worker.rank)
        )
        profiler = make_profiler(worker, folder, attempt.channel, self._log_event)
        stack.enter_context(contextlib.closing(profiler))
        setup.begin_step = profiled(with_lowered_rates(setup, progress, config.plateau), profiler)
        training = Training(
            config=config,
            setup=setup,
            loader=loader,
            progress=progress,
            log=self._log,
            save=partial(self._save, setup),
            stop_signal=self._monitor,
            first_step=partial(_log_first_step, self._log_event),
            pause_at=attempt.pause_at,
        )
        self._log_start(training, checkpoint)
        return training

    def _log_start(self, training: Training, checkpoint: Checkpoint | None) -> None:
        setup = training.setup
        progress = training.progress
        self._log_event(
            "start",
            {
                "step": progress.step,
                "steps": progress.step + training.loader.steps,
                "rows": progress.counters.rows,
                "world_size": self._worker.world_size,
                **node_fields(Communicator.all().all_gather(this_node())),
                "peak_multiply_adds_per_s": setup.peak_multiply_adds_per_s,
                "checkpoint": checkpoint and checkpoint.path,
                "damaged": sorted(self._damaged),
                **setup.described,
            },
        )
        self._stopwatch.lap("begin")
        self._log_event("start_up", {"process": "worker", "stages": dict(self._stopwatch.stages)})

    def _log(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "evaluate":
            self._evaluated_step = fields["step"]
        self._log_event(kind, fields)

    def _save(
        self,
        setup: WorkerSetup,
        progress: Progress,
        loader_state: dict[str, Any],
        *,
        score: float | None,
        needed: bool,
        complete: bool,
    ) -> None:
        saver = self._saver
        state = {
            "progress": progress.state(),
            "loader": loader_state,
            "recipe": self._attempt.config.recipe,
        }
        if needed:
            saver.wait()
        if not saver.begin(
            progress.step, all_tensors(setup.model, setup.optimizer), state=state, score=score
        ):
            self._log_event(
                "checkpoint_late",
                {"step": progress.step, "cause": "the previous save is not complete"},
            )
        if complete:
            saver.wait()


def _stopped(cause: str | None, step: int, log: Log) -> dict[str, Any]:
    """Log that a worker ends before the run does. Without a cause, the run paused."""
    paused = {} if cause else {"paused": True}
    cause = cause or "a planned pause"
    log("stop", {"cause": cause, "step": step, "last": cause not in RESUMES, **paused})
    return {"stopped": cause, **paused}


def _measured_peak(worker: WorkerContext, stopwatch: Stopwatch) -> float:
    """Measure the peak speed before data tasks compete for the CPU."""
    peak = multiply_adds_per_s_or_zero(worker.device, precision=worker.config.precision)
    stopwatch.lap("speed_probe")
    return peak


def _log_first_step(log: Log, blocked_s: float, elapsed_s: float) -> None:
    log(
        "start_up",
        {
            "process": "worker",
            "stages": {"first_batch": blocked_s, "first_step": elapsed_s - blocked_s},
        },
    )


def saver_log(folder: str, log: Log, *, grace_s: float) -> Log:
    """Return the log of a run's Saver. The first checkpoint of an attempt removes the summary of a
    finished run that is now trained longer. The first save that takes longer than `grace_s` is
    reported.
    """
    first = True
    quick = True

    def log_save(kind: str, fields: dict[str, Any]) -> None:
        nonlocal first, quick
        log(kind, fields)
        if kind != "checkpoint":
            return
        if first:
            with log_cleanup_errors(f"{folder}: an outdated {SUMMARY} is left"):
                storage.remove_file(storage.join(folder, SUMMARY))
                first = False
        if quick and fields["write_s"] > grace_s:
            quick = False
            log(
                "checkpoint_slow",
                {"step": fields["step"], "write_s": fields["write_s"], "grace_s": grace_s},
            )

    return log_save


def peak_of_all(peak: float, *, world_size: int) -> float | None:
    """Return the sum of all workers' peaks, or None if one is unknown (0). Collective, so all
    workers must call it.
    """
    (mean, _), (_, missing) = over_workers(peak, float(peak == 0.0))
    return None if missing else mean * world_size


def _loop(config: TrainConfig) -> Callable[[Training], bool]:
    if config.loop == "huggingface":
        from rayrec.training.huggingface import run

        return run
    return loop.run


class _Candidates:
    """Checkpoints to resume from, without those found damaged. Rank 0 adds the steps of skipped
    ones to `damaged`.
    """

    def __init__(self, attempt: AttemptContext, log: Log, damaged: set[int]) -> None:
        self._attempt = attempt
        self._log = log
        self._damaged = damaged
        self._skipped: dict[str, DamagedError] = {}

    def latest(self) -> Checkpoint | None:
        """Return the latest valid checkpoint; collective. Raises UnreadableError if the only ones
        left cannot be read.
        """
        checkpoint = latest_valid_checkpoint(
            self._attempt.folder,
            log=self._log_damaged,
            exclude=self._skipped.keys(),
            repair=self.repair,
        )
        unreadable = [
            error for error in self._skipped.values() if isinstance(error, UnreadableError)
        ]
        if checkpoint is None and unreadable:
            raise unreadable[0].without_another()  # It may be undamaged
        return checkpoint

    def skip(self, checkpoint: Checkpoint, error: DamagedError) -> None:
        self._log_damaged("checkpoint_damaged", {"path": checkpoint.path, "cause": str(error)})
        # without the stack frames, which reference the model
        self._skipped[checkpoint.path] = type(error)(str(error))

    def repair(self, checkpoint: Checkpoint) -> bool:
        return _repaired(checkpoint, self._attempt, self._log)

    def _log_damaged(self, kind: str, fields: dict[str, Any]) -> None:
        self._damaged.add(step_of(fields["path"]))
        self._log(kind, fields)


def _resume(
    worker: WorkerContext,
    attempt: AttemptContext,
    candidates: _Candidates,
    stopwatch: Stopwatch,
    stack: contextlib.ExitStack,
) -> tuple[Checkpoint | None, WorkerSetup, TrainLoader, Progress]:
    """Restore the latest valid checkpoint, or start a run; collective. The loader is entered in
    `stack` before it starts threads.
    """
    config = worker.config
    stopwatch.lap("storage")
    repaired: set[str] = set()
    setup: WorkerSetup | None = None
    while True:
        checkpoint = candidates.latest()
        try:
            state = _state_of(checkpoint) if checkpoint else None
        except DamagedError as error:
            assert checkpoint is not None
            candidates.skip(checkpoint, error)
            continue
        progress = Progress.from_state(state["progress"], rank=worker.rank) if state else Progress()
        loader = config.workload.make_loader(
            worker, attempt.prepared, state=state["loader"] if state else None, step=progress.step
        )
        opened = stack.enter_context(contextlib.ExitStack())
        opened.callback(loader.close)
        loader.start()  # data tasks run while the model is built
        stopwatch.lap("loader")
        if checkpoint is None and setup is not None:  # partly filled with damaged data
            setup = None
            gc.collect()  # memory may not suffice for two models
        if setup is None:
            setup = config.workload.set_up(worker, attempt.prepared)
            stopwatch.lap("set_up")
        if checkpoint is None:
            if config.init_from is not None:
                _start_warm(attempt, setup)
                stopwatch.lap("restore")
            return None, setup, loader, progress
        try:
            restore_all(checkpoint, setup.model, setup.optimizer)
        except DamagedError as error:
            opened.close()
            is_repaired = checkpoint.path not in repaired and Communicator.all().run_on_rank0(
                partial(candidates.repair, checkpoint)
            )
            repaired.add(checkpoint.path)
            if not is_repaired:
                candidates.skip(checkpoint, error)
            continue
        finally:
            stopwatch.lap("restore")
        return checkpoint, setup, loader, progress


def _start_warm(attempt: AttemptContext, setup: WorkerSetup) -> None:
    """Load the weights and optimizer state that a new run starts with; collective."""
    if attempt.warm_start is None:
        raise InputError(
            f"{attempt.folder}: no undamaged checkpoint is left. The run would start again from "
            "init_from. Choose another --name"
        )
    start = attempt.warm_start
    start_from(Checkpoint(start.checkpoint), start.tables.get(), setup.model, setup.optimizer)


def _repaired(checkpoint: Checkpoint, attempt: AttemptContext, log: Log) -> bool:
    """Rewrite damaged files next to the weights from this run's copies, on rank 0. Returns whether
    there were any.
    """
    names = repair(checkpoint.path, _extra_files(attempt))
    if names:
        log("checkpoint_repaired", {"path": checkpoint.path, "files": names})
    return bool(names)


def _state_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the state on rank 0 for all workers, so that all resume from or skip the same
    checkpoint.
    """
    return Communicator.all().run_on_rank0(lambda: checkpoint.manifest()["state"])


def _extra_files(attempt: AttemptContext) -> dict[str, bytes | str]:
    config = attempt.config
    return {
        "config.yaml": config.to_yaml().encode(),
        **config.workload.checkpoint_files(attempt.prepared),
    }


def _restore_best(
    best: Checkpoint, model: torch.nn.Module, attempt: AttemptContext, log: Log
) -> None:
    try:
        restore_model(best, model)
    except DamagedError:
        if not Communicator.all().run_on_rank0(lambda: _repaired(best, attempt, log)):
            raise
        restore_model(best, model)


def accounted(progress: Progress, expected: TrainedRows) -> dict[str, int | None]:
    """Return `rows_lost` and `rows_repeated`, trained relative to expected rows, or None if they
    were not counted; collective.
    """
    trained = progress.trained_by_all()
    lost, repeated = (None, None) if trained is None else trained.lost_and_repeated(expected)
    return {"rows_lost": lost, "rows_repeated": repeated}


def finish(
    attempt: AttemptContext,
    setup: WorkerSetup,
    progress: Progress,
    *,
    evaluated_step: int | None,
    expected: TrainedRows,
    log: Log,
    stop_signal: StopSignal,
) -> dict[str, Any] | None:
    """Run the final test with the weights to use (with early stopping, the best ones) and report
    the result; collective. Returns None after a stop request during an evaluation: everything is
    saved by then, and the next attempt starts here. `metrics` are computed on the test rows, or
    without these, on the validation rows. `evaluated_step`: step of the weights that this process
    evaluated last, or None. With `eval_rows`, computes `validation` again, on all rows. Raises
    InputError for damaged weights.
    """
    config = attempt.config
    step = progress.step
    validation = progress.metrics
    best_step = progress.early_stopping.best_step
    if config.early_stopping.patience and best_step is not None:
        step = best_step
        validation = progress.early_stopping.best_metrics
    best = Checkpoint(folder_of(attempt.folder, step))
    if step != progress.step:
        try:
            _restore_best(best, setup.model, attempt, log)
        except DamagedError as error:
            raise InputError(
                f"{error}. These were the best weights of the run. Train it again under another "
                "--name"
            ) from None
    names = [name for name in setup.eval_batches if name != "validation"]
    if config.eval_rows is not None:
        names.insert(0, "validation")
    elif "test" not in names and evaluated_step != step:
        names.append("validation")  # only for the samples, which show the last evaluation
    tested: dict[str, dict[str, float]] = {}
    for name in names:
        start_s = time.perf_counter()
        metrics = loop.evaluate(
            setup, name, loop.EvaluationWatch(stop_signal, save=None, save_after_s=0.0)
        )
        if metrics is None:
            return None
        tested[name] = metrics
        if name == "validation" and config.eval_rows is not None:
            validation = metrics
            seconds = time.perf_counter() - start_s
            log(
                "evaluate",
                {"step": step, "set": name, "counted": False, "seconds": seconds, **metrics},
            )
    result = {
        "step": progress.step,
        "rows": progress.counters.rows,
        **accounted(progress, expected),
        "train_s": progress.counters.train_s,
        "blocked_fraction": progress.counters.blocked_fraction,
        "chosen_step": step,
        **target_fields(progress, config.workload),
        "checkpoint": best.path,
        "metrics": tested.get("test", validation),
        "metrics_set": "test" if "test" in tested else "validation",
        "validation": validation,
    }
    if Communicator.all().first:  # not collective: reading the files of large tables takes long
        with storage.retry_timeout(config.failure.max_outage_s):
            result["weights_sha256"] = weights_sha256(best)
    log("finish", result)
    setup.model.eval()  # without an evaluation above, it is in training mode
    samples = setup.make_samples()
    if samples:
        log("samples", {"samples": samples})
    for warning in (sample["warning"] for sample in samples if sample.get("warning")):
        log("data_warning", {"warning": warning})
    return result
