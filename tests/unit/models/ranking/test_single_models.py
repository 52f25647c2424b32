"""What only one click model has: start values, a bias that moved, a context, a recipe of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders.networks import CROSSES, DEEPFM, DIM, FINALMLP, GDCN, INPUTS, WIDEDEEP
from torch import nn

from rayrec import recipes
from rayrec.config import InputError
from rayrec.layers.field_embeddings import width_with_weight
from rayrec.layers.keyed_embeddings import Embedded
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.linear import LinearConfig


def test_gated_crosses_start_with_biases_between_0_and_1() -> None:
    torch.manual_seed(0)
    biases, plain = (
        torch.cat([cross.linear.bias for cross in config.build(INPUTS).network.crosses]) for config in (GDCN, CROSSES)
    )
    assert 0 <= biases.min() < 0.2
    assert 0.8 < biases.max() < 1
    assert not plain.any()


def test_numbers_start_as_xavier_layers_of_one_input() -> None:
    torch.manual_seed(0)
    inputs = replace(INPUTS, num_dense=4000)
    for config, std in ((DEEPFM.replace(embedding_dim=16), (2 / 17) ** 0.5), (DEEPFM, (2 / 5) ** 0.5)):
        built = config.build(inputs).fields
        assert built.number_vectors.std().item() == pytest.approx(std, rel=0.02)
        assert built.linear.weight.std().item() == pytest.approx(1.0, rel=0.04)


def _widedeep() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = WIDEDEEP.replace(dropout=0.0).build(INPUTS).eval()
    return net, torch.randn(17, 2), torch.randn(17, 3, WIDEDEEP.width)


def _clicks(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return net(dense, Embedded.in_order(INPUTS.features, values.shape[2], values.flatten(1)))["click"]


def test_widedeep_learns_one_bias_of_the_logit() -> None:
    """The linear model's is constant; a checkpoint of an earlier version, which learned both, keeps its value."""
    net, dense, values = _widedeep()
    biases = [name for name, _ in net.named_parameters() if name.endswith("bias")]
    assert biases == ["deep.tower.layers.0.bias", "deep.logit.bias"]
    before = _clicks(net, dense, values)
    net.load_state_dict({**net.state_dict(), "fields.linear.bias": torch.tensor([0.75])})
    torch.testing.assert_close(_clicks(net, dense, values), before + 0.75)


def test_row_of_a_table_has_room_for_a_weight() -> None:
    assert [width_with_weight(dim) for dim in (1, 3, 4, 10, 16)] == [4, 4, 8, 12, 20]
    assert DEEPFM.replace(members=2).table_width == 16
    net, dense, values = _widedeep()
    changed = values.clone()
    changed[:, :, DIM + 1 :] = torch.nan  # what is left of a row reaches nothing
    assert torch.equal(_clicks(net, dense, changed), _clicks(net, dense, values))


def test_context_names_features_of_the_model() -> None:
    gated = FINALMLP.replace(feature_gates=True, first_context=("c", "numbers"))
    with pytest.raises(InputError, match="first_context: no feature 'd'; there are a, b, c, numbers"):
        gated.replace(first_context=("d",)).sequences(INPUTS)
    assert gated.sequences(INPUTS) == ()


def test_linear_model_takes_the_place_of_others() -> None:
    like = DLRMConfig(embedding_penalty=0.1, members=2)
    assert LinearConfig.in_place_of(like) == LinearConfig(embedding_penalty=0.1, members=2)
    assert DLRMConfig.in_place_of(LinearConfig(members=2)).embedding_dim == 16
    recipe, demo = recipes.criteo_ensemble("log"), recipes.criteo_demo("log")
    dlrm, final, linear = recipe.workload.model.models  # type: ignore[attr-defined]
    assert dlrm == demo.workload.model.replace(embedding_penalty=0.0)  # type: ignore[attr-defined]
    assert (final.embedding_dim, linear) == (16, LinearConfig())
    assert recipe.replace(recipe=demo.recipe, workload=demo.workload) == demo
