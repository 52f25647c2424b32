"""Native kernels in the threads of torch's operators."""

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch

from rayrec.native import library

Kernel = Any
"""A function of `library()` that kernels.h declares as a `rayrec_kernel`."""


@cache
def vectorized(name: str) -> Kernel:
    """The kernel of this name for this CPU, where `native/each_cpu.h` compiles it for several: by what torch's operators use."""
    suffix = {"AVX2": "_avx2", "AVX512": "_avx512"}.get(torch.backends.cpu.get_cpu_capability(), "")
    return getattr(library(), name + suffix)


def run_kernel(kernel: Kernel, arguments: Any, count: int, *, at_once: int) -> None:
    """`kernel(arguments, start, stop)` for all of 0 to `count`, so many at once, in as many threads as torch has. `arguments`: a
    structure or an array of ctypes.

    The threads are those of the OpenMP library that torch's operators use: they stay awake for a while after an operator, and
    others beside them would take their CPUs (measured: a step of DLRM took 5 % longer). A torch without OpenMP computes its
    operators by other means; kernels run in the calling thread there. Raises MemoryError.
    """
    work = _CWork(ctypes.cast(kernel, ctypes.c_void_p), ctypes.addressof(arguments), count, at_once, 0, 0)
    num_threads = min(torch.get_num_threads(), -(-count // at_once))
    parallel = openmp_parallel() if num_threads > 1 else None
    if parallel is None:
        _take_part()(ctypes.byref(work))
    else:
        parallel(_take_part(), ctypes.byref(work), num_threads, 0)
    if work.failed:
        raise MemoryError(f"no memory for a kernel ({kernel.__name__})")


class _CWork(ctypes.Structure):
    """rayrec_work of native/kernels.h."""

    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("at_once", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("failed", ctypes.c_int32),
    ]


@lru_cache(maxsize=1)
def _take_part() -> Kernel:
    function = library().rayrec_take_part
    function.argtypes = [ctypes.c_void_p]
    function.restype = None
    return function


@lru_cache(maxsize=1)
def openmp_parallel() -> Kernel | None:
    """`GOMP_parallel(function, data, num_threads, flags)` of the OpenMP library that torch has loaded: GNU's, or LLVM's or
    Intel's, which have it too. None: it has loaded none."""
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
    return function
