"""The embeddings of a batch, by the names of its features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import torch

Order = tuple[int, ...]
"""order[k] is the number of the feature whose embedding is at place k."""
Delivery = tuple[torch.Tensor, Order]
"""(rows, num_features * dim) float32, and the order of the features in it."""


def in_feature_order(values: torch.Tensor, order: Order, *, dim: int) -> torch.Tensor:
    """Brings (rows, num_features * dim) embeddings into the order of the features; no copy when they already are."""
    if order == tuple(range(len(order))):
        return values
    places = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat([values[:, place * dim : (place + 1) * dim] for place in places], dim=1)


@final
class Embedded(Mapping[str, torch.Tensor]):
    """What the tables give for a batch: for each feature, by its name, the sum of its ids' embeddings, float32 (rows, dim).

    Under training the embeddings come from other workers. They are awaited at the first use of any of them, so a network that
    computes on its dense features first overlaps this with the exchange. They arrive in an order that the sharding plan decides;
    only `delivered` shows it.
    """

    def __init__(self, features: Sequence[str], dim: int, deliver: Callable[[], Delivery]) -> None:
        self.features, self.dim = features, dim
        self._deliver: Callable[[], Delivery] | None = deliver
        self._delivered: Delivery | None = None

    @classmethod
    def in_order(cls, features: Sequence[str], dim: int, values: torch.Tensor) -> Embedded:
        """Of `values` (rows, num_features * dim) that are in the order of the features."""
        return cls(features, dim, lambda: (values, tuple(range(len(features)))))

    def delivered(self) -> Delivery:
        """The embeddings as they arrived, and their order. For layers whose cost depends on it; the result must not."""
        if self._delivered is None:
            assert self._deliver is not None
            self._delivered, self._deliver = self._deliver(), None
        return self._delivered

    def side_by_side(self) -> torch.Tensor:
        """(rows, num_features * dim), in the order of the features."""
        values, order = self.delivered()
        return in_feature_order(values, order, dim=self.dim)

    def stacked(self) -> torch.Tensor:
        """(rows, num_features, dim), in the order of the features."""
        return self.side_by_side().unflatten(1, (len(self.features), self.dim))

    def __getitem__(self, feature: str) -> torch.Tensor:
        try:
            number = list(self.features).index(feature)
        except ValueError:
            raise KeyError(feature) from None
        values, order = self.delivered()
        place = order.index(number)
        return values[:, place * self.dim : (place + 1) * self.dim]

    def __iter__(self) -> Iterator[str]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.features)
