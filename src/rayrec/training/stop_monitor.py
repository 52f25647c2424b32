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
NODE_GOES = "a node is about to be preempted, as announced"
RESUMES = (MORE_WORKERS, NO_DATA_NODES, NODE_GOES)
"""Reasons to stop that another attempt of the same run follows."""
POLL_S = 0.5
_OTHERS_POLL_S = 5.0
"""Seconds between two polls of the workers other than worker 0."""
PREEMPTION_POLL_S = 5.0
"""Seconds between two questions to Ray Train for nodes that are to go: all workers ask at once, and wait for each other."""


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
        self._looked_s = time.monotonic()
        self._seen_s: float | None = self._looked_s
        self._between_s = 0.0
        self._deadline_s: float | None = None
        """When a machine is preempted, in Unix time."""
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

    def seen(self) -> tuple[bool, bool]:
        now_s = time.monotonic()
        if self._seen_s is not None:
            self._between_s = now_s - self._seen_s
        self._seen_s = now_s
        if not self._first:
            return self.cause is not None, False
        if self.cause in (None, MORE_WORKERS) and self._is_last_moment():
            self.cause = NODE_GOES
        return self.cause is not None, now_s - self._looked_s >= PREEMPTION_POLL_S

    def urgent(self) -> bool:
        """Whether the cause is not room for more workers, which can wait for the end of an evaluation."""
        return self.cause is not None and self.cause != MORE_WORKERS

    def preempted(self) -> bool:
        self._looked_s = time.monotonic()
        info = self._preemption()
        new = set(info.preempted_node_ids) - self._known if info else set()
        self._known |= new
        if new and info is not None:
            self._seen_s = None  # the save that follows is no time between two looks
            self._deadline_s = info.deadline_ms / 1000 if info.deadline_ms else self._deadline_s
        return bool(new)

    def _is_last_moment(self) -> bool:
        """Whether the run has to save and end now, to be through before a machine is preempted."""
        if self._deadline_s is None:
            return False
        return time.time() >= last_save_s(self._deadline_s, write_s=self.write_s(), between_s=self._between_s)

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
