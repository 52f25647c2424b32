"""How a run is asked to save and end: the driver tells an actor, and worker 0 asks it now and then. Wishes for a profile take
the same way, but come to all workers at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.train
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayrec.data import ingest
from rayrec.training.grace import last_save_s

MORE_WORKERS = "there is room for more workers"
NO_DATA_NODES = "the nodes that ran data tasks are gone, and others can run them"
RESUMES = (MORE_WORKERS, NO_DATA_NODES)
"""Reasons to stop that another attempt of the same run follows."""
POLL_S = 0.5
_OTHERS_POLL_S = 5.0
"""Seconds between two polls of the workers other than worker 0."""
PREEMPTION_POLL_S = 5.0
"""As often as Ray Train itself looks for nodes that are to go."""
_MOST_CALLS = 100_000
"""At once, of the mailbox: one of every worker waits all the time."""


class _Mailbox:
    """Holds the first reason to stop that it was told; hands wishes for a profile to whoever waits for one."""

    def __init__(self) -> None:
        self._cause: str | None = None
        self._wish: dict[str, Any] | None = None
        self._wished = asyncio.Condition()
        self._written: dict[int, int] = {}

    async def wrote(self, rank: int, written_bytes: int) -> None:
        """What a worker's saves have written so far."""
        self._written[rank] = written_bytes

    async def written_bytes(self) -> int:
        """By all workers."""
        return sum(self._written.values())

    async def tell(self, cause: str) -> None:
        self._cause = self._cause or cause

    async def read(self) -> str | None:
        return self._cause

    async def ask(self, wish: dict[str, Any]) -> None:
        """`rayrec.training.profiling` says what of."""
        async with self._wished:
            self._wish = wish
            self._wished.notify_all()

    async def next_profile(self) -> dict[str, Any]:
        """The next wish from now on."""
        before = self._wish
        async with self._wished:
            await self._wished.wait_for(lambda: self._wish is not before)
        assert self._wish is not None
        return self._wish


class StopRequest:
    """The driver's side: one for each attempt; its `mailbox` goes to the workers."""

    def __init__(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": _MOST_CALLS, "scheduling_strategy": here}
        self.mailbox: Any = ray.remote(_Mailbox).options(**options).remote()
        self.cause: str | None = None
        self._written_bytes = 0
        self._answer: ray.ObjectRef[int] | None = None

    def written_bytes(self) -> int:
        """What the workers' saves have written, by the last answer of the mailbox; returns at once."""
        if self._answer is None:
            self._answer = self.mailbox.written_bytes.remote()
        if ray.wait([self._answer], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):  # the cluster is going, and the deadline stays
                self._written_bytes = ray.get(self._answer)
            self._answer = None
        return self._written_bytes

    def send(self, cause: str) -> None:
        """Asks the workers to save and end; the first cause stays."""
        if self.cause is None:
            self.cause = cause
            self.mailbox.tell.remote(cause)

    def close(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # a cluster that is gone has none
            ray.kill(self.mailbox)


class StopWatch:
    """A worker's side; see `rayrec.training.loop.Interruption`. Only worker 0 acts on the mailbox, and only it looks at the
    clock, so that all workers act at the same step. The others read it too, so as not to wait for data tasks that never run."""

    def __init__(self, mailbox: Any, *, rank: int) -> None:
        self.cause: str | None = None
        self.write_s: Callable[[], float] = lambda: 0.0
        """What the last save took."""
        self._first = rank == 0
        self._looked_s = self._seen_s = time.monotonic()
        self._between_s = 0.0
        self._deadline_s: float | None = None
        """When a machine is taken away, in Unix time, as long as a save is due before that."""
        self._known: set[str] = set()
        self._closed = threading.Event()
        ingest.STOP_ASKED.clear()
        if mailbox is not None:
            threading.Thread(target=self._poll, args=(mailbox,), name="stop-watch", daemon=True).start()

    def _poll(self, mailbox: Any) -> None:
        cause = None
        while cause is None and not self._closed.wait(POLL_S if self._first else _OTHERS_POLL_S):
            with contextlib.suppress(ray.exceptions.RayError):  # a driver that is gone takes the workers with it
                cause = ray.get(mailbox.read.remote(), timeout=10)
        if cause is not None:
            ingest.STOP_ASKED.set()
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
        info = ray.train.get_preemption_info()
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

    def __init__(self, mailbox: Any, written_bytes: Callable[[], int], *, rank: int) -> None:
        self._closed = threading.Event()
        arguments = (mailbox, written_bytes, rank)
        threading.Thread(target=self._report, args=arguments, name="save-reporter", daemon=True).start()

    def _report(self, mailbox: Any, written_bytes: Callable[[], int], rank: int) -> None:
        before = 0
        while not self._closed.wait(POLL_S):
            if (now := written_bytes()) > before:
                before = now
                with contextlib.suppress(ray.exceptions.RayError):
                    mailbox.wrote.remote(rank, now)

    def close(self) -> None:
        self._closed.set()
