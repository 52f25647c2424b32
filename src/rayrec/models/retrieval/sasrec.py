"""SASRec (Kang & McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018), with a softmax
over all items.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Count, Share
from rayrec.config import InputError
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
from rayrec.layers.mlp import Precision, UninitializedLinear, compute_dtype, init_values
from rayrec.metrics.ranking import candidate_logits, rank_measures
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.heads import Head, ItemsHead

if TYPE_CHECKING:
    from rayrec.batch import Batch

_START_STD: Final = 0.02
"""Standard deviation of the network's initial weights."""
_EPS: Final = 1e-12
"""Epsilon of layer norm, as in RecBole and BERT."""


@dataclass(frozen=True, kw_only=True)
class SASRecConfig(ClickModelConfig):
    """Causal attention that predicts each item of a list from the items before it.

    The list is the schema's first list, in chronological order, with a `max_length`. All known
    items are candidates. Unknown and missing ones are neither candidates nor targets.
    """

    LABELLED: ClassVar[bool] = False

    embedding_dim: int = 64
    """Width of every embedding, and of the network."""
    blocks: Count = 2
    """Number of blocks of attention and feed-forward layers."""
    attention_heads: Count = 2
    """Number of attention heads per block."""
    hidden: Count = 256
    """Width of the feed-forward layers."""
    dropout: Share = 0.5
    """Dropout probability."""
    k: Count = 10
    """Number of predicted items, at most all known ones, and rank k of the metrics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding_dim % self.attention_heads:
            raise InputError(
                f"SASRecConfig.attention_heads: must divide embedding_dim {self.embedding_dim}, "
                f"got {self.attention_heads}"
            )

    def sequence(self, inputs: ModelInputs) -> tuple[str, int]:
        """Return the list of items and its maximum length. Raises InputError if the schema has
        none.
        """
        name, length = next(iter(inputs.lists), (None, None))
        if name is None or length is None or length < 2:
            raise InputError(
                "SASRecConfig: the schema must have a list of items with a max_length of at least "
                f"2, got {name or 'no list'}. Set lists: [item] and features: [{{name: item, "
                "max_length: 50}]."
            )
        return name, length

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        return (self.sequence(inputs)[0],)

    full_tables = sequences

    def candidate_feature(self, inputs: ModelInputs) -> str:
        return self.sequence(inputs)[0]

    def output_heads(self, inputs: ModelInputs) -> tuple[Head, ...]:
        feature = self.candidate_feature(inputs)
        num_items = inputs.candidates_of(feature).count
        return (
            ItemsHead("items", self.k if num_items is None else min(self.k, num_items), feature),
        )

    def objective(self, metrics: Mapping[str, float]) -> str:
        return f"ndcg_at_{self.k}"

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return SASRec(self, inputs, precision=precision)


# Shapes, for lists of up to L items of width D and C known items:
#
#   list of ids -> embeddings, padded [rows, L, D], plus positions
#   blocks of causal attention and feed-forward layers -> hidden [rows, L, D]
#   training      hidden after item i against all candidates [C, D] -> cross entropy of item i + 1
#   evaluation    hidden before the last item -> rank of the last item
#   prediction    hidden after the last item -> the k best candidates
class SASRec(nn.Module):
    """Layer norm follows attention and feed-forward layers, as in RecBole. Products have the
    precision's dtype.
    """

    def __init__(self, config: SASRecConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._feature, self._length = config.sequence(inputs)
        self._candidates = inputs.candidates_of(self._feature)
        self._dropout = config.dropout
        self._k = config.k
        self._dtype = compute_dtype(precision)
        dim = config.embedding_dim
        self.positions = nn.Parameter(_init_normal(torch.empty(self._length - 1, dim)))
        self.norm = nn.LayerNorm(dim, eps=_EPS)
        self.blocks = nn.ModuleList(_Block(config, dtype=self._dtype) for _ in range(config.blocks))

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        """Return `hidden` [rows, max_length, dim], the state after each item, `ids` [rows,
        max_length], `lengths` and `table`.
        """
        items = embedded.sequences(self._feature)
        # The last position of a full list has no target in training, so it has no separate position
        # embedding.
        positions = torch.cat([self.positions, self.positions[-1:]])
        hidden = functional.dropout(
            self.norm(self._padded(items, items.values) + positions), self._dropout, self.training
        )
        for block in self.blocks:
            hidden = block(hidden)
        ids = self._padded(items, embedded.ids(self._feature))
        table = embedded.table(self._feature)
        return {"hidden": hidden, "ids": ids, "lengths": items.lengths, "table": table}

    def loss(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return each row's mean cross entropy over the known items after the first, 0 for lists
        without one, float32 [rows].
        """
        ids = outputs["ids"]
        targets = self._candidates.numbers(ids[:, 1:])
        positions = torch.arange(1, self._length, device=ids.device)
        is_target = (positions < outputs["lengths"].unsqueeze(1)) & (targets >= 0)
        rows, position = is_target.nonzero(as_tuple=True)
        logits = self._logits(outputs["hidden"][rows, position], outputs["table"], self._dtype)
        losses = functional.cross_entropy(logits, targets[rows, position], reduction="none")
        total = losses.new_zeros(len(ids)).index_add(0, rows, losses)
        return total / is_target.sum(1).clamp(min=1)

    def measures(self, outputs: dict[str, torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
        """Return `rank_measures` of each list's last item among all known ones, given those before.
        Lists of one item, and those with a missing last one, have no target.
        """
        last = (outputs["lengths"] - 1).clamp(min=1)
        logits = candidate_logits(
            self._after(outputs["hidden"], last - 1), self._candidates.of_table(outputs["table"])
        )
        ids = outputs["ids"].gather(1, last.unsqueeze(1)).squeeze(1)
        has_target = outputs["lengths"] > 1
        if self._candidates.missing is not None:
            has_target = has_target & (ids != self._candidates.missing)
        return rank_measures(
            logits, self._candidates.numbers(ids), k=self._k, has_target=has_target
        )

    def predict(
        self, outputs: dict[str, torch.Tensor], embedded: KeyedEmbeddings
    ) -> dict[str, torch.Tensor]:
        """Return the k next items with the highest scores for each list, or all known ones if there
        are fewer.
        """
        last = (outputs["lengths"] - 1).clamp(min=0)
        logits = self._logits(self._after(outputs["hidden"], last), outputs["table"], torch.float32)
        scores, numbers = logits.topk(min(self._k, logits.shape[1]), dim=1)
        return {"items": self._candidates.ids(numbers), "scores": scores}

    def _padded(self, items: JaggedEmbeddings, values: torch.Tensor) -> torch.Tensor:
        """Convert [ids, ...] to [rows, max_length, ...], with zeros after the end of each list."""
        rows = items.rows
        lengths = items.lengths
        position = torch.arange(values.shape[0], device=rows.device) - (
            lengths.cumsum(0) - lengths
        ).index_select(0, rows)
        padded = values.new_zeros(lengths.shape[0], self._length, *values.shape[1:])
        return padded.index_put((rows, position), values)

    @staticmethod
    def _after(hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the state of each row at one place, [rows, dim]."""
        return hidden.gather(1, position.view(-1, 1, 1).expand(-1, 1, hidden.shape[2])).squeeze(1)

    def _logits(
        self, hidden: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the scores of all candidates, float32 [rows, candidates]. Rounded scores would
        have ties, so ranks are computed from float32 products, whatever the precision of
        training.
        """
        return (hidden.to(dtype) @ self._candidates.of_table(table).to(dtype).T).float()


class _Block(nn.Module):
    """Block in which each place attends to itself and earlier places, [rows, places, dim]."""

    def __init__(self, config: SASRecConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        dim = config.embedding_dim
        self.query_key_value = _linear(dim, 3 * dim)
        self.mixed = _linear(dim, dim)
        self.attention_norm = nn.LayerNorm(dim, eps=_EPS)
        self.first = _linear(dim, config.hidden)
        self.second = _linear(config.hidden, dim)
        self.norm = nn.LayerNorm(dim, eps=_EPS)
        self._heads = config.attention_heads
        self._dropout = config.dropout
        self._dtype = dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(2, (self._heads, -1)).transpose(1, 2)
            for part in self._product(self.query_key_value, inputs).chunk(3, dim=2)
        )
        dropout = self._dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        hidden = self.attention_norm(
            inputs + self._dropped(self._product(self.mixed, mixed.transpose(1, 2).flatten(2)))
        )
        inner = functional.gelu(self._product(self.first, hidden))
        return self.norm(hidden + self._dropped(self._product(self.second, inner)))

    def _product(self, layer: UninitializedLinear, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(
            inputs.to(self._dtype), layer.weight.to(self._dtype), layer.bias.to(self._dtype)
        )

    def _dropped(self, values: torch.Tensor) -> torch.Tensor:
        return functional.dropout(values.float(), self._dropout, self.training)


def _linear(in_features: int, out_features: int) -> UninitializedLinear:
    layer = UninitializedLinear(in_features, out_features)
    _init_normal(layer.weight)
    init_values(layer.bias, nn.init.zeros_)
    return layer


def _init_normal(values: torch.Tensor) -> torch.Tensor:
    return init_values(values, lambda tensor: nn.init.normal_(tensor, std=_START_STD))
