"""SASRec (Kang & McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018), with a softmax over all items."""

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
from rayrec.metrics.ranking import rank_measures
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

    The list is the schema's first list, in chronological order, with a `max_length`. All rows of its table are candidates.
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
    """Number of predicted items, and rank k of the metrics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding_dim % self.attention_heads:
            raise InputError(
                f"SASRecConfig.attention_heads: must divide embedding_dim {self.embedding_dim}, got {self.attention_heads}"
            )

    def sequence(self, inputs: ModelInputs) -> tuple[str, int]:
        """Return the list of items and its maximum length. Raises InputError if the schema has none."""
        name, length = next(iter(inputs.lists), (None, None))
        if name is None or length is None or length < 2:
            raise InputError(
                "SASRecConfig: the schema must have a list of items with a max_length of at least 2, got "
                f"{name or 'no list'}. Set lists: [item] and features: [{{name: item, max_length: 50}}]."
            )
        return name, length

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        return (self.sequence(inputs)[0],)

    full_tables = sequences

    def output_heads(self, inputs: ModelInputs) -> tuple[Head, ...]:
        return (ItemsHead("items", self.k, self.sequence(inputs)[0]),)

    def objective(self, metrics: Mapping[str, float]) -> str:
        return f"ndcg_at_{self.k}"

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return SASRec(self, inputs, precision=precision)


class SASRec(nn.Module):
    """Layer norm follows attention and feed-forward layers, as in RecBole. Products have the precision's dtype."""

    def __init__(self, config: SASRecConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._feature, self._length = config.sequence(inputs)
        self._dropout, self._k, self._dtype = config.dropout, config.k, compute_dtype(precision)
        dim = config.embedding_dim
        self.positions = nn.Parameter(_init_normal(torch.empty(self._length - 1, dim)))
        self.norm = nn.LayerNorm(dim, eps=_EPS)
        self.blocks = nn.ModuleList(_Block(config, dtype=self._dtype) for _ in range(config.blocks))

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        """Return `hidden` [rows, max_length, dim], the state after each item, `ids` [rows, max_length], `lengths` and `table`."""
        del dense
        items = embedded.sequences(self._feature)
        # The last position of a full list has no target in training, so it has no separate position embedding.
        positions = torch.cat([self.positions, self.positions[-1:]])
        hidden = functional.dropout(self.norm(self._padded(items, items.values) + positions), self._dropout, self.training)
        for block in self.blocks:
            hidden = block(hidden)
        ids, table = self._padded(items, embedded.ids(self._feature)), embedded.table(self._feature)
        return {"hidden": hidden, "ids": ids, "lengths": items.lengths, "table": table}

    def loss(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return each row's mean cross entropy over the items after the first, 0 for lists of one item, float32 [rows]."""
        del batch
        positions = torch.arange(1, self._length, device=outputs["ids"].device)
        rows, position = (positions < outputs["lengths"].unsqueeze(1)).nonzero(as_tuple=True)
        logits = self._logits(outputs["hidden"][rows, position], outputs["table"])
        losses = functional.cross_entropy(logits, outputs["ids"][rows, position + 1], reduction="none")
        total = losses.new_zeros(len(outputs["ids"])).index_add(0, rows, losses)
        return total / (outputs["lengths"] - 1).clamp(min=1)

    def measures(self, outputs: dict[str, torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
        """Return NDCG and recall at k of each list's last item among all, given those before, NaN for one alone, float32
        [rows]."""
        del batch
        last = (outputs["lengths"] - 1).clamp(min=1)
        logits = self._logits(self._after(outputs["hidden"], last - 1), outputs["table"])
        target = outputs["ids"].gather(1, last.unsqueeze(1))
        return rank_measures(logits, target.squeeze(1), k=self._k, known=outputs["lengths"] > 1)

    def predict(self, outputs: dict[str, torch.Tensor], embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        """Return the k next items with the highest scores for each list."""
        del embedded
        logits = self._logits(self._after(outputs["hidden"], (outputs["lengths"] - 1).clamp(min=0)), outputs["table"])
        scores, items = logits.topk(self._k, dim=1)
        return {"items": items, "scores": scores}

    def _padded(self, items: JaggedEmbeddings, values: torch.Tensor) -> torch.Tensor:
        """Convert [ids, ...] to [rows, max_length, ...], with zeros after the end of each list."""
        rows, lengths = items.rows, items.lengths
        position = torch.arange(values.shape[0], device=rows.device) - (lengths.cumsum(0) - lengths).index_select(0, rows)
        padded = values.new_zeros(lengths.shape[0], self._length, *values.shape[1:])
        return padded.index_put((rows, position), values)

    @staticmethod
    def _after(hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the state of each row at one place, [rows, dim]."""
        return hidden.gather(1, position.view(-1, 1, 1).expand(-1, 1, hidden.shape[2])).squeeze(1)

    def _logits(self, hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (hidden.to(self._dtype) @ table.to(self._dtype).T).float()


class _Block(nn.Module):
    """Block in which each place attends to itself and earlier places, [rows, places, dim]."""

    def __init__(self, config: SASRecConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        dim = config.embedding_dim
        self.query_key_value, self.mixed = _linear(dim, 3 * dim), _linear(dim, dim)
        self.attention_norm = nn.LayerNorm(dim, eps=_EPS)
        self.first, self.second = _linear(dim, config.hidden), _linear(config.hidden, dim)
        self.norm = nn.LayerNorm(dim, eps=_EPS)
        self._heads, self._dropout, self._dtype = config.attention_heads, config.dropout, dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(2, (self._heads, -1)).transpose(1, 2)
            for part in self._product(self.query_key_value, inputs).chunk(3, dim=2)
        )
        dropout = self._dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        hidden = self.attention_norm(inputs + self._dropped(self._product(self.mixed, mixed.transpose(1, 2).flatten(2))))
        inner = functional.gelu(self._product(self.first, hidden))
        return self.norm(hidden + self._dropped(self._product(self.second, inner)))

    def _product(self, layer: UninitializedLinear, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs.to(self._dtype), layer.weight.to(self._dtype), layer.bias.to(self._dtype))

    def _dropped(self, values: torch.Tensor) -> torch.Tensor:
        return functional.dropout(values.float(), self._dropout, self.training)


def _linear(in_features: int, out_features: int) -> UninitializedLinear:
    layer = UninitializedLinear(in_features, out_features)
    _init_normal(layer.weight)
    init_values(layer.bias, nn.init.zeros_)
    return layer


def _init_normal(values: torch.Tensor) -> torch.Tensor:
    return init_values(values, lambda tensor: nn.init.normal_(tensor, std=_START_STD))
