"""Driver of a run: connects to the cluster, prepares the data, starts the workers and reports the
result.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rayrec import storage
from rayrec.checkpoint import SUMMARY, Checkpoint, latest, open_checkpoint
from rayrec.checkpoint.discovery import check_files
from rayrec.cluster import connection
from rayrec.cluster.connection import IN_PROCESS, is_in_process
from rayrec.cluster.layout import TorchrunEnv
from rayrec.config import InputError
from rayrec.environment.installation import origin, versions
from rayrec.observe.bottleneck import diagnose
from rayrec.observe.console import Console, console_line
from rayrec.observe.events import EventWriter, follow, merge_events, read_events, readable_events
from rayrec.observe.report.run import try_write_report
from rayrec.observe.run_summary import RunSummary
from rayrec.observe.timing import Stopwatch
from rayrec.observe.tracking.tracker import tracking
from rayrec.process_state import preserved_process
from rayrec.training import dataframe_input
from rayrec.training.launchers.base import Driver, Launcher, PreparedRun, local_layout
from rayrec.training.launchers.process_launcher import ProcessLauncher, fitted
from rayrec.training.result import CheckpointPath, Result
from rayrec.training.resume import Changes, changes_since, finished_summary, listed_data, run_hash
from rayrec.training.stop_monitor import Signals
from rayrec.workloads.base import RunContext, TrainConfig, WarmStart

if TYPE_CHECKING:
    from rayrec.data.frame_files import Rows

_PATIENCE_S = 5.0
"""Timeout for an unavailable store in the final writes after an error."""


def train(
    config: TrainConfig,
    *,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    console: Console | None = None,
    stopwatch: Stopwatch | None = None,
    stop: threading.Event | None = None,
) -> Result:
    """Train a recipe. Uses Ray if `config.cluster.address`, this process's connection or
    RAY_ADDRESS names a cluster; else trains in this process with one worker, or on a local Ray with
    several. In processes started by torchrun (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are
    set) each process is one worker without Ray, and all must call this function. In this process,
    the worker and data tasks are threads, and an error of the workload is raised unchanged. On Ray,
    failed workers are restarted, up to `config.failure.max_failures` times in a row.

    A second call with the same storage_path and name resumes from the latest valid checkpoint. A
    finished run is not trained again, unless for more steps or epochs, and raises InputError if its
    data changed. The first SIGTERM or Ctrl-C (in the main thread) saves a checkpoint before
    SystemExit(143) or KeyboardInterrupt is raised; `stop`, set by another thread, acts like
    SIGTERM. Raises InputError if the user can fix the problem. `stopwatch` starts with the command.
    None starts it with this call.

    For a click model, `data` and `eval_data` may replace `train_data.path` and `eval_data.path`: a
    pandas DataFrame, a `pyarrow.Table` or a `ray.data.Dataset` with the columns of its schema.
    Before anything starts, these columns are written once, atomically, as Parquet into the run's
    folder (`data/train`, `data/eval`) and read from there. Thus the run can resume at its exact
    position even without the original data. The row order of a DataFrame is kept, and NaN and None
    are missing values. Ray Data's tasks write a Dataset, in its order if
    `DataContext.execution_options.preserve_order` is set. Without `eval_data` the last rows are
    held out by default.

    A resumed run uses the written data. It raises InputError if columns, types or the row count
    differ, as far as they are known without computing a Dataset, but does not detect changed
    values. A run without a saved step writes its data again.
    """
    console, stopwatch = console or Console(), stopwatch or Stopwatch()
    tables = {
        name: table
        for name, table in (("train_data", data), ("eval_data", eval_data))
        if table is not None
    }
    drive = functools.partial(
        _drive, tables=tables, console=console, stopwatch=stopwatch, stop=stop
    )
    torchrun = TorchrunEnv.from_environment()
    with preserved_process():
        result = (
            drive(config, launcher_of)
            if torchrun is None
            else _drive_torchrun(fitted(config, torchrun), torchrun, drive)
        )
    assert result is not None, "only `train_until` pauses a run"
    return result


def train_until(
    config: TrainConfig,
    fraction: float,
    *,
    console: Console | None = None,
    stop: threading.Event | None = None,
) -> Result | None:
    """Train a run in this process as `train` does, but only until `fraction`, in (0, 1], of its
    steps are done. Returns None if it paused there, after an evaluation and a save; the next call
    resumes from it. Otherwise returns the finished run. Learning rates and row order are those for
    the full run, so pauses do not change the final weights.
    """
    launcher = functools.partial(ProcessLauncher, pause_at=fraction)
    with preserved_process():
        return _drive(
            config,
            launcher,
            tables={},
            console=console or Console(),
            stopwatch=Stopwatch(),
            stop=stop,
        )


def launcher_of(config: TrainConfig) -> Launcher:
    """Return the launcher for the configuration and environment. Raises InputError for
    contradictory settings.
    """
    if trains_in_process(config):
        return ProcessLauncher(config)
    storage.home()  # Ray Train cannot be imported without one.
    from rayrec.training.launchers.ray_launcher import RayLauncher

    return RayLauncher(config)


def trains_in_process(config: TrainConfig) -> bool:
    """Return whether the run needs no Ray: one worker, no Ray-only settings, no address. Raises
    InputError if these conflict.
    """
    requires_ray = {
        f"scaling.num_workers {config.scaling.max_workers}": config.scaling.max_workers > 1,
        "scaling.resources_per_worker": bool(config.scaling.resources_per_worker),
        **config.cluster.ray_only,
    }
    reasons = [reason for reason, is_set in requires_ray.items() if is_set]
    if config.cluster.address == IN_PROCESS and reasons:
        raise InputError(
            f"{reasons[0]}: needs Ray, but --cluster.address is {IN_PROCESS}. Omit one of the two"
        )
    return not reasons and is_in_process(config.cluster.address)


def check_settings(config: TrainConfig) -> None:
    """Check the settings that are independent of the data, such as a storage path that cannot be a
    folder. Raises InputError.
    """
    config.workload.check(config)
    config.trackers.check(os.environ)
    if storage.is_url(config.storage_path):
        storage.resolve(config.storage_path)
        return
    existing = storage.absolute(config.storage_path)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise InputError(f"storage_path: must be a folder, got the file {existing}")
    if not os.access(existing, os.W_OK):
        raise InputError(
            f"storage_path: cannot write to {existing}. Choose another folder or change its "
            "permissions"
        )


def preflight(config: TrainConfig) -> None:
    """Check that the data is readable and this machine, if no cluster is configured, has room.
    Raises InputError.
    """
    config.workload.check_data(config)
    if TorchrunEnv.from_environment() is not None:  # its processes are already running
        return
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    if address not in (None, "", "local", IN_PROCESS) or connection.is_connected():
        return  # Ray knows the resources of a running cluster
    if config.scaling.resources_per_worker:
        return
    local_layout(config, cpus=config.cluster.num_cpus or os.cpu_count() or 1)


def _drive_torchrun(
    config: TrainConfig,
    torchrun: TorchrunEnv,
    drive: Callable[[TrainConfig, Callable[[TrainConfig], Launcher]], Result | None],
) -> Result | None:
    """Train as one of several processes, of which rank 0 drives the run. Returns the same result in
    all of them.
    """
    from rayrec.training.launchers.process_worker import StoreRendezvous, end, train_other

    with contextlib.closing(StoreRendezvous.join(torchrun)) as rendezvous:
        if torchrun.rank:
            outcome = train_other(config, rendezvous)
            if "status" in outcome:
                raise SystemExit(outcome["status"])
            return Result(**outcome)
        how: dict[str, Any] = {}
        try:
            result = drive(config, functools.partial(ProcessLauncher, rendezvous=rendezvous))
            how = vars(result)
        except BaseException as error:
            status = (
                130
                if isinstance(error, KeyboardInterrupt)
                else 2
                if isinstance(error, InputError)
                else 1
            )
            how = {"status": error.code if isinstance(error, SystemExit) else status}
            raise
        finally:
            end(rendezvous, how)
        return result


def _drive(
    config: TrainConfig,
    make_launcher: Callable[[TrainConfig], Launcher],
    *,
    tables: Mapping[str, Rows],
    console: Console,
    stopwatch: Stopwatch,
    stop: threading.Event | None,
) -> Result | None:
    """Drive a run and return its result, or None if it paused."""
    stopwatch.lap("imports")
    config = config.replace(name=config.name or f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}")
    root = storage.absolute(config.storage_path)
    folder = storage.join(root, str(config.name))
    config, changes = _checked(config, folder, tables, console.note)
    if (finished := finished_summary(folder, config, changes, console.note)) is not None:
        return Result(folder, CheckpointPath(finished["checkpoint"]), finished)
    preflight(config)
    init = _start_checkpoint(config, folder)
    stopwatch.lap("checks")
    started_s = time.monotonic()
    with (
        _connected(make_launcher(config), root, console, stopwatch) as launcher,
        Signals(stop) as signals,  # only now, because ray.init installs its own handler
    ):
        config = config.replace(cluster=config.cluster.without_values())  # for other processes
        goes_on = latest(folder) is not None
        layout = launcher.allocate_resources(resumes=goes_on, note=console.note)
        # A new run must not wait long at a wrong endpoint.
        patience_s = config.failure.max_outage_s if goes_on else storage.outage_s()
        with storage.retry_timeout(patience_s):
            storage.make_folder(folder)
            if not goes_on:
                if changes.rejected:
                    config.workload.discard(folder)
                _write_config(folder, config)
        events_path = storage.join(folder, "events.jsonl")
        with (
            _finalize_run(folder, note=console.note),
            tracking(
                config.trackers.build(folder, config) | launcher.trackers(),
                events_path,
                note=console.note,
            ),
            EventWriter(events_path) as events,
            _record_failure(events, signals, launcher),
        ):
            events.write(
                "run",
                recipe=config.recipe,
                name=config.name,
                config_hash=run_hash(config),
                versions=versions(),
                **origin(),
                changed={
                    change.field: [change.old, change.new]
                    for change in (*changes.accepted, *changes.rejected)
                },
            )
            stopwatch.lap("folder")
            with console.preparing(), storage.retry_timeout(patience_s):
                # listed before reading, so that files modified meanwhile count as changed
                data = listed_data(config)
                engine = launcher.engine(layout, max_outage_s=patience_s)
                context = RunContext(
                    config, folder, engine, console.note, console.progress, stopwatch, console.warn
                )
                prepared = config.workload.prepare(context)
            events.write(
                "prepared",
                seconds=time.monotonic() - started_s,
                **config.workload.summarize(prepared, {}),
            )
            stopwatch.lap("prepare")
            with storage.retry_timeout(patience_s):
                start = None if init is None else _warm_start(context, prepared, init, events)
            events.write("start_up", process="driver", stages=stopwatch.stages)
            if goes_on:  # only after all checks
                with storage.retry_timeout(patience_s):
                    _write_config(folder, config)
            with console.training(lambda stopped: follow(events_path, stop=stopped)):
                finish = launcher.run(
                    PreparedRun(config, folder, prepared, layout, stopwatch.last_s, start),
                    Driver(events, signals, console.note),
                )
            with storage.retry_timeout(config.failure.max_outage_s):
                result = (
                    None
                    if finish is None
                    else summarize(
                        config,
                        folder,
                        prepared,
                        finish,
                        events=events,
                        note=console.note,
                        data=data,
                    )
                )
        if result or signals.cause is None:
            return result
        console.note(_stopped_text(folder))
        signals.throw()
    raise AssertionError("the signal was thrown")


@contextlib.contextmanager
def _connected(
    launcher: Launcher, root: str, console: Console, stopwatch: Stopwatch
) -> Iterator[Launcher]:
    stopwatch.lap("imports")
    try:
        launcher.connect(root, console)
        stopwatch.lap("connect")
        yield launcher
    finally:
        launcher.close()


def _stopped_text(folder: str) -> str:
    checkpoint = latest(folder)
    resumed_from = (
        f"step {checkpoint.step:,}" if checkpoint else "its start, because there is no checkpoint"
    )
    return f"{folder}: stopped; the same command resumes from {resumed_from}"


def _checked(
    config: TrainConfig, folder: str, tables: Mapping[str, Rows], note: Callable[[str], None]
) -> tuple[TrainConfig, Changes]:
    """Return the configuration with the paths of given data, after writing it, and the changes from
    an earlier start. Raises InputError for invalid settings and data before anything is written.
    """
    config = dataframe_input.with_paths(config, folder, tables)
    config = config.workload.adapted(config)
    check_settings(config)
    changes = changes_since(folder, config)
    if tables:
        dataframe_input.write(config, folder, tables, resumes=latest(folder) is not None, note=note)
    return config, changes


def _start_checkpoint(config: TrainConfig, folder: str) -> Checkpoint | None:
    """Return the checkpoint of `init_from`, None without, or if the run has one. Raises InputError
    if incomplete.
    """
    if config.init_from is None or latest(folder) is not None:
        return None
    checkpoint = open_checkpoint(config.init_from)
    check_files(checkpoint, checkpoint.manifest())
    return checkpoint


def _warm_start(
    context: RunContext, prepared: Any, checkpoint: Checkpoint, events: EventWriter
) -> WarmStart:
    """Return the workers' input for a warm start, and report it. Raises InputError if the
    checkpoint does not fit.
    """
    start = context.config.workload.warm_start(context, prepared, checkpoint)
    context.stopwatch.lap("warm_start")
    event = {"checkpoint": start.checkpoint, **start.report}
    events.write("warm_start", **event)
    context.note(str(console_line({"kind": "warm_start", **event})))
    return start


@contextlib.contextmanager
def _record_failure(events: EventWriter, signals: Signals, launcher: Launcher) -> Iterator[None]:
    """Record an error that ends the run as its last failure event, and reraise it."""
    try:
        yield
    except BaseException as error:
        interrupted = (
            isinstance(error, (SystemExit, KeyboardInterrupt)) and signals.cause is not None
        )
        events.write(
            "failure",
            cause=f"ended by {signals.cause}" if interrupted else launcher.cause_of(error),
            last=True,
        )
        raise


@contextlib.contextmanager
def _finalize_run(folder: str, *, note: Callable[[str], None]) -> Iterator[None]:
    """Merge the run's events into one file and write its report, however it ends; errors are noted.
    Waits little after a failure.
    """
    patience_s = min(_PATIENCE_S, storage.outage_s())
    try:
        yield
        patience_s = storage.outage_s()
    finally:
        with storage.retry_timeout(patience_s):
            try:
                merge_events(storage.join(folder, "events.jsonl"))
            except (OSError, InputError) as error:
                note(f"Cannot merge the events of this run; their parts can be read too ({error})")
            try_write_report(folder, note=note)


def _write_config(folder: str, config: TrainConfig) -> None:
    head = f"# rayrec {versions()['rayrec']}, config hash {run_hash(config)}\n"
    storage.write_bytes(storage.join(folder, "config.yaml"), (head + config.to_yaml()).encode())


def _events(events_path: str, *, note: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the run's events. Damaged ones are skipped with a note, because a finished run must
    still get its summary.
    """
    try:
        return read_events(events_path)
    except (InputError, OSError) as error:
        note(f"Computing the summary from the readable events ({error})")
        return readable_events(events_path)


