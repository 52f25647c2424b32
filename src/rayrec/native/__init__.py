"""Compiled kernels, called through ctypes, which releases the GIL while they run."""

import ctypes
import importlib.util
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Load the shared library with all kernels of kernels.h."""
    spec = importlib.util.find_spec("rayrec.native._kernels")
    if spec is None or spec.origin is None:
        raise ImportError(
            "rayrec's compiled kernels are missing. Install rayrec with `pip install .` or `pip "
            "install -e .`"
        )
    # Never unloaded: OpenMP's threads and cached functions point into it.
    return ctypes.CDLL(spec.origin)


def call(name: str, *arguments: Any, returns: type = ctypes.c_int64) -> int:
    """Call a kernel with arrays (as contiguous addresses), None (NULL), int (int64), float (double)
    and ctypes values.
    """
    function = getattr(library(), name)
    function.restype = returns
    result: int = function(*map(_converted, arguments))
    return result


# An address is no reference. The caller's frame keeps each array until the kernel has returned, and
# kernels keep no pointer after that.
def _converted(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    if (flags := getattr(argument, "flags", None)) is not None:  # An array
        assert flags.c_contiguous
        # A quarter of the time that the array's `ctypes` takes, but not for memory that is read
        # only, or dates
        if flags.writeable and argument.dtype.kind not in "mM":
            return _Memory.from_buffer(argument)
        return ctypes.c_void_p(argument.ctypes.data)
    return argument


_Memory = ctypes.c_char * 0
"""Argument type whose address is passed, for memory with any number of bytes."""


_C_TYPES = {
    "void*": ctypes.c_void_p,
    "int64*": ctypes.POINTER(ctypes.c_int64),
    "int64": ctypes.c_int64,
    "int32": ctypes.c_int32,
    "uint64": ctypes.c_uint64,
    "uint32": ctypes.c_uint32,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
}


def c_fields(declaration: str) -> list[tuple[str, Any]]:
    """Return `_fields_` of a ctypes structure from a declaration such as "void* ids offsets; int64
    count".
    """
    declared = (part.split() for part in declaration.split(";"))
    return [(name, _C_TYPES[c_type]) for c_type, *names in declared for name in names]


# From glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Let glibc keep and reuse the memory of freed megabyte-sized arrays for the rest of this
    process. By default it returns their pages to the kernel, which faults every page in again for
    the next array. Raises the speed of training on CPU by a third. Other C libraries have no
    `mallopt` and are left unchanged.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    for parameter, value in (
        (_M_MMAP_THRESHOLD, 32 << 20),
        (_M_TRIM_THRESHOLD, 1 << 30),
        (_M_TOP_PAD, 64 << 20),
    ):
        mallopt(ctypes.c_int(parameter), ctypes.c_int(value))
