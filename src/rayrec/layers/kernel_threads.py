"""Native kernels that run in the threads of torch's operators."""

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch

from rayrec.native import c_fields, library

Kernel = Any
"""Function of `library()` that kernels.h declares as a `rayrec_kernel`."""


@cache
def vectorized(name: str) -> Kernel:
    """Return the kernel's variant for this CPU, of those that `native/each_cpu.h` compiles, with torch's criterion."""
    suffix = {"AVX2": "_avx2", "AVX512": "_avx512"}.get(torch.backends.cpu.get_cpu_capability(), "")
    return getattr(library(), name + suffix)


def run_kernel(kernel: Kernel, arguments: Any, count: int, *, at_once: int) -> None:
    """Run `kernel(arguments, start, stop)` over 0 to `count`, `at_once` at a time, in as many threads as torch has.

    `arguments` is a ctypes structure or array. Uses the threads of torch's OpenMP library: they stay awake for a while after an
    operator, and other threads would take their CPUs (measured: 5 % longer DLRM steps). If torch has no OpenMP, the kernel runs
    in the calling thread. Raises MemoryError.
    """
    work = _CWork(ctypes.cast(kernel, ctypes.c_void_p), ctypes.addressof(arguments), count, at_once, 0, 0)
    num_threads = min(torch.get_num_threads(), -(-count // at_once))
    parallel = openmp_parallel() if num_threads > 1 else None
    if parallel is None:
        _take_part()(ctypes.byref(work))
    else:
        parallel(_take_part(), ctypes.byref(work), num_threads, 0)
    if work.failed:
        raise MemoryError(f"{kernel.__name__}: out of memory")


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
    """Return `GOMP_parallel(function, data, num_threads, flags)` of torch's OpenMP library (GNU, LLVM, Intel), or None."""
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
    return function
