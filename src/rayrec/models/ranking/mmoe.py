"""MMoE (Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate
Mixture-of-Experts", KDD 2018).
"""

from dataclasses import dataclass

import torch
from torch import nn

from rayrec.bounds import Count
from rayrec.layers.keyed_embeddings import KeyedEmbeddings, fields, number_vectors
from rayrec.layers.mlp import Experts, Gate, LogitTower, Precision
from rayrec.models.base import ExpertsConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class MMoEConfig(ExpertsConfig):
    """Multi-label model with experts that all labels share, and a gate and a tower for each
    label.
    """

    experts: Count = 4
    """Number of experts."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return MMoE(self, inputs, precision=precision)


# Shapes, for F fields of width D, E experts of width X:
#
#   numbers and embeddings -> inputs [rows, F * D] -> experts [rows, E, X], shared by all labels
#   each label: gate(inputs) [rows, E] -> mixture [rows, X] -> tower -> logit
class MMoE(nn.Module):
    def __init__(self, config: MMoEConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._labels = inputs.label_names
        width = (inputs.num_dense + len(inputs.features)) * config.embedding_dim
        settings = config.layer_settings(precision)
        self.number_vectors = number_vectors(inputs.num_dense, config.embedding_dim)
        self.experts = Experts(width, config.expert, config.experts, **settings)
        self.gates = nn.ModuleList(
            Gate(width, config.gate, config.experts, **settings) for _ in self._labels
        )
        self.towers = nn.ModuleList(
            LogitTower(config.expert[-1], config.tower, **settings) for _ in self._labels
        )

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        inputs = fields(dense, self.number_vectors, embedded).flatten(1)
        experts = self.experts(inputs)
        return {
            label: tower(gate(inputs, experts))
            for label, gate, tower in zip(self._labels, self.gates, self.towers, strict=True)
        }
