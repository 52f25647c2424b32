"""State that a call shares with the rest of its process: environment variables, random generators,
warnings, hooks.
"""

import contextlib
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

_VARIABLES: Final = (
    "LOCAL_WORLD_SIZE",
    "CRC32C_SW_MODE",
    "TORCHINDUCTOR_CACHE_DIR",
    "MLFLOW_ALLOW_FILE_STORE",
    "RAY_DATA_USAGE_DISABLED",
)
"""Variables that rayrec and its libraries set while they work. Others may be the caller's, set in
another thread.
"""
_lock: Final = threading.RLock()
_contexts: Final[dict[str, tuple[int, str | None]]] = {}
"""Variables set by `temporary_environment`: number of contexts, and the value before the first."""
_num_users = 0
_restore: Final[dict[str, Callable[[], None]]] = {}
"""Functions that restore what `preserved_process` found, by the name of their part."""


@contextlib.contextmanager
def temporary_environment(variables: Mapping[str, str], *, override: bool = True) -> Iterator[None]:
    """Set environment variables within the context, also for processes started there. Without
    `override`, the caller's own values stay. Contexts of several threads may overlap: a variable
    has its former value again after the last one.
    """
    with _lock:
        names = [
            name for name in variables if override or name in _contexts or name not in os.environ
        ]
        for name in names:
            count, before = _contexts.get(name, (0, os.environ.get(name)))
            _contexts[name] = count + 1, before
            os.environ[name] = variables[name]
    try:
        yield
    finally:
        with _lock:
            for name in names:
                count, before = _contexts.pop(name)
                if count > 1:
                    _contexts[name] = count - 1, before
                else:
                    _set_variable(name, before)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextlib.contextmanager
def preserved_process() -> Iterator[None]:
    """Restore the caller's process after the context: random generators of Python, NumPy and torch,
    torch's thread count and TF32 settings, warning filters, `sys.excepthook`, and variables that
    libraries set. If contexts of several threads overlap, the last one restores what the first one
    found.
    """
    global _num_users
    with _lock:
        _num_users += 1
        # torch may not have been loaded when an outer context began
        for name, save in _PARTS.items():
            if name not in _restore and (restore := save()) is not None:
                _restore[name] = restore
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if not _num_users:
                for restore in _restore.values():
                    restore()
                _restore.clear()


def _save_variables() -> Callable[[], None]:
    values = {name: os.environ.get(name) for name in _VARIABLES}

    def restore() -> None:
        for name, value in values.items():
            _set_variable(name, value)

    return restore


def _save_random() -> Callable[[], None]:
    state = random.getstate()
    return lambda: random.setstate(state)


def _save_numpy() -> Callable[[], None] | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return None
    state = numpy.random.get_state()
    return lambda: numpy.random.set_state(state)


def _save_warnings() -> Callable[[], None]:
    # Libraries add filters when they are imported, and `catch_warnings` is the only public way to
    # replace the list.
    caught = warnings.catch_warnings()
    caught.__enter__()
    return lambda: caught.__exit__(None, None, None)


def _save_hook() -> Callable[[], None]:
    # wrapped by `torch.distributed.init_process_group`, once more in every run
    hook = sys.excepthook

    def restore() -> None:
        sys.excepthook = hook

    return restore


def _save_torch() -> Callable[[], None] | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "backends"):  # another thread may be importing it
        return None
    generator = torch.get_rng_state()
    num_threads = torch.get_num_threads()
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    flags = [(part, _tf32(part)) for part in (torch.backends.cuda.matmul, torch.backends.cudnn)]

    def restore() -> None:
        torch.set_rng_state(generator)
        torch.set_num_threads(num_threads)
        if device_states is not None:
            torch.cuda.set_rng_state_all(device_states)
        for part, is_allowed in flags:
            if is_allowed is not None and _tf32(part) != is_allowed:
                part.allow_tf32 = is_allowed

    return restore


def _tf32(part: Any) -> bool | None:
    """Return whether TF32 is allowed, or None if the caller set it by torch's newer names, which
    forbid the older one.
    """
    try:
        return bool(part.allow_tf32)
    except RuntimeError:
        return None


_PARTS: Final[dict[str, Callable[[], Callable[[], None] | None]]] = {
    "variables": _save_variables,
    "random": _save_random,
    "numpy": _save_numpy,
    "warnings": _save_warnings,
    "hook": _save_hook,
    "torch": _save_torch,
}
