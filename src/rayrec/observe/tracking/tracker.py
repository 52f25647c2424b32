"""Trackers read the events of a run, each in a thread of its own, so that none of them delays training or another tracker."""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol, final, runtime_checkable

from rayrec import storage
from rayrec.observe.event_lines import without_users
from rayrec.observe.events import follow
from rayrec.observe.run_summary import Event, RunSummary

UPLOAD_S: Final = 30.0
"""Between two uploads, each of the whole file: a store has no appending."""


@final
class ViewFile:
    """Bytes appended to a file, which takes the place of an older one at the first `flush`.

    What could not be written is kept and written with the next `flush`; at a URL the whole file is kept in memory (of
    TensorBoard's about 2 kB a logged step).
    """

    def __init__(self, path: str) -> None:
        self.path: Final = path
        self._is_url = storage.is_url(path)
        self._waiting = bytearray()
        self._descriptor: int | None = None
        self._uploaded_bytes = 0
        self._next_upload_s = 0.0

    def write(self, data: bytes) -> None:
        """Keeps bytes in memory until `flush`."""
        self._waiting += data

    def flush(self, *, now: bool = False) -> None:
        """Writes what was taken; to a URL only every `UPLOAD_S`, or `now`. Raises OSError where it cannot."""
        if self._is_url:
            self._upload(now)
            return
        partial = f"{self.path}.partial"
        if self._descriptor is None:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        while self._waiting:
            del self._waiting[: os.write(self._descriptor, self._waiting)]
        with contextlib.suppress(FileNotFoundError):  # it has its name already
            os.replace(partial, self.path)

    def _upload(self, now: bool) -> None:
        if len(self._waiting) == self._uploaded_bytes or not (now or time.monotonic() >= self._next_upload_s):
            return
        with storage.patience(0):
            storage.write_bytes(self.path, bytes(self._waiting))
        self._uploaded_bytes = len(self._waiting)
        self._next_upload_s = time.monotonic() + UPLOAD_S

    def close(self) -> None:
        """Flushes, and closes the file whatever comes of that."""
        try:
            self.flush(now=True)
        finally:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)


FLUSH_S: Final = 2.0
"""Between two deliveries, so that what comes at once goes at once."""
CLOSE_S: Final = 10.0
"""What all trackers together may take at the end of a run; who takes longer is left behind."""
_ABANDONED_S: Final = 10.0
"""What the thread of a tracker that was abandoned may take to end."""
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 30.0
"""Between two attempts on a tracker that cannot be reached."""
_URL_POLL_S: Final = 10.0


class Tracker(Protocol):
    """Shows the events of a run elsewhere. It is given every event of the run, also of earlier drivers, in their order."""

    def update(self, event: dict[str, Any], run: RunSummary) -> None:
        """Takes an event, and what it and those before add up to; neither waits nor writes."""
        ...

    def flush(self) -> None:
        """Delivers what was taken. May raise anything and may take its time; what was not delivered is kept, and is
        delivered by a later call."""
        ...

    def close(self) -> None:
        """Delivers the rest; nothing is called after it."""
        ...


@runtime_checkable
class Lingering(Protocol):
    """What a tracker is, too, that would keep this process from ending for as long as it cannot be reached."""

    def abandon(self) -> None:
        """Called, from another thread, where the tracker is left behind: sees to it that the process can end."""
        ...


