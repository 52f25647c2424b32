"""Retries during outages of object stores."""

import contextvars
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from rayrec.config import InputError
from rayrec.storage.urls import bucket_of

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

OUTAGE_S: Final = 60.0
"""Seconds that a store may be unavailable before an operation fails. RAYREC_STORAGE_OUTAGE_S
overrides it.
"""

FIRST_WAIT_S: Final = 0.1
LONGEST_WAIT_S: Final = 5.0

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
    start = time.monotonic()
    wait_s = FIRST_WAIT_S
    limit_s = outage_s() if limit_s is None else limit_s
    warned = False
    while True:
        try:
            result = call()
        except UnavailableError as error:
            waited_s = time.monotonic() - start
            if waited_s >= limit_s:
                raise OSError(
                    f"{bucket_of(path)}: the store was unavailable for {waited_s:.0f} s "
                    f"({error.cause}); {error.hint}. Correct the endpoint, or try again when it "
                    "answers"
                ) from None
            if waited_s > 2 and not warned:
                warned = True
                _logger.warning(
                    "Retrying %s for up to %.0f s (%s)", bucket_of(path), limit_s, error.cause
                )
        else:
            if warned:
                _logger.warning(
                    "Reached the store of %s again after %.0f s",
                    bucket_of(path),
                    time.monotonic() - start,
                )
            return result
        # Random, so that the workers of a run do not send their requests at the same time.
        left_s = max(start + limit_s - time.monotonic(), 0.0)
        time.sleep(min(random.uniform(0.5, 1.0) * wait_s, left_s))
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
