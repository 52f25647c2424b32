"""The compiled kernels, reached through ctypes (which releases the GIL while they run)."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import lru_cache


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The shared library holding every kernel of kernels.h."""
    spec = importlib.util.find_spec("rayrec.native._kernels")
    if spec is None or spec.origin is None:
        raise ImportError("rayrec's compiled kernels are missing: install rayrec with pip (`pip install .` or `pip install -e .`)")
    return ctypes.CDLL(spec.origin)
