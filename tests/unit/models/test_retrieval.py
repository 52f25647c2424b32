"""Retrieval networks against plain PyTorch and naive ranks: reserved rows, unknown targets, ties,
precision.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from builders.click_models import make_preprocessor
from builders.faults import rejects
from torch import nn
from torch.nn import functional

from rayrec.batch import DENSE, Batch, StepOutput
from rayrec.data.encoding.rules import SparseColumn
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
from rayrec.layers.sequence_blocks import ListElements
from rayrec.metrics.item_ranks import ItemNumbers, candidate_logits, rank_measures
from rayrec.metrics.means import MeasureTotals, RowMetrics
from rayrec.models.base import CandidateRows, ModelInputs
from rayrec.models.retrieval.sasrec import SASRec, SASRecConfig
from rayrec.models.retrieval.two_tower import TwoTower, TwoTowerConfig
from rayrec.schema import Feature, Schema
from rayrec.workloads.recsys.candidates import candidate_rows, check_candidates, model_inputs

LENGTH = 6
CANDIDATES = CandidateRows(2, 9, missing=1)
"""Seven items in a table of ten rows, the last of which is reserved too."""
TABLE_ROWS = 10
LISTS = ModelInputs(0, ("item",), lists=(("item", LENGTH),), candidates=(("item", CANDIDATES),))
PAIRS = ModelInputs(1, ("user", "item", "kind"), candidates=(("item", CANDIDATES),))
SMALL = SASRecConfig(
    block="recbole",
    embedding_dim=8,
    hidden=12,
    loss_mean="rows",
    dropout=0.0,
    k=3,
)
TOWERS = TwoTowerConfig(
    embedding_dim=4,
    user_tower=(),
    vector=5,
    k=3,
)


def network_of(config: Any, inputs: ModelInputs, *, precision: Any = "fp32", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return config.build(inputs, precision=precision).eval().requires_grad_(False)


# -- Known rows
@pytest.mark.parametrize(
    ("column", "missing"),
    [
        pytest.param(SparseColumn(7, 5), 1, id="usual"),
        pytest.param(
            SparseColumn(
                8,
                5,
                first_id=1,
                unknown_id=6,
                missing_id=0,
            ),
            0,
            id="unknown at the end",
        ),
        pytest.param(SparseColumn(8, 5, missing_id=4, gap=4), 4, id="missing within the range"),
        pytest.param(SparseColumn(9, 5, missing_id=7, gap=7), 7, id="missing behind the range"),
        pytest.param(SparseColumn(7, 5, missing_id=0), None, id="missing is unknown"),
        pytest.param(SparseColumn(7, 5, missing_id=3), None, id="missing is a category"),
        pytest.param(SparseColumn(20, 5), 1, id="unused rows"),
    ],
)
def test_candidate_rows_match_vocabulary_ids(column: SparseColumn, missing: int | None) -> None:
    schema = Schema(label=None, sparse=("item",), tokens="any")
    preprocessor = make_preprocessor(schema, sparse=(column,))
    ((name, rows),) = candidate_rows(preprocessor)
    ids = column.ids()
    table = torch.arange(column.num_embeddings)
    assert (name, rows.missing, rows.count) == ("item", missing, 5)
    np.testing.assert_array_equal(rows.of_table(table), np.sort(ids))
    np.testing.assert_array_equal(np.flatnonzero(rows.contains(table.numpy())), np.sort(ids))
    candidates = rows.numbers(table)
    assert candidates[torch.from_numpy(ids).long()].tolist() == list(range(5))
    assert (candidates == -1).sum() == column.num_embeddings - 5
    np.testing.assert_array_equal(rows.ids(torch.arange(5)), np.sort(ids))


def test_hashed_rows_are_candidates_from_first_id() -> None:
    schema = Schema(label=None, sparse=("item",), tokens="any")
    for column, first in ((SparseColumn(9, None), 2), (SparseColumn(4, 5), 0)):
        tokens = np.arange(column.num_tokens or 0, dtype=np.uint64)
        preprocessor = make_preprocessor(schema, sparse=(column,), tokens=tokens)
        assert candidate_rows(preprocessor) == (
            ("item", CandidateRows(first, column.num_embeddings)),
        )
    assert model_inputs(preprocessor).candidates_of("item") == CandidateRows(0, 4)
    assert ModelInputs.from_schema(schema).candidates_of("item") == CandidateRows()
    assert CandidateRows().numbers(np.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        pytest.param(5, [], id="equal"),
        pytest.param(
            6,
            ["workload.model.k: column item has only 5 known items, got 6"],
            id="above",
        ),
    ],
)
def test_k_above_number_of_items_is_noted(k: int, expected: list[str]) -> None:
    schema = Schema(
        label=None,
        sparse=("item",),
        lists=("item",),
        features=(Feature(name="item", max_length=LENGTH),),
    )
    preprocessor = make_preprocessor(
        schema,
        sparse=(SparseColumn(7, 5),),
        tokens=np.arange(5, dtype=np.uint64),
    )
    notes: list[str] = []
    check_candidates(SMALL.replace(k=k), preprocessor, note=notes.append)
    assert [note.partition(". ")[0] for note in notes] == expected


# -- Ranks
def expected_at_k(scores: Sequence[float], target: int, k: int) -> tuple[float, float]:
    """Return mean NDCG and recall at k of one relevant item over all orders of tied items."""
    if target < 0:
        return 0.0, 0.0
    above = sum(score > scores[target] for score in scores)
    tied = sum(score == scores[target] for score in scores)
    ranks = [rank for rank in range(above, above + tied) if rank < k]
    return sum(1 / math.log2(rank + 2) for rank in ranks) / tied, len(ranks) / tied


def test_rank_measures_match_all_orders_of_ties() -> None:
    rng = np.random.default_rng(0)
    for candidates, k in itertools.product((1, 2, 5, 30), (1, 3, 10)):
        logits = rng.integers(0, 4, (50, candidates)).astype(np.float32)
        target = rng.integers(-1, candidates, 50)
        targets = ItemNumbers.one_each(torch.from_numpy(target))
        measures = rank_measures(torch.from_numpy(logits), targets, ks=(k,))
        expected = np.array(
            [
                expected_at_k(row, number, k)
                for row, number in zip(logits.tolist(), target.tolist(), strict=True)
            ]
        )
        np.testing.assert_allclose(measures[f"ndcg_at_{k}"], expected[:, 0], rtol=1e-6)
        np.testing.assert_allclose(measures[f"recall_at_{k}"], expected[:, 1], rtol=1e-6)
        assert (measures["targets"].sum(), measures["unknown_targets"].sum()) == (
            50,
            (target < 0).sum(),
        )


def test_rank_measures_of_nan_and_of_no_candidates_are_misses() -> None:
    nan = torch.nan
    measures = rank_measures(
        torch.tensor([[nan, 1.0], [nan, 1.0], [nan, nan]]),
        ItemNumbers.one_each(torch.tensor([0, 1, 1])),
        ks=(1,),
    )
    assert measures["recall_at_1"].tolist() == [0, 0, 0]
    only_first = ItemNumbers.one_each(torch.tensor([-1, -1]), torch.tensor([True, False]))
    measures = rank_measures(torch.zeros(2, 0), only_first, ks=(1,))
    np.testing.assert_array_equal(measures["recall_at_1"], [0, np.nan])
    assert (measures["targets"].tolist(), measures["unknown_targets"].tolist()) == ([1, 0], [1, 0])
    no_rows = ItemNumbers.one_each(torch.zeros(0, dtype=torch.int64))
    assert rank_measures(torch.zeros(0, 3), no_rows, ks=(1,))["ndcg_at_1"].shape == (0,)


@pytest.mark.parametrize("dim", [4, 16, 50])
def test_equal_candidates_have_equal_logits(dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    for rows, candidates in itertools.product((1, 3, 33), (1, 5, 6, 7, 13, 39)):
        vectors = torch.randn(1, dim, generator=generator).expand(candidates, dim).contiguous()
        users = torch.randn(rows, dim, generator=generator)
        logits = candidate_logits(users, vectors)
        assert torch.equal(logits, logits[:, :1].expand(rows, candidates))
        torch.testing.assert_close(logits, users @ vectors.T)


def test_candidate_logits_of_bf16_vectors_are_float32() -> None:
    users, items = (torch.randn(size, 6).to(torch.bfloat16) for size in (3, 5))
    logits = candidate_logits(users, items)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, users.float() @ items.float().T)


# -- SASRec
def lists_of(lists: Sequence[Sequence[int]], table: torch.Tensor) -> KeyedEmbeddings:
    ids = torch.tensor([item for items in lists for item in items], dtype=torch.int64)
    jagged = JaggedEmbeddings(table[ids], torch.tensor([len(items) for items in lists]))
    rows = torch.zeros(len(lists), 0)
    return KeyedEmbeddings.in_order(
        ("item",),
        table.shape[1],
        rows,
        {"item": jagged},
        ids={"item": ids},
        tables={"item": table},
    )


def outputs_of(
    network: SASRec,
    lists: Sequence[Sequence[int]],
    table: torch.Tensor,
) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return network(torch.zeros(len(lists), 0), lists_of(lists, table))


def states_of(network: SASRec, lists: Sequence[Sequence[int]], table: torch.Tensor) -> torch.Tensor:
    """Return the state after each item, [rows, LENGTH, dim]."""
    lengths = torch.tensor([len(items) for items in lists])
    elements = ListElements(lengths.cumsum(0) - lengths, lengths, width=LENGTH)
    ids = torch.tensor([item for items in lists for item in items], dtype=torch.int64)
    states = torch.zeros(len(lists), LENGTH, table.shape[1])
    with torch.no_grad():
        encoded = network.encode(table[ids[elements.item]], elements)
    return states.index_put((elements.rows, elements.index), encoded)


BATCH = Batch({DENSE: torch.zeros(0, 0)}, 1.0)


def plain_hidden(network: SASRec, config: SASRecConfig, items: torch.Tensor) -> torch.Tensor:
    """Return the state after each item of one list [items, dim], by PyTorch's own attention."""
    weights = network.state_dict()
    positions = torch.cat([weights["positions"], weights["positions"][-1:]])
    hidden = functional.layer_norm(
        items + positions[: len(items)],
        (config.embedding_dim,),
        weights["norm.weight"],
        weights["norm.bias"],
        1e-12,
    )
    is_later = torch.ones(len(items), len(items), dtype=torch.bool).triu(1)
    for number in range(config.blocks):
        block_weights = {
            name.split(".", 2)[2]: value
            for name, value in weights.items()
            if name.startswith(f"blocks.{number}.")
        }
        attention = nn.MultiheadAttention(
            config.embedding_dim,
            config.attention_heads,
            batch_first=True,
        )
        attention.load_state_dict(
            {
                "in_proj_weight": block_weights["query_key_value.weight"],
                "in_proj_bias": block_weights["query_key_value.bias"],
                "out_proj.weight": block_weights["mixed.weight"],
                "out_proj.bias": block_weights["mixed.bias"],
            }
        )
        mixed, _ = attention(hidden[None], hidden[None], hidden[None], attn_mask=is_later)
        hidden = functional.layer_norm(
            hidden + mixed[0],
            (config.embedding_dim,),
            block_weights["attention_norm.weight"],
            block_weights["attention_norm.bias"],
            1e-12,
        )
        inner = functional.gelu(
            functional.linear(hidden, block_weights["first.weight"], block_weights["first.bias"])
        )
        outer = functional.linear(
            inner,
            block_weights["second.weight"],
            block_weights["second.bias"],
        )
        hidden = functional.layer_norm(
            hidden + outer,
            (config.embedding_dim,),
            block_weights["norm.weight"],
            block_weights["norm.bias"],
            1e-12,
        )
    return hidden.detach()


