"""Idle Python processes that Ray starts ahead of train workers, with a worker's modules imported.
Imports take some 5 s of CPU per worker, most of the wait in a start.

Ray starts a process for a task. If the task is canceled meanwhile, the process goes to Ray's pool,
where the next actor with the same job and runtime environment finds it:

| who | does |
| --- | --- |
| driver or worker (`start_processes`) | writes a token, submits a task, cancels it a second later |
| new process (`import_modules`) | takes a token, imports the modules, joins the pool |
| Ray Train | creates a worker in a process of the pool, or in a new one if there is none |

Every process with a worker's runtime environment runs the setup hook `import_modules`, also those
of Ray Data's own actors, which a worker creates. They find no token and import nothing.
"""

import contextlib
import glob
import importlib
import logging
import os
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

HOOK: Final = f"{__name__}.import_modules"
"""Setup hook of a local Ray's processes."""
TOKENS: Final = "RAYREC_WORKER_TOKENS"
"""Variable with the folder for tokens, on a Ray that keeps idle processes."""
MODULES: Final = "RAYREC_WORKER_MODULES"
"""Variable with the modules to import, separated by commas."""
_CANCEL_S: Final = 1.0
"""Seconds until a task is canceled: Ray's node has received it, and its process, which imports the
modules first, cannot run it yet.
"""

_logger = logging.getLogger(__name__)


def worker_variables(environment: Mapping[str, str], modules: Sequence[str]) -> dict[str, str]:
    """Return variables for the runtime environment of workers that need `modules`, given this
    process's environment. Empty if Ray does not keep idle processes.
    """
    if TOKENS not in environment:
        return {}
    return {TOKENS: environment[TOKENS], MODULES: ",".join(modules)}


def task_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables for data tasks of a worker with `variables`, so that they neither import its
    modules nor run in the processes kept for workers.
    """
    return {MODULES: ""} if MODULES in variables else {}


def import_modules() -> None:
    """Import the modules if this process was started ahead. Failures are only logged: the worker
    imports the module again and reports its error.
    """
    modules = os.environ.get(MODULES)
    if not modules or not _take_token(os.environ[TOKENS]):
        return
    for module in modules.split(","):
        try:
            importlib.import_module(module)
        except Exception as error:
            _logger.info("Cannot import %s: %s", module, error)


def _take_token(folder: str) -> bool:
    for token in glob.glob(os.path.join(glob.escape(folder), "*")):
        # Of several processes, only one can remove the file.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(token)
            return True
    return False


def start_processes(number: int, variables: Mapping[str, str] | None = None) -> None:
    """Have Ray start idle processes with the runtime environment of this process and `variables`.
    Returns at once. Workers without an idle process start on demand, which only takes longer.
    """
    import ray

    variables = variables or {}
    for _ in range(number):
        Path({**os.environ, **variables}[TOKENS], uuid.uuid4().hex).touch()
    environment = {"env_vars": dict(variables)} if variables else None
    task: Any = ray.remote(num_cpus=0, max_retries=0, runtime_env=environment)(_do_nothing)
    pending = [task.remote() for _ in range(number)]

    def cancel() -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # The connection may be closed.
            for reference in pending:
                ray.cancel(reference)

    # A daemon, so that a command that fails meanwhile ends at once.
    timer = threading.Timer(_CANCEL_S, cancel)
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def standby(after_s: float | None) -> Iterator[None]:
    """Have Ray start an idle process after `after_s` seconds in the context, for the worker that
    replaces this one after a failure. None starts no process.
    """
    if after_s is None or not os.environ.get(MODULES):
        yield
        return
    # A thread, because training does not wait for it.
    timer = threading.Timer(after_s, start_processes, [1])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _do_nothing() -> None:
    """Do nothing. The task exists only for its process."""
