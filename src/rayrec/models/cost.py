"""What a click model's network costs: multiply-adds of a row, weights, and memory that a row takes until the backward pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Final

import torch

from rayrec.layers.keyed_embeddings import Embedded, Sequences
from rayrec.layers.operation_count import counted
from rayrec.models.base import ClickModelConfig, ModelInputs

_FEW_ROWS: Final = 16
"""Of a batch whose memory is measured, and twice as many: their difference is what rows take."""


USUAL_LENGTH: Final = 20
"""Of a sequence whose feature has no max_length."""


@torch.no_grad()
def network_multiply_adds(network: torch.nn.Module, inputs: ModelInputs, config: ClickModelConfig) -> float | None:
    """Multiply-adds of one row's forward pass through a click model's network, its sequences as long as they may be (20 without a
    max_length); None, with a warning, where torch cannot count."""
    row = _made_up(inputs, config, 1, like=network)
    return counted(network, lambda: network(*row))


def sequence_lengths(config: ClickModelConfig, inputs: ModelInputs) -> dict[str, int]:
    """The length that costs are computed for, of each feature that the model takes as a sequence."""
    most = dict(inputs.lists)
    return {name: most.get(name) or USUAL_LENGTH for name in config.sequences(inputs)}


def _made_up(
    inputs: ModelInputs, config: ClickModelConfig, rows: int, *, like: torch.nn.Module
) -> tuple[torch.Tensor, Embedded]:
    device = next((parameter.device for parameter in like.parameters()), torch.device("cpu"))

    def made_up(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device, requires_grad=True)

    sequences = {
        name: Sequences(
            made_up(rows * length, config.table_width), torch.full((rows,), length, dtype=torch.int64, device=device)
        )
        for name, length in sequence_lengths(config, inputs).items()
    }
    dense = torch.rand(rows, inputs.num_dense, device=device)
    pooled = made_up(rows, (len(inputs.features) - len(sequences)) * config.table_width)
    return dense, Embedded.in_order(inputs.features, config.table_width, pooled, sequences)


def saved_bytes_per_row(network: torch.nn.Module, inputs: ModelInputs, config: ClickModelConfig) -> float:
    """Memory that one more row of a batch takes between the forward and the backward pass of a click model's network."""
    network = copy.deepcopy(network).train()
    with torch.random.fork_rng(devices=[]):
        few, more = (
            _saved_bytes(network, _made_up(inputs, config, rows, like=network)) for rows in (_FEW_ROWS, 2 * _FEW_ROWS)
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


def network_cost(network: torch.nn.Module, inputs: ModelInputs, config: ClickModelConfig) -> NetworkCost:
    """Measured on the network itself, which is left as it was."""
    return NetworkCost(
        weights=sum(parameter.numel() for parameter in network.parameters()),
        multiply_adds=network_multiply_adds(network, inputs, config),
        saved_bytes_per_row=saved_bytes_per_row(network, inputs, config),
    )
