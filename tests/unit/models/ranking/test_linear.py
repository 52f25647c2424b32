"""Settings of logistic regression. Its formula: test_formulas.py."""

from __future__ import annotations

import pytest

from rayrec import recipes
from rayrec.config import InputError
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.linear import LinearConfig


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
