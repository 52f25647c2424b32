"""Embeddings of a batch, keyed by feature name, and their fields: one list of vectors with the
numbers, as in FuxiCTR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import final

import torch
from torch import nn

from rayrec.layers.mlp import UninitializedLinear, init_values

Order = tuple[int, ...]
"""Feature number of each embedding, by position."""
Delivery = tuple[torch.Tensor, Order]
"""Embeddings, float32 [rows, num_features * dim], and the order of their features."""


def feature_positions(order: Order) -> list[int]:
    """Return the position of each feature's embedding."""
    return sorted(range(len(order)), key=order.__getitem__)


def in_feature_order(values: torch.Tensor, order: Order, *, dim: int) -> torch.Tensor:
    """Reorder embeddings [rows, num_features * dim] by feature number. No copy if they are in
    order.
    """
    if order == tuple(range(len(order))):
        return values
    return torch.cat(
        [values[:, position * dim : (position + 1) * dim] for position in feature_positions(order)],
        dim=1,
    )


@final
@dataclass(frozen=True)
class JaggedEmbeddings:
    """Unpooled embeddings of a feature's ids, any number per row, in list order."""

    values: torch.Tensor
    """Embeddings of the ids of all rows, float32 [ids, dim]."""
    lengths: torch.Tensor
    """Number of ids in each row, int64 [rows]."""
    gaps: torch.Tensor | None = None
    """Seconds from each id to the next one in its row, from the last one to the row's time, float32
    [ids]. None without times.
    """

    @cached_property
    def rows(self) -> torch.Tensor:
        """Row index of each id, int64 [ids]."""
        # Sizes by `shape`, because torch.export treats the result of `len` as a constant.
        numbers = torch.arange(self.lengths.shape[0], device=self.lengths.device)
        return torch.repeat_interleave(numbers, self.lengths, output_size=self.values.shape[0])

    def spread(self, row_values: torch.Tensor) -> torch.Tensor:
        """Repeat the value of each row for its ids, [rows, ...] to [ids, ...]."""
        return row_values.index_select(0, self.rows)

    def sum(self, id_values: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum over the ids of each row, 0 without ids, [rows, width]. Default: the sum
        of `values`.
        """
        summed = self.values if id_values is None else id_values
        return summed.new_zeros(self.lengths.shape[0], summed.shape[1]).index_add(
            0, self.rows, summed
        )


def _absent(feature: str) -> torch.Tensor:
    raise KeyError(feature)


@final
class KeyedEmbeddings(Mapping[str, torch.Tensor]):
    """Embeddings of a batch: the sum of each feature's id embeddings, float32 [rows, dim], by name.
    `sequences` has the unpooled embeddings of `ClickModelConfig.sequences`. In training, embeddings
    come from other workers. Their first use waits, so a network that starts with dense features
    overlaps it with the exchange. Only `pooled_unordered` exposes the plan's order.
    """

    def __init__(
        self,
        features: Sequence[str],
        dim: int,
        deliver: Callable[[], Delivery],
        *,
        sequences: Callable[[], Mapping[str, JaggedEmbeddings]] = dict,
        ids: Callable[[str], torch.Tensor] = _absent,
        table: Callable[[str], torch.Tensor] = _absent,
    ) -> None:
        """`deliver` returns features that `sequences` does not. Each is called once, on first use.
        `ids`, `table`: the methods.
        """
        self.features = features
        self.dim = dim
        self._ids = ids
        self._table = table
        self._deliver: Callable[[], Delivery] | None = deliver
        self._delivered: Delivery | None = None
        self._give_sequences = sequences
        self._sequences: Mapping[str, JaggedEmbeddings] | None = None

    @classmethod
    def in_order(
        cls,
        features: Sequence[str],
        dim: int,
        values: torch.Tensor,
        sequences: Mapping[str, JaggedEmbeddings] | None = None,
        *,
        ids: Mapping[str, torch.Tensor] | None = None,
        tables: Mapping[str, torch.Tensor] | None = None,
    ) -> KeyedEmbeddings:
        """Build from `values` [rows, num_features * dim], in feature order without those in
        `sequences`. `ids` and `tables` have the results of the methods `ids` and `table` by
        feature.
        """
        unpooled = sequences or {}
        order = tuple(number for number, feature in enumerate(features) if feature not in unpooled)
        ids_of = (ids or {}).__getitem__
        table_of = (tables or {}).__getitem__
        return cls(
            features,
            dim,
            lambda: (values, order),
            sequences=lambda: unpooled,
            ids=ids_of,
            table=table_of,
        )

    def bags(self) -> Delivery:
        """Return `pooled_unordered` without the features of `all_sequences`."""
        if self._delivered is None:
            assert self._deliver is not None
            self._delivered, self._deliver = self._deliver(), None
        return self._delivered

    def all_sequences(self) -> Mapping[str, JaggedEmbeddings]:
        """Return all features with unpooled lookups."""
        if self._sequences is None:
            self._sequences = self._give_sequences()
        return self._sequences

    def pooled_unordered(self) -> Delivery:
        """Return the embeddings in order of arrival, and that order. Only for layers whose cost,
        not results, depends on it.
        """
        values, order = self.bags()
        if len(order) == len(self.features):
            return values, order
        one_by_one = self.all_sequences()
        summed = [sequences.sum() for sequences in one_by_one.values()]
        return torch.cat([values, *summed], dim=1), (
            *order,
            *map(list(self.features).index, one_by_one),
        )

    def flattened(self) -> torch.Tensor:
        """Return the embeddings in feature order, [rows, num_features * dim]."""
        values, order = self.pooled_unordered()
        return in_feature_order(values, order, dim=self.dim)

    def stacked(self) -> torch.Tensor:
        """Return the embeddings in feature order, [rows, num_features, dim]."""
        return self.flattened().unflatten(1, (len(self.features), self.dim))

    def columns(self, columns: slice) -> KeyedEmbeddings:
        """Return these columns of each embedding."""

        def deliver() -> Delivery:
            values, order = self.bags()
            return values.unflatten(1, (len(order), self.dim))[:, :, columns].flatten(1), order

        def sequences() -> dict[str, JaggedEmbeddings]:
            return {
                name: replace(unpooled, values=unpooled.values[:, columns])
                for name, unpooled in self.all_sequences().items()
            }

        dim = columns.stop - columns.start

        def table(feature: str) -> torch.Tensor:
            return self.table(feature)[:, columns]

        return KeyedEmbeddings(
            self.features, dim, deliver, sequences=sequences, ids=self.ids, table=table
        )

    def sequences(self, feature: str) -> JaggedEmbeddings:
        """Return a feature's unpooled embeddings. Raises KeyError unless it is in
        `ClickModelConfig.sequences`.
        """
        return self.all_sequences()[feature]

    def ids(self, feature: str) -> torch.Tensor:
        """Return a sequence feature's ids in the order of its embeddings, int64 [ids]. Raises
        KeyError for other features.
        """
        return self._ids(feature)

    def table(self, feature: str) -> torch.Tensor:
        """Return a full table, with gradient in training, float32 [num_embeddings, dim]. Raises
        KeyError for others.
        """
        return self._table(feature)

    def has_table(self, feature: str) -> bool:
        """Return whether `table` has the feature. With TRAINS_ON_TABLES False, only evaluations
        have it.
        """
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
        position = order.index(number)
        return values[:, position * self.dim : (position + 1) * self.dim]

    def __iter__(self) -> Iterator[str]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.features)


def number_vectors(num_dense: int, dim: int) -> nn.Parameter:
    """Return the factor vector of each number, [num_dense, dim]. Each is a layer from 1 to `dim`,
    Xavier normal.
    """
    draw = partial(nn.init.normal_, std=(2 / (1 + dim)) ** 0.5)
    return nn.Parameter(init_values(torch.empty(num_dense, dim), draw))


def fields(dense: torch.Tensor, vectors: torch.Tensor, embedded: KeyedEmbeddings) -> torch.Tensor:
    """Return each number times its vector, then the embeddings, [rows, num_dense + num_features,
    dim].
    """
    return torch.cat([dense.unsqueeze(2) * vectors, embedded.stacked()], dim=1)


@final
class FieldsAndLinear(nn.Module):
    """Field vectors of numbers and categories as in `fields`, and their linear model (FuxiCTR's
    LogisticRegression). The first `dim` values of an embedding are the field. The next one is the
    category's weight in the linear model.
    """

    def __init__(self, num_dense: int, dim: int, *, bias: bool = True) -> None:
        """`bias`: whether the linear model has a bias, initially 0."""
        super().__init__()
        self.number_vectors = number_vectors(num_dense, dim)
        self.linear = UninitializedLinear(num_dense, 1, bias=bias)
        # Each number's is a layer from 1 to 1, Xavier normal
        init_values(self.linear.weight, nn.init.normal_)
        if bias:
            init_values(self.linear.bias, nn.init.zeros_)
        self._dim = dim

    def forward(
        self, dense: torch.Tensor, embedded: KeyedEmbeddings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 fields [rows, num_dense + num_features, dim], and the linear model's
        output, float32 [rows]. Takes embeddings of `rayrec.models.base.width_with_weight(dim)`
        values.
        """
        stacked = embedded.stacked()
        fields = torch.cat(
            [dense.unsqueeze(2) * self.number_vectors, stacked[:, :, : self._dim]], dim=1
        )
        return fields, self.linear(dense).squeeze(1) + stacked[:, :, self._dim].sum(1)
