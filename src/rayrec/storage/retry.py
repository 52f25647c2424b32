"""Retries during outages of object stores."""

import contextvars
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from rayrec.config import InputError
from rayrec.storage.urls import bucket_url

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Error = TypeVar("_Error", bound=Exception)

OUTAGE_S: Final = 60.0
"""Seconds that a store may be unavailable before an operation fails. RAYREC_STORAGE_OUTAGE_S
overrides it.
"""

_SILENT_S: Final = 2.0
"""Seconds of an outage before a warning."""


@dataclass(frozen=True)
class Backoff:
    """Waits between attempts, doubled each time."""

    first_s: float
    longest_s: float

    def wait_s(self, attempt: int) -> float:
        """Return the wait in seconds after an attempt, counted from 0. Shortens it randomly by up
        to a half, so that the processes of a run do not send their requests at the same time.
        """
        # Not from Python's generator, whose state belongs to the training.
        chance = _chance.random()
        return min(self.first_s * 2 ** min(attempt, 32), self.longest_s) * (1 - chance / 2)


_chance = random.SystemRandom()
BACKOFF: Final = Backoff(first_s=0.1, longest_s=5.0)
"""Waits between requests to a store that is unavailable."""

_limit_s: contextvars.ContextVar[float | None] = contextvars.ContextVar(
    "storage_outage_s", default=None
)


class UnavailableError(OSError):
    """Outage of a store: no connection, no answer, or an answer that says to try again."""

    def __init__(self, cause: str, hint: str) -> None:
        super().__init__(f"the store is unavailable ({cause}); {hint}")
        self.cause = cause
        self.hint = hint
        """Endpoint of the store and the setting for it."""


@contextmanager
def retry_timeout(seconds: float) -> Iterator[None]:
    """Limit how long operations in this thread wait for an unavailable store, in seconds. 0 fails
    at once.
    """
    token = _limit_s.set(seconds)
    try:
        yield
    finally:
        _limit_s.reset(token)


def outage_s() -> float:
    """Return how long the next operation may wait for its store, in seconds. Raises InputError for
    an invalid environment.
    """
    limit = _limit_s.get()
    if limit is not None:
        return limit
    text = os.environ.get("RAYREC_STORAGE_OUTAGE_S", "")
    if not re.fullmatch(r"\d*\.?\d+|", text):
        raise InputError(
            f"RAYREC_STORAGE_OUTAGE_S: must be a number of seconds such as 60, got {text!r}"
        )
    return float(text) if text else OUTAGE_S


def retry(path: str, call: Callable[[], _Result], *, limit_s: float | None = None) -> _Result:
    """Return a function's result, retrying with growing delays in outages of `path`'s store. `call`
    must be idempotent. `limit_s` None is `outage_s`, 0 does not retry. Raises OSError if the outage
    lasts longer, and other errors at once.
    """
    start_s = time.monotonic()
    limit_s = outage_s() if limit_s is None else limit_s
    warned = False

    def warn(error: UnavailableError) -> None:
        nonlocal warned
        if _SILENT_S < time.monotonic() - start_s < limit_s and not warned:
            warned = True
            _logger.warning(
                "Retrying %s for up to %.0f s (%s)", bucket_url(path), limit_s, error.cause
            )

    try:
        result = retry_errors(
            call,
            UnavailableError,
            limit_s=limit_s,
            backoff=BACKOFF,
            on_failure=warn,
            wait=time.sleep,
        )
    except UnavailableError as error:
        raise OSError(
            f"{bucket_url(path)}: the store was unavailable for {time.monotonic() - start_s:.0f} s "
            f"({error.cause}); {error.hint}. Correct the endpoint, or try again when it answers"
        ) from None
    if warned:
        _logger.warning(
            "Reached the store of %s again after %.0f s",
            bucket_url(path),
            time.monotonic() - start_s,
        )
    return result


def retry_errors(
    call: Callable[[], _Result],
    errors: type[_Error] | tuple[type[_Error], ...],
    *,
    limit_s: float,
    backoff: Backoff,
    on_failure: Callable[[_Error], None] = lambda error: None,
    wait: Callable[[float], object],
) -> _Result:
    """Return a function's result, calling it again after `errors` for `limit_s` seconds from the
    first one. `wait` takes seconds and may return True to stop. Raises the last error, other errors
    of the function at once, and errors of `on_failure`, which is called with each failure.
    """
    end_s: float | None = None
    attempt = 0
    while True:
        try:
            return call()
        except errors as error:
            on_failure(error)
            now_s = time.monotonic()
            end_s = now_s + limit_s if end_s is None else end_s
            wait_s = backoff.wait_s(attempt)
            if now_s + wait_s > end_s or wait(wait_s):
                raise
        attempt += 1
