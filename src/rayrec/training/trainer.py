"""The driver of a run: reaches the cluster, prepares the data, starts the workers, and tells how it went."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayrec import storage
from rayrec.checkpoint import SUMMARY, latest, open_checkpoint
from rayrec.checkpoint.discovery import check_files
from rayrec.cluster.connection import IN_PROCESS, is_in_process
from rayrec.cluster.layout import Launched
from rayrec.config import InputError
from rayrec.environment.installation import origin, versions
from rayrec.observe.bottleneck import verdict
from rayrec.observe.console import Console
from rayrec.observe.events import EventWriter, follow, merge_events, read_events, readable_events
from rayrec.observe.panel import note_of
from rayrec.observe.report.run import write_or_note
from rayrec.observe.run_summary import RunSummary
from rayrec.observe.timing import Stopwatch
from rayrec.observe.tracking.tracker import tracking
from rayrec.training import dataframe_input
from rayrec.training.launchers.base import Driver, Launcher, PreparedRun
from rayrec.training.launchers.process_launcher import ProcessLauncher, fitted
from rayrec.training.preflight import check_settings, preflight
from rayrec.training.resume import Changes, changes_since, finished_summary, listed_data, run_hash
from rayrec.training.stop_monitor import Signals
from rayrec.workloads.base import RunContext, TrainConfig, WarmStart

if TYPE_CHECKING:
    import pandas
    import ray.train

    from rayrec.checkpoint import Checkpoint
    from rayrec.training.dataframe_input import Table

_PATIENCE_S = 5.0
"""With a store that is out, for what is left to write where an error ends a run."""


class CheckpointPath(str):
    """Path of a checkpoint's folder, with `path` and `as_directory` of `ray.train.Checkpoint`."""

    __slots__ = ()

    @property
    def path(self) -> str:
        return str(self)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield a local folder with the checkpoint: its own, or a copy of one at a URL that is removed afterwards."""
        if not storage.is_url(self):
            yield str(self)
            return
        with storage.Scratch("checkpoint") as parent:
            folder = storage.join(parent, storage.name_of(self))  # step_00001000, which readers want
            storage.copy_files(self, folder)
            yield folder


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: str
    checkpoint: CheckpointPath
    """Folder of the checkpoint to use."""
    summary: dict[str, Any]
    """What summary.json holds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoint", CheckpointPath(self.checkpoint))

    @property
    def metrics(self) -> dict[str, float]:
        return self.summary["metrics"]

    @property
    def metrics_dataframe(self) -> pandas.DataFrame:
        """A row for each logged step and evaluation: see `rayrec.observe.events.metrics_dataframe`."""
        from rayrec.observe.events import metrics_dataframe

        return metrics_dataframe(storage.join(self.folder, "events.jsonl"))

    def to_ray(self) -> ray.train.Result:
        """The same as Ray Train's own type, for code that expects what `Trainer.fit` returns: metrics, `path` (the run's
        folder), `checkpoint` and the one of `best_checkpoints` as a `ray.train.Checkpoint` (path and pyarrow file system, so a
        URL's credentials come along), `metrics_dataframe`, and no error. Imports Ray, and starts none."""
        import ray.train

        filesystem, path = storage.resolve(self.folder)
        checkpoint = ray.train.Checkpoint(storage.resolve(self.checkpoint)[1], filesystem)
        return ray.train.Result(
            metrics=dict(self.metrics),
            checkpoint=checkpoint,
            error=None,
            path=path,
            metrics_dataframe=self.metrics_dataframe,
            best_checkpoints=[(checkpoint, dict(self.metrics))],
            _storage_filesystem=filesystem,
        )


