"""Accounts for a worker's training time: a clock that is always in exactly one phase, and changes with every event."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, final

import torch
from torch import distributed

from rayrec.compat.torch_compat import call_at_end_of_backward
from rayrec.observe.timing import PHASES

OTHER = "other"


class StepClock:
    """Attributes the time between `start` and `stop` to phases (`rayrec.observe.timing.PHASES`). For one thread, and those
    that work for it while it waits. This one measures nothing."""

    measures = False

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.now = OTHER
        """The phase it is in."""

    def phase(self, name: str) -> _Phase:
        """A context within which time belongs to `name`, save what belongs to contexts inside it."""
        return _Phase(self, name)

    def enter(self, name: str) -> str:
        """From now on time belongs to this phase; returns the one before. Costs about a microsecond and waits for nothing."""
        return name

    def start(self) -> None:
        """A stretch of training begins."""

    def stop(self) -> None:
        """It ends: until the next start no time is counted."""

    def cut(self) -> None:
        """An interval ends here and the next begins."""

    def read(self) -> dict[str, float]:
        """Seconds by phase of the interval that was cut last, all phases; empty where none are measured. The device must
        have come to the cut already: call it behind something that waited for that anyhow."""
        return {}


@final
class _Phase:
    """A context manager without the cost of a generator."""

    __slots__ = ("_before", "_clock", "_name")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock, self._name, self._before = clock, name, OTHER

    def __enter__(self) -> None:
        self._before = self._clock.enter(self._name)

    def __exit__(self, *error: object) -> None:
        self._clock.enter(self._before)


@final
class HostClock(StepClock):
    """The time of a process whose operators run in it."""

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


@final
class DeviceClock(StepClock):
    """The time of a CUDA device, by events in the stream that computes: what it waits for is told apart from what overlaps.

    Data, copies and collectives that other streams do meanwhile cost nothing here; where the computing stream has to wait
    for them, or for this process, the time is theirs.
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
        self._running, self._marks = True, []
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
            self._free.append(start)  # the last one begins the next interval
        self._cut = []
        return seconds


def step_clock(device: torch.device, *, measure: bool) -> StepClock:
    """The clock for a device; `measure` False: one that costs nothing."""
    if not measure:
        return StepClock()
    return DeviceClock(device) if device.type == "cuda" else HostClock()


@contextlib.contextmanager
def waits_noticed(clock: StepClock) -> Iterator[None]:
    """Within it, what the clock's thread waits for in collectives belongs to these.

    torch has no hook there, so the one method through which Python code waits (torch.distributed's own, TorchRec's, ours) is
    replaced meanwhile. Threads that save are not concerned.
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


def notice_exchange(clock: StepClock, loss: torch.Tensor) -> None:
    """What the backward pass of `loss` still waits for, once it has computed, belongs to collectives: DDP and FSDP exchange
    gradients while it computes, and wait for the rest at its end, in C++."""
    if clock.measures and loss.requires_grad:
        loss.register_hook(partial(_at_the_end, clock))


def _at_the_end(clock: StepClock, gradient: torch.Tensor) -> None:
    # Callbacks are called in the order they are queued in, and theirs follow.
    call_at_end_of_backward(partial(_computed, clock))


def _computed(clock: StepClock) -> None:
    if clock.now == "backward":  # the code that entered it leaves it after the pass
        clock.enter("collectives")


@final
class TimedOptimizer:
    """What a pipeline calls of an optimizer, timed."""

    def __init__(self, optimizer: Any, clock: StepClock) -> None:
        self._optimizer, self._clock = optimizer, clock

    def zero_grad(self) -> None:
        with self._clock.phase("optimizer"):
            self._optimizer.zero_grad()

    def step(self) -> None:
        with self._clock.phase("optimizer"):
            self._optimizer.step()


def time_forward(model: torch.nn.Module, clock: StepClock) -> None:
    """Forward passes of the model belong to their phase."""
    if clock.measures:
        model.register_forward_pre_hook(lambda module, inputs: entered(clock, "forward"))
        model.register_forward_hook(lambda module, inputs, output: entered(clock, OTHER))


def entered(clock: StepClock, name: str) -> None:
    clock.enter(name)