def randomized(network: nn.Module, seed: int = 3) -> Any:
    """Replace all weights by larger random ones, so that positions, biases, norms and residuals all
    count.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + values / 4
                if name.endswith("norm.weight")
                else values / (4 if parameter.dim() == 1 else 2)
            )
    return network


@pytest.fixture
def sasrec() -> SASRec:
    return randomized(network_of(SMALL, LISTS))


@pytest.fixture
def table() -> torch.Tensor:
    return torch.randn(TABLE_ROWS, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_sasrec_matches_attention_of_pytorch(heads: int, table: torch.Tensor) -> None:
    config = SMALL.replace(attention_heads=heads)
    network = randomized(network_of(config, LISTS))
    lists = [[2, 5, 3, 8, 4, 4], [7], [6, 0, 1]]
    hidden = states_of(network, lists, table)
    for row, items in enumerate(lists):
        expected = plain_hidden(network, config, table[torch.tensor(items)])
        torch.testing.assert_close(hidden[row, : len(items)], expected, rtol=1e-4, atol=1e-5)


def test_sasrec_state_depends_on_order_and_earlier_items(
    sasrec: SASRec,
    table: torch.Tensor,
) -> None:
    items = [2, 5, 3, 8, 4, 6]
    hidden = states_of(sasrec, [items], table)[0]
    for position in range(1, LENGTH):
        changed = [*items[:position], 7, *items[position + 1 :]]
        other = states_of(sasrec, [changed], table)[0]
        torch.testing.assert_close(other[:position], hidden[:position], rtol=0, atol=1e-6)
        assert (other[position:] - hidden[position:]).abs().amax(dim=1).min() > 1e-3
    repeated = states_of(sasrec, [[2, 2, 2]], table)[0, :3]
    assert (repeated[1:] - repeated[:-1]).abs().amax(dim=1).min() > 1e-3  # By the positions alone


def test_sasrec_logits_of_seeded_model_are_unchanged(sasrec: SASRec, table: torch.Tensor) -> None:
    """Golden, because weights of earlier versions must give the same scores."""
    hidden = states_of(sasrec, [[2, 5, 3], [7, 8, 4, 6, 2, 3]], table)
    logits = torch.stack([hidden[0, 2], hidden[1, 5]]) @ table[2:9].T
    np.testing.assert_allclose(logits, GOLDEN_LOGITS, rtol=1e-4, atol=1e-5)


GOLDEN_LOGITS = [
    [-3.8139393, 1.8269303, 3.2753210, 0.7738590, -6.0597014, 0.3076084, -0.5544939],
    [-5.2341890, 4.7151546, 3.5242624, -0.6384275, -3.5778601, 5.3808775, -2.6114211],
]


def test_sasrec_loss_skips_reserved_targets_and_candidates(
    sasrec: SASRec,
    table: torch.Tensor,
) -> None:
    lists = [
        [2, 5, 0, 8, 1, 9],
        [0, 0, 1],
        [4],
        [],
        [1, 2],
    ]
    outputs = outputs_of(sasrec, lists, table)
    losses = sasrec.loss(outputs, BATCH)
    hidden = states_of(sasrec, lists, table)
    expected = []
    for row, items in enumerate(lists):
        item_losses = []
        for position, item in enumerate(items[1:], start=1):
            if 2 <= item < 9:
                logits = hidden[row, position - 1].double() @ table[2:9].double().T
                item_losses.append(float(logits.logsumexp(0) - logits[item - 2]))
        expected.append(np.mean(item_losses) if item_losses else 0.0)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert np.count_nonzero(expected) == 2


def test_sasrec_measures_match_naive_ranks(sasrec: SASRec, table: torch.Tensor) -> None:
    rng = np.random.default_rng(0)
    lists = [
        rng.integers(0, TABLE_ROWS, size).tolist() for size in rng.integers(0, LENGTH + 1, 200)
    ]
    outputs = outputs_of(sasrec, lists, table)
    measures = sasrec.measures(outputs, BATCH)
    hidden = states_of(sasrec, lists, table)
    for row, items in enumerate(lists):
        if len(items) < 2 or items[-1] == 1:
            assert math.isnan(measures["recall_at_3"][row])
            assert measures["targets"][row] == 0
            continue
        scores = (hidden[row, len(items) - 2] @ table[2:9].T).tolist()
        target = items[-1] - 2 if 2 <= items[-1] < 9 else -1
        assert (
            measures["ndcg_at_3"][row].item(),
            measures["recall_at_3"][row].item(),
        ) == pytest.approx(expected_at_k(scores, target, 3))
        assert (measures["targets"][row], measures["unknown_targets"][row]) == (1, target < 0)


def test_sasrec_constant_model_has_recall_of_chance(sasrec: SASRec) -> None:
    table = (
        torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
        .expand(TABLE_ROWS, 8)
        .contiguous()
    )
    lists = [[2, item] for item in range(2, 9)]
    measures = sasrec.measures(outputs_of(sasrec, lists, table), BATCH)
    np.testing.assert_allclose(measures["recall_at_3"], 3 / 7, rtol=1e-6)
    np.testing.assert_allclose(measures["ndcg_at_3"], sum(1 / np.log2([2, 3, 4])) / 7, rtol=1e-6)


def test_sasrec_predictions_have_no_reserved_rows(table: torch.Tensor) -> None:
    table[[0, 1, 9]] *= 100
    for k, size in ((3, 3), (7, 7), (50, 7)):
        config = SMALL.replace(k=k)
        network = randomized(network_of(config, LISTS))
        outputs = outputs_of(network, [[2, 5], [0], [], [1, 1]], table)
        predicted = network.predict(outputs, lists_of([], table))
        (head,) = config.output_heads(LISTS)
        head.check(predicted, rows=4, where="predict")
        assert head.shape == (size,)
        assert set(range(2, 9)) >= set(predicted["items"].flatten().tolist())
        assert network.measures(outputs, BATCH)[f"recall_at_{k}"].tolist()[0] == (
            1.0 if k >= 7 else pytest.approx(0, abs=1)
        )
    assert config.output_heads(ModelInputs(0, ("item",), lists=LISTS.lists))[0].shape == (50,)


def test_sasrec_ranks_in_full_precision() -> None:
    """Scores rounded to bf16 would have ties."""
    network = network_of(SMALL, LISTS, precision="bf16")
    generator = torch.Generator().manual_seed(1)
    table = torch.ones(TABLE_ROWS, 8) + torch.randn(TABLE_ROWS, 8, generator=generator) / 1000
    query = network.queries(outputs_of(network, [[2]], table))[0]
    order = (table[2:9] @ query).argsort(descending=True)
    for rank, candidate in enumerate(order.tolist()):
        lists = [[2, candidate + 2]]
        measures = network.measures(outputs_of(network, lists, table), BATCH)
        assert measures["recall_at_3"].item() == (rank < 3)
    predicted = network.predict(outputs_of(network, [[2]], table), lists_of([], table))
    assert predicted["items"][0].tolist() == (order[:3] + 2).tolist()


def test_sasrec_needs_lists_of_two_and_has_two_blocks() -> None:
    message = "SASRecConfig: the schema must have a list of items with a max_length of at least 2"
    for lists in ((), (("item", None),), (("item", 1),)):
        rejects(message, SASRecConfig().sequences, ModelInputs(0, ("item",), lists=lists))
    assert SASRecConfig().sequences(ModelInputs(0, ("item",), lists=(("item", 2),))) == ("item",)
    assert len(network_of(SASRecConfig(), LISTS).blocks) == 2
    rejects("attention_heads: must divide embedding_dim 64, got 3", SASRecConfig, attention_heads=3)


# -- Two towers
SEVERAL = TOWERS.replace(item_features=("item", "kind"))


def tower_outputs(
    network: TwoTower,
    rows: np.ndarray,
    tables: dict[str, torch.Tensor],
    *,
    table: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the outputs for rows of (user, item, kind)."""
    user, item, kind = (torch.from_numpy(column) for column in rows.T)
    jagged = {"item": JaggedEmbeddings(tables["item"][item], torch.ones_like(item))}
    pooled = torch.cat([tables["user"][user], tables["kind"][kind]], dim=1)
    full = {"item": tables["item"]} if table else {}
    embedded = KeyedEmbeddings.in_order(
        PAIRS.features,
        4,
        pooled,
        jagged,
        ids={"item": item},
        tables=full,
    )
    with torch.no_grad():
        return network(torch.ones(len(rows), 1), embedded)