def train(
    config: TrainConfig,
    *,
    data: Table | None = None,
    eval_data: Table | None = None,
    console: Console | None = None,
    stopwatch: Stopwatch | None = None,
    stop: threading.Event | None = None,
) -> Result:
    """Trains a recipe: on the Ray that `config.cluster.address` names, that this process is connected to, or that RAY_ADDRESS
    names; else in this process if there is one worker, and on a local Ray if there are several. In processes that torchrun has
    started (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set) each is one worker, no Ray is used, and all must call this.

    In this process the worker and the data tasks are threads, and an error of the workload is raised unchanged. On Ray failed
    workers are restarted, up to `config.failure.max_failures` times in a row.

    A second call with the same storage_path and name resumes from the newest good checkpoint; a finished run is not
    trained again, unless for more steps or epochs, and raises InputError if its data changed. The first SIGTERM or
    Ctrl-C (in the main thread) saves a checkpoint before it raises SystemExit(143) or KeyboardInterrupt; `stop`, set by
    another thread, does what SIGTERM does. Raises InputError for what the user can fix. `stopwatch` runs since the command
    began; None: since this call.

    A click model may be given `data` and `eval_data`, each a pandas DataFrame or a `ray.data.Dataset` with the columns of its
    schema, in place of `train_data.path` and `eval_data.path`. Before anything starts, these columns are written once as Parquet
    into the run's folder (`data/train`, `data/eval`), whole or not at all, and read from there; so a run resumes at its exact
    position, whatever happens to the DataFrame or Dataset. A DataFrame keeps its order of rows (NaN and None are missing
    values); a Dataset is written by Ray Data's tasks, in its order if `DataContext.execution_options.preserve_order` is set.
    Without `eval_data` the last rows are held out by default.

    A run that resumes uses what was written. Given data is compared with it by columns, types and number of rows, and
    InputError raised if they differ (to count rows, a Dataset may have to be computed); changed values are not noticed. A run
    of which no step was saved writes its data again.
    """
    console, stopwatch = console or Console(), stopwatch or Stopwatch()
    given: dict[str, Table | None] = {"train_data": data, "eval_data": eval_data}
    launched = Launched.of_environment()
    if launched is None:
        return _whole(_drive(config, given, console, stopwatch, launcher_of, stop))
    return _drive_launched(config, given, console, stopwatch, launched, stop)


def train_until(
    config: TrainConfig, share: float, *, console: Console | None = None, stop: threading.Event | None = None
) -> Result | None:
    """Trains a run in this process as `train` does, but only until `share` of its steps (above 0, at most 1) are done -> None if
    it paused there: this step is evaluated and saved, and the next call resumes from it. Otherwise the finished run.

    Learning rates and the order of rows are those of the whole run, so that a run trained in several parts ends with the
    weights of one that was never paused.
    """
    launcher = functools.partial(ProcessLauncher, pause_at=share)
    return _drive(config, {}, console or Console(), Stopwatch(), launcher, stop)


def launcher_of(config: TrainConfig) -> Launcher:
    """What the configuration and the environment ask for. Raises InputError for settings that contradict each other."""
    if trains_in_process(config):
        return ProcessLauncher(config)
    from rayrec.training.launchers.ray_launcher import RayLauncher

    return RayLauncher(config)


def trains_in_process(config: TrainConfig) -> bool:
    """Whether the run needs no Ray: one worker, nothing that only Ray has, and no address. Raises InputError for the address
    `none` with what only Ray has."""
    wanted = {
        f"scaling.num_workers {config.scaling.max_workers}": config.scaling.max_workers > 1,
        "scaling.resources_per_worker": bool(config.scaling.resources_per_worker),
        "cluster.object_store_bytes": config.cluster.object_store_bytes is not None,
    }
    reasons = [reason for reason, given in wanted.items() if given]
    if config.cluster.address == IN_PROCESS and reasons:
        raise InputError(f"{reasons[0]}: needs Ray, and --cluster.address {IN_PROCESS} asks for none; leave one of the two out")
    return not reasons and is_in_process(config.cluster.address)


def _whole(result: Result | None) -> Result:
    assert result is not None, "only `train_until` pauses a run"
    return result


def _drive_launched(
    config: TrainConfig,
    given: Mapping[str, Table | None],
    console: Console,
    stopwatch: Stopwatch,
    launched: Launched,
    stop: threading.Event | None,
) -> Result:
    """As one of several processes, of which the first drives the run; the result is the same in all of them."""
    from rayrec.training.launchers.process_worker import StoreRendezvous, end, train_other

    config = fitted(config, launched)
    with contextlib.closing(StoreRendezvous.join(launched)) as rendezvous:
        if launched.rank:
            found = train_other(config, rendezvous)
            if "status" in found:
                raise SystemExit(found["status"])
            return Result(**found)
        how: dict[str, Any] = {"status": 1}
        try:
            launcher = functools.partial(ProcessLauncher, rendezvous=rendezvous)
            result = _whole(_drive(config, given, console, stopwatch, launcher, stop))
            how = vars(result)
        except InputError:
            how = {"status": 2}
            raise
        except KeyboardInterrupt:
            how = {"status": 130}
            raise
        except SystemExit as error:
            how = {"status": error.code}
            raise
        finally:
            end(rendezvous, how)
        return result


