"""Piecewise-linear numbers."""

import numpy as np
import pytest
import torch

from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.piecewise import NUM_BINS, PARTS, PiecewiseNumbers
from rayrec.models.base import ModelInputs
from rayrec.models.ranking.dlrm import DLRMConfig


def test_parts_fill_bins_in_order() -> None:
    numbers = PiecewiseNumbers(2, 4, ends=[(-1.0, 0.0, 2.0), (0.0, 1.0)])
    parts = numbers.parts(torch.tensor([[-3.0, 0.25], [0.5, 1.0], [9.0, -1.0]]))
    assert parts.shape == (3, 2, PARTS)
    assert parts[:, 0, :3].tolist() == [[-3.0, 0.0, 0.0], [0.5, 1.0, 0.25], [9.0, 1.0, 1.0]]
    assert parts[:, 1, :2].tolist() == [[0.25, 0.25], [1.0, 1.0], [-1.0, 0.0]]
    assert not parts[:, 0, 3:].any()


def test_vectors_are_linear_in_parts_before_relu() -> None:
    numbers = PiecewiseNumbers(3, 5)
    parts = numbers.parts(torch.randn(7, 3))
    expected = torch.einsum("rnp,npd->rnd", parts, numbers.weight) + numbers.bias
    torch.testing.assert_close(numbers(parts), expected.relu())


def test_normal_distribution_replaces_unknown_quantiles() -> None:
    numbers = PiecewiseNumbers(1, 2)
    values = torch.tensor(np.random.default_rng(0).normal(size=(20_000, 1)), dtype=torch.float32)
    shares = numbers.parts(values)[:, 0, 1:].mean(0)
    expected = 1 - (torch.arange(NUM_BINS) + 1) / (NUM_BINS + 1)
    torch.testing.assert_close(shares, expected.float(), atol=0.02, rtol=0)


def test_constant_number_has_no_bins() -> None:
    numbers = PiecewiseNumbers(1, 2, ends=[(3.0,)])
    assert not numbers.parts(torch.tensor([[3.0], [5.0]]))[:, 0, 1:].any()


@pytest.mark.parametrize("interaction", ["dot", "cross", "projection"])
@pytest.mark.parametrize("first_order", [False, True])
def test_dlrm_takes_number_vectors_like_features(interaction: str, first_order: bool) -> None:
    config = DLRMConfig(
        interaction=interaction,
        embedding_dim=4,
        bottom_mlp=(8, 4),
        top_mlp=(8, 1),
        projection_first=(8,),
        projection_second=(8,),
        piecewise_numbers=True,
        first_order=first_order,
    )
    inputs = ModelInputs(2, ("a", "b"), bin_ends=((-1.0, 0.0, 1.0), (0.0, 1.0)))
    network = config.build(inputs)
    rows = torch.randn(6, 2 * config.width)
    embedded = KeyedEmbeddings.in_order(("a", "b"), config.width, rows)
    dense = torch.randn(6, 2)
    logits = network(dense, embedded)["label"]
    assert logits.shape == (6,)
    # A bin's weight moves the rows within it and above only.
    with torch.no_grad():
        network.piecewise.weight[0, 2] += 1.0
    moved = network(dense, embedded)["label"] != logits
    assert not moved[dense[:, 0] <= 0].any()
    assert network.state_dict()["piecewise.starts"][0, :2].tolist() == [-1.0, 0.0]


def test_dlrm_without_numbers_has_no_vectors() -> None:
    network = DLRMConfig(embedding_dim=4, bottom_mlp=(4,), piecewise_numbers=True).build(
        ModelInputs(0, ("a",))
    )
    assert network.piecewise is None
