"""What a click model's network costs: multiply-adds of a row, weights, and memory that a row takes until the backward pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Final

import torch

from rayrec.layers.embedded import Embedded
from rayrec.models.base import ModelInputs
from rayrec.workloads.row_cost import counted

_FEW_ROWS: Final = 16
"""Of a batch whose memory is measured, and twice as many: their difference is what rows take."""


@torch.no_grad()
def network_multiply_adds(network: torch.nn.Module, inputs: ModelInputs, *, embedding_dim: int) -> float | None:
    """Multiply-adds of one row's forward pass through a click model's network; None, with a warning, where torch cannot count."""
    row = _made_up(inputs, embedding_dim, 1, like=network)
    return counted(network, lambda: network(*row))


def _made_up(
    inputs: ModelInputs, embedding_dim: int, rows: int, *, like: torch.nn.Module
) -> tuple[torch.Tensor, Embedded]:
    device = next((parameter.device for parameter in like.parameters()), torch.device("cpu"))
    dense = torch.rand(rows, inputs.num_dense, device=device)
    pooled = torch.rand(rows, len(inputs.features) * embedding_dim, device=device, requires_grad=True)
    return dense, Embedded.in_order(inputs.features, embedding_dim, pooled)


def saved_bytes_per_row(network: torch.nn.Module, inputs: ModelInputs, *, embedding_dim: int) -> float:
    """Memory that one more row of a batch takes between the forward and the backward pass of a click model's network."""
    network = copy.deepcopy(network).train()
    with torch.random.fork_rng(devices=[]):
        few, more = (
            _saved_bytes(network, _made_up(inputs, embedding_dim, rows, like=network))
            for rows in (_FEW_ROWS, 2 * _FEW_ROWS)
        )
    return (more - few) / _FEW_ROWS


def _saved_bytes(network: torch.nn.Module, batch: tuple[torch.Tensor, Embedded]) -> int:
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # each once, whichever steps keep it
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = network(*batch)
    assert outputs
    return sum(storage.nbytes() for storage in kept.values())


@dataclass(frozen=True)
class NetworkCost:
    """What a click model's network takes, apart from its tables."""

    weights: int
    """Numbers in its parameters."""
    multiply_adds: float | None
    """Of one row's forward pass; None: torch cannot count them."""
    saved_bytes_per_row: float
    """Memory of one row until the backward pass has used it."""


def network_cost(network: torch.nn.Module, inputs: ModelInputs, *, embedding_dim: int) -> NetworkCost:
    """Measured on the network itself, which is left as it was."""
    return NetworkCost(
        weights=sum(parameter.numel() for parameter in network.parameters()),
        multiply_adds=network_multiply_adds(network, inputs, embedding_dim=embedding_dim),
        saved_bytes_per_row=saved_bytes_per_row(network, inputs, embedding_dim=embedding_dim),
    )
