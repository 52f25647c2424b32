"""Stop requests from driver to workers, and preemption notices. Worker 0 polls for both."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any, Final, Protocol, Self, final

from rayrec.background import in_background
from rayrec.checkpoint.save_retry import SaveStats
from rayrec.data.engine import StopToken
from rayrec.observe.console import handling_signals
from rayrec.workloads.run_config import FailureConfig

# Python delivers signals to the main thread alone, but runs may train in other threads.
_running: Final[set["Signals"]] = set()
"""Contexts of all runs of this process. Only the main thread's gets signals, and passes them to the
others.
"""


# Signals of a run, by its context:
#
#   state        first signal                     second signal
#   entered      raise                            raise
#   deferred     note; the driver asks workers    raise
#                to save and stop
#   exited       the caller's handlers            the caller's handlers
class Signals:
    """Context in which SIGTERM and SIGHUP raise SystemExit(143) and Ctrl-C KeyboardInterrupt. In
    `deferred` the first signal is only noted, and the second raises. Only the main thread gets
    signals; contexts of other threads note the first one. An ignored SIGHUP (nohup) stays ignored.
    `stop_event`, set by another thread, counts as a noted SIGTERM.
    """

    def __init__(self, stop_event: threading.Event | None = None) -> None:
        self._stop_event = stop_event or threading.Event()
        self._noted: str | None = None
        self._deferred = False
        self._handlers = contextlib.ExitStack()

    @property
    def cause(self) -> str | None:
        """Noted cause: SIGTERM, SIGHUP, SIGINT or a request to stop."""
        return self._noted or ("a request to stop" if self._stop_event.is_set() else None)

    @cause.setter
    def cause(self, noted: str | None) -> None:
        self._noted = noted

    def __enter__(self) -> Self:
        self._handlers.enter_context(handling_signals(self._handle))
        _running.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _running.discard(self)
        self._handlers.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self._noted is None
        for signals in tuple(_running):
            signals.cause = signals.cause or signal.Signals(number).name
        self._noted = self._noted or signal.Signals(number).name
        if not (first and self._deferred):
            self.throw()

    def throw(self) -> None:
        if self.cause == "SIGINT":
            raise KeyboardInterrupt
        raise SystemExit(143)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Note the first signal within the context instead of raising."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False


_WRITE_MARGIN: Final = 1.5
"""Maximum duration of a save relative to the previous one."""
_MARGIN_S: Final = 2.0


# States after a stop request. A save that writes bytes earns time, up to a limit:
#
#   requested       deadline = now + grace_s
#   new bytes       deadline = now + grace_s, but never after request + max_grace_s
#   deadline over   the driver leaves without the last checkpoint
@final
class GracePeriod:
    """Time to save after a stop request: failure.grace_s, restarted by polls with new bytes,
    failure.max_grace_s in all.
    """

    def __init__(self, failure: FailureConfig, *, now_s: float) -> None:
        self._grace_s = failure.grace_s
        self._end_s = now_s + max(failure.grace_s, failure.max_grace_s)
        self._deadline_s = now_s + failure.grace_s
        self._saved_bytes: int | None = None

    def expired(self, now_s: float, *, saved_bytes: int) -> bool:
        """Return whether to stop waiting for the workers. `saved_bytes`: by all saves of the
        attempt so far.
        """
        if self._saved_bytes is not None and saved_bytes > self._saved_bytes:
            self._deadline_s = now_s + self._grace_s
        self._saved_bytes = saved_bytes
        return now_s > min(self._deadline_s, self._end_s)


def unsaved_cause(cause: str | None, failure: FailureConfig) -> str:
    """Describe a stop, for `cause`, whose `GracePeriod` expired. Pure."""
    return (
        f"{cause}, and the last checkpoint made no progress for failure.grace_s "
        f"({failure.grace_s:.0f} s) or took longer than "
        f"failure.max_grace_s ({failure.max_grace_s:.0f} s)"
    )


def last_save_s(deadline_s: float, *, write_s: float, between_s: float) -> float:
    """Return the latest time to save and end before a preemption at `deadline_s`. Pure. `write_s`:
    duration of the last save. `between_s`: interval between two clock readings, which a step may
    lengthen.
    """
    return deadline_s - (_WRITE_MARGIN * write_s + 2 * between_s + _MARGIN_S)


ProfileRequest = dict[str, Any]


# Messages of an attempt. Each direction has one kind of writer, so that no message needs an answer:
#
#   driver -> workers    stop reason, which stays; the first one counts
#   driver -> rank 0     profile requests, each once
#   workers -> driver    bytes written by saves, which only grow
#
# A lost message delays, but does not harm: reasons and byte counts are states and polled again.
class ControlChannel(Protocol):
    """Messages of one attempt's driver and workers. Picklable for worker processes. Raises OSError
    if unreachable.
    """

    def stop_reason(self) -> str | None:
        """Return the driver's first reason to stop, or None."""

    def report_saved_bytes(self, rank: int, saved_bytes: int) -> None: ...

    def send_profile_request(self, request: ProfileRequest) -> None: ...

    def subscribe(self, requested: Callable[[ProfileRequest], None]) -> None:
        """Call `requested`, in any thread, for every later request of the attempt."""