def tower_rows(count: int, seed: int = 0) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Return rows of (user, item, kind), some of unknown or missing items, and the tables. An item
    has one kind.
    """
    rng = np.random.default_rng(seed)
    item = rng.integers(0, TABLE_ROWS, count)
    generator = torch.Generator().manual_seed(seed)
    tables = {name: torch.randn(TABLE_ROWS, 4, generator=generator) for name in PAIRS.features}
    return np.stack([rng.integers(0, TABLE_ROWS, count), item, item % 3], axis=1), tables


def naive_measures(
    users: np.ndarray,
    vectors: dict[int, np.ndarray],
    items: Sequence[int],
    k: int,
) -> list[tuple[float, float]]:
    """Return NDCG and recall of each row's item among these vectors, by item."""
    names = sorted(vectors)
    results = []
    for user, item in zip(users, items, strict=True):
        scores = [float(user @ vectors[name]) for name in names]
        results.append(expected_at_k(scores, names.index(item) if item in names else -1, k))
    return results


@pytest.mark.parametrize("count", [1, 4, 60])
def test_several_item_features_rank_distinct_items(count: int) -> None:
    network = randomized(network_of(SEVERAL, PAIRS))
    rows, tables = tower_rows(count)
    outputs = tower_outputs(network, rows, tables)
    vectors = {
        int(item): vector
        for item, vector in zip(rows[:, 1], outputs["item"].double().numpy(), strict=True)
        if 2 <= item < 9
    }
    measures = network.measures(outputs, BATCH)
    expected = naive_measures(outputs["user"].double().numpy(), vectors, rows[:, 1].tolist(), 3)
    has_target = rows[:, 1] != 1
    for number, name in enumerate(("ndcg_at_3", "recall_at_3")):
        np.testing.assert_allclose(
            measures[name][has_target],
            np.array(expected)[has_target][:, number],
            rtol=1e-6,
        )
        assert np.isnan(measures[name][~has_target]).all()
    np.testing.assert_array_equal(measures["targets"], has_target)
    np.testing.assert_array_equal(measures["unknown_targets"], np.isin(rows[:, 1], (0, 9)))


