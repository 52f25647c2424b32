"""Common part of models that predict each item of a list from the items before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Count, Positive, Share
from rayrec.collectives import all_reduce_sum, gathered_rows
from rayrec.config import InputError
from rayrec.layers import item_losses
from rayrec.layers.item_losses import find_hits
from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.mlp import Precision, compute_dtype
from rayrec.layers.sequence_blocks import ListElements, dropped
from rayrec.metrics.item_ranks import CandidateScores, tiled_rank_measures
from rayrec.models.base import ClickModelConfig, ModelInputs, table_key
from rayrec.models.evaluation_items import EvaluationItems, ItemList, evaluation_items
from rayrec.models.heads import Head, ItemsHead
from rayrec.schema import SEEN, TARGET

if TYPE_CHECKING:
    from rayrec.batch import Batch

Loss = Literal["full", "sampled", "gbce", "bce", "in_batch", "mixed", "ccl"]
"""Training losses of next-item models."""
_FROM_BATCH: Final = ("in_batch", "mixed")
"""Losses with the batch's items as negatives."""


@dataclass(frozen=True, kw_only=True)
class NextItemConfig(ClickModelConfig):
    """Prediction of each item of a list from the items before it.

    The list is the schema's first list, in chronological order, with a `max_length`. All known
    items are candidates. Unknown and missing ones are neither candidates nor targets. Embeddings of
    lists that are aligned with it are added to the items'.
    """

    LABELLED: ClassVar[bool] = False
    EARLIER: ClassVar[Mapping[str, Any]] = {"loss_mean": "rows"}

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
    blocks: Count = 2
    """Number of blocks of attention and feed-forward layers."""
    attention_heads: Count = 2
    """Number of attention heads per block."""
    dropout: Share = 0.2
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
        names = (*self.aligned(inputs), *(name for name in (TARGET, SEEN) if name in lists))
        return (self.sequence(inputs)[0], *names)

    def aligned(self, inputs: ModelInputs) -> tuple[str, ...]:
        """Return the lists whose embeddings are added to the items'."""
        item = self.sequence(inputs)[0]
        return tuple(name for name, other in inputs.aligned if other == item)

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


