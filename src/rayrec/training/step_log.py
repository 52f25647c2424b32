"""What the data side of a run does, told beside its steps: speed, load and backlog of each stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch

from rayrec.collectives import num_workers
from rayrec.compat.torch_compat import linear_pointwise
from rayrec.data.stage_times import STAGES, StageAccount

_LEAST_S: Final = 1.0
"""Between two events: a block lasts for many steps, and most intervals between two logs see none."""
_MOST_S: Final = 10.0
"""After which there is one though no block was taken in use."""


@final
class DataReport:
    """Adds up over the workers what their loaders' StageAccounts count; one on each worker, which all call alike."""

    def __init__(self, loader: Any) -> None:
        """A loader without `stages` is told nothing of."""
        self._account: StageAccount | None = getattr(loader, "stages", None)
        self._since_s = time.monotonic() if self._account is None else self._account.begin_s
        self._sums = dict.fromkeys(StageAccount.FIELDS, 0.0)

    def take(self) -> list[float]:
        """This worker's numbers since the last call, whose means over the workers `tell` is given; as many on each."""
        return [] if self._account is None else self._account.take()

    def tell(self, means: Sequence[float], *, step: int, log: Callable[[str, dict[str, Any]], None]) -> None:
        """Logs an event of kind data now and then."""
        if self._account is None:
            return
        workers = num_workers()
        for name, mean in zip(StageAccount.FIELDS, means, strict=True):
            self._sums[name] = mean * workers + (0.0 if name == "cpus" else self._sums[name])
        seconds = time.monotonic() - self._since_s
        if seconds < _LEAST_S or (seconds < _MOST_S and not self._sums["blocks"]):
            return
        log("data", {"step": step, **data_fields(self._sums, seconds=seconds)})
        self._since_s += seconds
        self._sums = dict.fromkeys(StageAccount.FIELDS, 0.0)


def data_fields(sums: Mapping[str, float], *, seconds: float) -> dict[str, Any]:
    """The fields of a data event, from the sums of all workers' StageAccounts over so long. Pure.

    Of each stage: `rows_per_s` of all the CPUs, were they at this stage alone; `busy`, the share of the CPUs' time it took;
    `cpu_share` and `queue_share`, the shares of that in which it computed, and could have but had no CPU; for the rest it waited
    for storage. The backlog is the mean over the time.
    """
    cpus, rows = sums["cpus"], sums["rows"]
    stages = []
    for name in STAGES:
        wall_s, cpu_s = sums[f"{name}_wall_s"], sums[f"{name}_cpu_s"]
        if wall_s:
            stages.append(
                {
                    "stage": name,
                    "rows_per_s": rows * cpus / wall_s,
                    "busy": wall_s / (seconds * cpus),
                    "cpu_share": cpu_s / wall_s,
                    "queue_share": sums[f"{name}_queue_s"] / wall_s,
                }
            )
    busy_s = sum(sums[f"{name}_wall_s"] for name in STAGES)
    return {
        "seconds": seconds,
        "rows": round(rows),
        "rows_per_s": rows / seconds,
        "cpus": cpus,
        "busy": busy_s / (seconds * cpus),
        "capacity_rows_per_s": rows * cpus / busy_s if busy_s else None,
        "backlog_rows": sums["waited_row_s"] / seconds,
        "backlog_blocks": sums["waited_block_s"] / seconds,
        "stages": stages,
    }


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
