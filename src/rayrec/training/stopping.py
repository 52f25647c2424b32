"""How a worker learns that its run is to save and end: worker 0 reads the mailbox now and then, and looks for preemptions."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from rayrec.data.engine import STOP_ASKED
from rayrec.training.mailbox import Mailbox
from rayrec.training.signals import last_save_s

MORE_WORKERS = "there is room for more workers"
NO_DATA_NODES = "the nodes that ran data tasks are gone, and others can run them"
RESUMES = (MORE_WORKERS, NO_DATA_NODES)
"""Reasons to stop that another attempt of the same run follows."""
POLL_S = 0.5
_OTHERS_POLL_S = 5.0
"""Seconds between two polls of the workers other than worker 0."""
PREEMPTION_POLL_S = 5.0
"""As often as Ray Train itself looks for nodes that are to go."""


class PreemptionInfo(Protocol):
    """Nodes that are about to be preempted, as Ray Train describes them."""

    preempted_node_ids: Collection[str]
    deadline_ms: int | None


class StopWatch:
    """A worker's side; see `rayrec.training.loop.Interruption`. Only worker 0 acts on the mailbox, and only it looks at the
    clock, so that all workers act at the same step. The others read it too, so as not to wait for data tasks that never run."""

    def __init__(
        self, mailbox: Mailbox | None, *, rank: int, preemption: Callable[[], PreemptionInfo | None] = lambda: None
    ) -> None:
        """`preemption` says which nodes are about to be preempted; without a mailbox nobody asks for a stop."""
        self.cause: str | None = None
        self._preemption = preemption
        self.write_s: Callable[[], float] = lambda: 0.0
        """What the last save took."""
        self._first = rank == 0
        self._looked_s = self._seen_s = time.monotonic()
        self._between_s = 0.0
        self._deadline_s: float | None = None
        """When a machine is preempted, in Unix time, as long as a save is due before that."""
        self._known: set[str] = set()
        self._closed = threading.Event()
        STOP_ASKED.clear()
        if mailbox is not None:
            threading.Thread(target=self._poll, args=(mailbox,), name="stop-watch", daemon=True).start()

    def _poll(self, mailbox: Mailbox) -> None:
        cause = None
        while cause is None and not self._closed.wait(POLL_S if self._first else _OTHERS_POLL_S):
            with contextlib.suppress(OSError):  # a driver that is gone takes the workers with it
                cause = mailbox.read()
        if cause is not None and not self._closed.is_set():
            STOP_ASKED.set()
        if self._first:
            self.cause = cause

    def seen(self) -> tuple[bool, int]:
        now_s = time.monotonic()
        self._between_s, self._seen_s = now_s - self._seen_s, now_s
        asked = self.cause is not None
        if not self._first:
            return asked, 0
        if self._deadline_s is not None and time.time() >= self._last_save_s(self._deadline_s):
            return asked, 2
        return asked, int(now_s - self._looked_s >= PREEMPTION_POLL_S)

    def urgent(self) -> bool:
        """Whether the cause is not room for more workers, which can wait for the end of an evaluation."""
        return self.cause is not None and self.cause != MORE_WORKERS

    def preempted(self, *, due: bool) -> bool:
        self._looked_s = time.monotonic()
        info = self._preemption()
        new = set(info.preempted_node_ids) - self._known if info else set()
        self._known |= new
        if due:
            self._deadline_s = None
        if new and info is not None and info.deadline_ms:
            self._deadline_s = info.deadline_ms / 1000
            if time.time() >= self._last_save_s(self._deadline_s):  # the save at this notice is the last one
                self._deadline_s = None
        return bool(new) or due

    def _last_save_s(self, deadline_s: float) -> float:
        return last_save_s(deadline_s, write_s=self.write_s(), between_s=self._between_s)

    def close(self) -> None:
        self._closed.set()


class SaveReporter:
    """A worker's side: reports to the mailbox how many bytes its saves have written, whenever there are more."""

    def __init__(self, mailbox: Mailbox, written_bytes: Callable[[], int], *, rank: int) -> None:
        self._closed = threading.Event()
        arguments = (mailbox, written_bytes, rank)
        threading.Thread(target=self._report, args=arguments, name="save-reporter", daemon=True).start()

    def _report(self, mailbox: Mailbox, written_bytes: Callable[[], int], rank: int) -> None:
        before = 0
        while not self._closed.wait(POLL_S):
            if (now := written_bytes()) > before:
                before = now
                with contextlib.suppress(OSError):  # the run is over
                    mailbox.wrote(rank, now)

    def close(self) -> None:
        self._closed.set()