def test_several_item_features_ignore_copies_of_rows() -> None:
    network = randomized(network_of(SEVERAL, PAIRS))
    rows, tables = tower_rows(30)
    once = network.measures(tower_outputs(network, rows, tables), BATCH)
    again = network.measures(tower_outputs(network, np.repeat(rows, 7, axis=0), tables), BATCH)
    for name in ("ndcg_at_3", "recall_at_3"):
        np.testing.assert_array_equal(once[name].numpy().repeat(7), again[name])


def test_varying_item_features_keep_row_values() -> None:
    """An item may have other features in each row, such as a price."""
    network = network_of(SEVERAL, PAIRS)
    outputs = {
        "user": torch.tensor([[1.0, 0.0]] * 3),
        "item": torch.tensor([[0.0, 1.0], [0.6, 0.8], [1.0, 0.0]]),
        "ids": torch.tensor([2, 5, 2]),
    }
    measures = network.measures(outputs, BATCH)["ndcg_at_3"].tolist()
    assert measures == pytest.approx([1 / math.log2(3), 1.0, 1.0])


def test_two_towers_rank_candidates_of_table() -> None:
    inputs = ModelInputs(1, ("user", "item", "kind"), candidates=(("item", CANDIDATES),))
    network = randomized(network_of(TOWERS, inputs))
    rows, tables = tower_rows(60)
    outputs = tower_outputs(network, rows, tables, table=True)
    layer = network.item_tower[1]
    vectors = (
        functional.normalize(functional.linear(tables["item"], layer.weight, layer.bias), dim=1)
        .detach()
        .double()
    )
    expected = naive_measures(
        outputs["user"].double().numpy(),
        {item: vectors[item].numpy() for item in range(2, 9)},
        rows[:, 1].tolist(),
        3,
    )
    measures = network.measures(outputs, BATCH)
    has_target = rows[:, 1] != 1
    np.testing.assert_allclose(
        measures["ndcg_at_3"][has_target],
        np.array(expected)[has_target][:, 0],
        rtol=1e-6,
    )
    assert measures["unknown_targets"].sum() == np.isin(rows[:, 1], (0, 9)).sum() > 0


