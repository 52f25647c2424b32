"""Behavior of single click models: DLRM's cost and settings, initial values, WideDeep's bias, FinalMLP's context."""

import dataclasses

import pytest
import torch
from builders.click_models import SMALL, whole_model
from builders.faults import fails_with, rejects
from builders.networks import DEEPFM, DIM, FINALMLP, INPUTS, WIDEDEEP
from torch import nn
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec import recipes
from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings, width_with_weight
from rayrec.layers.tower import Dice
from rayrec.models.base import ModelInputs, unpooled_features
from rayrec.models.cost import network_multiply_adds
from rayrec.models.ranking.din import DIN, DINConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.linear import LinearConfig
from rayrec.models.sharded_model import ClickModel


def _widedeep() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return WIDEDEEP.replace(dropout=0.0).build(INPUTS).eval(), torch.randn(17, 2), torch.randn(17, 3, WIDEDEEP.width)


def _clicks(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return net(dense, KeyedEmbeddings.in_order(INPUTS.features, values.shape[2], values.flatten(1)))["click"]


def test_widedeep_learns_one_logit_bias() -> None:
    """Check that the linear model's bias is constant. Checkpoints of earlier versions, which trained both, keep its value."""
    net, dense, values = _widedeep()
    biases = [name for name, _ in net.named_parameters() if name.endswith("bias")]
    assert biases == ["deep.tower.layers.0.bias", "deep.logit.bias"]
    before = _clicks(net, dense, values)
    net.load_state_dict({**net.state_dict(), "fields.linear.bias": torch.tensor([0.75])})
    torch.testing.assert_close(_clicks(net, dense, values), before + 0.75)


def test_table_row_width_includes_linear_weight() -> None:
    assert [width_with_weight(dim) for dim in (1, 3, 4, 10, 16)] == [4, 4, 8, 12, 20]
    assert DEEPFM.replace(members=2).table_width == 16
    net, dense, values = _widedeep()
    changed = values.clone()
    changed[:, :, DIM + 1 :] = torch.nan  # The rest of a row must not affect anything
    assert torch.equal(_clicks(net, dense, changed), _clicks(net, dense, values))


def test_finalmlp_context_rejects_unknown_features() -> None:
    gated = FINALMLP.replace(feature_gates=True, first_context=("c", "numbers"))
    with pytest.raises(InputError, match=r"first_context: feature 'd' not found\. Features are a, b, c, numbers"):
        gated.replace(first_context=("d",)).sequences(INPUTS)
    assert gated.sequences(INPUTS) == ()


def test_linear_model_replaces_other_models() -> None:
    assert LinearConfig.replacing(DLRMConfig(embedding_penalty=0.1, members=2)) == LinearConfig(embedding_penalty=0.1, members=2)
    assert DLRMConfig.replacing(LinearConfig(members=2)).embedding_dim == 16
    recipe, demo = recipes.criteo_ensemble("log"), recipes.criteo_demo("log")
    dlrm, final, linear = recipe.workload.model.models  # type: ignore[attr-defined]
    assert dlrm == demo.workload.model.replace(embedding_penalty=0.0)  # type: ignore[attr-defined]
    assert (final.embedding_dim, linear) == (16, LinearConfig())
    assert recipe.replace(recipe=demo.recipe, workload=demo.workload) == demo


# DLRM against torchrec's, its loss over uneven batches, its settings and cost -----------------------------------------
SIZES = [50, 3, 700, 20]


def batch(rows: int, *, seed: int = 0, loss_weight: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(0, size, (rows,), generator=generator) for size in SIZES])
    keys, lengths = [f"cat_{index}" for index in range(len(SIZES))], torch.ones(len(SIZES) * rows, dtype=torch.int32)
    features = KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths, stride=rows)
    dense = torch.randn(rows, 13, generator=generator)
    labels = torch.randint(0, 2, (rows,), generator=generator).float()
    return Batch({"dense": dense}, loss_weight, features, {"label": labels})


def build(config: DLRMConfig = SMALL, **settings: object) -> ClickModel:
    return whole_model(config, SIZES, **settings)


def test_multiply_adds_match_kaggle_dlrm() -> None:
    kaggle = DLRMConfig(interaction="dot", embedding_dim=16, bottom_mlp=(512, 256, 64, 16), top_mlp=(512, 256, 1))
    model = whole_model(kaggle, [2] * 26)
    assert network_multiply_adds(model.head.network, model.head.inputs, kaggle) == 486_032


@pytest.mark.parametrize("interaction", ["dot", "cross", "projection"])
def test_multiply_adds_count_built_layers(interaction: str) -> None:
    config = SMALL.replace(interaction=interaction)
    model = build(config)
    weights = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embedding_bags" not in n)
    products = {"dot": 5 * 5 * 8, "cross": 0, "projection": 2 * 2 * 8}[interaction]
    assert network_multiply_adds(model.head.network, model.head.inputs, config) == weights + products
    assert model.training


def test_uneven_workers_average_to_global_mean() -> None:
    model, whole = build(), batch(48)
    logits = model.score(whole.tensors["dense"], whole.sparse_features)
    expected = functional.binary_cross_entropy_with_logits(logits, whole.labels["label"])
    parts = []
    for start, stop in ((0, 31), (31, 48)):
        ids = whole.sparse_features.values().view(len(SIZES), 48)[:, start:stop].reshape(-1)
        part = batch(stop - start, loss_weight=2 / 48)
        part.tensors = {"dense": whole.tensors["dense"][start:stop]}
        part.labels = {"label": whole.labels["label"][start:stop]}
        part.sparse_features = KeyedJaggedTensor(
            keys=part.sparse_features.keys(), values=ids, lengths=part.sparse_features.lengths(), stride=stop - start
        )
        parts.append(model(part)[0])
    torch.testing.assert_close((parts[0] + parts[1]) / 2, expected)


