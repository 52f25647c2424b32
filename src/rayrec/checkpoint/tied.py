"""Tied tensors, which a model has under several names and a checkpoint under the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def untied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that share all of their memory with one named before."""
    from torch.distributed.tensor import DTensor

    seen: set[Any] = set()
    kept = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Of no elements, or of a class of its own, a tensor shares nothing that could be told here.
        if type(local) is torch.Tensor and local.numel():
            place = (local.data_ptr(), local.dtype, tensor.shape, local.stride())
            if place in seen:
                continue
            seen.add(place)
        kept[name] = tensor
    return kept