def test_two_towers_constant_model_has_recall_of_chance() -> None:
    rows, tables = tower_rows(60)
    is_candidate = (rows[:, 1] >= 2) & (rows[:, 1] < 9)
    tables["item"] = tables["item"][:1].expand(TABLE_ROWS, 4).contiguous()
    tables["kind"] = tables["kind"][:1].expand(TABLE_ROWS, 4).contiguous()
    for config, table in ((TOWERS, True), (SEVERAL, False)):
        network = randomized(network_of(config, PAIRS))
        network.item_tower[1].weight.data.zero_()
        measures = network.measures(tower_outputs(network, rows, tables, table=table), BATCH)
        np.testing.assert_allclose(
            measures["recall_at_3"][is_candidate],
            3 / len(set(rows[is_candidate, 1])),
            rtol=1e-6,
        )


def test_two_towers_loss_skips_unknown_items() -> None:
    network = randomized(network_of(TOWERS, PAIRS))
    network.item_counts.fill_(1.0)
    rows, tables = tower_rows(40)
    outputs = tower_outputs(network, rows, tables)
    item = torch.from_numpy(rows[:, 1])
    counts = 0.99 + torch.bincount(item, minlength=TABLE_ROWS)[item].double()
    logits = (
        outputs["user"].double() @ outputs["item"].double().T
    ) / TOWERS.temperature - counts.log()
    losses = network.loss(outputs, BATCH)
    for row in range(len(rows)):
        if not 2 <= item[row] < 9:
            assert losses[row] == 0
            continue
        negatives = [
            other for other in range(len(rows)) if 2 <= item[other] < 9 and item[other] != item[row]
        ]
        row_values = logits[row, [row, *negatives]]
        assert losses[row].item() == pytest.approx(
            (row_values.logsumexp(0) - row_values[0]).item(),
            rel=1e-4,
            abs=1e-5,
        )


