"""How a run is asked to save and end: the driver tells an actor, and worker 0 asks it now and then. Wishes for a profile take
the same way, but come to all workers at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import ray
import ray.train
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

MORE_WORKERS = "there is room for more workers"
"""The one reason to stop that another attempt follows."""
POLL_S = 0.5
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

    def send(self, cause: str) -> None:
        """Asks the workers to save and end; the first cause stays."""
        if self.cause is None:
            self.cause = cause
            self.mailbox.tell.remote(cause)

    def close(self) -> None:
        ray.kill(self.mailbox)


class StopWatch:
    """A worker's side; see `rayrec.training.loop.Interruption`. Only worker 0 reads the mailbox, and only it looks at the
    clock, so that all workers act at the same step."""

    def __init__(self, mailbox: Any, *, rank: int) -> None:
        self.cause: str | None = None
        self._first = rank == 0
        self._looked_s = time.monotonic()
        self._known: set[str] = set()
        self._closed = threading.Event()
        if self._first:
            threading.Thread(target=self._poll, args=(mailbox,), name="stop-watch", daemon=True).start()

    def _poll(self, mailbox: Any) -> None:
        while self.cause is None and not self._closed.wait(POLL_S):
            with contextlib.suppress(ray.exceptions.RayError):  # a driver that is gone takes the workers with it
                self.cause = ray.get(mailbox.read.remote(), timeout=10)

    def seen(self) -> tuple[bool, bool]:
        return self.cause is not None, self._first and time.monotonic() - self._looked_s >= PREEMPTION_POLL_S

    def urgent(self) -> bool:
        """Whether the cause is not room for more workers, which can wait for the end of an evaluation."""
        return self.cause is not None and self.cause != MORE_WORKERS

    def preempted(self) -> bool:
        self._looked_s = time.monotonic()
        info = ray.train.get_preemption_info()
        new = set(info.preempted_node_ids) - self._known if info else set()
        self._known |= new
        return bool(new)

    def close(self) -> None:
        self._closed.set()
