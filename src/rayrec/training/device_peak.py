"""What a worker's device can do at best, to hold against what training makes of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import torch

from rayrec.compat.torch_compat import linear_pointwise

_WINDOW_S: Final = 0.04
"""Of measuring on a CPU. The clock of its cores is up by then; a worker's start is not the place for more."""

_logger = logging.getLogger(__name__)


def multiply_adds_per_s_or_zero(device: torch.device, *, precision: str) -> float:
    """`multiply_adds_per_s`, or 0 and a warning where it cannot be measured, by which training shall not fail."""
    try:
        return multiply_adds_per_s(device, precision=precision)
    except Exception as error:  # kernels and allocators raise what they like
        _logger.warning("the peak of %s is not known (%s)", device, error)
        return 0.0


def multiply_adds_per_s(device: torch.device, *, precision: str) -> float:
    """Of the fastest matrix product torch has for this device and precision ("fp32" or "bf16"), with the threads it has now.
    Raises what torch raises where none works."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if device.type == "cuda":
        return _of_cuda(device, dtype)
    rows, inner, columns = 1024, 512, 512
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, inner, generator=generator).to(dtype)
    right = torch.randn(columns, inner, generator=generator).to(dtype)
    products: list[Callable[[], torch.Tensor]] = [lambda: torch.nn.functional.linear(left, right)]
    if torch.backends.mkldnn.is_available():
        products.append(lambda: linear_pointwise(left, right, None, "none"))
    with torch.no_grad():
        return rows * inner * columns / _shortest_of(products)


def _shortest_of(products: list[Callable[[], torch.Tensor]]) -> float:
    """Seconds of the fastest product that works; raises what the last one does where none works."""
    found: list[float] = []
    for number, product in enumerate(products, start=1):
        try:
            found.append(_shortest_s(product))
        except Exception as error:  # a private operation of another torch, a type the CPU has no product for
            if number == len(products) and not found:
                raise
            _logger.info("one way to multiply does not work here (%s)", error)
    return min(found)


def _shortest_s(product: Callable[[], torch.Tensor]) -> float:
    shortest_s, deadline_s = float("inf"), time.perf_counter() + _WINDOW_S
    while time.perf_counter() < deadline_s:
        start_s = time.perf_counter()
        product()
        shortest_s = min(shortest_s, time.perf_counter() - start_s)
    return shortest_s


def _of_cuda(device: torch.device, dtype: torch.dtype) -> float:
    size, repeats = 4096, 10
    left = torch.ones(size, size, device=device, dtype=dtype)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.no_grad():
        left @ left
        start.record()
        for _ in range(repeats):
            left @ left
        stop.record()
    stop.synchronize()
    return repeats * size**3 / (start.elapsed_time(stop) / 1e3)
