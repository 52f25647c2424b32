"""What every rank needs of a checkpoint far away is fetched by one of them and passed on."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from rayrec.checkpoint.ranks import Ranks

Shared = dict[str, int]
"""Names of tensors that all ranks hold whole -> the rank that reads them, in an order that all agree on."""


def share_out(tensors: dict[str, Any], ranks: Ranks) -> Shared:
    """Deals those tensors out so that each rank reads as many bytes; collective. Empty for a rank alone.

    Only what the default process group can pass on is dealt out: with NCCL nothing that lies in host memory.
    """
    if ranks.size == 1:
        return {}
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    mine = {
        name: (tuple(tensor.shape), tensor.dtype, tensor.nbytes)
        for name, tensor in tensors.items()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == device
        and tensor.is_contiguous()
    }
    everyone = ranks.gather_all(mine)
    held = [name for name, kind in everyone[0].items() if all(other.get(name) == kind for other in everyone)]
    shared: Shared = {}
    load = [0] * ranks.size
    for name in sorted(held, key=lambda name: (-mine[name][2], name)):
        reader = load.index(min(load))
        load[reader] += mine[name][2]
        shared[name] = reader
    return shared


def pass_on(tensors: dict[str, Any], shared: Shared) -> None:
    """Brings what each rank has read to the others; collective."""
    for name, reader in shared.items():
        distributed.broadcast(tensors[name].detach(), src=reader)