MORE_WORKERS = "there is room for more workers"
NO_DATA_NODES = "the nodes that ran data tasks are gone, and others can run them"
NODE_PREEMPTED = "a node is about to be preempted, as announced"
RESUMES = (MORE_WORKERS, NO_DATA_NODES, NODE_PREEMPTED)
"""Stop reasons after which another attempt of the run follows."""
POLL_S = 0.5
_RANKS_POLL_S = 5.0
"""Poll interval of the workers other than worker 0, in seconds."""
_JOIN_S: Final = 5.0
"""Maximum wait for a closed thread, in seconds, which may be in a call to a lost driver."""
PREEMPTION_POLL_S = 5.0
"""Interval between two preemption polls, in seconds. All workers poll Ray Train together and wait
for each other.
"""


class PreemptionInfo(Protocol):
    """Preemption notice, as in Ray Train."""

    preempted_node_ids: Collection[str]
    deadline_ms: int | None


# All workers must stop at the same step. So rank 0 decides, and the loop shares its answer with the
# others in the collective of the next step.
#
#   thread of rank 0     polls the channel each POLL_S; sets `cause`
#   thread of others     polls each _RANKS_POLL_S; only ends the waits of their readers
#   loop, each step      `poll` reads `cause` and the clock of a preemption
#   loop, all ranks      each PREEMPTION_POLL_S together: `preempted` asks Ray Train
#
#   cause                  effect
#   signal, request        save and end
#   MORE_WORKERS           save and end after a running evaluation, then another attempt with more
#   NO_DATA_NODES          save and end, then another attempt
#   NODE_PREEMPTED         save in time for the node's deadline, then another attempt
class StopMonitor:
    """Stop detection of a worker; implements `rayrec.training.progress.StopSignal`. Only worker 0
    acts on channel and clock, so that all workers act at the same step. Other workers also read the
    channel, so as not to wait for data tasks forever.
    """

    def __init__(
        self,
        channel: ControlChannel | None,
        *,
        rank: int,
        stop: StopToken | None = None,
        saves: SaveStats | None = None,
        preemption: Callable[[], PreemptionInfo | None] = lambda: None,
    ) -> None:
        """Start polling. `stop` is set after a request, for the worker's readers. `saves`: of this
        worker, to predict the duration of the last one. `preemption` returns the current preemption
        notice. Without a channel, no stop can be requested.
        """
        self.cause: str | None = None
        self._preemption = preemption
        self._stop = stop or StopToken()
        self._saves = saves or SaveStats()
        self._first = rank == 0
        self.begin()
        self._between_s = 0.0
        self._deadline_s: float | None = None
        """Unix time of a node's preemption."""
        self._known: set[str] = set()
        # Ends the thread's wait between polls, instead of a sleep that `close` would have to sit
        # out.
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if channel is not None:
            # A thread, because a channel through a busy driver may take longer to answer than a
            # step does. Daemon, because a call to a lost driver may never return.
            self._thread = threading.Thread(
                target=self._poll, args=(channel,), name="stop-watch", daemon=True
            )
            self._thread.start()

    def begin(self) -> None:
        """Start the clock: training begins now."""
        self._polled_preemption_s = time.monotonic()
        self._polled_s: float | None = self._polled_preemption_s

    def _poll(self, channel: ControlChannel) -> None:
        cause = None
        while cause is None and not self._closed.wait(POLL_S if self._first else _RANKS_POLL_S):
            with contextlib.suppress(OSError):  # Ray ends the workers of a lost driver
                cause = channel.stop_reason()
        if self._first:
            self.cause = cause
        if cause is not None and not self._closed.is_set():
            self._stop.set()

    def poll(self) -> tuple[bool, bool]:
        now_s = time.monotonic()
        if self._polled_s is not None:
            self._between_s = now_s - self._polled_s
        self._polled_s = now_s
        if not self._first:
            return self.cause is not None, False
        if self._deadline_s is not None and self.cause in (None, MORE_WORKERS):
            last_s = last_save_s(
                self._deadline_s, write_s=self._saves.write_s, between_s=self._between_s
            )
            if time.time() >= last_s:
                self.cause = NODE_PREEMPTED
        return self.cause is not None, now_s - self._polled_preemption_s >= PREEMPTION_POLL_S

    def urgent(self) -> bool:
        """Return whether to stop before an evaluation ends. Only scaling up can wait."""
        return self.cause is not None and self.cause != MORE_WORKERS

    def preempted(self) -> bool:
        self._polled_preemption_s = time.monotonic()
        info = self._preemption()
        new = set(info.preempted_node_ids) - self._known if info else set()
        self._known |= new
        if new and info is not None:
            self._polled_s = None  # the following save does not count as a poll interval
            self._deadline_s = info.deadline_ms / 1000 if info.deadline_ms else self._deadline_s
        return bool(new)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)


def report_saves(
    channel: ControlChannel, saved_bytes: Callable[[], int], *, rank: int
) -> contextlib.AbstractContextManager[None]:
    """Report the growing number of bytes written by a worker's saves, in a thread, within the
    context.
    """

    def report(closed: threading.Event) -> None:
        before = 0
        while not closed.wait(POLL_S):
            if (now := saved_bytes()) > before:
                before = now
                with contextlib.suppress(OSError):  # the run has ended
                    channel.report_saved_bytes(rank, now)

    # In a thread of its own: the saver's thread may be blocked in the write whose bytes are
    # reported.
    return in_background(report, name="save-reporter")
