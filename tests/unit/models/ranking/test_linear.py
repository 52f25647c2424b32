"""Logistic regression by hand, and its settings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayrec import recipes
from rayrec.config import InputError
from rayrec.layers.embedded import Embedded
from rayrec.models.base import ModelInputs
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.linear import LinearConfig

INPUTS = ModelInputs(3, ("a", "b"), "click")


def test_its_logit_is_a_sum_of_weights() -> None:
    config = LinearConfig(number_scale=4.0, category_scale=0.5)
    network = config.build(INPUTS)
    rng = np.random.default_rng(0)
    numbers, rows, weights = rng.normal(size=(5, 3)), rng.normal(size=(5, 2, config.width)), rng.normal(size=3)
    with torch.no_grad():
        for parameter, values in zip(network.parameters(), ([weights], [0.25]), strict=True):
            parameter.copy_(torch.tensor(np.array(values)).reshape(parameter.shape))
    embedded = Embedded.in_order(INPUTS.features, config.width, torch.tensor(rows.reshape(5, -1), dtype=torch.float32))
    found = network(torch.tensor(numbers, dtype=torch.float32), embedded)["click"]
    expected = 4.0 * (numbers @ weights + 0.25) + 0.5 * rows[:, :, 0].sum(1)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_settings() -> None:
    like = DLRMConfig(embedding_penalty=0.1, members=2)
    assert LinearConfig.in_place_of(like) == LinearConfig(embedding_penalty=0.1, members=2)
    assert DLRMConfig.in_place_of(LinearConfig(members=2)).embedding_dim == 16
    for wrong, message in (
        ({"embedding_dim": 8}, "embedding_dim: 8 has no effect; a category has one weight"),
        ({"number_scale": 0.0}, "number_scale: 0.0 must be above 0"),
        ({"category_scale": float("nan")}, "category_scale: nan must be above 0"),
    ):
        with pytest.raises(InputError, match=message):
            LinearConfig(**wrong)


def test_the_recipe_has_it_beside_two_networks() -> None:
    recipe, demo = recipes.criteo_ensemble("log"), recipes.criteo_demo("log")
    dlrm, final, linear = recipe.workload.model.models  # type: ignore[attr-defined]
    assert dlrm == demo.workload.model.replace(embedding_penalty=0.0)  # type: ignore[attr-defined]
    assert (final.embedding_dim, linear) == (16, LinearConfig())
    assert recipe.replace(recipe=demo.recipe, workload=demo.workload) == demo
