"""PLE (Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning Model for
Personalized Recommendations", RecSys 2020).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rayrec.bounds import Count
from rayrec.layers.keyed_embeddings import KeyedEmbeddings, fields, number_vectors
from rayrec.layers.mlp import Experts, Gate, LogitTower, Precision, TowerSettings
from rayrec.models.base import ExpertsConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class PLEConfig(ExpertsConfig):
    """Multi-label model with levels of shared and label-specific experts, and a tower for each
    label.

    A gate weights a label's own and the shared experts, so that conflicting labels interfere less
    than in MMoE. Between levels, the shared gate weights the experts of all labels, as in the paper
    (in FuxiCTR only the shared ones).
    """

    levels: Count = 1
    """Number of expert levels, each on top of the previous one. One level is CGC."""
    own_experts: Count = 1
    """Number of each label's own experts per level."""
    shared_experts: Count = 1
    """Number of shared experts per level."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return PLE(self, inputs, precision=precision)


# States of a level, for L labels and width X. One state more than labels is shared:
#
#   level 1     inputs [rows, F * D], L + 1 times
#   each        own and shared experts of each state -> a gate per label mixes its own and the
#               shared ones; the shared gate mixes all -> L + 1 states [rows, X]
#   last        the same without a shared state
#   towers      one per label -> logit
class PLE(nn.Module):
    def __init__(self, config: PLEConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._labels = inputs.label_names
        width = (inputs.num_dense + len(inputs.features)) * config.embedding_dim
        self.number_vectors = number_vectors(inputs.num_dense, config.embedding_dim)
        settings = config.layer_settings(precision)
        self.levels = nn.ModuleList()
        in_features = width
        for level in range(config.levels):
            last = level == config.levels - 1
            self.levels.append(_Level(in_features, len(self._labels), config, settings, last=last))
            in_features = config.expert[-1]
        self.towers = nn.ModuleList(
            LogitTower(in_features, config.tower, **settings) for _ in self._labels
        )

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        states = [fields(dense, self.number_vectors, embedded).flatten(1)] * (len(self._labels) + 1)
        for level in self.levels:
            states = level(states)
        return {
            label: tower(state)
            for label, tower, state in zip(self._labels, self.towers, states, strict=True)
        }


class _Level(nn.Module):
    """Experts and gates of each label, and shared ones. The last level has no shared gate because
    no level takes its output.
    """

    def __init__(
        self,
        in_features: int,
        labels: int,
        config: PLEConfig,
        settings: TowerSettings,
        *,
        last: bool,
    ) -> None:
        super().__init__()
        own = config.own_experts
        shared = config.shared_experts

        def experts(count: int) -> Experts:
            return Experts(in_features, config.expert, count, **settings)

        def gate(count: int) -> Gate:
            return Gate(in_features, config.gate, count, **settings)

        self.own = nn.ModuleList(experts(own) for _ in range(labels))
        self.shared = experts(shared)
        self.gates = nn.ModuleList(gate(own + shared) for _ in range(labels))
        self.shared_gate = None if last else gate(labels * own + shared)

    def forward(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Map the states of each label and the shared one, [rows, in_features], to [rows, width].
        The last level shares none.
        """
        by_label = [experts(state) for experts, state in zip(self.own, states[:-1], strict=True)]
        shared = self.shared(states[-1])
        mixed = [
            gate(state, torch.cat([label_outputs, shared], dim=1))
            for gate, state, label_outputs in zip(self.gates, states[:-1], by_label, strict=True)
        ]
        if self.shared_gate is not None:
            mixed.append(self.shared_gate(states[-1], torch.cat([*by_label, shared], dim=1)))
        return mixed