def test_two_towers_evaluation_loss_of_rare_items_is_bounded() -> None:
    """An item that no recent training step had counts with its rows in the evaluation's step, which
    later steps forget.
    """
    config = TOWERS.replace(temperature=1.0)
    network = randomized(network_of(config, PAIRS))
    # Popular; item 6 is in the vocabulary, but was not seen for long
    network.item_counts[5] = 1000.0
    rows = np.array(
        [
            [3, 5, 0],
            [4, 6, 0],
            [5, 6, 0],
            [6, 5, 0],
        ]
    )
    _, tables = tower_rows(1)
    outputs = tower_outputs(network, rows, tables)
    cosine = outputs["user"].double() @ outputs["item"].double().T
    log_frequency = torch.tensor([992.0, 2.0, 2.0, 992.0], dtype=torch.float64).log()
    losses = network.loss(outputs, BATCH)
    expected = cosine - log_frequency
    for row, negatives in (
        (0, [1, 2]),
        (1, [0, 3]),
        (2, [0, 3]),
        (3, [1, 2]),
    ):
        row_values = expected[row, [row, *negatives]]
        assert losses[row].item() == pytest.approx(
            (row_values.logsumexp(0) - row_values[0]).item(),
            rel=1e-3,
            abs=1e-6,
        )
    assert network.item_counts.sum() == 1000
    torch.testing.assert_close(network.loss(outputs, BATCH), losses)


