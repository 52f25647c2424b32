"""Tries again what storage refuses, for as long as an outage may last, and says in the end what to do about it."""

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

_logger = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 15.0
PATIENCE_S = 15.0
"""For which a single attempt waits for a store that is out, before it reports that the save is late."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class Persistence:
    """How long to try for, and who is told."""

    place: str
    """What is written, for messages."""
    max_outage_s: float
    """From the first failure on: a long write is no outage."""
    seed: str
    """Spreads the attempts of many ranks in time. No random state is touched: training's would change."""
    ended: threading.Event
    """Set: no more attempts."""
    late: Callable[[str], None]
    """Told the cause of each failure."""

    def run(self, function: Callable[[], T]) -> T:
        """What the function returns at last. Raises InputError where it raised OSError for `max_outage_s`, and at once
        whatever else it raised."""
        attempt, first_s = 0, None
        while True:
            try:
                with storage.patience(PATIENCE_S):
                    return function()
            except OSError as error:
                self.late(one_line(error))
                now_s = time.monotonic()
                first_s = now_s if first_s is None else first_s
                delay_s = delay(attempt, seed=self.seed)
                if now_s + delay_s > first_s + self.max_outage_s or self.ended.wait(delay_s):
                    raise self._given_up(error) from error
            attempt += 1

    def _given_up(self, error: OSError) -> InputError:
        if is_full(error):
            return InputError(f"{self.place}: no space left; free some or choose another --storage-path")
        return InputError(
            f"{self.place}: cannot be written for {self.max_outage_s:.0f} s ({one_line(error)}); see that the storage is "
            "reachable and give the same command again"
        )


def persisted(function: Callable[[], T], *, place: str, max_outage_s: float) -> T:
    """What the function returns at last; see `Persistence.run`. Warns of each failure."""

    def late(cause: str) -> None:
        _logger.warning("%s: cannot be written yet (%s)", place, cause)

    return Persistence(place, max_outage_s, seed=place, ended=threading.Event(), late=late).run(function)


def delay(attempt: int, *, seed: str) -> float:
    """Seconds to wait after an attempt (from 0 on): doubling, less up to a half of it. Pure."""
    chance = hashlib.sha256(f"{seed} {attempt}".encode()).digest()[0] / 256
    return min(FIRST_DELAY_S * 2**attempt, LONGEST_DELAY_S) * (1 - chance / 2)


def is_full(error: OSError) -> bool:
    return error.errno in _FULL or "No space left on device" in str(error)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def tolerated(what: str) -> Iterator[None]:
    """Cleaning that fails loses nothing: it is warned of, and comes again with the next save or attempt."""
    try:
        with storage.patience(PATIENCE_S):
            yield
    except (OSError, InputError) as error:
        _logger.warning("%s: %s", what, error)
