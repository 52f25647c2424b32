"""Entry points of training, and the choice of a launcher."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rayrec import storage
from rayrec.cluster.connection import IN_PROCESS, is_in_process
from rayrec.cluster.layout import TorchrunEnv
from rayrec.config import InputError
from rayrec.data.frames import as_table
from rayrec.observe.console import Console
from rayrec.observe.timing import Stopwatch
from rayrec.process_state import preserved_process
from rayrec.training.launchers.base import Launcher
from rayrec.training.launchers.process_launcher import ProcessLauncher, fitted
from rayrec.training.result import Result
from rayrec.training.session import RunSession
from rayrec.workloads.base import TrainConfig

if TYPE_CHECKING:
    from rayrec.data.frame_files import Rows


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
    DataFrame, a `pyarrow.Table` or a `ray.data.Dataset` with the columns of its schema.
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
        name: as_table(table)
        for name, table in (("train_data", data), ("eval_data", eval_data))
        if table is not None
    }
    session = functools.partial(
        RunSession, tables=tables, console=console, stopwatch=stopwatch, stop=stop
    )
    torchrun = TorchrunEnv.from_environment()
    with preserved_process():
        if torchrun is None:
            result = session(config, choose_launcher).drive()
        else:
            result = _drive_torchrun(fitted(config, torchrun), torchrun, session)
    assert result is not None, "only `train_until` pauses a run"
    return result


def train_until(
    config: TrainConfig,
    fraction: float,
    *,
    console: Console | None = None,
) -> Result | None:
    """Train a run in this process as `train` does, but only until `fraction`, in (0, 1], of its
    steps are done. Returns None if it paused there, after an evaluation and a save; the next call
    resumes from it. Otherwise returns the finished run. Learning rates and row order are those for
    the full run, so pauses do not change the final weights.
    """
    launcher = functools.partial(ProcessLauncher, pause_at=fraction)
    with preserved_process():
        return RunSession(
            config,
            launcher,
            tables={},
            console=console or Console(),
            stopwatch=Stopwatch(),
            stop=None,
        ).drive()


def choose_launcher(config: TrainConfig) -> Launcher:
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
        **config.scaling.ray_only,
        **config.cluster.ray_only,
    }
    reasons = [reason for reason, is_set in requires_ray.items() if is_set]
    if config.cluster.address == IN_PROCESS and reasons:
        raise InputError(
            f"{reasons[0]}: needs Ray, but --cluster.address is {IN_PROCESS}. Omit one of the two"
        )
    return not reasons and is_in_process(config.cluster.address)


def _drive_torchrun(
    config: TrainConfig,
    torchrun: TorchrunEnv,
    session: Callable[[TrainConfig, Callable[[TrainConfig], Launcher]], RunSession],
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
            make_launcher = functools.partial(ProcessLauncher, rendezvous=rendezvous)
            result = session(config, make_launcher).drive()
            how = vars(result)
        except BaseException as error:
            how = {"status": _exit_status(error)}
            raise
        finally:
            end(rendezvous, how)
        return result


def _exit_status(error: BaseException) -> Any:
    """Return the exit status of all processes after an error of the first."""
    if isinstance(error, SystemExit):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, InputError) else 1
