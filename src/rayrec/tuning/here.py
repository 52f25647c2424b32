"""Trials in this process, one after the other."""

from __future__ import annotations

from collections import deque
from typing import final

from rayrec.tuning.trials import Job, train_part


@final
class HerePool:
    """See `rayrec.tuning.halving.Pool`. A signal reaches the trial that trains."""

    def __init__(self) -> None:
        self._queue: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def next(self) -> Job:
        job = self._queue.popleft()
        train_part(job)
        return job
