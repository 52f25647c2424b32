"""Timer of a worker's training phases. Exactly one phase is active at any time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, final

import torch
from torch import distributed

from rayrec.compat.torch_compat import call_at_end_of_backward
from rayrec.observe.timing import PHASES

OTHER = "other"
T = TypeVar("T")


class StepTimer:
    """Timer that does nothing. Subclasses attribute the time from `start` to `stop` to phases
    (`rayrec.observe.timing.PHASES`). For one thread, and threads that work for it while it
    waits.
    """

    measures = False

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.now = OTHER
        """Current phase."""

    def phase(self, name: str) -> _Phase:
        """Return a context that attributes time to `name`, except in nested contexts."""
        return _Phase(self, name)

    def enter(self, name: str) -> str:
        """Switch to a phase and return the previous one. Takes about a microsecond and never
        blocks.
        """
        return name

    def start(self) -> None:
        """Start timing."""

    def stop(self) -> None:
        """Stop timing until the next start."""

    def cut(self) -> None:
        """End an interval and begin the next."""

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase in the last completed interval, empty if not measured.
        The device must have reached the cut: call it after a synchronization that happens
        anyway.
        """
        return {}


@final
class _Phase:
    """Phase context manager that is faster than a generator."""

    __slots__ = ("_before", "_clock", "_name")

    def __init__(self, clock: StepTimer, name: str) -> None:
        self._clock = clock
        self._name = name
        self._before = OTHER

    def __enter__(self) -> None:
        self._before = self._clock.enter(self._name)

    def __exit__(self, *error: object) -> None:
        self._clock.enter(self._before)


@final
class HostTimer(StepTimer):
    """Timer of a process that runs its operators itself."""

    measures = True

    def __init__(self) -> None:
        super().__init__()
        self._running = False
        self._since_s = 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._read = dict.fromkeys(PHASES, 0.0)

    def enter(self, name: str) -> str:
        now_s = time.perf_counter()
        before = self.now
        if self._running:
            self._seconds[before] += now_s - self._since_s
            self._since_s = now_s
        self.now = name
        return before

    def start(self) -> None:
        self._running = True
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since_s = time.perf_counter()

    def stop(self) -> None:
        self._running = False

    def cut(self) -> None:
        self.enter(self.now)
        self._read, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)

    def read(self) -> dict[str, float]:
        return self._read


# Events are recorded when a phase begins, and read after a log's synchronization, so the host never
# waits for them. `cut` moves the events of an interval to `_cut`, and keeps the last one, which
# begins the next interval. Events are reused, because each one takes driver memory.
@final
class DeviceTimer(StepTimer):
    """Timer of a CUDA device with events in the compute stream, which separate waiting from
    overlapped work. Concurrent data loading, copies and collectives in other streams are free. If
    the compute stream waits for them, or for the host, the time counts as theirs.
    """

    measures = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = torch.cuda.current_stream(device)
        self._running = False
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._cut: list[tuple[str, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []

    def enter(self, name: str) -> str:
        before = self.now
        self.now = name
        if self._running:
            self._mark(name)
        return before

    def _mark(self, name: str) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._marks.append((name, event))

    def start(self) -> None:
        self._free += [event for _, event in self._marks]
        self._running = True
        self._marks = []
        self._mark(self.now)

    def stop(self) -> None:
        self._running = False

    def cut(self) -> None:
        if not self._running:
            return
        self._mark(self.now)
        self._cut, self._marks = self._marks, [self._marks[-1]]

    def read(self) -> dict[str, float]:
        seconds = dict.fromkeys(PHASES, 0.0)
        for (name, start), (_, stop) in zip(self._cut, self._cut[1:], strict=False):
            seconds[name] += start.elapsed_time(stop) / 1e3
            self._free.append(start)  # the last event starts the next interval
        self._cut = []
        return seconds


def make_step_timer(device: torch.device, *, measure: bool) -> StepTimer:
    """Return the timer for a device, or one without overhead if not `measure`."""
    if not measure:
        return StepTimer()
    return DeviceTimer(device) if device.type == "cuda" else HostTimer()


@contextlib.contextmanager
def time_collective_waits(clock: StepTimer) -> Iterator[None]:
    """Attribute time that the timer's thread waits for collectives to the phase `collectives`.
    torch has no hook for this, so it temporarily replaces `Work.wait`, which all Python code waits
    through (torch.distributed, TorchRec and rayrec). Threads that save are not affected.
    """
    if not clock.measures:
        yield
        return
    work: Any = distributed.Work
    plain = work.wait

    def wait(self: Any, *arguments: Any, **named: Any) -> Any:
        if threading.get_ident() != clock.owner:
            return plain(self, *arguments, **named)
        with clock.phase("collectives"):
            return plain(self, *arguments, **named)

    work.wait = wait
    try:
        yield
    finally:
        work.wait = plain


def time_gradient_exchange(clock: StepTimer, loss: torch.Tensor) -> None:
    """Attribute the end of the backward pass of `loss` to collectives: DDP and FSDP exchange
    gradients in it, and wait in C++.
    """

    def computed() -> None:
        if clock.now == "backward":  # the code that enter_phase `backward` leaves it after the pass
            clock.enter("collectives")

    if clock.measures and loss.requires_grad:
        # Callbacks run in queue order, so this one runs before those of DDP and FSDP.
        loss.register_hook(lambda gradient: call_at_end_of_backward(computed))


@final
class TimedOptimizer:
    """Optimizer wrapper for pipelines that times the calls."""

    def __init__(self, optimizer: Any, clock: StepTimer) -> None:
        self._optimizer = optimizer
        self._clock = clock

    def zero_grad(self) -> None:
        with self._clock.phase("optimizer"):
            self._optimizer.zero_grad()

    def step(self) -> None:
        with self._clock.phase("optimizer"):
            self._optimizer.step()


def timed(method: Callable[..., T], phase: str) -> Callable[..., T]:
    """Return a method of a class with a `_clock` that attributes its time to a phase."""

    def call(self: Any, *arguments: Any) -> T:
        with self._clock.phase(phase):
            return method(self, *arguments)

    return call


def time_forward(model: torch.nn.Module, clock: StepTimer) -> None:
    """Attribute forward passes of the model to the phase `forward`."""
    if clock.measures:
        model.register_forward_pre_hook(lambda module, inputs: enter_phase(clock, "forward"))
        model.register_forward_hook(lambda module, inputs, output: enter_phase(clock, OTHER))


def enter_phase(clock: StepTimer, name: str) -> None:
    clock.enter(name)
