"""MMoE (Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", KDD 2018)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from rayrec.bounds import Count, Share, Sizes, SomeSizes
from rayrec.layers.keyed_embeddings import KeyedEmbeddings, fields, number_vectors
from rayrec.layers.mlp import Experts, Gate, LogitTower, Precision, TowerSettings
from rayrec.models.base import ClickModelConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class MMoEConfig(ClickModelConfig):
    """Multi-label model with experts that all labels share, and a gate and a tower for each label."""

    SEVERAL_LABELS: ClassVar[bool] = True

    experts: Count = 4
    """Number of experts."""
    expert: SomeSizes = (512, 256, 128)
    """Layer widths of each expert."""
    gate: Sizes = ()
    """Widths of a gate's layers before its softmax. If empty, the gate is linear, as in the paper."""
    tower: Sizes = (128, 64)
    """Layer widths of each label's tower."""
    dropout: Share = 0.0
    """Dropout probability of each layer."""
    batch_norm: bool = False
    """Whether to use batch norm, over the global batch, in experts, gates and towers."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return MMoE(self, inputs, precision=precision)


class MMoE(nn.Module):
    def __init__(self, config: MMoEConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._labels = inputs.label_names
        width = (inputs.num_dense + len(inputs.features)) * config.embedding_dim
        settings = TowerSettings(dropout=config.dropout, batch_norm=config.batch_norm, precision=precision)
        self.number_vectors = number_vectors(inputs.num_dense, config.embedding_dim)
        self.experts = Experts(width, config.expert, config.experts, **settings)
        self.gates = nn.ModuleList(Gate(width, config.gate, config.experts, **settings) for _ in self._labels)
        self.towers = nn.ModuleList(LogitTower(config.expert[-1], config.tower, **settings) for _ in self._labels)

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        inputs = fields(dense, self.number_vectors, embedded).flatten(1)
        experts = self.experts(inputs)
        return {
            label: tower(gate(inputs, experts)) for label, gate, tower in zip(self._labels, self.gates, self.towers, strict=True)
        }
