"""Retry failed storage writes for up to `max_outage_s`, then raise an error with the fix."""

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from rayrec import storage
from rayrec.config import InputError
from rayrec.humanize import one_line
from rayrec.storage.retry import Backoff, retry_errors

_logger = logging.getLogger(__name__)
T = TypeVar("T")
BACKOFF = Backoff(first_s=0.5, longest_s=15.0)
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
    ended: threading.Event
    """Stops the retries when set."""
    on_failure: Callable[[str], None]
    """Called with the cause of each failure."""

    def run(self, function: Callable[[], T]) -> T:
        """Return the function's result, calling it until it succeeds. Raises InputError after
        `max_outage_s` of OSErrors.
        """

        # Storage has its own retries within PATIENCE_S. This loop outlasts an outage.
        def attempt() -> T:
            with storage.retry_timeout(PATIENCE_S):
                return function()

        try:
            return retry_errors(
                attempt,
                OSError,
                limit_s=self.max_outage_s,
                backoff=BACKOFF,
                on_failure=lambda error: self.on_failure(one_line(error)),
                wait=self.ended.wait,
            )
        except OSError as error:
            if error.errno in _FULL or "No space left on device" in str(error):
                raise InputError(
                    f"{self.path}: no space left. Free some or choose another --storage-path"
                ) from error
            raise InputError(
                f"{self.path}: cannot be written for {self.max_outage_s:.0f} s "
                f"({one_line(error)}). Check that the storage is reachable, then run the same "
                "command again"
            ) from error


def retry_write(function: Callable[[], T], *, path: str, max_outage_s: float) -> T:
    """Call the function until it succeeds, and return its result; see `RetryPolicy.run`. Warns
    about each failure.
    """

    def on_failure(cause: str) -> None:
        _logger.warning("Cannot write %s yet (%s)", path, cause)

    # Nobody ends this wait, so that its event is never set.
    return RetryPolicy(path, max_outage_s, ended=threading.Event(), on_failure=on_failure).run(
        function
    )


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
