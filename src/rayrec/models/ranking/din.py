"""DIN (Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018)."""

from dataclasses import dataclass

import torch
from torch import nn

from rayrec.bounds import Share, Sizes
from rayrec.config import InputError
from rayrec.layers.attention import AttentionPooling
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings, number_vectors
from rayrec.layers.mlp import Precision, Tower, xavier_linear
from rayrec.models.base import ClickModelConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class DINConfig(ClickModelConfig):
    """Sum of each list of earlier items, weighted by relevance to the current item, and an MLP over
    all features.

    This applies to a list whose feature shares a vocabulary with a single-category feature, its
    target (schema.features: {name: history, vocabulary: item}). Other lists are summed. Aligned
    lists (schema.features: {name: shops, vocabulary: shop, aligned_with: history}) get one weight
    per item, as the paper does with an item's fields.
    """

    attention: Sizes = (64,)
    """Layer widths of the network that computes the weight of an item."""
    mlp: Sizes = (512, 128, 64)
    """Layer widths of the MLP over all features."""
    dropout: Share = 0.0
    """Dropout probability of each layer."""

    def targets(self, inputs: ModelInputs) -> dict[str, str]:
        """Return the target of each list that has one."""
        lists = [name for name, _ in inputs.lists]
        single = [name for name in inputs.features if name not in lists]
        owners = {inputs.table_of[name]: name for name in reversed(single)}
        return {
            name: owners[inputs.table_of[name]] for name in lists if inputs.table_of[name] in owners
        }

    def units(self, inputs: ModelInputs) -> tuple[tuple[str, ...], ...]:
        """Return the lists that have targets, grouped by alignment."""
        units: dict[str, list[str]] = {}
        for name in self.targets(inputs):
            units.setdefault(dict(inputs.aligned).get(name, name), []).append(name)
        return tuple(map(tuple, units.values()))

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        sequences = tuple(self.targets(inputs))
        if not sequences:
            raise InputError(
                "DINConfig: the schema must have a list with the vocabulary of a single-category "
                "column, got none. Set features: [{name: history, vocabulary: item}]."
            )
        return sequences

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return DIN(self, inputs, precision=precision)


# Shapes, for width D. A unit is a list with its aligned lists, and has one attention:
#
#   unit: items [ids, lists * D], target [rows, lists * D] -> weight of each id -> sums [rows, D]
#   numbers, sums, and embeddings of the other features [rows, F * D] -> MLP with Dice -> logit
class DIN(nn.Module):
    def __init__(self, config: DINConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        dim = config.embedding_dim
        self._label = inputs.label
        self._features = inputs.features
        self._targets = config.targets(inputs)
        self.number_vectors = number_vectors(inputs.num_dense, dim)
        self._units = config.units(inputs)
        self._dim = dim
        self.attention = nn.ModuleList(
            AttentionPooling(len(unit) * dim, config.attention, precision=precision)
            for unit in self._units
        )
        width = (inputs.num_dense + len(inputs.features)) * dim
        self.tower = Tower(
            width, config.mlp, dropout=config.dropout, activation="dice", precision=precision
        )
        self.logit = xavier_linear(self.tower.out_features, 1)

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        numbers = (dense.unsqueeze(2) * self.number_vectors).flatten(1)
        interests: dict[str, torch.Tensor] = {}
        for unit, attention in zip(self._units, self.attention, strict=True):
            lists = [embedded.sequences(name) for name in unit]
            items = JaggedEmbeddings(
                torch.cat([embeddings.values for embeddings in lists], dim=1), lists[0].lengths
            )
            target = torch.cat([embedded[self._targets[name]] for name in unit], dim=1)
            interests |= zip(unit, attention(target, items).split(self._dim, dim=1), strict=True)
        features = [
            interests[name] if name in interests else embedded[name] for name in self._features
        ]
        return {
            self._label: self.logit(
                self.tower(torch.cat([numbers, *features], dim=1)).float()
            ).squeeze(1)
        }
