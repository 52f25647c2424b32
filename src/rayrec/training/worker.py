"""Training worker, from its process group's start to its last checkpoint."""

import gc
import logging
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

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
from rayrec.layers.kernel_threads import CpuWatch
from rayrec.native import keep_freed_memory
from rayrec.observe.events import EventWriter
from rayrec.observe.timing import Stopwatch
from rayrec.trained_rows import TrainedRows
from rayrec.training import loop
from rayrec.training.launchers.base import AttemptContext
from rayrec.training.progress import Progress, StopSignal, Training, target_fields, with_lowered_rates
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
    """Train as one worker of an attempt, in its process group. Returns the driver's input, or {"stopped": cause}. `preemption`
    returns the current preemption notice, and `object_store` the usage of Ray's object store, for data events. `stopwatch` times
    the stages since the driver began the attempt."""
    config, folder = attempt.config, attempt.folder
    keep_freed_memory()
    if worker.device.type == "cpu":
        torch.set_num_threads(threads_of_worker(config.scaling, node_cpus=worker.cpus))
    else:
        allow_tf32(config.tf32)
    torch.manual_seed(config.seed)
    watch = CpuWatch(partial(_log_contention, folder, worker))
    events = EventWriter(storage.join(folder, "events.jsonl")) if worker.rank == 0 else None

    def log(kind: str, fields: dict[str, Any]) -> None:
        if events is not None:
            events.write(kind, **fields, **(object_store() if kind == "data" else {}))

    try:
        return _train(worker, attempt, log, preemption=preemption, stopwatch=stopwatch)
    finally:
        watch.close()
        if events is not None:
            events.close()


def _log_contention(folder: str, worker: WorkerContext, waiting: float) -> None:
    """Log, on any rank, that other processes use the CPUs of its node."""
    with EventWriter(storage.join(folder, "events.jsonl")) as events:
        events.write("cpu_contention", rank=worker.rank, node=worker.node, waiting_share=waiting)


def allow_tf32(allowed: bool) -> None:
    """Set whether fp32 matrix products and convolutions on NVIDIA GPUs may use TF32 (torch's default: only convolutions)."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def threads_of_worker(scaling: ScalingConfig, *, node_cpus: int) -> int:
    """Return the number of threads for CPU operators: threads_per_worker, else the CPUs reserved by cpus_per_worker, else
    `node_cpus`, the worker's share of its node. Pure."""
    reserved = None if scaling.cpus_per_worker is None else int(scaling.cpus_per_worker)
    return scaling.threads_per_worker or max(1, node_cpus if reserved is None else min(node_cpus, reserved))


