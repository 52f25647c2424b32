"""Where the libraries of a training worker write what they have to say, which is not for the eyes of whoever trains."""

from __future__ import annotations

import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from typing import Final

from rayrec import storage

_MOST_BYTES: Final = 64 << 20
"""Of a file; the one before it is kept."""
_LOGGERS: Final = ("torchrec", "fbgemm_gpu", "ray.data", "torch.distributed", "transformers", "accelerate")
"""Those that bring handlers of their own."""

_logger = logging.getLogger(__name__)


def quiet_logs(path: str, *, rank: int) -> None:
    """Sends what this process logs with Python's `logging` into a local file of the run; to standard error at a URL, and where
    the file cannot be opened. What native code writes goes to standard error in any case."""
    handler, trouble = _handler(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.handlers = [handler]
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
    if trouble is not None:
        _logger.warning("%s: logs go to standard error instead (%s)", path, trouble)


def _handler(path: str) -> tuple[logging.Handler, OSError | None]:
    """With the reason why it is not the file's."""
    if storage.is_url(path):
        return logging.StreamHandler(sys.stderr), None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return RotatingFileHandler(path, maxBytes=_MOST_BYTES, backupCount=1), None
    except OSError as error:  # a full disk, say: what a run cannot do without fails by itself
        return logging.StreamHandler(sys.stderr), error
