"""Tensor collectives between workers, and their device and backend. Imports torch on the first
call.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def group_arguments(device: torch.device, *, timeout_s: float) -> dict[str, Any]:
    """Return the arguments of `torch.distributed.init_process_group` for a worker on `device`,
    which has an index if it is a GPU. With NCCL the group is bound to the GPU. NCCL then connects
    at once, so a broken network or GPU fails the start, not a later step. Collectives also need not
    guess the GPU from the rank, which is wrong on machines of unequal size.
    """
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    return {"backend": backend, "timeout": timedelta(seconds=timeout_s), "device_id": device_id}


def use_device(device: torch.device) -> None:
    """Set the calling thread's current GPU; new threads start with the first one."""
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def num_workers(group: ProcessGroup | None = None) -> int:
    """Return the number of workers in a group (None: all), or 1 without torch.distributed."""
    from torch import distributed

    return (
        distributed.get_world_size(group)
        if distributed.is_available() and distributed.is_initialized()
        else 1
    )


def group_device(group: ProcessGroup | None = None) -> torch.device:
    """Return the device of the tensors that a group (None: all workers) exchanges: the CPU if its
    backends support it.
    """
    import torch
    from torch import distributed

    # as "cpu:gloo,cuda:nccl" or "cuda:nccl"
    serves_cpu = "cpu:" in str(distributed.get_backend_config(group))
    return torch.device("cpu") if serves_cpu else torch.device("cuda", torch.cuda.current_device())


def gathered(values: torch.Tensor, group: ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return the values of each worker by rank, on the group's device. All shapes must be equal.
    Collective.
    """
    import torch
    from torch import distributed

    if num_workers(group) == 1:
        return [values]
    local = values.to(group_device(group))
    parts = [torch.empty_like(local) for _ in range(num_workers(group))]
    # Gathers instead of reducing, so that callers add the parts in rank order, on every rank alike.
    distributed.all_gather(parts, local, group=group)
    return parts


def gathered_rows(
    values: torch.Tensor, group: ProcessGroup | None = None
) -> tuple[torch.Tensor, slice]:
    """Gather the rows of all workers in rank order, with gradient to their owners; return them and
    the slice of own rows. Workers may have different numbers of rows, or none; `values` is float32
    or bfloat16 [rows, ...], with one dtype and trailing shape. The gradient of a row is the sum of
    all workers', added in rank order. Collective, as is its backward pass.
    """
    import torch
    from torch import distributed

    counts = [int(count) for count in gathered(torch.tensor([len(values)]), group)]
    start = sum(counts[: distributed.get_rank(group)]) if len(counts) > 1 else 0
    rows: torch.Tensor = _gathered_rows().apply(values, counts, group)
    return rows, slice(start, start + len(values))


@cache
def _gathered_rows() -> type[torch.autograd.Function]:
    import torch
    from torch import distributed

    class GatheredRows(torch.autograd.Function):
        """Autograd function behind `gathered_rows`."""

        @staticmethod
        def forward(
            ctx: Any, values: torch.Tensor, counts: list[int], group: ProcessGroup | None
        ) -> torch.Tensor:
            ctx.counts = counts
            ctx.group = group
            ctx.own = values.shape
            if len(counts) == 1:
                return values.view_as(values)
            # all_gather needs equal shapes.
            padded = values.new_zeros(max(counts), *values.shape[1:])
            padded[: len(values)] = values
            parts = [
                part[:count] for part, count in zip(gathered(padded, group), counts, strict=True)
            ]
            return torch.cat(parts).to(values.device)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            (gradient,) = gradients
            counts = ctx.counts
            rows = ctx.own[0]
            if len(counts) == 1:
                return gradient, None, None
            sent = gradient.contiguous().to(group_device(ctx.group))
            received = sent.new_empty(len(counts) * rows, *ctx.own[1:])
            # The transpose of the gathering: each worker returns the gradients of a row to its
            # owner.
            distributed.all_to_all_single(
                received, sent, [rows] * len(counts), counts, group=ctx.group
            )
            total, *summands = received.split(rows) if rows else [received]
            for other in summands:  # In rank order, so that the sum does not depend on timing
                total = total + other
            return total.to(gradient.device), None, None

    return GatheredRows


def over_workers(*values: float) -> tuple[list[float], list[float]]:
    """Return (means, maxima) of the values over the workers, added in a fixed order; collective."""
    import torch

    stacked = torch.stack(gathered(torch.tensor(values, dtype=torch.float64)))
    return stacked.mean(dim=0).tolist(), stacked.amax(dim=0).tolist()


def sum_over_workers(counts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the sum of all workers' arrays; collective."""
    import torch
    from torch import distributed

    if num_workers() == 1:
        return counts
    total = torch.from_numpy(counts).to(group_device(), copy=True)
    distributed.all_reduce(total)
    return total.cpu().numpy()


def all_reduce_sum(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sum each part, [values], over the workers in one exchange, with gradient; collective."""
    if num_workers() == 1:
        return parts
    import torch
    from torch.distributed.nn.functional import all_reduce

    # Few values: the wait for all ranks costs more than the bytes, so that they go together.
    return all_reduce(torch.cat(parts)).split([len(part) for part in parts])


def global_means(values: torch.Tensor) -> torch.Tensor:
    """Return the means, [columns], of `values`, [rows, columns], over all workers' rows, or 0
    without rows; collective.
    """
    count, total = all_reduce_sum(values.new_ones(1).mul_(len(values)), values.sum(0))
    return total / count.detach().clamp(min=1)


@final
class Collectives:
    """Collectives of a group on NumPy arrays."""

    def __init__(self, process_group: ProcessGroup | None) -> None:
        self._group = process_group
        self.num_ranks = num_workers(process_group)

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of each rank in rank order. All ranks must pass the same number of
        values.
        """
        return [part.tolist() for part in self.gather(np.array(values, dtype=np.float64))]

    def gather(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the array of each rank in rank order. All lengths must be equal."""
        import torch

        return [
            part.cpu().numpy()
            for part in gathered(torch.from_numpy(np.ascontiguousarray(values)), self._group)
        ]

    def exchange(
        self, values: npt.NDArray[Any], send_counts: list[int], receive_counts: list[int]
    ) -> npt.NDArray[Any]:
        """Send `send_counts[r]` of the values to each rank r (all-to-all); return the received
        values in rank order.
        """
        import torch
        import torch.distributed as dist

        local = torch.from_numpy(np.ascontiguousarray(values)).to(group_device(self._group))
        received = torch.empty(sum(receive_counts), dtype=local.dtype, device=local.device)
        # The caller knows both counts, so that no sizes are exchanged first.
        dist.all_to_all_single(received, local, receive_counts, send_counts, group=self._group)
        return received.cpu().numpy()
