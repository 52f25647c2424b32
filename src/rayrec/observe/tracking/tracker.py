"""Tracker interface and threads: each tracker follows the run's events in its own thread and never
delays training.
"""

import contextlib
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol, final

from rayrec import storage
from rayrec.observe.event_json import redact_credentials
from rayrec.observe.events import follow
from rayrec.observe.run_summary import Event, RunSummary, select_metrics
from rayrec.storage.retry import Backoff, retry_errors

UPLOAD_S: Final = 30.0
"""Seconds between uploads. Each sends the full file, because object stores cannot append."""


@final
class AppendFile:
    """Append-only file that replaces an older one at the first `flush`. Unwritten bytes are kept
    for the next `flush`. For URLs, the full file is in memory (TensorBoard: 2 kB per logged
    step).
    """

    def __init__(self, path: str) -> None:
        self.path: Final = path
        self._is_url = storage.is_url(path)
        self._waiting = bytearray()
        self._descriptor: int | None = None
        self._uploaded_bytes = 0
        self._next_upload_s = 0.0

    def write(self, data: bytes) -> None:
        """Buffer bytes until `flush`."""
        self._waiting += data

    def flush(self, *, now: bool = False) -> None:
        """Write the buffered bytes. URLs are uploaded every `UPLOAD_S` seconds, or `now`. Raises
        OSError on failure.
        """
        if self._is_url:
            if len(self._waiting) != self._uploaded_bytes and (
                now or time.monotonic() >= self._next_upload_s
            ):
                with storage.retry_timeout(0):
                    storage.write_bytes(self.path, bytes(self._waiting))
                self._uploaded_bytes = len(self._waiting)
                self._next_upload_s = time.monotonic() + UPLOAD_S
            return
        partial = f"{self.path}.partial"
        if self._descriptor is None:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._descriptor = os.open(
                partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
            )
        while self._waiting:
            del self._waiting[: os.write(self._descriptor, self._waiting)]
        with contextlib.suppress(FileNotFoundError):  # Already renamed.
            os.replace(partial, self.path)

    def close(self) -> None:
        """Flush, and close the file even if that fails."""
        try:
            self.flush(now=True)
        finally:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)


FLUSH_S: Final = 2.0
"""Seconds between deliveries, so that simultaneous events are sent together."""
CLOSE_S: Final = 10.0
"""Maximum seconds for all trackers at the end of a run. Slower trackers are abandoned."""
_ABANDONED_S: Final = 10.0
"""Maximum seconds for the thread of an abandoned tracker to end."""
_BACKOFF: Final = Backoff(first_s=1.0, longest_s=30.0)
"""Waits between retries if a tracker is unreachable."""
_URL_POLL_S: Final = 10.0


class Tracker(Protocol):
    """Destination for the events of a run. Receives all events in order, including events of
    earlier drivers.
    """

    def update(self, event: dict[str, Any], run: RunSummary) -> None:
        """Process an event and the run summary so far, without waiting or writing."""

    def flush(self) -> None:
        """Deliver the processed events. May raise any error and may block. Undelivered events are
        kept for later calls.
        """

    def close(self) -> None:
        """Deliver the rest. This is the last call."""


@contextmanager
def tracking(
    makers: Mapping[str, Callable[[], Tracker]], path: str, *, note: Callable[[str], None]
) -> Iterator[None]:
    """Follow the event file with trackers while the context is open. On exit, they receive the
    remaining events. `makers` run in the trackers' threads. Never raises because of a tracker: the
    first error of each is logged with `note`. Exit takes at most `CLOSE_S` seconds. Close all event
    writers before.
    """
    # One event for all trackers: it ends their reading of the file at its current end.
    stop = threading.Event()
    feeds = [TrackerThread(name, make, path, stop=stop, note=note) for name, make in makers.items()]
    for feed in feeds:
        feed.start()
    try:
        yield
    finally:
        stop.set()
        deadline_s = time.monotonic() + CLOSE_S
        for feed in feeds:
            feed.finish(deadline_s)


