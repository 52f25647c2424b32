"""The embeddings of a batch, by the names of its features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch

Order = tuple[int, ...]
"""order[k] is the number of the feature whose embedding is at place k."""
Delivery = tuple[torch.Tensor, Order]
"""(rows, num_features * dim) float32, and the order of the features in it."""


def places_of(order: Order) -> list[int]:
    """The place of each feature's embedding."""
    return sorted(range(len(order)), key=order.__getitem__)


def in_feature_order(values: torch.Tensor, order: Order, *, dim: int) -> torch.Tensor:
    """Brings (rows, num_features * dim) embeddings into the order of the features; no copy when they already are."""
    if order == tuple(range(len(order))):
        return values
    return torch.cat([values[:, place * dim : (place + 1) * dim] for place in places_of(order)], dim=1)


@final
@dataclass(frozen=True)
class Sequences:
    """The embeddings of a feature's ids, one by one: of each row any number, in the order of its list."""

    values: torch.Tensor
    """float32 (ids of all rows, dim), row after row."""
    lengths: torch.Tensor
    """int64 (rows,): how many ids each row has."""

    @cached_property
    def rows(self) -> torch.Tensor:
        """int64 (ids,): the row that each id belongs to."""
        # Sizes by `shape`: torch.export takes what `len` gives for a constant.
        numbers = torch.arange(self.lengths.shape[0], device=self.lengths.device)
        return torch.repeat_interleave(numbers, self.lengths, output_size=self.values.shape[0])

    def spread(self, of_rows: torch.Tensor) -> torch.Tensor:
        """(rows, ...) -> (ids, ...): to each id what its row has."""
        return of_rows.index_select(0, self.rows)

    def sum(self, of_ids: torch.Tensor | None = None) -> torch.Tensor:
        """(ids, width) -> (rows, width): the sum over the ids of each row, 0 for a row without ids; None: of `values`."""
        summed = self.values if of_ids is None else of_ids
        return summed.new_zeros(self.lengths.shape[0], summed.shape[1]).index_add(0, self.rows, summed)


def _absent(feature: str) -> torch.Tensor:
    raise KeyError(feature)


@final
class Embedded(Mapping[str, torch.Tensor]):
    """What the tables give for a batch: for each feature, by its name, the sum of its ids' embeddings, float32 (rows, dim);
    `sequences` has them one by one, for features of `ClickModelConfig.sequences`.

    Under training the embeddings come from other workers. They are awaited at the first use of any of them, so a network that
    computes on its dense features first overlaps this with the exchange. They arrive in an order that the sharding plan decides;
    only `delivered` shows it.
    """

    def __init__(
        self,
        features: Sequence[str],
        dim: int,
        deliver: Callable[[], Delivery],
        *,
        sequences: Callable[[], Mapping[str, Sequences]] = dict,
        ids: Callable[[str], torch.Tensor] = _absent,
        table: Callable[[str], torch.Tensor] = _absent,
    ) -> None:
        """`deliver` gives the features that `sequences` does not give; each is called once, when it is first used. `ids` and
        `table` as the methods of these names."""
        self.features, self.dim = features, dim
        self._ids, self._table = ids, table
        self._deliver: Callable[[], Delivery] | None = deliver
        self._delivered: Delivery | None = None
        self._give_sequences = sequences
        self._sequences: Mapping[str, Sequences] | None = None

    @classmethod
    def in_order(
        cls,
        features: Sequence[str],
        dim: int,
        values: torch.Tensor,
        sequences: Mapping[str, Sequences] | None = None,
        *,
        ids: Mapping[str, torch.Tensor] | None = None,
        tables: Mapping[str, torch.Tensor] | None = None,
    ) -> Embedded:
        """Of `values` (rows, num_features * dim) that are in the order of the features, those of `sequences` left out. `ids` and
        `tables`: what `ids` and `table` return, by feature."""
        given = sequences or {}
        order = tuple(number for number, feature in enumerate(features) if feature not in given)
        ids_of, table_of = (ids or {}).__getitem__, (tables or {}).__getitem__
        return cls(features, dim, lambda: (values, order), sequences=lambda: given, ids=ids_of, table=table_of)

    def bags(self) -> Delivery:
        """As `delivered`, without the features that `all_sequences` has."""
        if self._delivered is None:
            assert self._deliver is not None
            self._delivered, self._deliver = self._deliver(), None
        return self._delivered

    def all_sequences(self) -> Mapping[str, Sequences]:
        """The features whose embeddings were looked up one by one."""
        if self._sequences is None:
            self._sequences = self._give_sequences()
        return self._sequences

    def delivered(self) -> Delivery:
        """The embeddings as they arrived, and their order. For layers whose cost depends on it; the result must not."""
        values, order = self.bags()
        if len(order) == len(self.features):
            return values, order
        one_by_one = self.all_sequences()
        summed = [sequences.sum() for sequences in one_by_one.values()]
        return torch.cat([values, *summed], dim=1), (*order, *map(list(self.features).index, one_by_one))

    def side_by_side(self) -> torch.Tensor:
        """(rows, num_features * dim), in the order of the features."""
        values, order = self.delivered()
        return in_feature_order(values, order, dim=self.dim)

    def stacked(self) -> torch.Tensor:
        """(rows, num_features, dim), in the order of the features."""
        return self.side_by_side().unflatten(1, (len(self.features), self.dim))

    def sequences(self, feature: str) -> Sequences:
        """The embeddings of a feature's ids, one by one. Raises KeyError for one that is not in `ClickModelConfig.sequences`."""
        return self.all_sequences()[feature]

    def ids(self, feature: str) -> torch.Tensor:
        """Return the ids of a feature of `ClickModelConfig.sequences`, in the order of its embeddings, int64 [ids]. Raises
        KeyError for another feature."""
        return self._ids(feature)

    def table(self, feature: str) -> torch.Tensor:
        """Return the full table of a feature of `ClickModelConfig.full_tables`, with gradient in training, float32
        [num_embeddings, dim]. Raises KeyError for another feature."""
        return self._table(feature)

    def has_table(self, feature: str) -> bool:
        """Return whether `table` has the feature: of a model with TRAINS_ON_TABLES False, in evaluations alone."""
        try:
            self._table(feature)
        except KeyError:
            return False
        return True

    def __getitem__(self, feature: str) -> torch.Tensor:
        try:
            number = list(self.features).index(feature)
        except ValueError:
            raise KeyError(feature) from None
        values, order = self.bags()
        if number not in order:
            return self.all_sequences()[feature].sum()
        place = order.index(number)
        return values[:, place * self.dim : (place + 1) * self.dim]

    def __iter__(self) -> Iterator[str]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.features)
