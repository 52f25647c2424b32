"""Retry failed storage writes for up to `max_outage_s`, then raise an error with the fix."""

import contextlib
import errno
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from rayrec import storage
from rayrec.config import InputError
from rayrec.humanize import one_line

_logger = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 15.0
PATIENCE_S = 15.0
"""Seconds that a single attempt waits for an unavailable store before the save is reported as
late.
"""
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class RetryPolicy:
    """Retry limits, and a callback for failures."""

    path: str
    """Path that is written, for messages."""
    max_outage_s: float
    """Maximum seconds since the first failure. The duration of a successful write does not
    count.
    """
    seed: str
    """Key that spreads the retries of many ranks in time, without touching the random state of the
    training.
    """
    ended: threading.Event
    """Stops the retries when set."""
    on_failure: Callable[[str], None]
    """Called with the cause of each failure."""

    def run(self, function: Callable[[], T]) -> T:
        """Return the function's result, calling it until it succeeds. Raises InputError after
        `max_outage_s` of OSErrors.
        """
        attempt = 0
        first_s = None
        while True:
            try:
                with storage.retry_timeout(PATIENCE_S):
                    return function()
            except OSError as error:
                self.on_failure(one_line(error))
                now_s = time.monotonic()
                first_s = now_s if first_s is None else first_s
                delay_s = delay(attempt, seed=self.seed)
                if now_s + delay_s > first_s + self.max_outage_s or self.ended.wait(delay_s):
                    if error.errno in _FULL or "No space left on device" in str(error):
                        raise InputError(
                            f"{self.path}: no space left. Free some or choose another "
                            "--storage-path"
                        ) from error
                    raise InputError(
                        f"{self.path}: cannot be written for {self.max_outage_s:.0f} s "
                        f"({one_line(error)}). Check that the storage is reachable, then run the "
                        "same command again"
                    ) from error
            attempt += 1


def retry_write(function: Callable[[], T], *, path: str, max_outage_s: float) -> T:
    """Call the function until it succeeds, and return its result; see `RetryPolicy.run`. Warns
    about each failure.
    """

    def on_failure(cause: str) -> None:
        _logger.warning("Cannot write %s yet (%s)", path, cause)

    return RetryPolicy(
        path, max_outage_s, seed=path, ended=threading.Event(), on_failure=on_failure
    ).run(function)


def delay(attempt: int, *, seed: str) -> float:
    """Return the delay in seconds after an attempt (counted from 0): exponential backoff, shortened
    by up to a half. Pure.
    """
    chance = hashlib.sha256(f"{seed} {attempt}".encode()).digest()[0] / 256
    return min(FIRST_DELAY_S * 2**attempt, LONGEST_DELAY_S) * (1 - chance / 2)


@contextlib.contextmanager
def log_cleanup_errors(message: str) -> Iterator[None]:
    """Suppress and log cleanup failures: they lose no data, and the next save or attempt cleans up
    again.
    """
    try:
        with storage.retry_timeout(PATIENCE_S):
            yield
    except (OSError, InputError) as error:
        _logger.warning("%s: %s", message, error)


@dataclass
class SaveStats:
    """Numbers on the saves of one rank. Only the saver's thread writes them; others read them
    without a lock, because each is a single value.
    """

    written_bytes: int = 0
    """Bytes that this rank has written so far, including the current save."""
    write_s: float = 0.0
    """Duration of the last save in seconds, from the copy to the manifest."""
