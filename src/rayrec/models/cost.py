"""Cost of a click model's network: multiply-adds per row, weights, and activation memory per
row.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rayrec.batch import DENSE, Batch
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
from rayrec.layers.operation_count import counted
from rayrec.models.base import ClickModelConfig, ModelInputs, table_key
from rayrec.models.heads import network_loss

_FEW_ROWS: Final = 16
"""Row count of the batch whose memory is measured, and of its increase. The difference is the
memory of the rows.
"""


USUAL_LENGTH: Final = 20
"""Assumed sequence length for features without max_length."""


@torch.no_grad()
def network_multiply_adds(
    network: torch.nn.Module,
    inputs: ModelInputs,
    config: ClickModelConfig,
    *,
    num_embeddings: Sequence[int] = (),
) -> float | None:
    """Return the multiply-adds of the forward pass per row, or None, with a warning, if torch
    cannot count them. JaggedEmbeddings have their maximum length (20 without max_length). Includes
    the loss of a network that trains on full tables. `num_embeddings`: row count of each feature's
    table, for full tables.
    """
    row = _random_rows(inputs, config, 1, like=network, num_embeddings=num_embeddings)
    return counted(network, lambda: _computed(network, config, row))


def _computed(
    network: torch.nn.Module,
    config: ClickModelConfig,
    rows: tuple[torch.Tensor, KeyedEmbeddings],
) -> Any:
    outputs = network(*rows)
    if config.LABELLED or not config.TRAINS_ON_TABLES:
        return outputs
    loss = network_loss(network)
    assert loss is not None, "a network without labels has a loss of its own"
    return loss(outputs, Batch({DENSE: rows[0]}, 1.0))


def sequence_lengths(config: ClickModelConfig, inputs: ModelInputs) -> dict[str, int]:
    """Return the assumed sequence length of each feature that the model takes as a sequence."""
    max_lengths = dict(inputs.lists)
    return {
        name: (max_lengths[name] or USUAL_LENGTH) if name in max_lengths else 1
        for name in config.sequences(inputs)
    }


def _random_rows(
    inputs: ModelInputs,
    config: ClickModelConfig,
    rows: int,
    *,
    like: torch.nn.Module,
    num_embeddings: Sequence[int],
) -> tuple[torch.Tensor, KeyedEmbeddings]:
    device = next((parameter.device for parameter in like.parameters()), torch.device("cpu"))

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device, requires_grad=True)

    sequences = {
        name: JaggedEmbeddings(
            random(rows * length, config.table_width),
            torch.full((rows,), length, dtype=torch.int64, device=device),
            torch.ones(rows * length, device=device) if name in inputs.aged else None,
        )
        for name, length in sequence_lengths(config, inputs).items()
    }
    dense = torch.rand(rows, inputs.num_dense, device=device)
    pooled = random(rows, (len(inputs.features) - len(sequences)) * config.table_width)
    # Ids of known categories, because the loss of others may cost nothing
    ids = {
        name: embeddings.rows.new_full((len(embeddings.values),), inputs.candidates_of(name).first)
        for name, embeddings in sequences.items()
    }
    rows_of = dict(zip(inputs.features, num_embeddings, strict=False))
    tables = {}
    for name in config.full_tables(inputs):
        sample = config.table_sample() if like.training else None
        tables[name] = random(rows_of[name] if sample is None else sample, config.table_width)
        first = inputs.candidates_of(name).first
        ids[table_key(name)] = torch.full((len(tables[name]),), first, device=device)
    return dense, KeyedEmbeddings.in_order(
        inputs.features,
        config.table_width,
        pooled,
        sequences,
        ids=ids,
        tables=tables,
    )


def _saved_bytes(
    network: torch.nn.Module,
    config: ClickModelConfig,
    rows: tuple[torch.Tensor, KeyedEmbeddings],
) -> int:
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # Once, even if several steps save it
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = _computed(network, config, rows)
    assert outputs is not None
    return sum(storage.nbytes() for storage in storages.values())


@dataclass(frozen=True)
class NetworkCost:
    """Cost of a click model's network without its tables."""

    weights: int
    """Parameter count."""
    multiply_adds: float | None
    """Multiply-adds of the forward pass per row, or None if torch cannot count them."""
    saved_bytes_per_row: float
    """Memory of one row until its backward pass."""


def network_cost(
    network: torch.nn.Module,
    inputs: ModelInputs,
    config: ClickModelConfig,
    *,
    num_embeddings: Sequence[int] = (),
) -> NetworkCost:
    """Measure the cost of a network without changing it. `num_embeddings`: row count of each
    feature's table.
    """
    copied = copy.deepcopy(network).train()
    with torch.random.fork_rng(devices=[]):
        few, more = (
            _saved_bytes(
                copied,
                config,
                _random_rows(inputs, config, count, like=network, num_embeddings=num_embeddings),
            )
            for count in (_FEW_ROWS, 2 * _FEW_ROWS)
        )
    return NetworkCost(
        weights=sum(parameter.numel() for parameter in network.parameters()),
        multiply_adds=network_multiply_adds(network, inputs, config, num_embeddings=num_embeddings),
        saved_bytes_per_row=(more - few) / _FEW_ROWS,
    )
