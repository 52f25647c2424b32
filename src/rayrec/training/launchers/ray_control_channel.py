"""Control channel of a run on Ray: an actor on the driver's node."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayrec.training.stop_monitor import ProfileRequest

_ANSWER_S = 10.0
_MAX_CALLS = 100_000
"""Maximum number of concurrent calls of the actor. Each worker has a permanently waiting one."""


# Calls of this actor. All are coroutines of one thread, so its fields need no lock.
#
#   driver    send, saved_bytes (polled, without waiting), request_profile
#   worker    read (each poll), report_bytes (no answer), next_request (waits for the next one)
#
# The actor runs on the driver's node, and ends with the attempt. So a worker whose driver is lost
# gets an error instead of an old reason.
class _Holder:
    """Actor that stores the first reason to stop and passes profile requests to all waiting
    workers.
    """

    def __init__(self) -> None:
        self._cause: str | None = None
        self._request: ProfileRequest | None = None
        # Each worker waits in one call. Polling instead would cost a call per worker and second.
        self._requested = asyncio.Condition()
        self._bytes_by_rank: dict[int, int] = {}

    async def report_bytes(self, rank: int, saved_bytes: int) -> None:
        self._bytes_by_rank[rank] = saved_bytes

    async def saved_bytes(self) -> int:
        return sum(self._bytes_by_rank.values())

    async def send(self, cause: str) -> None:
        self._cause = self._cause or cause

    async def read(self) -> str | None:
        return self._cause

    async def request_profile(self, request: ProfileRequest) -> None:
        async with self._requested:
            self._request = request
            self._requested.notify_all()

    async def next_request(self) -> ProfileRequest:
        """Return the next request from now on."""
        # Compared by identity: a repeated request is a new object.
        before = self._request
        async with self._requested:
            await self._requested.wait_for(lambda: self._request is not before)
        assert self._request is not None
        return self._request


@dataclass(frozen=True)
class RayControlChannel:
    """Control channel to the actor."""

    actor: Any

    def stop_reason(self) -> str | None:
        try:
            return ray.get(self.actor.read.remote(), timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            raise ConnectionError(
                f"the driver's control channel does not answer ({type(error).__name__})"
            ) from None

    def report_saved_bytes(self, rank: int, saved_bytes: int) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # Ray ends the workers of a lost driver
            self.actor.report_bytes.remote(rank, saved_bytes)

    def send_profile_request(self, request: ProfileRequest) -> None:
        try:
            self.actor.request_profile.remote(request)
        except ray.exceptions.RayError as error:
            raise ConnectionError(
                f"the workers' control channel does not answer ({type(error).__name__})"
            ) from None

    def subscribe(self, requested: Callable[[ProfileRequest], None]) -> None:
        def arrived(future: Future[ProfileRequest]) -> None:
            with contextlib.suppress(Exception):  # the attempt has ended, or the driver is lost
                requested(future.result())
                self.subscribe(requested)

        # The callback runs in a thread of Ray and subscribes again. A request that arrives in
        # between is lost, and its sender times out.
        self.actor.next_request.remote().future().add_done_callback(arrived)


class StopRequest:
    """Driver's end of the control channel of one attempt; its `channel` is sent to the workers."""

    def __init__(self) -> None:
        local_node = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        options = {"num_cpus": 0, "max_concurrency": _MAX_CALLS, "scheduling_strategy": local_node}
        self.channel = RayControlChannel(ray.remote(_Holder).options(**options).remote())
        self.cause: str | None = None
        self._saved_bytes = 0
        self._answer: ray.ObjectRef[int] | None = None

    def saved_bytes(self) -> int:
        """Return the bytes written by the workers' saves, by the actor's latest answer, without
        waiting.
        """
        if self._answer is None:
            self._answer = self.channel.actor.saved_bytes.remote()
        if ray.wait([self._answer], timeout=0)[0]:
            # the cluster is lost, and the deadline does not change
            with contextlib.suppress(ray.exceptions.RayError):
                self._saved_bytes = ray.get(self._answer)
            self._answer = None
        return self._saved_bytes

    def send(self, cause: str) -> None:
        """Ask the workers to save and end. The first cause is kept."""
        if self.cause is None:
            self.cause = cause
            self.channel.actor.send.remote(cause)

    def close(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # the cluster may be gone
            ray.kill(self.channel.actor)