def test_two_towers_correct_exact_frequencies() -> None:
    known = replace(PAIRS, frequencies=(("item", ((3, 3), (1, 4))),))
    network = randomized(network_of(TOWERS, known)).train()
    rows, tables = tower_rows(40)
    outputs = tower_outputs(network, rows, tables)
    item = torch.from_numpy(rows[:, 1])
    counts = torch.tensor([1, 1, 3, 3, 3, 1, 1, 1, 1, 1])[item].double()
    logits = outputs["user"].double() @ outputs["item"].double().T
    logits = logits / TOWERS.temperature - (counts / 13).log()
    losses = network.loss(outputs, BATCH)
    for row in range(len(rows)):
        if not 2 <= item[row] < 9:
            continue
        others = [
            other for other in range(len(rows)) if 2 <= item[other] < 9 and item[other] != item[row]
        ]
        own = logits[row, [row, *others]]
        expected = (own.logsumexp(0) - own[0]).item()
        assert losses[row].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert network.item_counts.sum() == 0
    assert "frequencies" not in network.state_dict()


def test_two_towers_training_counts_items_of_all_steps() -> None:
    network = randomized(network_of(TOWERS, PAIRS)).train()
    rows, tables = tower_rows(5)
    outputs = tower_outputs(network, rows, tables)
    network.loss(outputs, BATCH)
    network.loss(outputs, BATCH)
    counts = np.bincount(rows[:, 1], minlength=TABLE_ROWS)
    np.testing.assert_allclose(network.item_counts[:TABLE_ROWS], counts * 1.99, rtol=1e-6)
    assert network.loss(tower_outputs(network, rows[:0], tables), BATCH).shape == (0,)


