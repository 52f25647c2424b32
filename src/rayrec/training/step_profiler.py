"""Profiler that records full steps of a worker with torch.profiler and writes standard trace
files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rayrec import storage
from rayrec.cluster import connection
from rayrec.observe.events import EventWriter
from rayrec.training.profiling import TRACE, Window, profile_folder
from rayrec.training.stop_monitor import ControlChannel
from rayrec.workloads.base import WorkerContext
from rayrec.workloads.run_config import MAX_PROFILED_STEPS

TIMELINE: Final = "ray_timeline.json"
"""Trace of Ray's tasks, next to the folders of the ranks."""
_PATIENCE_S: Final = 10.0
"""Timeout for an unavailable store, which delays the end of an attempt."""

_logger = logging.getLogger(__name__)


@final
class StepProfiler:
    """Profiler of one worker. Without a request, a step costs two comparisons. A thread writes each
    recording to FOLDER/NAME/rank_N/trace.json.gz (Chrome's trace format, for Perfetto or
    chrome://tracing), so that training continues, but shares Python's interpreter lock. It calls
    `written(window)` or `failed(window, cause)`; the training thread may also call `failed`. No
    error of the profiler reaches training.
    """

    def __init__(
        self,
        folder: str,
        *,
        rank: int,
        device: torch.device,
        memory: bool = True,
        stack: bool = False,
        on_saved: Callable[[Window], None],
        on_failed: Callable[[Window, str], None],
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._device = device
        self._memory = memory
        self._stack = stack
        self._written = on_saved
        self._failed = on_failed
        self._requested: Window | None = None
        self._active: _Recording | None = None
        self._writers: list[threading.Thread] = []

    def request(self, window: Window) -> None:
        """Record these steps, 200 at most, or equally many from the next step if they are past. Any
        thread may call it. Only the last request waits; the one before is reported as failed.
        """
        before, self._requested = self._requested, window
        if before is not None:
            self._failed(before, "another profile was requested before this one began")

    def begin_step(self, step: int) -> None:
        """Advance the profiler; called before each step, after `step` completed steps."""
        active = self._active
        if active is not None:
            if step >= active.end:
                self._finish(active)
            else:
                self._mark(active, step)
        elif self._requested is not None and step >= self._requested.first:
            self._begin(self._requested, step)

    def close(self) -> None:
        """End an active recording and wait until all recordings are written. A waiting request
        fails.
        """
        waiting, self._requested = self._requested, None
        if waiting is not None:
            self._failed(
                waiting, f"training ended, or was interrupted, before step {waiting.first + 1:,}"
            )
        if self._active is not None:
            self._finish(self._active)
        for writer in self._writers:
            writer.join()

    def _begin(self, window: Window, step: int) -> None:
        self._requested = None
        if window.end - window.first > MAX_PROFILED_STEPS:
            self._failed(
                window,
                f"{window.end - window.first:,} steps; at most {MAX_PROFILED_STEPS} fit into "
                "memory",
            )
            return
        end = window.end if step < window.end else step + window.end - window.first
        try:
            recording = _Recording(
                window, end, self._device, memory=self._memory, stack=self._stack
            )
        except Exception as error:  # e.g. another profiler in this process, such as dynolog's
            self._failed(window, str(error))
            return
        self._active = recording
        self._mark(recording, step)

    def _mark(self, recording: _Recording, step: int) -> None:
        try:
            recording.mark(step)
        except Exception as error:
            self._active = None
            with contextlib.suppress(Exception):
                recording.stop()
            self._failed(recording.window, str(error))

    def _finish(self, recording: _Recording) -> None:
        self._active = None
        # A trace of 200 steps takes seconds to write, which must not stall all workers' next step.
        # `close` waits for it, so that the process does not end with half a file.
        writer = threading.Thread(
            target=self._write, args=(recording,), name="profile", daemon=True
        )
        try:
            recording.stop()
            writer.start()
        except Exception as error:  # out of memory or threads
            self._failed(recording.window, str(error))
        else:
            self._writers.append(writer)

    def _write(self, recording: _Recording) -> None:
        target = storage.join(self._folder, recording.window.name, f"rank_{self._rank}")
        try:
            with storage.retry_timeout(_PATIENCE_S), storage.writing_folder(target) as folder:
                recording.write(folder)
        except (
            Exception
        ) as error:  # e.g. a full disk or an unavailable store; must not fail the run
            _logger.warning("%s: not written (%s)", target, error)
            self._failed(recording.window, str(error))
        else:
            self._written(recording.window)


@final
class _Recording:
    def __init__(
        self, window: Window, end: int, device: torch.device, *, memory: bool, stack: bool
    ) -> None:
        self.window = window
        self.end = end
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, profile_memory=memory, with_stack=stack)
        self._profile.start()
        self._step = contextlib.ExitStack()

    def mark(self, step: int) -> None:
        self._step.close()
        self._step.enter_context(record_function(f"step {step + 1}"))

    def stop(self) -> None:
        self._step.close()
        self._profile.stop()

    def write(self, folder: str) -> None:
        self._profile.export_chrome_trace(os.path.join(folder, TRACE))


def make_profiler(
    worker: WorkerContext,
    folder: str,
    channel: ControlChannel,
    log: Callable[[str, dict[str, Any]], None],
) -> StepProfiler:
    """Return a worker's profiler for the configured window and requests from `channel`. Rank 0 logs
    profiles, all log errors.
    """
    config = worker.config.profile
    target = profile_folder(folder)
    events_path = storage.join(folder, "events.jsonl")

    def on_saved(window: Window) -> None:
        if worker.rank == 0:
            path = storage.join(target, window.name)
            _write_timeline(storage.join(path, TIMELINE))
            fields = {"step": window.first, "end": window.end, "name": window.name, "path": path}
            log("profile", {**fields, "rank": 0, "ranks": worker.world_size})

    def on_failed(window: Window, cause: str) -> None:
        fields = {"step": window.first, "name": window.name, "rank": worker.rank, "cause": cause}
        if worker.rank == 0:
            log("profile_failed", fields)
            return
        with EventWriter(events_path) as events:  # only worker 0's `log` writes events
            events.write("profile_failed", **fields)

    profiler = StepProfiler(
        target,
        rank=worker.rank,
        device=worker.device,
        memory=config.memory,
        stack=config.stack,
        on_saved=on_saved,
        on_failed=on_failed,
    )
    steps = config.window()
    if steps is not None:
        window = Window(f"step_{steps[0]:08d}", *steps)
        # recorded by an earlier attempt
        if not storage.exists(storage.join(target, window.name, f"rank_{worker.rank}")):
            profiler.request(window)

    channel.subscribe(lambda request: profiler.request(Window(**request)))
    return profiler


def profiled(
    begin_step: Callable[[int, int], None], profiler: StepProfiler
) -> Callable[[int, int], None]:
    """Return `WorkerSetup.begin_step` extended by the profiler."""

    def begin(step: int, total: int) -> None:
        profiler.begin_step(step)
        begin_step(step, total)

    return begin


def _write_timeline(path: str) -> None:
    """Write a trace of Ray's tasks, if the process is connected to Ray."""
    if not connection.is_connected():
        return
    import ray

    try:
        with storage.writing(path) as local:
            ray.timeline(filename=local)
    except Exception as error:  # a profile is useful without the timeline
        _logger.warning("%s: not written (%s)", path, error)