@contextmanager
def tracking(makers: Mapping[str, Callable[[], Tracker]], path: str, *, note: Callable[[str], None]) -> Iterator[None]:
    """Within it trackers follow the event file, made by `makers` in their threads; on leaving it they get what is left of it.

    Whatever a tracker does, nothing is raised here, and leaving takes `CLOSE_S` at most; the first trouble of each is
    noted. The events' writers must be closed before it is left.
    """
    stop = threading.Event()
    feeds = [Feed(name, make, path, stop=stop, note=note) for name, make in makers.items()]
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
class Feed:
    """One tracker and its thread. The event file is its queue: it reads on when the tracker has taken what came before."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], path: str, *, stop: threading.Event, note: Callable[[str], None]
    ) -> None:
        self.num_failures = 0
        """Attempts at anything that failed."""
        self._name, self._make, self._path, self._stop, self._note = name, make, path, stop, note
        self._tracker: Tracker | None = None
        self._summary = RunSummary(curves=False)
        self._noted = False
        self._has_taken = False
        self._next_flush_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, deadline_s: float) -> None:
        """Waits for the thread until `deadline_s` of the monotonic clock; `stop` was set before."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._tell(f"not done {CLOSE_S:.0f} s after the end; its last events may be missing there")
            if isinstance(self._tracker, Lingering):
                self._tracker.abandon()
                # A thread that the interpreter's end finds within foreign code may abort the process.
                self._thread.join(_ABANDONED_S)

    def _run(self) -> None:
        poll_s = _URL_POLL_S if storage.is_url(self._path) else None
        try:
            self._tracker = tracker = self._make()
            # What comes within FLUSH_S of a delivery goes later, and need not wait for an event that goes with it.
            idle = partial(self._deliver_due, tracker)
            for event in follow(self._path, stop=self._stop, poll_s=poll_s, idle=idle):
                self._take(tracker, event)
                self._deliver_due(tracker)
            tracker.close()
        except Exception as error:  # of a tracker anything may come, and none of it is a reason to end a run
            self.num_failures += 1
            self._tell(f"{_line(error)}; the run continues without it")

    def _take(self, tracker: Tracker, event: dict[str, Any]) -> None:
        try:
            self._summary.update(event)
            tracker.update(event, self._summary)
        except Exception as error:  # an event of another version, perhaps
            self.num_failures += 1
            self._tell(f"an event of kind {event['kind']} was left out ({_line(error)}); later ones are only counted")
        self._has_taken = True

    def _deliver_due(self, tracker: Tracker) -> None:
        if self._has_taken and time.monotonic() >= self._next_flush_s:
            self._deliver(tracker)
            self._next_flush_s = time.monotonic() + FLUSH_S

    def _deliver(self, tracker: Tracker) -> None:
        """Flushes until it works, or the run ends."""
        pause_s = _FIRST_WAIT_S
        while True:
            try:
                return tracker.flush()
            except Exception as error:  # as above
                self.num_failures += 1
                self._tell(f"{_line(error)}; it is tried again, and the run continues")
            if self._stop.wait(pause_s):
                return None
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)

    def _tell(self, text: str) -> None:
        if not self._noted:
            self._noted = True
            self._note(f"{self._name}: {text}")


def _line(error: Exception) -> str:
    return without_users(" ".join(str(error).split()))[:300] or type(error).__name__


# -- what trackers show of events

_PREFIXES = {"step": "train", "checkpoint": "checkpoint", "data": "data"}
_NO_MEASURES = {"time", "kind", "step", "steps", "set"}


def scalars(event: Event) -> dict[str, float]:
    """The measures of an event by name: train/loss, train/times_s/forward, validation/auroc, checkpoint/stall_s, final/auroc,
    data/backlog_rows, data/parse/busy (of a stage); nothing of kinds that measure nothing. What was not finite is left out."""
    kind = event["kind"]
    if kind == "finish":
        return dict(_numbers(event["metrics"], "final"))
    prefix = str(event["set"]) if kind == "evaluate" else _PREFIXES.get(kind)
    if prefix is None:
        return {}
    measures = {name: value for name, value in event.items() if name not in _NO_MEASURES}
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
    """16 hex digits: the same for all drivers of a run, others for a run of the same name that is started again. `begin_s` is the
    time of its first event."""
    return hashlib.sha256(f"{name} {begin_s:.6f}".encode()).hexdigest()[:16]
