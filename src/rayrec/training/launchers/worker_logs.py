"""Library logs of a training worker, written to a file of the run instead of the terminal."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from typing import Final, TextIO

from rayrec import storage

_MAX_BYTES: Final = 64 << 20
"""Maximum size of a log file. One previous file is kept."""
_LOGGERS: Final = ("torchrec", "fbgemm_gpu", "ray.data", "torch", "torch.distributed", "transformers", "accelerate")
"""Loggers with their own handlers."""

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def worker_logs(path: str, *, rank: int) -> Iterator[None]:
    """Write this process's Python logs and warnings to a local file of the run within the context; to standard error if `path` is
    a URL or cannot be opened. Existing handlers still receive their records. Output of native code always goes to standard
    error."""
    handler, error = _handler(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s"))
    root, loggers = logging.getLogger(), [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    level, handlers = root.level, root.handlers
    levels = [other.level for other in handlers]
    for other in handlers:
        other.setLevel(max(other.level, level))
    root.handlers = [*handlers, handler]
    root.setLevel(logging.INFO)
    for logger in loggers:
        logger.handlers, logger.propagate = [], True
    shown = warnings.showwarning
    warnings.showwarning = _log_warning  # logging.captureWarnings would not restore the caller's function
    if error is not None:
        _logger.warning("Cannot open %s, logging to standard error instead (%s)", path, error)
    try:
        yield
    finally:
        warnings.showwarning = shown
        root.setLevel(level)
        root.handlers = handlers
        for other, its in zip(handlers, levels, strict=True):
            other.setLevel(its)
        for logger, its_handlers, propagate in before:
            logger.handlers, logger.propagate = its_handlers, propagate
        handler.close()


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Replace `warnings.showwarning`, with the logger name of `logging.captureWarnings`."""
    logging.getLogger("py.warnings").warning("%s", warnings.formatwarning(message, category, filename, lineno, line))


def _handler(path: str) -> tuple[logging.Handler, OSError | None]:
    """Return the file's handler, or one for standard error and the reason, if any."""
    if storage.is_url(path):
        return logging.StreamHandler(sys.stderr), None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return RotatingFileHandler(path, maxBytes=_MAX_BYTES, backupCount=1), None
    except OSError as error:  # e.g. a full disk, which fails the run by itself if it matters
        return logging.StreamHandler(sys.stderr), error
