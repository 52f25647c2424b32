"""Two towers with sampled softmax over the items of all workers' batches (Yi et al.,
"Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", RecSys 2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Count, Positive, Share, Sizes
from rayrec.collectives import gathered_rows
from rayrec.config import InputError
from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.mlp import Precision, Tower, xavier_linear
from rayrec.metrics.item_ranks import (
    CandidateScores,
    ItemNumbers,
    candidate_logits,
    rank_measures,
    tiled_rank_measures,
)
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.heads import Head, VectorHead
from rayrec.models.item_lists import RankMetric

if TYPE_CHECKING:
    from rayrec.batch import Batch

_BUCKETS: Final = 1 << 16
"""Number of item counters, for Preprocessors without frequencies. Items share one if their ids are
equal modulo this.
"""
_DECAY: Final = 0.99
"""Factor of the counters in each step."""


@dataclass(frozen=True, kw_only=True)
class TwoTowerConfig(ClickModelConfig):
    """Vectors of users and items in one space. A row of the log is a user with a chosen item.

    Discriminates the row's item from all items in the step, corrected for frequency. Dense features
    and lists are the user's. Unknown and missing items are neither candidates nor targets.
    """

    LABELLED: ClassVar[bool] = False
    TRAINS_ON_TABLES: ClassVar[bool] = False

    embedding_dim: int = 32
    """Width of every embedding."""
    item_features: tuple[str, ...] = ("item",)
    """Features of the item. The first one is its id. All other features are the user's."""
    user_tower: Sizes = (64,)
    """Widths of the hidden layers of the user's tower."""
    item_tower: Sizes = ()
    """Widths of the hidden layers of the item's tower."""
    vector: Count = 32
    """Width of the vectors."""
    temperature: Positive = 0.1
    """Divisor of the cosine of two vectors."""
    dropout: Share = 0.0
    """Dropout probability of each layer's outputs."""
    k: Count = 10
    """Rank k of the metrics."""
    best_metric: RankMetric = "ndcg"
    """Metric at rank k of the validation rows that selects the best weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.item_features:
            raise InputError(
                "TwoTowerConfig.item_features: must name at least the item's id, got none."
            )

    def user_features(self, inputs: ModelInputs) -> tuple[str, ...]:
        """Return the user's features. Raises InputError without any, or if an item feature is not a
        single category.
        """
        lists = [name for name, _ in inputs.lists]
        for name in self.item_features:
            if name not in inputs.features or name in lists:
                single = ", ".join(each for each in inputs.features if each not in lists)
                fix = f"The log has {single}: choose by --workload.model.item-features."
                if not single:
                    fix = "Use recipe next_item, or name user and item in sparse, not in sequence."
                raise InputError(
                    "TwoTowerConfig.item_features: must be features of one category a row, got "
                    f"{name}. {fix}"
                )
        features = tuple(name for name in inputs.features if name not in self.item_features)
        if not features:
            raise InputError(
                "TwoTowerConfig: the schema must have features of the user, got none. Name them "
                "in sparse."
            )
        return features

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        self.user_features(inputs)
        return self.item_features[:1]  # Its ids identify rows with the same item

    def full_tables(self, inputs: ModelInputs) -> tuple[str, ...]:
        """Return the item table if the items have no other features. Evaluations then rank all
        items.
        """
        return () if self.item_features[1:] else self.item_features

    def candidate_feature(self, inputs: ModelInputs) -> str:
        return self.item_features[0]

    def output_heads(self, inputs: ModelInputs) -> tuple[Head, ...]:
        return (VectorHead("user", self.vector), VectorHead("item", self.vector))

    def objective(self, metrics: Mapping[str, float]) -> str:
        return f"{self.best_metric}_at_{self.k}"

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return TwoTower(self, inputs, precision=precision)


# Shapes, for R rows of all workers in a step and vectors of width V:
#
#   user features -> user tower -> user [rows, V], norm 1
#   item features -> item tower -> item [rows, V], norm 1
#   training      items of all workers [R, V] are the candidates; an item's frequency is subtracted,
#                 since frequent ones are negatives more often
#   evaluation    candidates are the whole table, or the step's distinct items
class TwoTower(nn.Module):
    """Two MLPs with outputs of norm 1."""

    item_counts: torch.Tensor
    frequencies: torch.Tensor

    def __init__(
        self,
        config: TwoTowerConfig,
        inputs: ModelInputs,
        *,
        precision: Precision,
    ) -> None:
        super().__init__()
        self._users = config.user_features(inputs)
        self._items = config.item_features
        self._candidates = inputs.candidates_of(self._items[0])
        self._temperature = config.temperature
        self._k = config.k
        dim = config.embedding_dim

        def tower(width: int, sizes: Sequence[int]) -> nn.Sequential:
            layers = Tower(width, sizes, dropout=config.dropout, precision=precision)
            return nn.Sequential(layers, xavier_linear(layers.out_features, config.vector))

        self.user_tower = tower(inputs.num_dense + len(self._users) * dim, config.user_tower)
        self.item_tower = tower(len(self._items) * dim, config.item_tower)
        # For items without known frequencies. Saved, as in earlier versions
        self.register_buffer("item_counts", torch.zeros(_BUCKETS))
        frequencies = inputs.frequencies_of(self._items[0])
        unknown = torch.empty(0, device="cpu")
        self.register_buffer(
            "frequencies",
            unknown if frequencies is None else frequencies,
            persistent=False,
        )

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        """Return vectors `user` and `item` [rows, vector], the item's `ids` [rows], and the item
        `table`, if in `full_tables`.
        """
        features = torch.cat([dense, *(embedded[name] for name in self._users)], dim=1)
        first = self._items[0]
        outputs = {
            "user": self._vector(self.user_tower, features),
            "item": self._vector(
                self.item_tower,
                torch.cat([embedded[name] for name in self._items], dim=1),
            ),
            "ids": embedded.ids(first),
        }
        if not self.training and embedded.has_table(first):
            outputs["table"] = embedded.table(first)
        return outputs

    def loss(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return each row's cross entropy of its item among the known items of all rows in the
        step, 0 for rows without a known item, float32 [rows]. Collective.
        """
        items, local_rows = gathered_rows(outputs["item"])
        ids, _ = gathered_rows(outputs["ids"])
        logits = outputs["user"] @ items.T / self._temperature - self._log_frequency(ids)
        target = torch.arange(local_rows.start, local_rows.stop, device=ids.device)
        # Another row with the row's own item is no negative, and unknown items are none either.
        hidden = (outputs["ids"].unsqueeze(1) == ids) | ~self._candidates.contains(ids)
        hidden = hidden.scatter(1, target.unsqueeze(1), value=False)
        losses = functional.cross_entropy(
            logits.masked_fill(hidden, -torch.inf),
            target,
            reduction="none",
        )
        return losses.masked_fill(~self._candidates.contains(outputs["ids"]), 0.0)

    def measures(
        self,
        outputs: dict[str, torch.Tensor],
        batch: Batch,
        *,
        ks: Sequence[int] = (),
    ) -> dict[str, torch.Tensor]:
        """Return `tiled_rank_measures` of each row's item among the table's known items, or
        `rank_measures` among the step's distinct ones, at these ranks or at k. Rows with a missing
        item have no target. Collective.
        """
        ids = outputs["ids"]
        ranks = ks or (self._k,)
        has_target = None if self._candidates.missing is None else ids != self._candidates.missing
        if "table" in outputs:
            scores = CandidateScores(self.queries(outputs), self.item_vectors(outputs))
            targets = ItemNumbers.one_each(self._candidates.numbers(ids), has_target)
            return tiled_rank_measures(scores, targets, shape=scores.shape, ks=ranks)
        logits, target = self._step_logits(outputs)
        return rank_measures(logits, ItemNumbers.one_each(target, has_target), ks=ranks)

    def queries(self, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the vector of each row's user, float32 [rows, vector]. An item's score is its dot
        product with one of `item_vectors`.
        """
        return outputs["user"]

    def item_vectors(self, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the vectors of all candidates, float32 [candidates, vector]. Raises KeyError
        unless the outputs have the item `table`.
        """
        return self._vector(self.item_tower, self._candidates.of_table(outputs["table"]))

    def _step_logits(self, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the step's distinct known items, and the number of each row's item
        among them, -1 if unknown. The first row with an item stands for it, and each row for its
        own. Collective.
        """
        items, local_rows = gathered_rows(outputs["item"])
        ids, _ = gathered_rows(outputs["ids"])
        distinct, number = ids.unique(return_inverse=True)
        rows = torch.arange(len(ids), device=ids.device)
        first = rows.new_full((len(distinct),), len(ids)).scatter_reduce(0, number, rows, "amin")
        local = rows[local_rows]
        logits_of_rows = candidate_logits(outputs["user"], items)
        logits = logits_of_rows[:, first].scatter(
            1,
            number[local].unsqueeze(1),
            logits_of_rows.gather(1, local.unsqueeze(1)),
        )
        is_candidate = self._candidates.contains(distinct)
        target = (is_candidate.cumsum(0) * is_candidate - 1)[number[local]]
        return logits[:, is_candidate], target

    def predict(
        self,
        outputs: dict[str, torch.Tensor],
        embedded: KeyedEmbeddings,
    ) -> dict[str, torch.Tensor]:
        """Return the vectors."""
        return {name: outputs[name] for name in ("user", "item")}

    @staticmethod
    def _vector(tower: nn.Sequential, features: torch.Tensor) -> torch.Tensor:
        hidden = tower[0](features)
        last: Any = tower[1]
        return functional.normalize(
            functional.linear(hidden.float(), last.weight, last.bias),
            dim=1,
        )

    def _log_frequency(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of each item's share of the training rows, equal on all workers,
        float32 [ids]. If the Preprocessor has none, of recent rows and the step's. In an
        evaluation, the step does not count for later ones.
        """
        if len(self.frequencies):
            # Reserved ids, with any value, are no candidates
            return self.frequencies[self._candidates.numbers(ids).clamp(min=0)].log()
        if not len(ids):
            return self.item_counts.new_zeros(0)
        bucket = ids % _BUCKETS
        with torch.no_grad():
            counts = self.item_counts * _DECAY + torch.bincount(bucket, minlength=_BUCKETS)
            if self.training:
                self.item_counts.copy_(counts)
        return (counts.index_select(0, bucket) / counts.sum()).log()