def test_initial_weights_depend_on_seed_only() -> None:
    torch.manual_seed(5)
    one = build(seed=1).state_dict()
    state = torch.get_rng_state()
    two = build(seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["top_mlp.layers.0.weight"], build(seed=2).state_dict()["top_mlp.layers.0.weight"])


def test_bottom_mlp_follows_embedding_dim_unless_set() -> None:
    assert SMALL.replace(embedding_dim=16).bottom_mlp == (16, 16)
    assert SMALL.replace(embedding_dim=16, bottom_mlp=(64, 16)).bottom_mlp == (64, 16)
    assert SMALL.updated({"class": SMALL.to_dict()["class"], "embedding_dim": 16}).bottom_mlp == (16, 16)
    other = SMALL.updated({"class": "deepfm", "embedding_dim": 16})
    assert (type(other).__name__, other.embedding_dim) == ("DeepFMConfig", 16)
    with pytest.raises(InputError, match="must end with embedding_dim 16"):
        SMALL.replace(embedding_dim=16, bottom_mlp=(32, 8))


# DIN's sequences, training and settings; its formula is in test_formulas.py -------------------------------------------
WIDTH, ROWS = 4, 9
LISTED = ModelInputs(
    2, ("item", "history", "tags"), "click", vocabularies=("item", "item", "tags"), lists=(("history", 5), ("tags", None))
)
SMALL_DIN = DINConfig(embedding_dim=WIDTH, attention=(6, 3), mlp=(8, 5))
LENGTHS = torch.tensor([3, 0, 5, 1, 2, 0, 4, 5, 1])


def network(*, precision: str = "fp32") -> DIN:
    torch.manual_seed(0)
    built = SMALL_DIN.build(LISTED, precision=precision)
    assert isinstance(built, DIN)
    for module in built.modules():
        if isinstance(module, Dice):
            nn.init.normal_(module.slope)
            nn.init.normal_(module.norm.running_mean)
            nn.init.uniform_(module.norm.running_var, 0.5, 2)
    return built


def embedded(values: torch.Tensor, item: torch.Tensor, tags: torch.Tensor, *, lengths: torch.Tensor = LENGTHS) -> KeyedEmbeddings:
    """Build embeddings delivered in a different order than the features."""
    lists, pooled = {"history": JaggedEmbeddings(values, lengths)}, torch.cat([tags, item], dim=1)
    return KeyedEmbeddings(LISTED.features, WIDTH, lambda: (pooled, (2, 0)), sequences=lambda: lists)


def test_other_networks_receive_sequence_sums() -> None:
    values, item, tags = torch.randn(int(LENGTHS.sum()), WIDTH), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    sums = torch.stack([part.sum(0) for part in values.split(LENGTHS.tolist())])
    given = embedded(values, item, tags)
    torch.testing.assert_close(given["history"], sums)
    torch.testing.assert_close(given.stacked(), torch.stack([item, sums, tags], dim=1))
    torch.testing.assert_close(given.flattened(), torch.cat([item, sums, tags], dim=1))
    fails_with(KeyError, "item", given.sequences, "item")


def test_din_selects_sequences_by_vocabulary() -> None:
    assert SMALL_DIN.targets(LISTED) == {"history": "item"}
    assert unpooled_features(SMALL_DIN, LISTED) == ("item", "history")
    assert unpooled_features(DLRMConfig(), LISTED) == ()
    alone = ModelInputs(0, ("item", "tags"), lists=(("tags", None),))
    rejects("the schema must have a list with the vocabulary of a single-category column", unpooled_features, SMALL_DIN, alone)
    weighted = ModelInputs(0, LISTED.features, vocabularies=LISTED.vocabularies, lists=LISTED.lists, weighted=True)
    rejects("^DINConfig: lists with weights must be summed, got unpooled lists history", unpooled_features, SMALL_DIN, weighted)


def test_aligned_lists_use_one_attention_unit() -> None:
    single, lists = ("item", "shop"), ("items", "shops", "tags")
    inputs = ModelInputs(
        0,
        (*single, *lists),
        vocabularies=("item", "shop", "item", "shop", "tags"),
        lists=tuple((name, None) for name in lists),
        aligned=(("shops", "items"), ("tags", "items")),
    )
    assert SMALL_DIN.units(inputs) == (("items", "shops"),)  # tags have no target, so they are summed
    assert SMALL_DIN.units(dataclasses.replace(inputs, aligned=())) == (("items",), ("shops",))


def test_din_bf16_is_close_and_empty_batches_return_no_logits() -> None:
    values, item, tags = torch.randn(int(LENGTHS.sum()), WIDTH), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    dense, nothing = torch.randn(ROWS, 2), torch.zeros(0, WIDTH)
    exact, rough = (network(precision=kind).eval() for kind in ("fp32", "bf16"))
    expected = exact(dense, embedded(values, item, tags))["click"]
    close = rough(dense, embedded(values, item, tags))["click"]
    torch.testing.assert_close(close, expected, atol=0.05 * expected.abs().max().item(), rtol=0.05)
    no_rows = embedded(nothing, nothing, nothing, lengths=LENGTHS[:0])
    for net in (exact.train(), rough.train()):
        assert net(dense[:0], no_rows)["click"].shape == (0,)


def test_cost_uses_maximum_list_length() -> None:
    attention = 5 * (2 * WIDTH * 6 + 6 * 3 + 3) + WIDTH * 6
    assert network_multiply_adds(network(), LISTED, SMALL_DIN) == attention + 5 * WIDTH * 8 + 8 * 5 + 5
