"""Common part of models that predict each item of a list from the items before it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Count
from rayrec.config import InputError
from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.mlp import Precision
from rayrec.layers.sequence_blocks import ListElements
from rayrec.models.base import ModelInputs
from rayrec.models.item_lists import ItemListConfig, ItemListNetwork


@dataclass(frozen=True, kw_only=True)
class NextItemConfig(ItemListConfig):
    """Prediction of each item of a list from the items before it.

    The list is the schema's first list, in chronological order, with a `max_length`. All known
    items are candidates. Unknown and missing ones are neither candidates nor targets. Embeddings of
    lists that are aligned with it are added to the items'.
    """

    EARLIER: ClassVar[Mapping[str, Any]] = {"loss_mean": "rows"}

    blocks: Count = 2
    """Number of blocks of attention and feed-forward layers."""
    attention_heads: Count = 2
    """Number of attention heads per block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding_dim % self.attention_heads:
            raise InputError(
                f"{type(self).__name__}.attention_heads: must divide embedding_dim "
                f"{self.embedding_dim}, got {self.attention_heads}"
            )

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        item, *evaluated = super().sequences(inputs)
        return (item, *self.aligned(inputs), *evaluated)

    def aligned(self, inputs: ModelInputs) -> tuple[str, ...]:
        """Return the lists whose embeddings are added to the items'."""
        item = self.sequence(inputs)[0]
        return tuple(name for name, other in inputs.aligned if other == item)


@dataclass(frozen=True, kw_only=True)
class TimedConfig(NextItemConfig):
    """Prediction of each item from the items before it and the times between them."""

    EARLIER: ClassVar[Mapping[str, Any]] = {**NextItemConfig.EARLIER, "times": False}

    times: bool = True
    """Whether the network reads the times of items, if the log has them."""
    request_time: bool = False
    """Whether the network knows when the next item is asked for: in training and evaluations the
    time of the item that it predicts, as in the published code. Needs times.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.request_time and not self.times:
            raise InputError(
                f"{type(self).__name__}.request_time: must be false without times, got true. Set "
                "times too."
            )

    @property
    def reads_ages(self) -> bool:
        return self.times

    @property
    def reads_request_time(self) -> bool:
        return self.request_time

    def is_timed(self, inputs: ModelInputs) -> bool:
        """Return whether the network reads times. Raises InputError if it must, and the log has
        none.
        """
        has_ages = self.sequence(inputs)[0] in inputs.aged
        if self.request_time and not has_ages:
            raise InputError(
                f"{type(self).__name__}.request_time: the log has no times of items. Name its "
                "column in time of the schema's sequence, or set request_time false."
            )
        return self.times and has_ages

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        self.is_timed(inputs)
        return super().sequences(inputs)


# Shapes, for P elements in all lists and width D, besides those of ItemListNetwork:
#
#   encode        a part of each list [P, D] -> state after each item [P, D]
#   training      state after item i -> loss of item i + 1
#   evaluation    state after the history
#   prediction    state after the last item
class NextItemNetwork(ItemListNetwork):
    """Network of a NextItemConfig. A subclass encodes lists."""

    def __init__(
        self,
        config: NextItemConfig,
        inputs: ModelInputs,
        *,
        precision: Precision,
    ) -> None:
        super().__init__(config, inputs, precision=precision)
        self._aligned = config.aligned(inputs)
        self._history = self._length - 1
        self._is_timed = isinstance(config, TimedConfig) and config.is_timed(inputs)

    @abstractmethod
    def encode(self, items: torch.Tensor, elements: ListElements) -> torch.Tensor:
        """Return the state after each item of the lists, float32 [elements, dim], from the items'
        embeddings, float32 [elements, dim].
        """

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        """Return the outputs of ItemListNetwork, and `inputs` [ids, dim], which are the items'
        embeddings and those of aligned lists. A network with times has `gaps`, float32 [ids].
        """
        outputs = super().forward(dense, embedded)
        inputs = outputs["values"]
        for name in self._aligned:
            inputs = inputs + embedded.sequences(name).values
        outputs["inputs"] = inputs
        if self._is_timed:
            gaps = embedded.sequences(self._feature).gaps
            outputs["gaps"] = inputs.new_zeros(inputs.shape[0]) if gaps is None else gaps
        return outputs

    def states(
        self,
        outputs: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the state before each known item after the first of a list."""
        elements = self._elements(outputs, left_out=1)
        numbers = self._candidates.numbers(outputs[f"ids_{self._feature}"])
        # The next item of the list, which is not among the elements
        targets = elements.item + 1
        is_candidate = numbers[targets] >= 0
        states = self.encode(outputs["inputs"].index_select(0, elements.item), elements)
        return states[is_candidate], targets[is_candidate], elements.rows[is_candidate]

    def last_states(
        self,
        outputs: dict[str, torch.Tensor],
        *,
        left_out: torch.Tensor | int,
    ) -> torch.Tensor:
        """Return the state after each row's list without its last items. A list without items has
        one with an embedding of zeros.
        """
        inputs = outputs["inputs"]
        elements = self._elements(outputs, left_out=left_out, fill=True)
        # A row of zeros before the embeddings
        filled = torch.cat([inputs.new_zeros(1, inputs.shape[1]), inputs])
        states = self.encode(filled.index_select(0, elements.item + 1), elements)
        return states[elements.last]

    def _elements(
        self,
        outputs: dict[str, torch.Tensor],
        *,
        left_out: torch.Tensor | int,
        fill: bool = False,
    ) -> ListElements:
        """Return the newest items of each list as elements, without the last `left_out` ones. A
        list without items has no element or, with `fill`, one with the item -1.
        """
        lengths = outputs[f"lengths_{self._feature}"]
        stops = lengths.cumsum(0) - left_out
        counts = (lengths - left_out).clamp(min=0, max=self._history)
        starts = stops - counts
        if fill:
            starts = torch.where(counts > 0, starts, -1)
            counts = counts.clamp(min=1)
        elements = ListElements(starts, counts, width=self._history)
        if "gaps" in outputs:
            gaps = functional.pad(outputs["gaps"], (1, 0))
            elements.measure_times(
                gaps.index_select(0, elements.item + 1),
                to_next=self._config.reads_request_time,
            )
        return elements


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