def _train(
    worker: WorkerContext,
    attempt: AttemptContext,
    log: Log,
    *,
    preemption: Callable[[], PreemptionInfo | None],
    stopwatch: Stopwatch,
) -> dict[str, Any]:
    config, folder = attempt.config, attempt.folder
    peak = _measured_peak(worker, stopwatch) if config.observe.times else 0.0
    damaged: set[int] = set()
    with storage.retry_timeout(config.failure.max_outage_s):  # a start may wait as long as a save
        check_shared(attempt.storage_token, Communicator.all())
        # Retries like saves: a full disk may have room again.
        lease = (
            retry_write(partial(acquire_lease, folder), path=folder, max_outage_s=config.failure.max_outage_s)
            if worker.rank == 0
            else None
        )
        checkpoint, setup, loader, progress = _resume(worker, attempt, log, damaged, stopwatch)
    if config.observe.times:
        setup.peak_multiply_adds_per_s = peak_of_all(peak, world_size=worker.world_size)
    watch = StopMonitor(attempt.channel, rank=worker.rank, preemption=preemption)
    profiler = make_profiler(worker, folder, attempt.channel, log)
    setup.begin_step = profiled(with_lowered_rates(setup, progress, config.plateau), profiler)
    saver = Saver(
        folder,
        lease=lease,
        retention=Retention(config.checkpoint.num_to_keep, config.checkpoint.keep_best, config.checkpoint.keep_every),
        extra_files=_extra_files(attempt) if lease else {},
        max_outage_s=config.failure.max_outage_s,
        log=saver_log(folder, log, grace_s=config.failure.grace_s),
        damaged=damaged,
    )
    watch.write_s = lambda: saver.write_s
    reporting = report_saves(attempt.channel, lambda: saver.written_bytes, rank=worker.rank)
    _log_start(
        log,
        stopwatch,
        step=progress.step,
        steps=progress.step + loader.steps,
        rows=progress.rows,
        world_size=worker.world_size,
        nodes=Communicator.all().all_gather(platform.node()),
        peak_multiply_adds_per_s=setup.peak_multiply_adds_per_s,
        checkpoint=checkpoint and checkpoint.path,
        damaged=sorted(damaged),
        **setup.described,
    )

    evaluated_step: int | None = None

    def log_and_note(kind: str, fields: dict[str, Any]) -> None:
        nonlocal evaluated_step
        if kind == "evaluate":
            evaluated_step = fields["step"]
        log(kind, fields)

    def save(progress: Progress, loader_state: dict[str, Any], *, score: float | None, needed: bool, complete: bool) -> None:
        state = {"progress": progress.state(), "loader": loader_state, "recipe": config.recipe}
        if needed:
            saver.wait()
        if not saver.begin(progress.step, all_tensors(setup.model, setup.optimizer), state=state, score=score):
            log("checkpoint_late", {"step": progress.step, "cause": "the previous save is not complete"})
        if complete:
            saver.wait()

    try:
        with time_collective_waits(setup.clock), memory_errors(setup.described, rank=worker.rank, device=worker.device):
            training = Training(
                config=config,
                setup=setup,
                loader=loader,
                progress=progress,
                log=log_and_note,
                save=save,
                stop_signal=watch,
                first_step=partial(_log_first_step, log),
                pause_at=attempt.pause_at,
            )
            finished = _loop(config)(training)
        saver.wait()
    except BaseException:
        watch.close()
        raise
    finally:
        profiler.close()
        reporting.set()
        saver.close()
        loader.close()
    try:
        result = finished and finish(
            attempt, setup, progress, evaluated_step=evaluated_step, expected=loader.trained_rows(), log=log, stop_signal=watch
        )
    finally:
        watch.close()
    if result:
        return result
    return _stopped(watch.cause, progress.step, log)


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


def _log_start(log: Log, stopwatch: Stopwatch, **start: Any) -> None:
    log("start", start)
    stopwatch.lap("begin")
    log("start_up", {"process": "worker", "stages": dict(stopwatch.stages)})


def _log_first_step(log: Log, blocked_s: float, elapsed_s: float) -> None:
    log("start_up", {"process": "worker", "stages": {"first_batch": blocked_s, "first_step": elapsed_s - blocked_s}})


def saver_log(folder: str, log: Log, *, grace_s: float) -> Log:
    """Return the log of a run's Saver. The first checkpoint of an attempt removes the summary of a finished run that is now
    trained longer. The first save that takes longer than `grace_s` is reported."""
    first, quick = True, True

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
            log("checkpoint_slow", {"step": fields["step"], "write_s": fields["write_s"], "grace_s": grace_s})

    return log_save


def peak_of_all(peak: float, *, world_size: int) -> float | None:
    """Return the sum of all workers' peaks, or None if one is unknown (0). Collective, so all workers must call it."""
    (mean, _), (_, missing) = over_workers(peak, float(peak == 0.0))
    return None if missing else mean * world_size


def _loop(config: TrainConfig) -> Callable[[Training], bool]:
    if config.loop == "huggingface":
        from rayrec.training.huggingface import run

        return run
    return loop.run


def _resume(
    worker: WorkerContext, attempt: AttemptContext, log: Log, damaged: set[int], stopwatch: Stopwatch
) -> tuple[Checkpoint | None, WorkerSetup, TrainLoader, Progress]:
    """Restore the latest valid checkpoint, or start a run; collective. Rank 0 adds skipped checkpoints' steps to `damaged`."""
    config, folder = worker.config, attempt.folder
    stopwatch.lap("storage")
    skipped: dict[str, DamagedError] = {}
    repaired: set[str] = set()
    setup: WorkerSetup | None = None

    def log_damaged(kind: str, fields: dict[str, Any]) -> None:
        damaged.add(step_of(fields["path"]))
        log(kind, fields)

    def skip(checkpoint: Checkpoint, error: DamagedError) -> None:
        log_damaged("checkpoint_damaged", {"path": checkpoint.path, "cause": str(error)})
        skipped[checkpoint.path] = type(error)(str(error))  # without the stack frames, which reference the model

    def repair_it(checkpoint: Checkpoint) -> bool:
        return _repaired(checkpoint, attempt, log)

    while True:
        checkpoint = latest_valid_checkpoint(folder, log=log_damaged, exclude=skipped.keys(), repair=repair_it)
        unreadable = [error for error in skipped.values() if isinstance(error, UnreadableError)]
        if checkpoint is None and unreadable:
            raise unreadable[0].without_another()  # It may be undamaged
        try:
            state = _state_of(checkpoint) if checkpoint else None
        except DamagedError as error:
            assert checkpoint is not None
            skip(checkpoint, error)
            continue
        progress = Progress.from_state(state["progress"], rank=worker.rank) if state else Progress()
        loader = config.workload.make_loader(
            worker, attempt.prepared, state=state["loader"] if state else None, step=progress.step
        )
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
            loader.close()
            is_repaired = checkpoint.path not in repaired and Communicator.all().run_on_rank0(partial(repair_it, checkpoint))
            repaired.add(checkpoint.path)
            if not is_repaired:
                skip(checkpoint, error)
            continue
        finally:
            stopwatch.lap("restore")
        return checkpoint, setup, loader, progress


