"""DIN: its sequences, training and settings. Its formula: test_formulas.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from builders.whole_click_model import whole_model
from torch import nn

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.data.encoded import Bags, EncodedRows
from rayrec.ingest.batches import sparse_features
from rayrec.layers.keyed_embeddings import Embedded, Sequences
from rayrec.layers.tower import Dice
from rayrec.models.base import ModelInputs, unpooled_features
from rayrec.models.cost import network_multiply_adds
from rayrec.models.ranking.din import DIN, DINConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.scoring_tables import RowFormat
from rayrec.workloads.recsys.scorer import PlainModel, make_scorer

DIM, ROWS = 4, 9
INPUTS = ModelInputs(
    2,
    ("item", "history", "tags"),
    "click",
    vocabularies=("item", "item", "tags"),
    lists=(("history", 5), ("tags", None)),
)
SMALL = DINConfig(embedding_dim=DIM, attention=(6, 3), mlp=(8, 5))
LENGTHS = torch.tensor([3, 0, 5, 1, 2, 0, 4, 5, 1])


def network(config: DINConfig = SMALL) -> DIN:
    torch.manual_seed(0)
    built = config.build(INPUTS)
    assert isinstance(built, DIN)
    for module in built.modules():
        if isinstance(module, Dice):
            nn.init.normal_(module.slope)
            nn.init.normal_(module.norm.running_mean)
            nn.init.uniform_(module.norm.running_var, 0.5, 2)
    return built


def embedded(values: torch.Tensor, item: torch.Tensor, tags: torch.Tensor) -> Embedded:
    """Delivered in another order than the features'."""
    history = Sequences(values, LENGTHS)
    return Embedded(
        INPUTS.features, DIM, lambda: (torch.cat([tags, item], dim=1), (2, 0)), sequences=lambda: {"history": history}
    )


def test_other_networks_get_the_sum_of_a_sequence() -> None:
    values, item, tags = torch.randn(int(LENGTHS.sum()), DIM), torch.randn(ROWS, DIM), torch.randn(ROWS, DIM)
    sums = torch.stack([part.sum(0) for part in values.split(LENGTHS.tolist())])
    given = embedded(values, item, tags)
    torch.testing.assert_close(given["history"], sums)
    torch.testing.assert_close(given.stacked(), torch.stack([item, sums, tags], dim=1))
    torch.testing.assert_close(given.side_by_side(), torch.cat([item, sums, tags], dim=1))
    with pytest.raises(KeyError, match="item"):
        given.sequences("item")


def test_which_features_are_sequences() -> None:
    assert SMALL.targets(INPUTS) == {"history": "item"}
    assert unpooled_features(SMALL, INPUTS) == ("item", "history")
    assert unpooled_features(DLRMConfig(), INPUTS) == ()
    with pytest.raises(
        InputError, match="DINConfig: no list shares its vocabulary with a column of one category a row"
    ):
        unpooled_features(SMALL, ModelInputs(0, ("item", "tags"), lists=(("tags", None),)))
    weighted = ModelInputs(0, INPUTS.features, vocabularies=INPUTS.vocabularies, lists=INPUTS.lists, weighted=True)
    with pytest.raises(
        InputError, match=r"takes lists of categories one by one \(history\), to which weights do not apply"
    ):
        unpooled_features(SMALL, weighted)


def test_aligned_lists_share_an_attention_unit() -> None:
    single, lists = ("item", "shop"), ("items", "shops", "tags")
    inputs = ModelInputs(
        0,
        (*single, *lists),
        vocabularies=("item", "shop", "item", "shop", "tags"),
        lists=tuple((name, None) for name in lists),
        aligned=(("shops", "items"), ("tags", "items")),
    )
    assert SMALL.units(inputs) == (("items", "shops"),)  # tags have no target: they are summed
    assert SMALL.units(dataclasses.replace(inputs, aligned=())) == (("items",), ("shops",))


def rows(count: int) -> tuple[Batch, EncodedRows]:
    """Rows whose click depends on whether the item is among the last of the history."""
    chance = torch.Generator().manual_seed(count)
    lengths = torch.randint(0, 6, (count,), generator=chance).int()
    history = torch.randint(0, 12, (int(lengths.sum()),), generator=chance).int()
    item = torch.randint(0, 12, (count,), generator=chance).int()
    known = torch.zeros(count)
    for row, part in enumerate(history.split(lengths.tolist())):
        known[row] = (part == item[row]).any()
    bags = Bags(history.numpy(), lengths.numpy())
    tags = Bags(torch.zeros(count, dtype=torch.int32).numpy(), torch.ones(count, dtype=torch.int32).numpy())
    dense = torch.rand(count, 2, generator=chance)
    batch = Batch(
        {"dense": dense},
        1 / max(count, 1),
        sparse_features(["tags"], [tags], count),
        {"click": known},
        sequence_features=sparse_features(["item", "history"], [item.numpy(), bags], count),
    )
    return batch, EncodedRows(dense.numpy(), [item.numpy(), bags, tags])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_learns_and_scores_as_it_trains(precision: str) -> None:
    model = whole_model(
        DINConfig(embedding_dim=DIM, attention=(8,), mlp=(16,), embedding_penalty=1e-6),
        [12, 12, 3],
        inputs=INPUTS,
        precision=precision,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    batch, encoded = rows(400)
    losses = []
    for _ in range(120):
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]  # a model of sums cannot tell
    model.eval()
    trained = model.score(batch.tensors["dense"], batch.sparse_features, batch.sequence_features)
    plain = PlainModel(
        model.head.network,
        INPUTS,
        SMALL.output_heads(INPUTS),
        width=DIM,
        sequences=("history",),
        unpooled=("item", "history"),
    ).requires_grad_(requires_grad=False)
    weights = model.state_dict()
    tables = [weights[name] for name in plain.table_weights().values()]
    assert list(plain.table_weights().values()) == ["sequences.embeddings.item.weight"] * 2 + [
        "embeddings.embedding_bags.tags.weight"
    ]
    scorer = make_scorer(plain, tables, row_format=RowFormat("fp32", DIM), device="cpu")
    tolerance = 1e-5 if precision == "fp32" else 0.05
    torch.testing.assert_close(
        torch.from_numpy(scorer.score(encoded)), trained.detach(), atol=tolerance, rtol=tolerance
    )
    assert model(rows(0)[0])[0].item() == 0.0


def test_cost_counts_a_list_as_long_as_it_may_be() -> None:
    net = network()
    config, attention = SMALL, 5 * (2 * DIM * 6 + 6 * 3 + 3) + DIM * 6
    mlp = 5 * DIM * 8 + 8 * 5 + 5
    assert network_multiply_adds(net, INPUTS, config) == attention + mlp
