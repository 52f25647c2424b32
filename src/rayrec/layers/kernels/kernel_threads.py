"""Threads of torch's operators: native kernels run in them, and their waits are short while other
processes use the CPUs.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, final

import torch

from rayrec.native import c_fields, library

Kernel = Any
"""Function of `library()` that kernels.h declares as a `rayrec_kernel`."""


@cache
def vectorized(name: str) -> Kernel:
    """Return the kernel's variant for this CPU, of those that `native/each_cpu.h` compiles, with
    torch's criterion.
    """
    suffix = {"AVX2": "_avx2", "AVX512": "_avx512"}.get(torch.backends.cpu.get_cpu_capability(), "")
    return getattr(library(), name + suffix)


def uses_kernels(tensor: torch.Tensor) -> bool:
    """Return whether native kernels may read `tensor`: on a CPU, and not while torch.export or
    torch.compile trace, which need torch's operators.
    """
    return tensor.is_cpu and not torch.compiler.is_compiling()


def run_kernel(kernel: Kernel, arguments: Any, count: int, *, at_once: int) -> None:
    """Run `kernel(arguments, start, stop)` over 0 to `count`, `at_once` at a time, in as many
    threads as torch has.

    `arguments` is a ctypes structure or array. Uses the threads of torch's OpenMP library: they
    stay awake for a while after an operator, and other threads would take their CPUs (measured: 5 %
    longer DLRM steps). If torch has no OpenMP, the kernel runs in the calling thread. Raises
    MemoryError.
    """
    # An address is no reference. `arguments` is a parameter, and so outlives the parallel region.
    work = _CWork(
        ctypes.cast(kernel, ctypes.c_void_p), ctypes.addressof(arguments), count, at_once, 0, 0
    )
    num_threads = min(torch.get_num_threads(), -(-count // at_once))
    parallel = openmp_parallel() if num_threads > 1 else None
    if parallel is None:
        _take_part()(ctypes.byref(work))
    else:
        # Returns when all threads have ended, and the GIL is released meanwhile. No thread calls
        # Python.
        parallel(_take_part(), ctypes.byref(work), num_threads, 0)
    if work.failed:
        raise MemoryError(f"{kernel.__name__}: out of memory")


# All threads of one `run_kernel` share this structure, which is a variable of that call:
#
#   kernel, arguments   of the caller, which keeps the arguments
#   count, at_once      constant
#   next                threads take items by adding to it atomically
#   failed              a thread sets it if memory is exhausted; read after all have ended
class _CWork(ctypes.Structure):
    """Mirror of rayrec_work in native/kernels.h."""

    _fields_ = c_fields("void* kernel arguments; int64 count at_once next; int32 failed")


@lru_cache(maxsize=1)
def _take_part() -> Kernel:
    function = library().rayrec_take_part
    function.argtypes = [ctypes.c_void_p]
    function.restype = None
    return function


@lru_cache(maxsize=1)
def openmp_parallel() -> Kernel | None:
    """Return `GOMP_parallel(function, data, num_threads, flags)` of torch's OpenMP library (GNU,
    LLVM, Intel), or None.
    """
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
    return function


# -- shorter waits under contention

_INTERVAL_S = 0.1
_WAITING = 0.45
"""Minimum share of its runnable time that a thread waits for a CPU under contention. Measured on 2
cores: 0.1 at the median next to data tasks of the same run, and 0.5 or more next to one busy
process.
"""
_CONTENDED_INTERVALS = 5
"""Number of consecutive contended intervals before waits are shortened. Process starts of a run
take fewer.
"""
_RUNNABLE = 0.2
"""Minimum runnable share of an interval for a thread to count."""
_MIN_SHORT_S = 1.0
_MAX_SHORT_S = 60.0
_MAX_CPUS = 64
"""Maximum CPU count. On larger machines, waits stay unchanged: shortening them costs an idle thread
per CPU.
"""
_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@final
class CpuWatch:
    """Thread that measures how long the operator threads of the calling thread wait for a CPU,
    until `close`. Between two operators, the threads of GNU's OpenMP library, which torch uses on
    CPU, spin for some milliseconds before they sleep. This is fastest on idle CPUs. If other
    processes use the CPUs, threads spin for a thread without a CPU, and training is up to 80 times
    slower. During contention, waits are 3,000 times shorter, unless the environment sets them
    (OMP_WAIT_POLICY, GOMP_SPINCOUNT). Results are bit-identical. Without
    /proc/PID/task/TID/schedstat nothing is measured.
    """

    def __init__(self, on_contention: Callable[[float], None] = lambda waiting: None) -> None:
        """Start the thread. It calls `on_contention` once, with the share of its runnable time that
        an operator thread waited.
        """
        self._on_contention: Callable[[float], None] | None = on_contention
        self._paths: Final = [
            Path(f"/proc/self/task/{thread}/schedstat")
            for thread in _run_in_team(torch.get_num_threads())
        ]
        self._short: Final = _ShortWaits() if _can_shorten_waits(len(self._paths)) else None
        # Also the wait between two measurements, so that `close` returns at once.
        self._ended: Final = threading.Event()
        # A daemon without locks: `on_contention` may be in a store when the process ends.
        self._thread: Final = threading.Thread(
            target=self._run, name="rayrec-cpu-watch", daemon=True
        )
        if self._paths and self._paths[0].exists():
            self._thread.start()

    def close(self) -> None:
        """Stop the thread and restore long waits."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        policy = WaitPolicy()
        before = [_run_and_wait_ns(path) for path in self._paths]
        while not self._ended.wait(_INTERVAL_S):
            now = [_run_and_wait_ns(path) for path in self._paths]
            waiting = waiting_share(before, now)
            before = now
            short = policy.update(waiting, time.monotonic())
            if self._short is not None:
                self._short.set(short)
            if short and self._on_contention is not None:
                self._on_contention(waiting)  # May wait for a store
                self._on_contention = None
        if self._short is not None:
            self._short.set(False)