def _drive(
    config: TrainConfig,
    given: Mapping[str, Table | None],
    console: Console,
    stopwatch: Stopwatch,
    make_launcher: Callable[[TrainConfig], Launcher],
    stop: threading.Event | None,
) -> Result | None:
    """The finished run; None if it paused."""
    stopwatch.lap("imports")
    config = config.replace(name=config.name or f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}")
    root = storage.absolute(config.storage_path)
    folder = storage.join(root, str(config.name))
    config, changes = _checked(config, folder, given, console.note)
    finished = finished_summary(folder, config, changes, console.note)
    if finished is not None:
        return Result(folder, CheckpointPath(finished["checkpoint"]), finished)
    preflight(config)
    init = _start_checkpoint(config, folder)
    _set_environment()
    stopwatch.lap("checks")
    started_s = time.monotonic()
    launcher = _connected(make_launcher(config), root, console, stopwatch)

    with Signals(stop) as signals:  # not before: ray.init puts a handler of its own in place
        goes_on = latest(folder) is not None
        layout = launcher.allocate_resources(resumes=goes_on, note=console.note)
        # Nor shall a new run wait for long at a wrong endpoint.
        patience_s = config.failure.max_outage_s if goes_on else storage.outage_s()
        with storage.patience(patience_s):
            storage.make_folder(folder)
            if not goes_on:
                if changes.refused:
                    config.workload.discard(folder)
                _write_config(folder, config)
        place = storage.join(folder, "events.jsonl")
        with (
            _told_in_the_end(folder, note=console.note),
            tracking(config.trackers.build(folder, config) | launcher.trackers(), place, note=console.note),
            EventWriter(place) as events,
            _end_told(events, signals, launcher),
        ):
            events.write(
                "run",
                recipe=config.recipe,
                name=config.name,
                config_hash=run_hash(config),
                versions=versions(),
                **origin(),
                changed={change.field: [change.old, change.new] for change in (*changes.accepted, *changes.refused)},
            )
            stopwatch.lap("folder")
            with console.preparing(), storage.patience(patience_s):
                data = listed_data(config)  # before they are read: files that change meanwhile count as changed
                engine = launcher.engine(layout, max_outage_s=patience_s)
                context = RunContext(config, folder, engine, console.note, console.progress, stopwatch)
                prepared = config.workload.prepare(context)
            events.write("prepared", seconds=time.monotonic() - started_s, **config.workload.summarize(prepared, {}))
            stopwatch.lap("prepare")
            with storage.patience(patience_s):
                start = None if init is None else _warm_start(context, prepared, init, events)
            events.write("start_up", process="driver", stages=stopwatch.stages)
            if goes_on:  # not before everything that may be refused here
                with storage.patience(patience_s):
                    _write_config(folder, config)
            with console.training(lambda over: follow(place, stop=over)):
                finish = launcher.run(
                    PreparedRun(config, folder, prepared, layout, stopwatch.last_s, start), Driver(events, signals, console.note)
                )
            with storage.patience(config.failure.max_outage_s):
                result = (
                    None
                    if finish is None
                    else summarize(config, folder, prepared, finish, events=events, note=console.note, data=data)
                )
        if result or signals.cause is None:
            return result
        console.note(f"{folder}: stopped; the same command resumes from {_newest(folder)}")
        signals.throw()
    raise AssertionError("the signal was thrown")


def _connected(launcher: Launcher, root: str, console: Console, stopwatch: Stopwatch) -> Launcher:
    stopwatch.lap("imports")
    launcher.connect(root, console)
    stopwatch.lap("connect")
    return launcher


def _checked(
    config: TrainConfig, folder: str, given: Mapping[str, Table | None], note: Callable[[str], None]
) -> tuple[TrainConfig, Changes]:
    """The configuration with the paths of given data, which is in the run's folder then, and what differs from an earlier
    start. Raises InputError for settings and data that are refused, before anything is written."""

    tables = {field: table for field, table in given.items() if table is not None}
    config = dataframe_input.with_paths(config, folder, tables)
    config = config.workload.adapted(config)
    check_settings(config)
    changes = changes_since(folder, config)
    if tables:
        dataframe_input.write(config, folder, tables, resumes=latest(folder) is not None, note=note)
    return config, changes


