"""DIN's sequences, training and settings. Its formula is in test_formulas.py."""

import dataclasses

import torch
from builders.faults import fails_with, rejects
from torch import nn

from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
from rayrec.layers.tower import Dice
from rayrec.models.base import ModelInputs, unpooled_features
from rayrec.models.cost import network_multiply_adds
from rayrec.models.ranking.din import DIN, DINConfig
from rayrec.models.ranking.dlrm import DLRMConfig

DIM, ROWS = 4, 9
INPUTS = ModelInputs(
    2, ("item", "history", "tags"), "click", vocabularies=("item", "item", "tags"), lists=(("history", 5), ("tags", None))
)
SMALL = DINConfig(embedding_dim=DIM, attention=(6, 3), mlp=(8, 5))
LENGTHS = torch.tensor([3, 0, 5, 1, 2, 0, 4, 5, 1])


def network(*, precision: str = "fp32") -> DIN:
    torch.manual_seed(0)
    built = SMALL.build(INPUTS, precision=precision)
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
    return KeyedEmbeddings(INPUTS.features, DIM, lambda: (pooled, (2, 0)), sequences=lambda: lists)


def test_other_networks_receive_sequence_sums() -> None:
    values, item, tags = torch.randn(int(LENGTHS.sum()), DIM), torch.randn(ROWS, DIM), torch.randn(ROWS, DIM)
    sums = torch.stack([part.sum(0) for part in values.split(LENGTHS.tolist())])
    given = embedded(values, item, tags)
    torch.testing.assert_close(given["history"], sums)
    torch.testing.assert_close(given.stacked(), torch.stack([item, sums, tags], dim=1))
    torch.testing.assert_close(given.flattened(), torch.cat([item, sums, tags], dim=1))
    fails_with(KeyError, "item", given.sequences, "item")


def test_din_selects_sequences_by_vocabulary() -> None:
    assert SMALL.targets(INPUTS) == {"history": "item"}
    assert unpooled_features(SMALL, INPUTS) == ("item", "history")
    assert unpooled_features(DLRMConfig(), INPUTS) == ()
    alone = ModelInputs(0, ("item", "tags"), lists=(("tags", None),))
    rejects("the schema must have a list with the vocabulary of a single-category column", unpooled_features, SMALL, alone)
    weighted = ModelInputs(0, INPUTS.features, vocabularies=INPUTS.vocabularies, lists=INPUTS.lists, weighted=True)
    rejects("^DINConfig: lists with weights must be summed, got unpooled lists history", unpooled_features, SMALL, weighted)


def test_aligned_lists_use_one_attention_unit() -> None:
    single, lists = ("item", "shop"), ("items", "shops", "tags")
    inputs = ModelInputs(
        0,
        (*single, *lists),
        vocabularies=("item", "shop", "item", "shop", "tags"),
        lists=tuple((name, None) for name in lists),
        aligned=(("shops", "items"), ("tags", "items")),
    )
    assert SMALL.units(inputs) == (("items", "shops"),)  # tags have no target, so they are summed
    assert SMALL.units(dataclasses.replace(inputs, aligned=())) == (("items",), ("shops",))


def test_din_bf16_is_close_and_empty_batches_return_no_logits() -> None:
    values, item, tags = torch.randn(int(LENGTHS.sum()), DIM), torch.randn(ROWS, DIM), torch.randn(ROWS, DIM)
    dense, nothing = torch.randn(ROWS, 2), torch.zeros(0, DIM)
    exact, rough = (network(precision=kind).eval() for kind in ("fp32", "bf16"))
    expected = exact(dense, embedded(values, item, tags))["click"]
    close = rough(dense, embedded(values, item, tags))["click"]
    torch.testing.assert_close(close, expected, atol=0.05 * expected.abs().max().item(), rtol=0.05)
    no_rows = embedded(nothing, nothing, nothing, lengths=LENGTHS[:0])
    for net in (exact.train(), rough.train()):
        assert net(dense[:0], no_rows)["click"].shape == (0,)


def test_cost_uses_maximum_list_length() -> None:
    attention = 5 * (2 * DIM * 6 + 6 * 3 + 3) + DIM * 6
    assert network_multiply_adds(network(), INPUTS, SMALL) == attention + 5 * DIM * 8 + 8 * 5 + 5