# States of the waits:
#
#   state    interval is contended                         interval is not
#   long     short after _CONTENDED_INTERVALS in a row     stays long; the next trial is after 1 s
#   short    stays until its time is over                  the same: short waits hide contention
#   trial    short again, for twice as long, up to 60 s    long
@final
class WaitPolicy:
    """Decision when to shorten waits: after half a second of contention. Then tries long waits for
    one interval after 1 s, and during further contention after 2, 4, ... 60 s. Pure.
    """

    def __init__(self) -> None:
        self._contended = 0
        self._short_s = _MIN_SHORT_S
        self._until_s: float | None = None

    def update(self, waiting: float, now_s: float) -> bool:
        """Return whether waits are short in the next interval. `waiting`: share of the last one,
        from `waiting_share`.
        """
        if self._until_s is not None:
            if now_s < self._until_s:
                return True
            # One more suffices
            self._until_s = None
            self._contended = _CONTENDED_INTERVALS - 1
            self._short_s = min(2 * self._short_s, _MAX_SHORT_S)
            return False
        self._contended = self._contended + 1 if waiting >= _WAITING else 0
        if not self._contended:
            self._short_s = _MIN_SHORT_S
        if self._contended < _CONTENDED_INTERVALS:
            return False
        self._until_s = now_s + self._short_s
        return True


def waiting_share(before: Sequence[tuple[int, int]], now: Sequence[tuple[int, int]]) -> float:
    """Return the maximum share of its runnable time that a thread waited for a CPU. Ignores threads
    that were runnable for less than a fifth of the interval. Arguments are (running, waiting) of
    each thread since its start, in ns. Pure.
    """
    ratios = [0.0]
    for (run_before, wait_before), (run, wait) in zip(before, now, strict=True):
        runnable = run - run_before + wait - wait_before
        if runnable > _RUNNABLE * _INTERVAL_S * 1e9:
            ratios.append((wait - wait_before) / runnable)
    return max(ratios)


def _run_and_wait_ns(path: Path) -> tuple[int, int]:
    try:
        run, wait, _ = path.read_text().split()
    except OSError:  # The thread has ended
        return 0, 0
    return int(run), int(wait)


# `ids` is a ctypes array, which the structure keeps alive. Threads write to distinct places of it.
class _CTeam(ctypes.Structure):
    """Mirror of rayrec_team in native/kernels.h."""

    _fields_ = c_fields("int64* ids; int64 capacity count")


def _run_in_team(num_threads: int) -> list[int]:
    """Start `num_threads` OpenMP threads of the calling thread and return their Linux thread
    ids.
    """
    ids = (ctypes.c_int64 * num_threads)()
    team = _CTeam(ids, num_threads, 0)
    parallel = openmp_parallel()
    if parallel is None or num_threads == 1:
        return [threading.get_native_id()]
    parallel(
        # GNU's entry point of a parallel region: each of its threads calls the function with the
        # team. It returns after the last one, so that `team` and `ids` may be local.
        ctypes.cast(library().rayrec_add_thread_id, ctypes.c_void_p),
        ctypes.byref(team),
        num_threads,
        0,
    )
    return list(ids[: team.count])


def _can_shorten_waits(num_threads: int) -> bool:
    """Return whether this is GNU's library, on a small enough machine, and without user settings
    for waits.
    """
    is_set = any(name in os.environ for name in _WAIT_VARIABLES)
    gnu = openmp_parallel() is not None and not hasattr(ctypes.CDLL(None), "kmp_set_blocktime")
    return num_threads > 1 and gnu and not is_set and len(os.sched_getaffinity(0)) <= _MAX_CPUS


@final
class _ShortWaits:
    """Switch for short waits of all OpenMP threads in this process. GNU's library spins 100 instead
    of 300,000 times if it has more threads than CPUs (`gomp_throttled_spin_count_var`). A thread of
    ours keeps an idle OpenMP thread per CPU.
    """

    def __init__(self) -> None:
        self._released: threading.Event | None = None
        self._keeper: threading.Thread | None = None

    def set(self, short: bool) -> None:
        """Make waits short or long, effective on return."""
        if short and self._released is None:
            # Two events, because waits change only when the team exists, and back only when it has
            # ended.
            started = threading.Event()
            self._released = threading.Event()
            # Only the thread that started a team of OpenMP can keep it, so this is one of our own.
            self._keeper = threading.Thread(
                target=_keep_team,
                args=(started, self._released),
                name="rayrec-idle-team",
                daemon=True,
            )
            self._keeper.start()
            started.wait()
        elif not short and self._released is not None and self._keeper is not None:
            self._released.set()
            self._keeper.join()
            self._released = self._keeper = None


def _keep_team(started: threading.Event, released: threading.Event) -> None:
    _run_in_team(len(os.sched_getaffinity(0)) + 1)
    started.set()
    released.wait()
