"""Common part of models that predict each item of a list from the items before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Count, Share
from rayrec.config import InputError
from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.mlp import Precision, compute_dtype
from rayrec.metrics.item_ranks import ItemNumbers, candidate_logits, rank_measures
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.heads import Head, ItemsHead

if TYPE_CHECKING:
    from rayrec.batch import Batch

TARGET = "target"
"""List of the items to predict in rows of an evaluation."""
SEEN = "seen"
"""List of the items that a user had before, which are no candidates in an evaluation."""


@dataclass(frozen=True, kw_only=True)
class NextItemConfig(ClickModelConfig):
    """Prediction of each item of a list from the items before it.

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
    dropout: Share = 0.5
    """Dropout probability."""
    k: Count = 10
    """Number of predicted items, at most all known ones, and rank k of the metrics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding_dim % self.attention_heads:
            raise InputError(
                f"{type(self).__name__}.attention_heads: must divide embedding_dim "
                f"{self.embedding_dim}, got {self.attention_heads}"
            )

    def sequence(self, inputs: ModelInputs) -> tuple[str, int]:
        """Return the list of items and its maximum length. Raises InputError if the schema has
        none.
        """
        name, length = next(iter(inputs.lists), (None, None))
        if name is None or length is None or length < 2:
            raise InputError(
                f"{type(self).__name__}: the schema must have a list of items with a max_length of "
                f"at least 2, got {name or 'no list'}. Set lists: [item] and features: [{{name: "
                "item, max_length: 50}]."
            )
        return name, length

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        item = self.sequence(inputs)[0]
        lists = dict(inputs.lists)
        return (item, *(name for name in (TARGET, SEEN) if name in lists))

    def full_tables(self, inputs: ModelInputs) -> tuple[str, ...]:
        return (self.sequence(inputs)[0],)

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


# Shapes, for lists of up to L items of width D and C known items:
#
#   forward       list of ids -> embeddings [ids, D]
#   encode        a part of each list, padded [rows, L, D] -> state after each item [rows, L, D]
#   training      state after item i against all candidates [C, D] -> cross entropy of item i + 1
#   evaluation    state after the history -> ranks of the items in `target`; without that list, the
#                 history ends before the list's last item, which is the target
#   prediction    state after the last item -> the k best candidates
class NextItemNetwork(nn.Module, ABC):
    """Network of a NextItemConfig. A subclass encodes lists."""

    def __init__(
        self, config: NextItemConfig, inputs: ModelInputs, *, precision: Precision
    ) -> None:
        super().__init__()
        self._feature, self._length = config.sequence(inputs)
        self._lists = config.sequences(inputs)
        self._candidates = inputs.candidates_of(self._feature)
        self._k = config.k
        self._dtype = compute_dtype(precision)

    @abstractmethod
    def encode(self, items: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the state after each item of a list, float32 [rows, places, dim], from the items'
        embeddings, zeros after the end of a list, float32 [rows, places, dim], and lengths, int64
        [rows]. States after the end of a list have any values.
        """

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        """Return the items' embeddings `values` [ids, dim], the ids and lengths of each list,
        `ids_NAME` [ids] and `lengths_NAME` [rows], and the item `table`.
        """
        outputs = {
            "values": embedded.sequences(self._feature).values,
            "table": embedded.table(self._feature),
        }
        for name in self._lists:
            outputs[f"ids_{name}"] = embedded.ids(name)
            outputs[f"lengths_{name}"] = embedded.sequences(name).lengths
        return outputs

    def loss(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return each row's mean cross entropy over the known items after the first, 0 for lists
        without one, float32 [rows].
        """
        lengths = outputs[f"lengths_{self._feature}"]
        ids = self._padded(outputs[f"ids_{self._feature}"], lengths, self._length)
        targets = self._candidates.numbers(ids[:, 1:])
        places = torch.arange(1, self._length, device=ids.device)
        is_target = (places < lengths.unsqueeze(1)) & (targets >= 0)
        rows, place = is_target.nonzero(as_tuple=True)
        hidden = self._states(outputs, drop_last=True)
        logits = self._logits(hidden[rows, place], outputs["table"], self._dtype)
        losses = functional.cross_entropy(logits, targets[rows, place], reduction="none")
        total = losses.new_zeros(len(ids)).index_add(0, rows, losses)
        return total / is_target.sum(1).clamp(min=1)

    def measures(self, outputs: dict[str, torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
        """Return `rank_measures` of each row's targets among all known items, or of the list's last
        item if the row has none. Lists of one item, and those with a missing last one, have no
        target.
        """
        has_own = self._lengths(outputs, TARGET) > 0
        lengths = outputs[f"lengths_{self._feature}"]
        last = (lengths.cumsum(0) - 1).clamp(min=0)
        ids = outputs[f"ids_{self._feature}"]
        last_ids = ids[last] if len(ids) else torch.zeros_like(lengths)
        has_last = ~has_own & (lengths > 1)
        if self._candidates.missing is not None:
            has_last = has_last & (last_ids != self._candidates.missing)
        targets = self._items(outputs, TARGET)
        from_last = ItemNumbers.one_each(self._candidates.numbers(last_ids), has_last)
        targets = ItemNumbers(
            torch.cat([targets.rows, from_last.rows]),
            torch.cat([targets.numbers, from_last.numbers]),
        )
        queries = torch.where(
            has_own.unsqueeze(1), self.queries(outputs), self._queries(outputs, drop_last=True)
        )
        logits = candidate_logits(queries, self.item_vectors(outputs))
        seen = self._items(outputs, SEEN) if SEEN in self._lists else None
        return rank_measures(logits, targets, ks=(self._k,), seen=seen)

    def predict(
        self, outputs: dict[str, torch.Tensor], embedded: KeyedEmbeddings
    ) -> dict[str, torch.Tensor]:
        """Return the k next items with the highest scores for each list, or all known ones if there
        are fewer.
        """
        logits = self._logits(self.queries(outputs), outputs["table"], torch.float32)
        scores, numbers = logits.topk(min(self._k, logits.shape[1]), dim=1)
        return {"items": self._candidates.ids(numbers), "scores": scores}

    def queries(self, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the vector of each row after its whole list, float32 [rows, dim]. An item's score
        is its dot product with one of `item_vectors`.
        """
        return self._queries(outputs, drop_last=False)

    def item_vectors(self, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the vectors of all candidates, float32 [candidates, dim]."""
        return self._candidates.of_table(outputs["table"])

    def _queries(self, outputs: dict[str, torch.Tensor], *, drop_last: bool) -> torch.Tensor:
        hidden = self._states(outputs, drop_last=drop_last)
        lengths = outputs[f"lengths_{self._feature}"] - int(drop_last)
        last = (lengths - 1).clamp(min=0).view(-1, 1, 1)
        return hidden.gather(1, last.expand(-1, 1, hidden.shape[2])).squeeze(1)

    def _states(self, outputs: dict[str, torch.Tensor], *, drop_last: bool) -> torch.Tensor:
        """Return the state after each item of the lists, without their last items if `drop_last`,
        float32 [rows, places, dim].
        """
        lengths = outputs[f"lengths_{self._feature}"]
        width = self._length - int(drop_last)
        items = self._padded(outputs["values"], lengths, width, drop_last=drop_last)
        kept = (lengths - int(drop_last)).clamp(min=0)
        return self.encode(items, kept)

    def _lengths(self, outputs: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        """Return the lengths of a list, 0 without it, int64 [rows]."""
        lengths = outputs.get(f"lengths_{name}")
        return torch.zeros_like(outputs[f"lengths_{self._feature}"]) if lengths is None else lengths

    def _items(self, outputs: dict[str, torch.Tensor], name: str) -> ItemNumbers:
        """Return the items of a list, which is empty without it."""
        ids = outputs.get(f"ids_{name}")
        if ids is None:
            ids = outputs[f"ids_{self._feature}"][:0]
        return ItemNumbers.of_lists(self._candidates.numbers(ids), self._lengths(outputs, name))

    @staticmethod
    def _padded(
        values: torch.Tensor, lengths: torch.Tensor, width: int, *, drop_last: bool = False
    ) -> torch.Tensor:
        """Convert lists [ids, ...] to [rows, width, ...], with zeros after the end of each list."""
        place = torch.arange(width, device=lengths.device)
        starts = (lengths.cumsum(0) - lengths).unsqueeze(1)
        is_inside = place < (lengths - int(drop_last)).unsqueeze(1)
        # Places after the end take a row of zeros behind the values
        index = torch.where(is_inside, starts + place, values.shape[0])
        filled = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        return filled.index_select(0, index.flatten()).unflatten(0, (-1, width))

    def _logits(
        self, hidden: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the scores of all candidates, float32 [rows, candidates]. Rounded scores would
        have ties, so ranks are computed from float32 products, whatever the precision of
        training.
        """
        return (hidden.to(dtype) @ self._candidates.of_table(table).to(dtype).T).float()
