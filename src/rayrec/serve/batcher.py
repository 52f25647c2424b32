"""Dynamic batching without delay: requests that arrive while the model is busy form the next batch.
Small batches are scored in the event loop, because a round trip to a thread takes longer than
scoring.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeAlias, TypeVar, final

from rayrec.serve.config import ServeConfig
from rayrec.serve.requests import RequestError

_RETRY: Final = {"retry-after": "1"}
INLINE_ROWS: Final = 64
"""Maximum rows scored in the event loop, which takes less than a millisecond."""
INLINE_BYTES: Final = 64 << 10
"""Maximum bytes scored in the event loop, because list columns have any number of values."""


class Body(Protocol):
    """Request with rows."""

    @property
    def num_rows(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


_Body = TypeVar("_Body", bound=Body)
_Answer = TypeVar("_Answer")
Outcomes: TypeAlias = Sequence[_Answer | RequestError]
"""Answer or error of each body of a batch."""


@dataclass(frozen=True, eq=False)
class _Job(Generic[_Body, _Answer]):
    body: _Body
    answer: asyncio.Future[_Answer]


@final
class Batcher(Generic[_Body, _Answer]):
    """Request queue that feeds the model in order. Use it from one event loop."""

    def __init__(
        self,
        score: Callable[[Sequence[_Body]], Outcomes[_Answer]],
        config: ServeConfig,
        *,
        inline: bool = True,
    ) -> None:
        """`score` returns one answer per body and is called by one thread at a time. Batches of a
        single body have no limits. Unless `inline`, small ones are scored in the thread,
        too.
        """
        self._inline = inline
        self._score = score
        self._max_batch_rows = config.max_batch_rows
        self._max_batch_bytes = config.max_batch_bytes
        self._max_waiting_rows = config.max_waiting_rows
        self._max_waiting_requests = config.max_waiting_requests
        self._waiting: deque[_Job[_Body, _Answer]] = deque()
        self._at_work = False
        # One thread: models have state for one batch at a time, and torch's operators use several
        # cores anyway. The event loop reads the next requests meanwhile.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score")
        self.waiting_rows = 0

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    async def submit(self, body: _Body) -> _Answer:
        """Score a body. Raises RequestError if `score` rejects it or the queue is full. Cancel to
        stop waiting.
        """
        too_many = len(self._waiting) >= self._max_waiting_requests
        # An empty queue accepts a body larger than the limit, which would never be scored
        # otherwise.
        if too_many or (
            self._waiting and self.waiting_rows + body.num_rows > self._max_waiting_rows
        ):
            raise RequestError(503, "too many rows are waiting; retry later", headers=_RETRY)
        # A request waits, is scored in a batch, and is answered. A cancelled one leaves the queue,
        # but not a batch that is being scored: its answer is dropped.
        job = _Job(body, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self.waiting_rows += body.num_rows
        if not self._at_work:
            self._at_work = True
            # Runs after the callbacks that are ready now, so that their requests join the batch.
            asyncio.get_running_loop().call_soon(self._begin)
        try:
            return await job.answer
        except asyncio.CancelledError:
            if job in self._waiting:
                self._waiting.remove(job)
                self.waiting_rows -= body.num_rows
            raise

    def _begin(self) -> None:
        """Score waiting batches until none is left or one runs in the thread."""
        while jobs := self._next():
            bodies = [job.body for job in jobs]
            num_rows = sum(body.num_rows for body in bodies)
            num_bytes = sum(body.num_bytes for body in bodies)
            is_small = num_rows <= INLINE_ROWS and num_bytes <= INLINE_BYTES
            if not (is_small and self._inline):
                work = asyncio.get_running_loop().run_in_executor(self._thread, self._score, bodies)
                work.add_done_callback(functools.partial(self._finish, jobs))
                return
            try:
                outcomes: Outcomes[_Answer] | BaseException = self._score(bodies)
            except Exception as error:  # Passed to the callers, as from the thread
                outcomes = error
            _answer(jobs, outcomes)
        self._at_work = False

    def _next(self) -> list[_Job[_Body, _Answer]]:
        jobs: list[_Job[_Body, _Answer]] = []
        rows = num_bytes = 0
        while self._waiting:
            body = self._waiting[0].body
            rows, num_bytes = rows + body.num_rows, num_bytes + body.num_bytes
            if jobs and (rows > self._max_batch_rows or num_bytes > self._max_batch_bytes):
                break
            self.waiting_rows -= body.num_rows
            jobs.append(self._waiting.popleft())
        return jobs

    def _finish(
        self,
        jobs: list[_Job[_Body, _Answer]],
        done: asyncio.Future[Outcomes[_Answer]],
    ) -> None:
        self._begin()  # First, so that the thread has work while answers are written
        error = (
            RequestError(503, "the server is stopping", headers=_RETRY)
            if done.cancelled()
            else done.exception()
        )
        _answer(jobs, error or done.result())

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _answer(jobs: list[_Job], outcomes: Outcomes[_Answer] | BaseException) -> None:
    """Pass each job its part of the batch result, or the error of the batch."""
    for number, job in enumerate(jobs):
        outcome = outcomes if isinstance(outcomes, BaseException) else outcomes[number]
        if job.answer.done():  # The caller gave up
            continue
        if isinstance(outcome, BaseException):
            job.answer.set_exception(outcome)
        else:
            job.answer.set_result(outcome)