def _start_warm(attempt: AttemptContext, setup: WorkerSetup) -> None:
    """Load the weights and optimizer state that a new run starts with; collective."""
    if attempt.warm_start is None:
        raise InputError(
            f"{attempt.folder}: no undamaged checkpoint is left. The run would start again from init_from. Choose another --name"
        )
    start = attempt.warm_start
    start_from(Checkpoint(start.checkpoint), start.tables.get(), setup.model, setup.optimizer)


def _repaired(checkpoint: Checkpoint, attempt: AttemptContext, log: Log) -> bool:
    """Rewrite damaged files next to the weights from this run's copies, on rank 0. Returns whether there were any."""
    names = repair(checkpoint.path, _extra_files(attempt))
    if names:
        log("checkpoint_repaired", {"path": checkpoint.path, "files": names})
    return bool(names)


def _state_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the state on rank 0 for all workers, so that all resume from or skip the same checkpoint."""
    return Communicator.all().run_on_rank0(lambda: checkpoint.manifest()["state"])


def _extra_files(attempt: AttemptContext) -> dict[str, bytes | str]:
    config = attempt.config
    return {"config.yaml": config.to_yaml().encode(), **config.workload.checkpoint_files(attempt.prepared)}


def _restore_best(best: Checkpoint, model: torch.nn.Module, attempt: AttemptContext, log: Log) -> None:
    try:
        restore_model(best, model)
    except DamagedError:
        if not Communicator.all().run_on_rank0(lambda: _repaired(best, attempt, log)):
            raise
        restore_model(best, model)


def accounted(progress: Progress, expected: TrainedRows) -> dict[str, int | None]:
    """Return `rows_lost` and `rows_repeated`, trained relative to expected rows, or None if they were not counted; collective."""
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
    """Run the final test with the weights to use (with early stopping, the best ones) and report the result; collective. Returns
    None after a stop request during an evaluation: everything is saved by then, and the next attempt starts here. `metrics` are
    computed on the test rows, or without these, on the validation rows. `evaluated_step`: step of the weights that this process
    evaluated last, or None. With `eval_rows`, computes `validation` again, on all rows. Raises InputError for damaged weights."""
    config = attempt.config
    step, validation = progress.step, progress.metrics
    if config.early_stopping.patience and progress.best_step is not None:
        step, validation = progress.best_step, progress.best_metrics
    best = Checkpoint(folder_of(attempt.folder, step))
    if step != progress.step:
        try:
            _restore_best(best, setup.model, attempt, log)
        except DamagedError as error:
            raise InputError(f"{error}. These were the best weights of the run. Train it again under another --name") from None
    names = [name for name in setup.eval_batches if name != "validation"]
    if config.eval_rows is not None:
        names.insert(0, "validation")
    elif "test" not in names and evaluated_step != step:
        names.append("validation")  # only for the samples, which show the last evaluation
    tested: dict[str, dict[str, float]] = {}
    for name in names:
        start_s = time.perf_counter()
        metrics = loop.evaluate(setup, name, loop.EvaluationWatch(stop_signal, save=None, save_after_s=0.0))
        if metrics is None:
            return None
        tested[name] = metrics
        if name == "validation" and config.eval_rows is not None:
            validation, seconds = metrics, time.perf_counter() - start_s
            log("evaluate", {"step": step, "set": name, "counted": False, "seconds": seconds, **metrics})
    result = {
        "step": progress.step,
        "rows": progress.rows,
        **accounted(progress, expected),
        "train_s": progress.train_s,
        "blocked_fraction": progress.blocked_s / progress.train_s if progress.train_s else 0.0,
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
