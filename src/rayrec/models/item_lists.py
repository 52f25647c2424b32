"""Common part of models that learn from lists of items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Count, Positive, Share
from rayrec.collectives import all_reduce_sum, gathered_rows
from rayrec.config import InputError
from rayrec.layers import item_losses
from rayrec.layers.item_losses import find_hits
from rayrec.layers.kernels.dropout import dropped
from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.mlp import Precision, compute_dtype
from rayrec.metrics.item_ranks import CandidateScores, tiled_rank_measures
from rayrec.models.base import ClickModelConfig, ModelInputs, table_key
from rayrec.models.evaluation_items import EvaluationItems, ItemList, evaluation_items
from rayrec.models.heads import Head, ItemsHead
from rayrec.schema import SEEN, TARGET

if TYPE_CHECKING:
    from rayrec.batch import Batch

Loss = Literal["full", "sampled", "gbce", "bce", "in_batch", "mixed", "ccl"]
"""Training losses of models of item lists."""
RankMetric = Literal["ndcg", "recall", "hit_rate", "mrr"]
"""Metrics of ranked items."""
_FROM_BATCH: Final = ("in_batch", "mixed")
"""Losses with the batch's items as negatives."""


@dataclass(frozen=True, kw_only=True)
class ItemListConfig(ClickModelConfig):
    """Prediction of a list's items from its other items.

    The list is the schema's first list, with a `max_length`. All known items are candidates.
    Unknown and missing ones are neither candidates nor targets.
    """

    LABELLED: ClassVar[bool] = False

    loss: Loss = "full"
    """Training loss of a target. full: softmax over all items. sampled: softmax over it and
    `negatives`. bce, gbce: binary cross entropy, for gbce calibrated by `gbce_t`. in_batch: softmax
    over the step's targets, corrected for frequencies; mixed adds `negatives`. ccl: cosines of it
    and `negatives`. Evaluations report the softmax over all items.
    """
    negatives: Count = 2048
    """Number of random items, which all targets in a step share, and maximum number of negatives
    from the step's targets.
    """
    gbce_t: Share = 0.75
    """Calibration of loss gbce, from 0, which is bce, to 1."""
    ccl_margin: Share = 0.4
    """Cosine up to which negatives have no loss ccl."""
    ccl_weight: Positive = 150.0
    """Weight of the negatives in loss ccl."""
    loss_mean: Literal["targets", "rows"] = "targets"
    """Average of the loss: over all targets of a step, or over each row's targets, then over
    rows.
    """
    temperature: Positive = 1.0
    """Divisor of scores."""
    unit_vectors: bool = False
    """Whether scores are cosines, divided by `temperature`, instead of dot products."""
    embedding_dim: int = 64
    """Width of every embedding, and of the network."""
    dropout: Share = 0.2
    """Dropout probability."""
    item_dropout: Share = 0.0
    """Dropout probability of items' embeddings, with one mask for an item in a step, as input,
    target and negative.
    """
    k: Count = 10
    """Number of predicted items, at most all known ones, and rank k of the metrics."""
    best_metric: RankMetric = "ndcg"
    """Metric at rank k of the validation rows that selects the best weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "ccl" and not self.unit_vectors:
            raise InputError(
                f"{type(self).__name__}.unit_vectors: must be true for loss ccl, got false. Set it."
            )

    def table_sample(self) -> int | None:
        return {"full": None, "in_batch": 0}.get(self.loss, self.negatives)

    def needs_frequencies(self) -> bool:
        return self.loss in _FROM_BATCH

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
        lists = dict(inputs.lists)
        evaluated = (name for name in (TARGET, SEEN) if name in lists)
        return (self.sequence(inputs)[0], *evaluated)

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
        return f"{self.best_metric}_at_{self.k}"


# Shapes, for lists of items, width D, and C known items:
#
#   forward       lists of ids -> embeddings [ids, D]
#   training      states of predicted items [targets, D] against candidates -> their losses
#   evaluation    state of the history -> ranks of the items in `target`; without that list, the
#                 list's last item is the target, and not in the history
#   prediction    state of the whole list -> the k best candidates
class ItemListNetwork(nn.Module, ABC):
    """Network of an ItemListConfig. A subclass computes states of lists."""

    frequencies: torch.Tensor

    def __init__(
        self,
        config: ItemListConfig,
        inputs: ModelInputs,
        *,
        precision: Precision,
    ) -> None:
        super().__init__()
        self._config = config
        self._feature, self._length = config.sequence(inputs)
        self._lists = config.sequences(inputs)
        self._candidates = inputs.candidates_of(self._feature)
        self._k = config.k
        self._dtype = compute_dtype(precision)
        frequencies = inputs.frequencies_of(self._feature) if config.needs_frequencies() else None
        # Not saved, because only training needs them
        if frequencies is None:
            frequencies = torch.empty(0, device="cpu")
        self.register_buffer("frequencies", frequencies, persistent=False)

    @abstractmethod
    def states(
        self,
        outputs: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the states that predict known items in training, float32 [targets, dim], each
        item's position among all lists' items, and its row, int64 [targets] both.
        """

    @abstractmethod
    def last_states(
        self,
        outputs: dict[str, torch.Tensor],
        *,
        left_out: torch.Tensor | int,
    ) -> torch.Tensor:
        """Return the state of each row's list without its last `left_out` items, int64 [rows],
        float32 [rows, dim].
        """

    def dropped(self, values: torch.Tensor) -> torch.Tensor:
        """Return values with dropout, in training."""
        return dropped(values, self._config.dropout if self.training else 0.0)

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        """Return the items' embeddings `values` [ids, dim]. Each list has `ids_NAME` [ids] and
        `lengths_NAME` [rows]. In training, unless the loss is over all items, the `table` has only
        the rows of `sample`, int64 [rows].
        """
        values = embedded.sequences(self._feature).values
        outputs = {"values": values, "table": embedded.table(self._feature)}
        for name in self._lists:
            outputs[f"ids_{name}"] = embedded.ids(name)
            outputs[f"lengths_{name}"] = embedded.sequences(name).lengths
        if self.training and self._config.table_sample() is not None:
            outputs["sample"] = embedded.ids(table_key(self._feature))
        return outputs | self._dropped_items(outputs)

    def _dropped_items(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `values` and `table` with dropout of items, in training."""
        probability = self._config.item_dropout
        if not self.training or not probability:
            return {}
        values = outputs["values"]
        table = outputs["table"]
        rows = outputs.get("sample")
        if rows is None:
            rows = torch.arange(len(table), device=table.device)
        ids = torch.cat([outputs[f"ids_{self._feature}"], rows])
        items, number = ids.unique(return_inverse=True)
        masks = dropped(values.new_ones(len(items), values.shape[1]), probability)[number]
        return {"values": values * masks[: len(values)], "table": table * masks[len(values) :]}

    def loss(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return each row's loss over the items that `states` predicts, whose mean over the step's
        rows is the loss of the step, 0 for rows without one, float32 [rows]. In an evaluation, the
        mean cross entropy over each row's targets. Collective in training.
        """
        if not self.training and TARGET in self._lists:
            queries, evaluated = self._evaluated(outputs)
            ranked = evaluated.targets.candidates_only()
            scores = CandidateScores(queries, self.item_vectors(outputs))
            log_sums = scores.map_rows(item_losses.log_sums)
            if scores.stored is not None:
                outputs["scores"] = scores.stored
            losses = log_sums[ranked.rows] - scores.at_items(ranked)
            return _row_means(losses, ranked.rows, len(queries))
        states, targets, rows = self.states(outputs)
        losses = self._losses(self._scaled(states), targets, outputs)
        num_rows = len(outputs[f"lengths_{self._feature}"])
        if not self.training or self._config.loss_mean == "rows":
            return _row_means(losses, rows, num_rows)
        counts = losses.new_tensor([len(losses), num_rows])
        (totals,) = all_reduce_sum(counts)
        scale = totals[1] / totals[0].clamp(min=1)
        return losses.new_zeros(num_rows).index_add(0, rows, losses) * scale

    def _losses(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        outputs: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the loss of each target, float32 [targets], from the scaled states before it,
        [targets, dim], and its position among all items. Collective.
        """
        ids = outputs[f"ids_{self._feature}"][targets]
        if "sample" not in outputs:
            numbers = self._candidates.numbers(ids)
            vectors = self.item_vectors(outputs)
            return item_losses.full_softmax(states, vectors, numbers, dtype=self._dtype)
        positives = self._unit(outputs["values"].index_select(0, targets))
        if self._config.loss in _FROM_BATCH:
            return self._corrected(states, positives, ids, outputs)
        sample = outputs["sample"]
        return self._sampled_loss()(
            states,
            positives,
            self._unit(outputs["table"]),
            hits=find_hits(ids, sample),
            dtype=self._dtype,
        )

    def _sampled_loss(self) -> Callable[..., torch.Tensor]:
        config = self._config
        if config.loss == "gbce":
            num_items = self._candidates.count
            assert num_items is not None, "predicted ids belong to a vocabulary"
            return partial(item_losses.gbce, num_items=num_items, t=config.gbce_t)
        if config.loss == "ccl":
            return partial(
                item_losses.cosine_contrastive,
                margin=config.ccl_margin,
                weight=config.ccl_weight,
            )
        return {"sampled": item_losses.sampled_softmax, "bce": item_losses.bce}[config.loss]

    def _corrected(
        self,
        states: torch.Tensor,
        positives: torch.Tensor,
        ids: torch.Tensor,
        outputs: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the loss with the targets of all workers, and the sample if there is one, as the
        pool of negatives. Collective.
        """
        all_ids, _ = gathered_rows(ids)
        all_vectors, _ = gathered_rows(positives)
        # In order of ids, whatever the workers
        order = all_ids.argsort(stable=True)
        limit = self._config.negatives
        if len(order) > limit:
            order = order[torch.arange(limit, device=order.device) * len(order) // limit]
        pool_ids = torch.cat([all_ids[order], outputs["sample"]])
        pool = torch.cat([all_vectors[order], self._unit(outputs["table"])])
        probabilities = item_losses.pool_probabilities(
            self._frequencies(torch.cat([pool_ids, ids])),
            from_batch=len(order),
            uniform=len(outputs["sample"]),
            num_items=max(1, len(self.frequencies)),
        )
        return item_losses.corrected_softmax(
            states,
            positives,
            pool,
            hits=find_hits(ids, pool_ids),
            probabilities=probabilities[: len(pool)],
            positive_probabilities=probabilities[len(pool) :],
            dtype=self._dtype,
        )

    def _frequencies(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the share of each item in all occurrences of items, float32 [ids]."""
        if not len(self.frequencies):  # In a forecast, which has no counts
            return torch.full(ids.shape, 1 / (len(ids) + 1), device=ids.device)
        return self.frequencies[self._candidates.numbers(ids)]

    def measures(
        self,
        outputs: dict[str, torch.Tensor],
        batch: Batch,
        *,
        ks: Sequence[int] = (),
    ) -> dict[str, torch.Tensor]:
        """Return `tiled_rank_measures` of each row's targets among all known items (see
        `evaluation_items`), at these ranks or at k.
        """
        queries, evaluated = self._evaluated(outputs)
        # Those of the loss, which are changed here
        stored = outputs.pop("scores", None)
        scores = CandidateScores(queries, self.item_vectors(outputs), stored=stored)
        return tiled_rank_measures(
            scores,
            evaluated.targets,
            shape=scores.shape,
            ks=ks or (self._k,),
            seen=evaluated.seen,
        )

    def _evaluated(self, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, EvaluationItems]:
        """Return the vector of each row before its targets, float32 [rows, dim], and the targets
        with the items before them.
        """
        lists = {
            name: ItemList(outputs[f"ids_{name}"], outputs[f"lengths_{name}"])
            for name in self._lists
        }
        evaluated = evaluation_items(lists, self._feature, self._candidates)
        # Both the loss and the measures of a step need them
        if "evaluated" not in outputs:
            states = self.last_states(outputs, left_out=evaluated.is_last.long())
            outputs["evaluated"] = self._scaled(states)
        return outputs["evaluated"], evaluated

    def predict(
        self,
        outputs: dict[str, torch.Tensor],
        embedded: KeyedEmbeddings,
    ) -> dict[str, torch.Tensor]:
        """Return the k next items with the highest scores for each list, or all known ones if there
        are fewer.
        """
        logits = self.queries(outputs) @ self.item_vectors(outputs).T
        scores, numbers = logits.topk(min(self._k, logits.shape[1]), dim=1)
        return {"items": self._candidates.ids(numbers), "scores": scores}

    def queries(self, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the vector of each row after its whole list, float32 [rows, dim]. An item's score
        is its dot product with one of `item_vectors`.
        """
        return self._scaled(self.last_states(outputs, left_out=0))

    def item_vectors(self, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the vectors of all candidates, float32 [candidates, dim]."""
        return self._unit(self._candidates.of_table(outputs["table"]))

    def _unit(self, vectors: torch.Tensor) -> torch.Tensor:
        """Normalize vectors if scores are cosines."""
        return functional.normalize(vectors, dim=1) if self._config.unit_vectors else vectors

    def _scaled(self, states: torch.Tensor) -> torch.Tensor:
        """Return vectors whose dot products with items are scores."""
        temperature = self._config.temperature
        return self._unit(states) if temperature == 1 else self._unit(states) / temperature


def _row_means(losses: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the mean of the losses of each row, 0 without any, float32 [count]."""
    totals = losses.new_zeros(count).index_add(0, rows, losses)
    return totals / torch.bincount(rows, minlength=count).clamp(min=1)
