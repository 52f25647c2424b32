"""Embeddings by the names of their features, whatever order a plan delivers them in."""

from __future__ import annotations

import pytest
import torch

from rayrec.layers.keyed_embeddings import Delivery, Embedded

FEATURES = ["b", "a", "c"]
VALUES = torch.arange(24.0).view(2, 12)
ORDER = (2, 0, 1)


def test_names_and_order_do_not_depend_on_the_delivery() -> None:
    plain = Embedded.in_order(FEATURES, 4, VALUES)
    moved = torch.cat([VALUES[:, 4 * number : 4 * number + 4] for number in ORDER], dim=1)
    delivered = Embedded(FEATURES, 4, lambda: (moved, ORDER))
    assert delivered.delivered()[0] is moved
    assert plain.side_by_side() is VALUES
    assert torch.equal(delivered.side_by_side(), VALUES)
    assert torch.equal(delivered.stacked(), VALUES.view(2, 3, 4))
    assert list(delivered) == FEATURES
    for number, feature in enumerate(FEATURES):
        assert torch.equal(delivered[feature], VALUES[:, 4 * number : 4 * number + 4])
        assert torch.equal(plain[feature], delivered[feature])
    with pytest.raises(KeyError, match="d"):
        delivered["d"]


def test_nothing_is_awaited_before_it_is_used() -> None:
    calls = []

    def deliver() -> Delivery:
        calls.append(1)
        return VALUES, (0, 1, 2)

    embedded = Embedded(FEATURES, 4, deliver)
    assert (len(embedded), "a" in list(embedded), calls) == (3, True, [])
    embedded.stacked()
    embedded.side_by_side()
    assert calls == [1]
