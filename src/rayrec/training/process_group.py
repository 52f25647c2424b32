"""How a worker joins the process group; one place for all that start workers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch


def group_arguments(device: torch.device, *, timeout_s: float) -> dict[str, Any]:
    """Arguments of `torch.distributed.init_process_group` for a worker on `device`, which has an index if it is a GPU.

    With NCCL the group is bound to the GPU. NCCL then connects at once, so that a network or a GPU that does not work fails the
    start and not a later step. And no collective has to guess the GPU from the rank, which is wrong on machines of unequal size.
    """
    on_gpu = device.type == "cuda"
    return {
        "backend": "nccl" if on_gpu else "gloo",
        "timeout": timedelta(seconds=timeout_s),
        "device_id": device if on_gpu else None,
    }


def use_device(device: torch.device) -> None:
    """Makes a GPU the calling thread's own; a new thread has the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