# Shapes, for lists with up to L + 1 items, width D, C known items, and P elements in all lists:
#
#   forward       list of ids -> embeddings [ids, D]
#   encode        a part of each list [P, D] -> state after each item [P, D]
#   training      state after item i against candidates -> loss of item i + 1
#   evaluation    state after the history -> ranks of the items in `target`; without that list, the
#                 history ends before the list's last item, which is the target
#   prediction    state after the last item -> the k best candidates
class NextItemNetwork(nn.Module, ABC):
    """Network of a NextItemConfig. A subclass encodes lists."""

    frequencies: torch.Tensor

    def __init__(
        self,
        config: NextItemConfig,
        inputs: ModelInputs,
        *,
        precision: Precision,
    ) -> None:
        super().__init__()
        self._config = config
        self._feature, self._length = config.sequence(inputs)
        self._lists = config.sequences(inputs)
        self._aligned = config.aligned(inputs)
        self._candidates = inputs.candidates_of(self._feature)
        self._k = config.k
        self._dtype = compute_dtype(precision)
        self._history = self._length - 1
        frequencies = inputs.frequencies_of(self._feature) if config.needs_frequencies() else None
        # Not saved, because only training needs them
        if frequencies is None:
            frequencies = torch.empty(0, device="cpu")
        self.register_buffer("frequencies", frequencies, persistent=False)

    @abstractmethod
    def encode(self, items: torch.Tensor, elements: ListElements) -> torch.Tensor:
        """Return the state after each item of the lists, float32 [elements, dim], from the items'
        embeddings, float32 [elements, dim].
        """

    def dropped(self, values: torch.Tensor) -> torch.Tensor:
        """Return values with dropout, in training."""
        return dropped(values, self._config.dropout if self.training else 0.0)

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        """Return the items' embeddings `values` [ids, dim], and `inputs` [ids, dim], to which those
        of aligned lists are added. Each list has `ids_NAME` [ids] and `lengths_NAME` [rows]. In
        training, unless the loss is over all items, the `table` has only the rows of `sample`,
        int64 [rows].
        """
        values = embedded.sequences(self._feature).values
        inputs = values
        for name in self._aligned:
            inputs = inputs + embedded.sequences(name).values
        outputs = {"values": values, "inputs": inputs, "table": embedded.table(self._feature)}
        for name in self._lists:
            outputs[f"ids_{name}"] = embedded.ids(name)
            outputs[f"lengths_{name}"] = embedded.sequences(name).lengths
        if self.training and self._config.table_sample() is not None:
            outputs["sample"] = embedded.ids(table_key(self._feature))
        return outputs

    def loss(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return each row's loss over the known items after the first, whose mean over the step's
        rows is the loss of the step, 0 for rows without one, float32 [rows]. In an evaluation, the
        mean cross entropy over each row's targets. Collective in training.
        """
        if not self.training and TARGET in self._lists:
            queries, evaluated = self._evaluated(outputs)
            ranked = evaluated.targets.candidates_only()
            losses = item_losses.full_softmax(
                queries[ranked.rows],
                self.item_vectors(outputs),
                ranked.numbers,
                dtype=self._dtype,
            )
            return _row_means(losses, ranked.rows, len(queries))
        elements = self._elements(outputs, dropped=1)
        numbers = self._candidates.numbers(outputs[f"ids_{self._feature}"])
        # The next item of the list, which is not among the elements
        targets = elements.item + 1
        is_candidate = numbers[targets] >= 0
        states = self.encode(outputs["inputs"].index_select(0, elements.item), elements)[
            is_candidate
        ]
        rows = elements.rows[is_candidate]
        losses = self._losses(self._scaled(states), targets[is_candidate], outputs)
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
        scores = CandidateScores(queries, self.item_vectors(outputs))
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
        return self._queries(outputs, dropped=evaluated.is_last.long()), evaluated

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
        return self._queries(outputs, dropped=0)

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

    def _queries(
        self,
        outputs: dict[str, torch.Tensor],
        *,
        dropped: torch.Tensor | int,
    ) -> torch.Tensor:
        """Return the vector of each row after its list without the last `dropped` items, int64
        [rows], float32 [rows, dim]. A list without items has one with an embedding of zeros.
        """
        inputs = outputs["inputs"]
        elements = self._elements(outputs, dropped=dropped, fill=True)
        # A row of zeros before the embeddings
        filled = torch.cat([inputs.new_zeros(1, inputs.shape[1]), inputs])
        states = self.encode(filled.index_select(0, elements.item + 1), elements)
        return self._scaled(states[elements.last])

    def _elements(
        self,
        outputs: dict[str, torch.Tensor],
        *,
        dropped: torch.Tensor | int,
        fill: bool = False,
    ) -> ListElements:
        """Return the newest items of each list as elements, without the last `dropped` ones. A
        list without items has no element or, with `fill`, one with the item -1.
        """
        lengths = outputs[f"lengths_{self._feature}"]
        stops = lengths.cumsum(0) - dropped
        counts = (lengths - dropped).clamp(min=0, max=self._history)
        starts = stops - counts
        if fill:
            starts = torch.where(counts > 0, starts, -1)
            counts = counts.clamp(min=1)
        return ListElements(starts, counts, width=self._history)


class BlockNetwork(NextItemNetwork):
    """Network of blocks over the items' embeddings and their positions from the newest item."""

    positions: nn.Parameter
    blocks: nn.ModuleList
    scale = 1.0
    """Factor of the items' embeddings."""

    def encode(self, items: torch.Tensor, elements: ListElements) -> torch.Tensor:
        scaled = items if self.scale == 1 else items * self.scale
        hidden = self.dropped(scaled + self.positions.index_select(0, elements.age))
        for block in self.blocks:
            hidden = block(hidden, elements)
        return hidden


def _row_means(losses: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the mean of the losses of each row, 0 without any, float32 [count]."""
    totals = losses.new_zeros(count).index_add(0, rows, losses)
    return totals / torch.bincount(rows, minlength=count).clamp(min=1)
