"""State that a call shares with the rest of its process, compared before and after it."""

import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from builders.faults import until
from torch import distributed

from rayrec.training.launchers import base

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def state_of_process() -> dict[str, Any]:
    """Return the state that a call shares with its caller, in values that can be compared."""
    loggers = [
        logging.getLogger(),
        *(logging.getLogger(name) for name in (*base._LOGGERS, "ray", "rayrec", "py.warnings")),
    ]
    return {
        "threads": {thread for thread in threading.enumerate() if thread.is_alive()},
        "variables": dict(os.environ),
        "filters": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "hooks": (sys.excepthook, threading.excepthook, sys.stdout, sys.stderr),
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "loggers": [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers],
        "random": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "num_threads": torch.get_num_threads(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "group": distributed.is_initialized(),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "modules": {name for name in sys.modules if name.startswith("streaming.")},
    }


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Check that what is called inside leaves the process as it was."""
    before = state_of_process()
    yield
    until(lambda: set(threading.enumerate()) <= before["threads"], timeout_s=20)
    after = state_of_process()
    before = {**before, "threads": after["threads"]}  # some of the caller's may have ended
    assert {part: after[part] for part in after if after[part] != before[part]} == {}
