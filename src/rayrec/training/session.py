"""Session of one run on its driver: checks, connection, preparation, training and summary."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

from rayrec import storage
from rayrec.checkpoint import SUMMARY, Checkpoint, latest, open_checkpoint
from rayrec.checkpoint.discovery import check_files
from rayrec.cluster import connection
from rayrec.cluster.connection import IN_PROCESS
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
from rayrec.training import dataframe_input
from rayrec.training.launchers.base import Driver, Launcher, PreparedRun, local_layout
from rayrec.training.result import CheckpointPath, Result
from rayrec.training.resume import (
    changes_since,
    finished_summary,
    listed_data,
    run_hash,
    with_stored_versions,
)
from rayrec.training.stop_monitor import Signals
from rayrec.workloads.base import RunContext, TrainConfig, WarmStart

if TYPE_CHECKING:
    from rayrec.data.frame_files import Rows

_PATIENCE_S = 5.0
"""Timeout for an unavailable store in the final writes after an error."""


# Stage     Does                                                   Ends the session with
# --------  -----------------------------------------------------  -----------------------------
# check     Settings, given data, changes since an earlier start.  The result of a finished run.
# connect   Launcher, signals, CPUs, folder of the run.
# prepare   Data, warm start. Events are recorded from here on.
# run       Attempts, until the run ends.                          None if stopped or paused.
# finish    Summary.                                               The result.
#
# After `connect`, the run's events are merged and its report is written, however it ends.
# Stages of a driver, and what an error leaves behind:
#
#   stage     effect                                      error before its end
#   check     none outside the process, but given data    the run is unchanged
#   connect   Ray, signals, folder, config.yaml           a folder without a step
#   prepare   index, vocabulary, Preprocessor             events, reusable caches
#   run       attempts of the workers                     the latest checkpoint
#   finish    summary.json                                the same command writes it again
@final
class RunSession:
    """Driver of one run."""

    def __init__(
        self,
        config: TrainConfig,
        make_launcher: Callable[[TrainConfig], Launcher],
        *,
        tables: Mapping[str, Rows],
        console: Console,
        stopwatch: Stopwatch,
        stop: threading.Event | None,
    ) -> None:
        name = config.name or f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._config = config.replace(name=name)
        self._make_launcher = make_launcher
        self._tables = tables
        self._console = console
        self._stopwatch = stopwatch
        self._stop = stop
        self._root = storage.absolute(config.storage_path)
        self._folder = storage.join(self._root, name)
        self._events_path = storage.join(self._folder, "events.jsonl")

    def drive(self) -> Result | None:
        """Drive the run and return its result, or None if it paused."""
        self._stopwatch.lap("imports")
        finished = self.check()
        if finished is not None:
            return finished
        with contextlib.ExitStack() as stack:
            self.connect(stack)
            with self._recorded():
                prepared = self.prepare()
                outcome = self.run(prepared)
                result = None
                if outcome is not None:
                    result = self.finish(prepared, outcome)
            if result is not None or self._signals.cause is None:
                return result
            # Only now, because the run's files are complete.
            self._console.note(_stopped_text(self._folder))
            self._signals.throw()
        raise AssertionError("the signal was thrown")

    def check(self) -> Result | None:
        """Check the settings and write given data. Returns the result of a finished run. Raises
        InputError for invalid settings and data before anything is written.
        """
        folder = self._folder
        note = self._console.note
        config = dataframe_input.with_paths(self._config, folder, self._tables)
        config = with_stored_versions(folder, config)
        config = config.workload.adapted(config)
        check_settings(config)
        self._changes = changes_since(folder, config)
        self._is_resumed = latest(folder) is not None
        if self._tables:
            dataframe_input.write(config, folder, self._tables, resumes=self._is_resumed, note=note)
        finished = finished_summary(folder, config, self._changes, note)
        if finished is not None:
            return Result(folder, CheckpointPath(finished["checkpoint"]), finished)
        preflight(config)
        self._config = config
        self._init = _start_checkpoint(config, folder)
        self._stopwatch.lap("checks")
        return None

    def connect(self, stack: contextlib.ExitStack) -> None:
        """Connect to the machines, which `stack` ends, and make the folder of the run."""
        self._started_s = time.monotonic()
        self._stopwatch.lap("imports")
        self._launcher = self._make_launcher(self._config)
        stack.callback(self._launcher.close)  # also after an error of `connect`
        self._launcher.connect(self._root, self._console)
        self._stopwatch.lap("connect")
        # Only now, because ray.init installs its own handler.
        self._signals = stack.enter_context(Signals(self._stop))
        # For other processes.
        config = self._config.replace(cluster=self._config.cluster.without_values())
        self._config = config
        # Again, because connecting may take long, and another driver may have saved meanwhile.
        self._is_resumed = latest(self._folder) is not None
        self._layout = self._launcher.allocate_resources(
            resumes=self._is_resumed, note=self._console.note
        )
        # A new run must not wait long at a wrong endpoint.
        self._patience_s = storage.outage_s()
        if self._is_resumed:
            self._patience_s = config.failure.max_outage_s
        with storage.retry_timeout(self._patience_s):
            storage.make_folder(self._folder)
            if not self._is_resumed:
                if self._changes.rejected:
                    config.workload.discard(self._folder)
                _write_config(self._folder, config)

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record the run's events and the error that ends it, and write its report."""
        config = self._config
        note = self._console.note
        trackers = config.trackers.build(self._folder, config) | self._launcher.trackers()
        with (
            _finalize_run(self._folder, note=note),
            tracking(trackers, self._events_path, note=note),
            EventWriter(self._events_path) as self._events,
        ):
            try:
                changes = (*self._changes.accepted, *self._changes.rejected)
                self._events.write(
                    "run",
                    recipe=config.recipe,
                    name=config.name,
                    config_hash=run_hash(config),
                    versions=versions(),
                    **origin(),
                    changed={change.field: [change.old, change.new] for change in changes},
                )
                self._stopwatch.lap("folder")
                yield
            except BaseException as error:
                is_signal = isinstance(error, (SystemExit, KeyboardInterrupt))
                if is_signal and self._signals.cause is not None:
                    cause = f"ended by {self._signals.cause}"
                else:
                    cause = self._launcher.cause_of(error)
                self._events.write("failure", cause=cause, last=True)
                raise

    def prepare(self) -> PreparedRun:
        """Prepare the data and the weights of a warm start."""
        config = self._config
        console = self._console
        with console.preparing(), storage.retry_timeout(self._patience_s):
            # Listed before reading, so that files modified meanwhile count as changed.
            self._data = listed_data(config)
            engine = self._launcher.engine(self._layout, max_outage_s=self._patience_s)
            context = RunContext(
                config,
                self._folder,
                engine,
                console.note,
                console.progress,
                self._stopwatch,
                console.warn,
            )
            prepared = config.workload.prepare(context)
        self._events.write(
            "prepared",
            seconds=time.monotonic() - self._started_s,
            **config.workload.summarize(prepared, {}),
        )
        self._stopwatch.lap("prepare")
        start = None
        with storage.retry_timeout(self._patience_s):
            if self._init is not None:
                start = self._warm_start(context, prepared, self._init)
        self._events.write("start_up", process="driver", stages=self._stopwatch.stages)
        if self._is_resumed:  # only after all checks
            with storage.retry_timeout(self._patience_s):
                _write_config(self._folder, config)
        return PreparedRun(
            config, self._folder, prepared, self._layout, self._stopwatch.last_s, start
        )

    def _warm_start(self, context: RunContext, prepared: Any, checkpoint: Checkpoint) -> WarmStart:
        """Return the workers' input for a warm start, and report it. Raises InputError if the
        checkpoint does not fit.
        """
        start = self._config.workload.warm_start(context, prepared, checkpoint)
        self._stopwatch.lap("warm_start")
        event = {"checkpoint": start.checkpoint, **start.report}
        self._events.write("warm_start", **event)
        self._console.note(str(console_line({"kind": "warm_start", **event})))
        return start

    def run(self, prepared: PreparedRun) -> dict[str, Any] | None:
        """Train. Returns the workers' last report, or None if they stopped or paused."""
        console = self._console
        driver = Driver(self._events, self._signals, console.note)
        # The live view reads the events in a thread, which ends with the context.
        with console.training(lambda stopped: follow(self._events_path, stop=stopped)):
            return self._launcher.run(prepared, driver)

    def finish(self, prepared: PreparedRun, outcome: dict[str, Any]) -> Result:
        """Write the summary, waiting for storage as long as a save."""
        with storage.retry_timeout(self._config.failure.max_outage_s):
            return summarize(
                self._config,
                self._folder,
                prepared.prepared,
                outcome,
                events=self._events,
                note=self._console.note,
                data=self._data,
            )


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


def _start_checkpoint(config: TrainConfig, folder: str) -> Checkpoint | None:
    """Return the checkpoint of `init_from`, None without, or if the run has one. Raises InputError
    if incomplete.
    """
    if config.init_from is None or latest(folder) is not None:
        return None
    checkpoint = open_checkpoint(config.init_from)
    check_files(checkpoint, checkpoint.manifest())
    return checkpoint


def _stopped_text(folder: str) -> str:
    checkpoint = latest(folder)
    resumed_from = (
        f"step {checkpoint.step:,}" if checkpoint else "its start, because there is no checkpoint"
    )
    return f"{folder}: stopped; the same command resumes from {resumed_from}"


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
    workload_summary = config.workload.summarize(prepared, finish["metrics"])
    train_rows = workload_summary.get("rows_of_sets", {}).get("train")
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
        **workload_summary,
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
