"""Training worker, from its process group's start to its last checkpoint."""

import contextlib
import dataclasses
import gc
import logging
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

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
    latest_valid_checkpoint,
    parse_step,
    step_folder,
    weights_sha256,
)
from rayrec.checkpoint.communicator import Communicator
from rayrec.checkpoint.format import UnreadableError
from rayrec.checkpoint.lease import Lease
from rayrec.checkpoint.save_retry import SaveStats, log_cleanup_errors, retry_write
from rayrec.checkpoint.state import all_tensors, restore_all, restore_model, start_from
from rayrec.checkpoint.writer import repair
from rayrec.collectives import over_workers
from rayrec.config import InputError
from rayrec.host_resources import node_fields, this_node
from rayrec.layers.kernels.kernel_threads import CpuWatch
from rayrec.native import keep_freed_memory
from rayrec.observe.events import EventWriter
from rayrec.observe.timing import Stopwatch
from rayrec.trained_rows import TrainedRows
from rayrec.training import loop
from rayrec.training.launchers.base import AttemptContext
from rayrec.training.progress import (
    Progress,
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
        torch.set_num_threads(worker_threads(config.scaling, node_cpus=worker.cpus))
    else:
        allow_tf32(config.tf32)
    torch.manual_seed(config.seed)
    with contextlib.ExitStack() as stack:
        # Entered in this order, so that an error of any later part ends the threads and files of
        # those before it.
        stack.enter_context(contextlib.closing(CpuWatch(partial(_log_contention, folder, worker))))
        events = None
        if worker.rank == 0:
            events = stack.enter_context(EventWriter(storage.join(folder, "events.jsonl")))
        saves = SaveStats()
        monitor = StopMonitor(
            attempt.channel,
            rank=worker.rank,
            stop=attempt.engine.stop,
            saves=saves,
            preemption=preemption,
        )
        stack.enter_context(contextlib.closing(monitor))

        def log(kind: str, fields: dict[str, Any]) -> None:
            if events is not None:
                events.write(kind, **fields, **(object_store() if kind == "data" else {}))

        return WorkerRun(worker, attempt, log, monitor, saves, stopwatch).run()


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


def worker_threads(scaling: ScalingConfig, *, node_cpus: int) -> int:
    """Return the number of threads for CPU operators: threads_per_worker, else the CPUs reserved by
    cpus_per_worker, else `node_cpus`, the worker's share of its node. Pure.
    """
    reserved = None if scaling.cpus_per_worker is None else int(scaling.cpus_per_worker)
    return scaling.threads_per_worker or max(
        1, node_cpus if reserved is None else min(node_cpus, reserved)
    )


# Stages of a worker, all collective:
#
# begin    Lease, checkpoint or start values, loader, model, saver, profiler.
# train    Segments, until the run ends, stops or pauses. Then the last save is complete.
# finish   Test of the chosen weights and the result, unless the run stopped or paused.
@final
class WorkerRun:
    """Part of one worker in an attempt: it resumes, trains and tests."""

    def __init__(
        self,
        worker: WorkerContext,
        attempt: AttemptContext,
        log: Log,
        monitor: StopMonitor,
        saves: SaveStats,
        stopwatch: Stopwatch,
    ) -> None:
        self._worker = worker
        self._attempt = attempt
        self._monitor = monitor
        self._saves = saves
        self._stopwatch = stopwatch
        self._log_event = log
        self._damaged: set[int] = set()
        self._evaluated_step: int | None = None
        """Step of the weights that this process evaluated last."""

    def run(self) -> dict[str, Any]:
        """Return the driver's input, or {"stopped": cause}; collective."""
        # Loader, saver and their threads are entered as soon as they exist, so that an error of a
        # later part ends them. They end before the final test, because data tasks and saves take
        # its CPUs and memory.
        with contextlib.ExitStack() as stack:
            training = self._begin(stack)
            described = training.setup.described
            with (
                time_collective_waits(training.setup.clock),
                memory_errors(described, rank=self._worker.rank, device=self._worker.device),
            ):
                is_finished = _loop(self._attempt.config)(training)
            self._saver.wait()
        result = None
        if is_finished:
            result = FinalTest(
                attempt=self._attempt,
                training=training,
                evaluated_step=self._evaluated_step,
                expected=training.loader.trained_rows(),
            ).run()
        return result or _stopped(self._monitor.cause, training.progress.step, self._log_event)

    def _begin(self, stack: contextlib.ExitStack) -> Training:
        """Restore or start the run, and enter its threads in `stack`."""
        attempt = self._attempt
        config = attempt.config
        worker = self._worker
        peak = _measured_peak(worker, self._stopwatch) if config.observe.times else 0.0
        stack.enter_context(
            report_saves(attempt.channel, lambda: self._saves.written_bytes, rank=worker.rank)
        )
        # A start may wait for storage as long as a save.
        with storage.retry_timeout(config.failure.max_outage_s):
            # Before the lease: a worker that sees other storage must not commit there.
            check_shared(attempt.storage_token, Communicator.all())
            # Before the checkpoint is chosen: no earlier attempt can add one after that.
            lease = self._acquire_lease()
            resumption = Resumption(
                worker, attempt, self._log_event, self._damaged, self._stopwatch, stack
            )
            resumed = resumption.run()
        self._monitor.begin()
        self._saver = stack.enter_context(contextlib.closing(self._make_saver(lease)))
        profiler = make_profiler(worker, attempt.folder, attempt.channel, self._log_event)
        stack.enter_context(contextlib.closing(profiler))
        begin_step = with_lowered_rates(resumed.setup, resumed.progress, config.plateau)
        setup = dataclasses.replace(
            resumed.setup,
            begin_step=profiled(begin_step, profiler),
            peak_multiply_adds_per_s=sum_peaks(peak, world_size=worker.world_size)
            if config.observe.times
            else None,
        )
        training = Training(
            config=config,
            setup=setup,
            loader=resumed.loader,
            progress=resumed.progress,
            log=self._log,
            save=partial(self._save, setup),
            stop_signal=self._monitor,
            first_step=partial(_log_first_step, self._log_event),
            pause_at=attempt.pause_at,
        )
        self._log_start(training, resumed.checkpoint)
        return training

    def _acquire_lease(self) -> Lease | None:
        """Acquire the run's lease, on rank 0, which alone commits checkpoints."""
        if self._worker.rank:
            return None
        # Retries like saves: a full disk may have room again.
        folder = self._attempt.folder
        return retry_write(
            partial(acquire_lease, folder),
            path=folder,
            max_outage_s=self._attempt.config.failure.max_outage_s,
        )

    def _make_saver(self, lease: Lease | None) -> Saver:
        config = self._attempt.config
        folder = self._attempt.folder
        retention = Retention(
            config.checkpoint.num_to_keep, config.checkpoint.keep_best, config.checkpoint.keep_every
        )
        return Saver(
            folder,
            lease=lease,
            retention=retention,
            extra_files=_extra_files(self._attempt) if lease else {},
            max_outage_s=config.failure.max_outage_s,
            log=SaverLog(folder, self._log_event, grace_s=config.failure.grace_s),
            damaged=self._damaged,
            stats=self._saves,
        )

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
                # All ranks enter here, but only rank 0 writes the event.
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


@final
class SaverLog:
    """Log of a run's Saver, called by its thread. The first checkpoint of an attempt removes the
    summary of a finished run that is now trained longer. The first save that takes longer than
    `grace_s` is reported.
    """

    def __init__(self, folder: str, log: Log, *, grace_s: float) -> None:
        self._folder = folder
        self._log = log
        self._grace_s = grace_s
        self._is_summary_removed = False
        self._is_slow_reported = False

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        self._log(kind, fields)
        if kind != "checkpoint":
            return
        if not self._is_summary_removed:
            with log_cleanup_errors(f"{self._folder}: an outdated {SUMMARY} is left"):
                storage.remove_file(storage.join(self._folder, SUMMARY))
                self._is_summary_removed = True
        if fields["write_s"] > self._grace_s and not self._is_slow_reported:
            self._is_slow_reported = True
            slow = {"step": fields["step"], "write_s": fields["write_s"], "grace_s": self._grace_s}
            self._log("checkpoint_slow", slow)


def sum_peaks(peak: float, *, world_size: int) -> float | None:
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


class Resumed(NamedTuple):
    """Start of a worker's training, from a checkpoint or, if it is None, from start values."""

    checkpoint: Checkpoint | None
    setup: WorkerSetup
    loader: TrainLoader
    progress: Progress


# Checkpoints are tried from the latest on, by all ranks alike:
#
# Finding                         Next
# ------------------------------  ------------------------------------------------------------
# No checkpoint is left.          Start values or `init_from`. An error if one is unreadable.
# Its state is damaged.           Skip it.
# Its tensors are damaged.        Repair it once from the run's own files, and try it again.
# Damaged and not repairable.     Skip it.
@final
class Resumption:
    """Restoration of the latest valid checkpoint of a run, or its start. Rank 0 adds the steps of
    skipped checkpoints to `damaged`.
    """

    def __init__(
        self,
        worker: WorkerContext,
        attempt: AttemptContext,
        log: Log,
        damaged: set[int],
        stopwatch: Stopwatch,
        stack: contextlib.ExitStack,
    ) -> None:
        """Create the restoration. `stack` closes the loader."""
        self._worker = worker
        self._attempt = attempt
        self._log = log
        self._damaged = damaged
        self._stopwatch = stopwatch
        self._stack = stack
        self._skipped: dict[str, DamagedError] = {}
        self._repaired: set[str] = set()
        self._setup: WorkerSetup | None = None

    def run(self) -> Resumed:
        """Restore or start; collective. Raises UnreadableError if the only checkpoints left cannot
        be read.
        """
        self._stopwatch.lap("storage")
        # Each round restores one checkpoint or rejects it. Every rank takes part in every decision,
        # since a rank that continued alone would wait in its first collective.
        while True:
            checkpoint = self._latest()
            state: dict[str, Any] = {}
            if checkpoint is not None:
                try:
                    state = _broadcast_state(checkpoint)
                except DamagedError as error:
                    self._skip(checkpoint, error)
                    continue
            resumed = self._restore(checkpoint, state)
            if resumed is not None:
                return resumed

    def _latest(self) -> Checkpoint | None:
        checkpoint = latest_valid_checkpoint(
            self._attempt.folder,
            log=self._log_damaged,
            exclude=self._skipped.keys(),
            repair=self._repair,
        )
        if checkpoint is None:
            for error in self._skipped.values():
                if isinstance(error, UnreadableError):
                    raise error.without_another()  # It may be undamaged
        return checkpoint

    def _restore(self, checkpoint: Checkpoint | None, state: dict[str, Any]) -> Resumed | None:
        """Restore a checkpoint, or start without one. Returns None to try the next one."""
        workload = self._worker.config.workload
        prepared = self._attempt.prepared
        rank = self._worker.rank
        progress = Progress.from_state(state["progress"], rank=rank) if state else Progress()
        loader = workload.make_loader(
            self._worker, prepared, state=state.get("loader"), step=progress.step
        )
        opened = self._stack.enter_context(contextlib.ExitStack())
        opened.callback(loader.close)  # before it starts threads
        loader.start()  # data tasks run while the model is built
        self._stopwatch.lap("loader")
        if checkpoint is None and self._setup is not None:  # partly filled with damaged data
            self._setup = None
            gc.collect()  # memory may not suffice for two models
        if self._setup is None:
            self._setup = workload.set_up(self._worker, prepared)
            self._stopwatch.lap("set_up")
        setup = self._setup
        if checkpoint is None:
            if self._worker.config.init_from is not None:
                _start_warm(self._attempt, setup)
                self._stopwatch.lap("restore")
            return Resumed(None, setup, loader, progress)
        try:
            restore_all(checkpoint, setup.model, setup.optimizer)
        except DamagedError as error:
            opened.close()
            # On rank 0, which writes; the others learn the result and try the same checkpoint.
            is_repaired = checkpoint.path not in self._repaired and Communicator.all().run_on_rank0(
                partial(self._repair, checkpoint)
            )
            self._repaired.add(checkpoint.path)
            if not is_repaired:
                self._skip(checkpoint, error)
            return None
        finally:
            self._stopwatch.lap("restore")
        return Resumed(checkpoint, setup, loader, progress)

    def _skip(self, checkpoint: Checkpoint, error: DamagedError) -> None:
        self._log_damaged("checkpoint_damaged", {"path": checkpoint.path, "cause": str(error)})
        # Without the stack frames, which reference the model.
        self._skipped[checkpoint.path] = type(error)(str(error))

    def _repair(self, checkpoint: Checkpoint) -> bool:
        return _repaired(checkpoint, self._attempt, self._log)

    def _log_damaged(self, kind: str, fields: dict[str, Any]) -> None:
        self._damaged.add(parse_step(fields["path"]))
        self._log(kind, fields)


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


def _broadcast_state(checkpoint: Checkpoint) -> dict[str, Any]:
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


def accounted(progress: Progress, expected: TrainedRows) -> dict[str, int | None]:
    """Return `rows_lost` and `rows_repeated`, trained relative to expected rows, or None if they
    were not counted; collective.
    """
    trained = progress.trained_by_all()
    lost, repeated = (None, None) if trained is None else trained.lost_and_repeated(expected)
    return {"rows_lost": lost, "rows_repeated": repeated}


@final
@dataclass(frozen=True, kw_only=True)
class FinalTest:
    """Test of a finished run's weights (with early stopping, the best ones), and the run's result.
    `metrics` are computed on the test rows, or without these, on the validation rows. With
    `eval_rows`, computes `validation` again, on all rows.
    """

    attempt: AttemptContext
    training: Training
    evaluated_step: int | None
    """Step of the weights that this process evaluated last, or None."""
    expected: TrainedRows

    def run(self) -> dict[str, Any] | None:
        """Test and report the result; collective. Returns None after a stop request during an
        evaluation: everything is saved by then, and the next attempt starts here. Raises InputError
        for damaged weights.
        """
        progress = self.training.progress
        config = self.attempt.config
        step = progress.step
        validation = progress.metrics
        early_stopping = progress.early_stopping
        if config.early_stopping.patience and early_stopping.best_step is not None:
            step = early_stopping.best_step
            validation = early_stopping.best_metrics
        chosen = Checkpoint(step_folder(self.attempt.folder, step))
        if step != progress.step:
            self._restore(chosen)
        tested = self._evaluate(step)
        if tested is None:
            return None
        if config.eval_rows is not None:
            validation = tested["validation"]
        result = {
            "step": progress.step,
            "rows": progress.counters.rows,
            **accounted(progress, self.expected),
            "train_s": progress.counters.train_s,
            "blocked_fraction": progress.counters.blocked_fraction,
            "chosen_step": step,
            **target_fields(progress, config.workload),
            "checkpoint": chosen.path,
            "metrics": tested.get("test", validation),
            "metrics_set": "test" if "test" in tested else "validation",
            "validation": validation,
        }
        # Not collective: reading the files of large tables takes long.
        if Communicator.all().first:
            with storage.retry_timeout(config.failure.max_outage_s):
                result["weights_sha256"] = weights_sha256(chosen)
        self.training.log("finish", result)
        self._log_samples()
        return result

    def _restore(self, best: Checkpoint) -> None:
        model = self.training.setup.model
        try:
            try:
                restore_model(best, model)
            except DamagedError:
                repair = partial(_repaired, best, self.attempt, self.training.log)
                if not Communicator.all().run_on_rank0(repair):
                    raise
                restore_model(best, model)
        except DamagedError as error:
            raise InputError(
                f"{error}. These were the best weights of the run. Train it again under another "
                "--name"
            ) from None

    def _evaluate(self, step: int) -> dict[str, dict[str, float]] | None:
        """Return the metrics by evaluation set, or None after a stop request."""
        setup = self.training.setup
        is_shortened = self.attempt.config.eval_rows is not None
        names = [name for name in setup.eval_batches if name != "validation"]
        if is_shortened:
            names.insert(0, "validation")
        elif "test" not in names and self.evaluated_step != step:
            names.append("validation")  # only for the samples, which show the last evaluation
        tested: dict[str, dict[str, float]] = {}
        for name in names:
            start_s = time.perf_counter()
            stop_signal = self.training.stop_signal
            watch = loop.EvaluationWatch(stop_signal, save=None, save_after_s=0.0)
            metrics = loop.evaluate(setup, name, watch)
            if metrics is None:
                return None
            tested[name] = metrics
            if name == "validation" and is_shortened:
                event = {"step": step, "set": name, "counted": False}
                seconds = time.perf_counter() - start_s
                self.training.log("evaluate", {**event, "seconds": seconds, **metrics})
        return tested

    def _log_samples(self) -> None:
        setup = self.training.setup
        setup.model.eval()  # without an evaluation, it is in training mode
        samples = setup.make_samples()
        if samples:
            self.training.log("samples", {"samples": samples})
        for sample in samples:
            if sample.get("warning"):
                self.training.log("data_warning", {"warning": sample["warning"]})
