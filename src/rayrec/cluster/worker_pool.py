"""Idle Python processes in a local Ray's pool with a train worker's modules imported. Imports take
some 5 s of CPU per worker, most of the wait in a start.

Every process with the runtime environment of workers runs the hook `import_modules`, also those of
Ray Data's own actors, which a worker creates. It imports only if there is a token.
"""

import contextlib
import importlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

# Ray creates a worker in a process of its pool with the same job and runtime environment that has
# run no task, else in a new one. The first attempt's processes start while data is prepared, the
# next attempt's during training (standby). The protocol is this table.

# who                                   does
# driver or worker (`start_processes`)  Writes a token for each process, creates as many actors.
# Ray                                   Starts a process for each actor, unless one is idle.
# driver or worker, 0.2 to 1 s later    Kills the actors, which ends idle processes that became
#                                       one. New processes are still starting, and stay.
# new process (`import_modules`)        Takes a token, imports the modules, joins the pool.
# driver or worker, 20 s later          Creates actors again if tokens are left.
#
# Actors, because for tasks Ray starts more processes: one for the task, and up to one for each CPU
# in expectation of more tasks.

HOOK: Final = f"{__name__}.import_modules"
"""Setup hook of a local Ray's processes."""
TOKENS: Final = "RAYREC_WORKER_TOKENS"
"""Variable with the folder for tokens, on a local Ray."""
MODULES: Final = "RAYREC_WORKER_MODULES"
"""Variable with the modules to import, separated by commas."""
_KILL_S: Final = 0.2
"""Seconds until the first actors are killed. Ray has begun to start their processes, unless the
machine is very busy, and none has connected to Ray yet.
"""
_MAX_KILL_S: Final = 1.0
"""Maximum of these seconds. They double with each round, because a machine on which no process was
started is a busy one. A process takes longer than that to connect, also on an idle machine.
"""
_START_S: Final = 20.0
"""Seconds until actors are created again for tokens that no process has taken."""
_ROUNDS: Final = 10
"""Maximum number of such rounds."""
_POLL_S: Final = 0.1

_logger = logging.getLogger(__name__)


def worker_variables(environment: Mapping[str, str], modules: Sequence[str]) -> dict[str, str]:
    """Return variables for the runtime environment of workers that need `modules`, given this
    process's environment. Empty if no process can be started ahead.
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
    for token in os.listdir(folder):
        # Of several processes, only one can remove the file.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, token))
            return True
    return False


def start_processes(number: int, variables: Mapping[str, str] | None = None) -> None:
    """Have Ray start idle processes with the runtime environment of this process and `variables`.
    Returns at once. Workers without an idle process start on demand, which only takes longer.
    """
    import ray

    folder = {**os.environ, **(variables or {})}[TOKENS]
    for _ in range(number):
        Path(folder, uuid.uuid4().hex).touch()
    actor: Any = ray.remote(num_cpus=0, max_restarts=0)(_Placeholder)
    if variables:
        actor = actor.options(runtime_env={"env_vars": dict(variables)})
    # A daemon, so that a command or worker that fails meanwhile ends at once.
    threading.Thread(target=_create, args=(actor, folder), name="worker-pool", daemon=True).start()


class _Placeholder:
    """Actor that exists only for its process."""


def _create(actor: Any, folder: str) -> None:
    """Create actors for the tokens in the folder, until processes have taken all tokens."""
    import ray

    # The connection may be closed, and the folder removed with the run.
    with contextlib.suppress(ray.exceptions.RayError, FileNotFoundError):
        for number in range(_ROUNDS):
            tokens = os.listdir(folder)
            if not tokens or not ray.is_initialized():  # An actor would start another Ray.
                return
            pending = [actor.remote() for _ in tokens]
            time.sleep(min(_KILL_S * 2**number, _MAX_KILL_S))
            for handle in pending:
                ray.kill(handle)
            deadline_s = time.monotonic() + _START_S
            while os.listdir(folder) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)


@contextlib.contextmanager
def standby(after_s: float | None, *, num_processes: int) -> Iterator[None]:
    """Have Ray start idle processes after `after_s` seconds in the context, for the workers that
    replace the present ones after a failure. None starts no process. Call it in one worker.
    """
    if after_s is None or not os.environ.get(MODULES):
        yield
        return
    # A thread, because training does not wait for it.
    timer = threading.Timer(after_s, start_processes, [num_processes])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