def summarize(
    config: TrainConfig,
    folder: str,
    prepared: Any,
    finish: dict[str, Any],
    *,
    events: EventWriter,
    note: Callable[[str], None],
    data: Mapping[str, Any] | None = None,
) -> Result:
    """Write the summary of a finished run, and its event. `finish`: the workers' last report.
    `data`: result of `data_versions`. `epochs` and `wall_s` include all attempts and drivers.
    """
    run = RunSummary(_events(storage.join(folder, "events.jsonl"), note=note), curves=False)
    diagnosis = diagnose(run)
    of_workload = config.workload.summarize(prepared, finish["metrics"])
    train_rows = of_workload.get("rows_of_sets", {}).get("train")
    summary = {
        "recipe": config.recipe,
        "name": config.name,
        "config_hash": run_hash(config),
        "steps": finish["step"],
        "chosen_step": finish["chosen_step"],
        "epochs": finish["rows"] / train_rows if train_rows else None,
        "rows": finish["rows"],
        "wall_s": run.working_s,
        "train_s": finish["train_s"],
        "rows_per_s": finish["rows"] / finish["train_s"] if finish["train_s"] else 0.0,
        "blocked_fraction": finish["blocked_fraction"],
        "rows_repeated": finish["rows_repeated"],
        "rows_lost": finish["rows_lost"],
        "metrics": finish["metrics"],
        "metrics_set": finish["metrics_set"],
        "validation": finish["validation"],
        **{name: value for name, value in finish.items() if name.startswith("target")},
        "checkpoint": finish["checkpoint"],
        **run.costs(train_s=finish["train_s"]),
        "verdict": diagnosis and diagnosis.text,
        "bottleneck": diagnosis and diagnosis.bottleneck,
        "weights_sha256": finish["weights_sha256"],
        "data": data or {},
        **of_workload,
        "versions": versions(),
    }
    if summary["rows_lost"] or summary["rows_repeated"]:
        note(
            f"{folder}: {summary['rows_lost']:,} rows of the log were not trained and "
            f"{summary['rows_repeated']:,} were trained "
            "more than once per epoch. Do not use the weights, and report this"
        )
    storage.write_json(storage.join(folder, SUMMARY), summary)
    events.write("summary", **summary)
    return Result(folder, CheckpointPath(finish["checkpoint"]), summary)