def _start_checkpoint(config: TrainConfig, folder: str) -> Checkpoint | None:
    """The checkpoint that the run starts with; None for a run without `init_from`, and for one that has a checkpoint of its own.
    Raises InputError if there is none, or if its files are not complete."""
    if config.init_from is None or latest(folder) is not None:
        return None
    checkpoint = open_checkpoint(config.init_from)
    check_files(checkpoint, checkpoint.manifest())
    return checkpoint


def _warm_start(context: RunContext, prepared: Any, checkpoint: Checkpoint, events: EventWriter) -> WarmStart:
    """What the workers need for it; writes an event and prints a line. Raises InputError for a checkpoint that does not fit."""
    start = context.config.workload.warm_start(context, prepared, checkpoint)
    context.stopwatch.lap("warm_start")
    event = {"checkpoint": start.checkpoint, **start.report}
    events.write("warm_start", **event)
    context.note(str(note_of({"kind": "warm_start", **event})))
    return start


@contextlib.contextmanager
def _end_told(events: EventWriter, signals: Signals, launcher: Launcher) -> Iterator[None]:
    """An error that ends the run is its last event of kind failure, and raised on."""
    try:
        yield
    except BaseException as error:
        interrupted = isinstance(error, (SystemExit, KeyboardInterrupt)) and signals.cause is not None
        cause = f"ended by {signals.cause}" if interrupted else launcher.cause_of(error)
        events.write("failure", cause=cause, last=True)
        raise


@contextlib.contextmanager
def _told_in_the_end(folder: str, *, note: Callable[[str], None]) -> Iterator[None]:
    """However the run ends, its events are one file then, and its report is written; trouble with either is noted only. An error
    that ends it does not wait for long for a store."""
    patience_s = min(_PATIENCE_S, storage.outage_s())
    try:
        yield
        patience_s = storage.outage_s()
    finally:
        with storage.patience(patience_s):
            try:
                merge_events(storage.join(folder, "events.jsonl"))
            except (OSError, InputError) as error:
                note(f"the events of this run stay in parts, which can be read as well ({error})")
            write_or_note(folder, note=note)


def _newest(folder: str) -> str:

    checkpoint = latest(folder)
    return f"step {checkpoint.step:,}" if checkpoint else "its start, because there is no checkpoint"


def _set_environment() -> None:
    # Before Ray starts: its workers inherit these.
    defaults = {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how soon a dead worker is seen
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",  # how soon a notice is: a cloud may give 30 s
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)


def _write_config(folder: str, config: TrainConfig) -> None:
    head = f"# rayrec {versions()['rayrec']}, config hash {run_hash(config)}\n"
    storage.write_bytes(storage.join(folder, "config.yaml"), (head + config.to_yaml()).encode())


def _events(place: str, *, note: Callable[[str], None]) -> list[dict[str, Any]]:
    """The run's result. A finished run is worth its summary, also where some of that is damaged: this is noted."""
    try:
        return read_events(place)
    except (InputError, OSError) as error:
        note(f"the summary is computed from the events that can be read ({error})")
        return readable_events(place)


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
    """Writes the summary of a run that is through, `finish` being what its workers told last, and tells the events of it.
    `data`: the versions of its data, as `data_versions` returns them.
    `epochs` and `wall_s` count all attempts and drivers of the run."""

    run = RunSummary(_events(storage.join(folder, "events.jsonl"), note=note), curves=False)
    found = verdict(run)
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
        "validation": finish["validation"],
        "checkpoint": finish["checkpoint"],
        **run.costs(train_s=finish["train_s"]),
        "verdict": found and found.text,
        "bottleneck": found and found.bottleneck,
        "weights_sha256": finish["weights_sha256"],
        "data": data or {},
        **of_workload,
        "versions": versions(),
    }
    if summary["rows_lost"] or summary["rows_repeated"]:
        note(
            f"{folder}: {summary['rows_lost']:,} rows of the log were not trained and {summary['rows_repeated']:,} were trained "
            "more often than once an epoch; do not use the weights, and report this"
        )
    storage.write_json(storage.join(folder, SUMMARY), summary)
    events.write("summary", **summary)
    return Result(folder, CheckpointPath(finish["checkpoint"]), summary)
