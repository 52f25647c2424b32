"""Records whole steps of a worker with torch.profiler, and leaves what it saw in files that other tools open."""

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
from rayrec.training.stop_monitor import ControlChannel, ProfileRequest
from rayrec.workloads.base import WorkerContext
from rayrec.workloads.run_config import MOST_PROFILED_STEPS

TIMELINE: Final = "ray_timeline.json"
"""What Ray's tasks did, as a trace; beside the folders of the ranks."""
_PATIENCE_S: Final = 10.0
"""With a store that is out: the end of an attempt waits for this."""

_logger = logging.getLogger(__name__)


@final
class StepProfiler:
    """One worker's profiler. While nobody asks for anything, a step costs it two comparisons.

    What is recorded appears in FOLDER/NAME/rank_N/trace.json.gz (Chrome's trace format, for Perfetto or chrome://tracing). A
    thread writes it, so that training continues; it shares Python's interpreter lock with it. `written(window)` and
    `failed(window, cause)` are called from that thread, `failed` also from the one that trains. Whatever goes wrong is told so,
    and nothing of it reaches training.
    """

    def __init__(
        self,
        folder: str,
        *,
        rank: int,
        device: torch.device,
        memory: bool = True,
        stack: bool = False,
        written: Callable[[Window], None],
        failed: Callable[[Window, str], None],
    ) -> None:
        self._folder, self._rank, self._device = folder, rank, device
        self._memory, self._stack = memory, stack
        self._written, self._failed = written, failed
        self._asked: Window | None = None
        self._active: _Recording | None = None
        self._writers: list[threading.Thread] = []

    def ask(self, window: Window) -> None:
        """Records these steps, 200 at most, or, where they are past, as many from the next one on. Any thread may call it; one
        request at a time waits, the last; the one before it is reported as failed."""
        before, self._asked = self._asked, window
        if before is not None:
            self._failed(before, "another profile was asked for before this one began")

    def begin_step(self, step: int) -> None:
        """Called before each step; `step` are done."""
        active = self._active
        if active is not None:
            if step >= active.end:
                self._finish(active)
            else:
                self._mark(active, step)
        elif self._asked is not None and step >= self._asked.first:
            self._begin(self._asked, step)

    def close(self) -> None:
        """Ends a recording that is on, and returns when all is written. A request that still waits has failed."""
        waiting, self._asked = self._asked, None
        if waiting is not None:
            self._failed(waiting, f"training ended, or was interrupted, before step {waiting.first + 1:,}")
        if self._active is not None:
            self._finish(self._active)
        for writer in self._writers:
            writer.join()

    def _begin(self, window: Window, step: int) -> None:
        self._asked = None
        if window.end - window.first > MOST_PROFILED_STEPS:
            self._failed(window, f"{window.end - window.first:,} steps; at most {MOST_PROFILED_STEPS} fit into memory")
            return
        end = window.end if step < window.end else step + window.end - window.first
        try:
            recording = _Recording(window, end, self._device, memory=self._memory, stack=self._stack)
        except Exception as error:  # another profiler is at work in this process, dynolog's for one
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
        writer = threading.Thread(target=self._write, args=(recording,), name="profile", daemon=True)
        try:
            recording.stop()
            writer.start()
        except Exception as error:  # too little memory, or no more threads
            self._failed(recording.window, str(error))
        else:
            self._writers.append(writer)

    def _write(self, recording: _Recording) -> None:
        target = storage.join(self._folder, recording.window.name, f"rank_{self._rank}")
        try:
            with storage.patience(_PATIENCE_S), storage.writing_folder(target) as folder:
                recording.write(folder)
        except Exception as error:  # a full disk, a store that is out: a profile is never worth a run
            _logger.warning("%s: not written (%s)", target, error)
            self._failed(recording.window, str(error))
        else:
            self._written(recording.window)


@final
class _Recording:
    """torch.profiler at work."""

    def __init__(self, window: Window, end: int, device: torch.device, *, memory: bool, stack: bool) -> None:
        self.window, self.end = window, end
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, profile_memory=memory, with_stack=stack)
        self._profile.start()
        self._step: record_function | None = None

    def mark(self, step: int) -> None:
        """A step begins, and with it the one before has ended."""
        self._leave()
        self._step = record_function(f"step {step + 1}")
        self._step.__enter__()

    def _leave(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def stop(self) -> None:
        self._leave()
        self._profile.stop()

    def write(self, folder: str) -> None:
        """Writes the trace into a local folder."""
        self._profile.export_chrome_trace(os.path.join(folder, TRACE))


def make_profiler(
    worker: WorkerContext, folder: str, channel: ControlChannel, log: Callable[[str, dict[str, Any]], None]
) -> StepProfiler:
    """The profiler of one worker: it records what the configuration says, and what `channel` is asked for. Worker 0 logs its
    profile, every worker that it has none."""
    config = worker.config.profile
    target = profile_folder(folder)
    place = storage.join(folder, "events.jsonl")

    def written(window: Window) -> None:
        if worker.rank == 0:
            _write_timeline(storage.join(target, window.name, TIMELINE))
            path = storage.join(target, window.name)
            fields = {"step": window.first, "end": window.end, "name": window.name, "path": path}
            log("profile", {**fields, "rank": 0, "ranks": worker.world_size})

    def failed(window: Window, cause: str) -> None:
        fields = {"step": window.first, "name": window.name, "rank": worker.rank, "cause": cause}
        if worker.rank == 0:
            log("profile_failed", fields)
            return
        with EventWriter(place) as events:  # `log` is worker 0's; the others have nothing else to tell
            events.write("profile_failed", **fields)

    profiler = StepProfiler(
        target, rank=worker.rank, device=worker.device, memory=config.memory, stack=config.stack, written=written, failed=failed
    )
    steps = config.window()
    if steps is not None:
        window = Window(f"step_{steps[0]:08d}", *steps)
        if not storage.exists(storage.join(target, window.name, f"rank_{worker.rank}")):  # by an earlier attempt
            profiler.ask(window)

    def requested(request: ProfileRequest) -> None:
        profiler.ask(Window(**request))

    channel.subscribe(requested)
    return profiler


def profiled(begin_step: Callable[[int, int], None], profiler: StepProfiler) -> Callable[[int, int], None]:
    """`WorkerSetup.begin_step` that tells the profiler too."""

    def begin(step: int, total: int) -> None:
        profiler.begin_step(step)
        begin_step(step, total)

    return begin


def _write_timeline(path: str) -> None:
    """What Ray's tasks did; nothing if none ran, since the process is connected to no Ray."""
    if not connection.is_connected():
        return
    import ray

    try:
        with storage.writing(path) as local:
            ray.timeline(filename=local)
    except Exception as error:  # Ray keeps it where it can; a profile without it is one too
        _logger.warning("%s: not written (%s)", path, error)
