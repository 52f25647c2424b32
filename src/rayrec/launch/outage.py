"""Waits for a head that is gone, for as long as the policy allows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from rayrec.launch.jobs import Jobs, Unreachable
from rayrec.launch.policy import Policy, pause_s

_FIRST_PROBE_S, _LONGEST_PROBE_S = 1.0, 30.0
_FIRST_REPORT_S = 15.0
"""Of an outage that goes on; the next reports come when it has lasted twice as long."""


class Outage:
    """From the first request that the head did not answer well until `over`, which answers in between do not end: a head
    may answer and take no job."""

    def __init__(self, jobs: Jobs, policy: Policy, *, say: Callable[[str], None]) -> None:
        self._jobs, self._limit_s, self._say = jobs, policy.max_wait_s, say
        self._since_s: float | None = None
        self._num_probes = 0
        self._report_s = 0.0

    def wait(self, why: str) -> str | None:
        """Returns when the head answers; with a cause where it has not for longer than the policy allows."""
        if self._since_s is None:
            self._since_s, self._num_probes, self._report_s = time.monotonic(), 0, _FIRST_REPORT_S
            limit = span(self._limit_s)
            self._say(f"head lost: {self._jobs.url} gives no good answer ({why}); waiting for it, {limit} at most")
        silent_s = time.monotonic() - self._since_s
        while True:
            self._num_probes += 1
            wait_s = pause_s(
                self._num_probes, first_s=_FIRST_PROBE_S, longest_s=_LONGEST_PROBE_S, jitter=random.random()
            )
            time.sleep(min(wait_s, max(0.0, self._limit_s - silent_s)))
            silent_s = time.monotonic() - self._since_s
            if silent_s >= self._limit_s:
                return f"no head at {self._jobs.url} for {span(silent_s)} ({why})"
            if silent_s >= self._report_s:
                self._say(f"head still lost ({why}), for {span(silent_s)} now")
                self._report_s = 2 * silent_s
            try:
                self._jobs.probe()
                return None
            except Unreachable as error:
                why = str(error)

    def over(self) -> None:
        if self._since_s is not None:
            self._say(f"head is back after {span(time.monotonic() - self._since_s)}")
            self._since_s = None


def span(seconds: float) -> str:
    """A time, readable."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