def test_item_features_must_be_single_categories() -> None:
    assert SEVERAL.sequences(PAIRS) == ("item",)
    assert (SEVERAL.full_tables(PAIRS), TOWERS.full_tables(PAIRS)) == ((), ("item",))
    assert SEVERAL.user_features(PAIRS) == ("user",)
    assert TOWERS.user_features(PAIRS) == ("user", "kind")
    listed = ModelInputs(0, ("user", "item"), lists=(("item", 5),))
    rejects(
        r"item_features: must be features of one category a row, got item\. The log has user",
        TOWERS.user_features,
        listed,
    )
    rejects(
        r"a row, got item\. Use recipe next_item, or name user and item in sparse, not in sequence",
        TOWERS.user_features,
        ModelInputs(0, ("item", "target"), lists=(("item", 5), ("target", None))),
    )
    rejects(
        r"item_features: must name at least the item's id, got none",
        TwoTowerConfig,
        item_features=(),
    )
    rejects(
        r"must have features of the user, got none",
        TOWERS.user_features,
        ModelInputs(0, ("item",)),
    )


# -- Means and counts of an evaluation
def test_evaluations_average_measures_and_add_up_counts() -> None:
    rows = RowMetrics()
    tables = MeasureTotals()
    for recall, targets in (
        ([1.0, 0.0, 0.0], [1, 1, 1]),
        ([1.0], [1, 0]),
        ([], []),
    ):
        rows.update(
            StepOutput(
                torch.tensor(0.0),
                measures={
                    "recall": torch.tensor(recall),
                    "targets": torch.tensor(targets, dtype=torch.int64),
                },
            )
        )
        padded = np.array([*recall, *[math.nan] * (len(targets) - len(recall))])
        tables.update(
            pa.table(
                {
                    "row": pa.array(range(len(targets)), pa.int64()),
                    "recall": pa.array(padded, from_pandas=True),
                    "targets": pa.array(targets, pa.int64()),
                }
            )
        )
    for metrics in (rows.compute(), tables.compute()):
        assert metrics == {"recall": 0.5, "targets": 4}
        assert [type(value) for value in metrics.values()] == [float, int]
