"""The mailbox of a run on Ray: an actor on the driver's node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayrec.training.stop_monitor import Wish

_ANSWER_S = 10.0
_MOST_CALLS = 100_000
"""At once, of the actor: one of every worker waits all the time."""


class _Holder:
    """Holds the first reason to stop that it was sent; hands wishes for a profile to all that wait for one."""

    def __init__(self) -> None:
        self._cause: str | None = None
        self._wish: Wish | None = None
        self._wished = asyncio.Condition()
        self._written: dict[int, int] = {}

    async def wrote(self, rank: int, written_bytes: int) -> None:
        self._written[rank] = written_bytes

    async def written_bytes(self) -> int:
        return sum(self._written.values())

    async def send(self, cause: str) -> None:
        self._cause = self._cause or cause

    async def read(self) -> str | None:
        return self._cause

    async def ask(self, wish: Wish) -> None:
        async with self._wished:
            self._wish = wish
            self._wished.notify_all()

    async def next_wish(self) -> Wish:
        """The next wish from now on."""
        before = self._wish
        async with self._wished:
            await self._wished.wait_for(lambda: self._wish is not before)
        assert self._wish is not None
        return self._wish


@dataclass(frozen=True)
class RayMailbox:
    """See `Mailbox`."""

    actor: Any

    def read(self) -> str | None:
        try:
            return ray.get(self.actor.read.remote(), timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            raise ConnectionError(f"the driver's mailbox does not answer ({type(error).__name__})") from None

    def wrote(self, rank: int, written_bytes: int) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # a driver that is gone takes the workers with it
            self.actor.wrote.remote(rank, written_bytes)

    def ask(self, wish: Wish) -> None:
        try:
            self.actor.ask.remote(wish)
        except ray.exceptions.RayError as error:
            raise ConnectionError(f"the workers' mailbox does not answer ({type(error).__name__})") from None

    def watch(self, wished: Callable[[Wish], None]) -> None:
        def arrived(future: Future[Wish]) -> None:
            with contextlib.suppress(Exception):  # the mailbox is gone: the attempt is over, or the driver lost
                wished(future.result())
                self.watch(wished)

        self.actor.next_wish.remote().future().add_done_callback(arrived)


class StopRequest:
    """The driver's side: one for each attempt; its `mailbox` goes to the workers."""

    def __init__(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": _MOST_CALLS, "scheduling_strategy": here}
        self.mailbox = RayMailbox(ray.remote(_Holder).options(**options).remote())
        self.cause: str | None = None
        self._written_bytes = 0
        self._answer: ray.ObjectRef[int] | None = None

    def written_bytes(self) -> int:
        """What the workers' saves have written, by the last answer of the mailbox; returns at once."""
        if self._answer is None:
            self._answer = self.mailbox.actor.written_bytes.remote()
        if ray.wait([self._answer], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):  # the cluster is going, and the deadline stays
                self._written_bytes = ray.get(self._answer)
            self._answer = None
        return self._written_bytes

    def send(self, cause: str) -> None:
        """Asks the workers to save and end; the first cause stays."""
        if self.cause is None:
            self.cause = cause
            self.mailbox.actor.send.remote(cause)

    def close(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # a cluster that is gone has none
            ray.kill(self.mailbox.actor)