@final
class TrackerThread:
    """Thread of one tracker. The event file is its queue: it reads on when the tracker has
    processed the previous events.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        path: str,
        *,
        stop: threading.Event,
        note: Callable[[str], None],
    ) -> None:
        self.num_failures = 0
        """Number of failed calls."""
        self._name = name
        self._make = make
        self._path = path
        self._stop = stop
        self._note = note
        self._tracker: Tracker | None = None
        self._summary = RunSummary(curves=False)
        self._noted = False
        self._has_taken = False
        self._next_flush_s = 0.0
        # A thread each: a tracker whose server is slow must delay neither training nor other
        # trackers. Daemon, because its client may hang.
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, deadline_s: float) -> None:
        """Wait for the thread until `deadline_s` of the monotonic clock, after `stop` is set."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._note_once(
                f"not finished {CLOSE_S:.0f} s after the end. The last events may be missing."
            )
            # Only trackers that keep the process alive while their server is unreachable have it.
            if abandon := getattr(self._tracker, "abandon", None):
                abandon()
                # The interpreter may abort if its shutdown interrupts the thread in foreign code.
                self._thread.join(_ABANDONED_S)

    def _run(self) -> None:
        poll_s = _URL_POLL_S if storage.is_url(self._path) else None
        try:
            self._tracker = tracker = self._make()
            # Events within FLUSH_S of a delivery are sent by a later idle call, without waiting for
            # another event.
            for event in follow(
                self._path, stop=self._stop, poll_s=poll_s, idle=partial(self._deliver_due, tracker)
            ):
                self._take(tracker, event)
                self._deliver_due(tracker)
            tracker.close()
        except Exception as error:  # No tracker error may end the run.
            self.num_failures += 1
            self._note_once(f"{_error_text(error)}. Continuing without it.")

    def _take(self, tracker: Tracker, event: dict[str, Any]) -> None:
        try:
            self._summary.update(event)
            tracker.update(event, self._summary)
        except Exception as error:  # For example, an event of another version.
            self.num_failures += 1
            self._note_once(
                f"skipping an event of kind {event['kind']} ({_error_text(error)}). Later ones "
                "are only counted."
            )
        self._has_taken = True

    def _deliver_due(self, tracker: Tracker) -> None:
        """Call `flush` if it is due. Retry it until it succeeds or the run ends."""
        if not self._has_taken or time.monotonic() < self._next_flush_s:
            return
        # The file keeps the events, so a server may be away for as long as the run takes.
        with contextlib.suppress(Exception):  # See `_run`. Reported below
            retry_errors(
                tracker.flush,
                Exception,
                limit_s=math.inf,
                backoff=_BACKOFF,
                on_failure=self._note_failure,
                wait=self._stop.wait,
            )
        self._next_flush_s = time.monotonic() + FLUSH_S

    def _note_failure(self, error: Exception) -> None:
        self.num_failures += 1
        self._note_once(f"{_error_text(error)}. Retrying while the run continues.")

    def _note_once(self, text: str) -> None:
        if not self._noted:
            self._noted = True
            self._note(f"{self._name}: {text}")


def _error_text(error: Exception) -> str:
    return redact_credentials(" ".join(str(error).split()))[:300] or type(error).__name__


# -- measures

_PREFIXES = {"step": "train", "checkpoint": "checkpoint", "data": "data"}
_NO_MEASURES = {"time", "kind", "step", "steps"}


def scalars(event: Event) -> dict[str, float]:
    """Return the finite measures of an event by name: train/loss, train/times_s/forward,
    validation/auroc, checkpoint/stall_s, final/auroc, data/backlog_rows, data/parse/busy (of a
    stage). Empty for other kinds.
    """
    kind = event["kind"]
    if kind == "finish":
        return dict(_numbers(event["metrics"], "final"))
    prefix = str(event["set"]) if kind == "evaluate" else _PREFIXES.get(kind)
    if prefix is None:
        return {}
    measures = (
        select_metrics(event)
        if kind == "evaluate"
        else {name: event[name] for name in event if name not in _NO_MEASURES}
    )
    if kind == "data":
        measures |= {stage["stage"]: stage for stage in measures.pop("stages", ())}
    return dict(_numbers(measures, prefix))


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}/{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def run_identity(name: str, begin_s: float) -> str:
    """Return 16 hex digits that identify a run for all its drivers, not just by name. `begin_s`:
    time of its first event.
    """
    return hashlib.sha256(f"{name} {begin_s:.6f}".encode()).hexdigest()[:16]
