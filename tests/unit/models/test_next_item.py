"""Next-item networks against their formulas in plain PyTorch, and their losses and inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from builders.faults import rejects
from builders.interactions import LISTS as LISTS_SCHEMA
from torch.nn import functional

from rayrec import models, recipes
from rayrec.batch import DENSE, Batch
from rayrec.layers import item_losses
from rayrec.layers.item_losses import find_hits
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
from rayrec.layers.sequence_blocks import ListElements
from rayrec.models.base import CandidateRows, ModelInputs, stored_model, table_key
from rayrec.models.retrieval.sasrec import SASRecConfig
from rayrec.training.resume import compare_settings

DIM = 8
HEADS = 2
LENGTH = 6
ROWS = 12
CANDIDATES = CandidateRows(2, 11, missing=1)
RUNS = ((5, 2), (3, 3), (1, 4))
NAMES = ("item", "action", "target", "seen")
INPUTS = ModelInputs(
    0,
    NAMES,
    vocabularies=("item", "action", "item", "item"),
    lists=tuple((name, LENGTH) for name in NAMES),
    aligned=(("action", "item"),),
    candidates=tuple((name, CANDIDATES) for name in NAMES),
    frequencies=(("item", RUNS),),
)
PLAIN = ModelInputs(
    0,
    ("item",),
    lists=(("item", LENGTH),),
    candidates=(("item", CANDIDATES),),
    frequencies=(("item", RUNS),),
)
TABLE = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
BATCH = Batch({DENSE: torch.zeros(0, 0)}, 1.0)
LISTS = [[2, 5, 3, 8, 4, 4], [7], [], [6, 0, 3], [1, 9, 10]]


def network_of(name: str, inputs: ModelInputs = PLAIN, **settings: Any) -> Any:
    """Return a network with larger weights than at the start."""
    small = {"embedding_dim": DIM, "attention_heads": HEADS, "dropout": 0.0, "k": 3}
    network = models.config_class(name)(**{**small, **settings}).build(inputs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
    return network.eval().requires_grad_(False)


def outputs_of(
    network: Any,
    lists: dict[str, Sequence[Sequence[int]]],
    *,
    sample: Sequence[int] | None = None,
) -> dict[str, torch.Tensor]:
    ids = {
        name: torch.tensor([item for items in rows for item in items], dtype=torch.int64)
        for name, rows in lists.items()
    }
    jagged = {
        name: JaggedEmbeddings(TABLE[ids[name]], torch.tensor([len(items) for items in rows]))
        for name, rows in lists.items()
    }
    table = TABLE
    if sample is not None:
        ids[table_key("item")] = torch.tensor(sample, dtype=torch.int64)
        table = TABLE[ids[table_key("item")]]
    rows = torch.zeros(len(lists["item"]), 0)
    embedded = KeyedEmbeddings.in_order(
        tuple(lists),
        DIM,
        rows,
        jagged,
        ids=ids,
        tables={"item": table},
    )
    return network(rows, embedded)


# -- Formulas of one list [items, dim]
Weights = dict[str, torch.Tensor]


def norm(values: torch.Tensor, weights: Weights, name: str, eps: float = 1e-5) -> torch.Tensor:
    shape = (values.shape[1],)
    return functional.layer_norm(
        values,
        shape,
        weights[f"{name}.weight"],
        weights[f"{name}.bias"],
        eps,
    )


def product(values: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    return functional.linear(values, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def in_heads(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(1, (HEADS, -1)).transpose(0, 1)


def attention(query: torch.Tensor, others: torch.Tensor, weights: Weights) -> torch.Tensor:
    matrices = weights["query_key_value.weight"].chunk(3)
    biases = weights["query_key_value.bias"].chunk(3)
    q, k, v = (
        in_heads(functional.linear(inputs, matrix, bias))
        for inputs, matrix, bias in zip((query, others, others), matrices, biases, strict=True)
    )
    scores = q @ k.transpose(1, 2) / (DIM / HEADS) ** 0.5
    is_later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(is_later, -torch.inf).softmax(2) @ v
    return product(mixed.transpose(0, 1).flatten(1), weights, "mixed")


def sasrec_block(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    query = norm(x, weights, "query_norm")
    hidden = norm(query + attention(query, x, weights), weights, "norm")
    return hidden + product(product(hidden, weights, "first").relu(), weights, "second")


def esasrec_block(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    normed = norm(x, weights, "attention_norm")
    gate = product(x, weights, "attention_gate").sigmoid()
    x = x + gate * attention(normed, normed, weights)
    normed = norm(x, weights, "norm")
    inner = functional.silu(product(normed, weights, "first")) * product(normed, weights, "factor")
    return x + product(x, weights, "gate").sigmoid() * product(inner, weights, "second")


def silu_weights(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | float) -> torch.Tensor:
    scores = in_heads(q) @ in_heads(k).transpose(1, 2)
    return (functional.silu(scores + bias) / (LENGTH - 1)).tril()


def distance_bias(weights: Weights, count: int) -> torch.Tensor:
    return torch.tensor(
        [[float(weights["distances"][abs(i - j)]) for j in range(count)] for i in range(count)]
    )


def hstu_block(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    normed = functional.layer_norm(x, (DIM,), eps=1e-6)
    u, q, k, v = functional.silu(product(normed, weights, "joint")).chunk(4, dim=1)
    mixed = silu_weights(q, k, distance_bias(weights, len(x))) @ in_heads(v)
    mixed = functional.layer_norm(mixed.transpose(0, 1).flatten(1), (DIM,), eps=1e-6)
    return x + product(u * mixed, weights, "mixed")


def fuxi_block(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    normed = functional.rms_norm(x, (DIM,), eps=1e-6)
    joint = functional.silu(product(normed, weights, "joint"))
    gates, q, k, v = joint.split([2 * DIM, DIM, DIM, DIM], dim=1)
    by_contents = silu_weights(q, k, 0.0) @ in_heads(v)
    by_position = distance_bias(weights, len(x)).tril() @ in_heads(v)
    channels = torch.cat([by_position, by_contents], dim=2).transpose(0, 1).flatten(1)
    normed = functional.rms_norm(channels, (2 * DIM,), eps=1e-6)
    x = x + product(gates * normed, weights, "mixed")
    normed = functional.rms_norm(x, (DIM,), eps=1e-6)
    inner = functional.silu(product(normed, weights, "first")) * product(normed, weights, "factor")
    return x + product(inner, weights, "second")


BLOCKS: dict[str, Callable[[torch.Tensor, Weights], torch.Tensor]] = {
    "sasrec": sasrec_block,
    "esasrec": esasrec_block,
    "hstu": hstu_block,
    "fuxi": fuxi_block,
}


def plain_states(name: str, network: Any, items: torch.Tensor) -> torch.Tensor:
    """Return the state after each item of one list, [items, dim]."""
    weights = network.state_dict()
    scale = DIM**0.5 if name in ("hstu", "fuxi") else 1.0
    hidden = items * scale + weights["positions"][: len(items)].flip(0)
    for number in range(2):
        prefix = f"blocks.{number}."
        block = {
            key.removeprefix(prefix): values
            for key, values in weights.items()
            if key.startswith(prefix)
        }
        hidden = BLOCKS[name](hidden, block)
    return norm(hidden, weights, "norm", 1e-8) if name == "sasrec" else hidden


def states_of(network: Any, items: Sequence[int]) -> torch.Tensor:
    elements = ListElements(torch.tensor([0]), torch.tensor([len(items)]), width=LENGTH)
    return network.encode(TABLE[list(items)], elements)


@pytest.mark.parametrize("name", BLOCKS)
def test_network_matches_formula(name: str) -> None:
    network = network_of(name)
    for items in ([2, 5, 3, 8, 4], [7], [9, 9, 9]):
        states = states_of(network, items)
        expected = plain_states(name, network, TABLE[items])
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_queries_and_item_vectors_give_scores(name: str) -> None:
    network = network_of(name)
    outputs = outputs_of(network, {"item": LISTS})
    queries = network.queries(outputs)
    items = TABLE[2:11]
    for row in (0, 1, 3):
        # The newest items that training has positions for
        state = plain_states(name, network, TABLE[LISTS[row][-(LENGTH - 1) :]])[-1]
        scores = items @ state
        if name in ("hstu", "fuxi"):
            scores = functional.normalize(items, dim=1) @ functional.normalize(state, dim=0) / 0.05
        found = network.item_vectors(outputs) @ queries[row]
        torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-4)
    predicted = network.predict(outputs, None)
    best = (queries @ network.item_vectors(outputs).T).argsort(dim=1, descending=True)[:, :3] + 2
    assert predicted["items"].tolist() == best.tolist()


# -- Losses
SAMPLE = [3, 4, 5, 5, 10]
TARGETS = [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (3, 2), (4, 1), (4, 2)]
"""Row and place of the known items after the first."""
IDS = torch.tensor([LISTS[row][place] for row, place in TARGETS])


def training_states(network: Any) -> torch.Tensor:
    """Return the state before each of TARGETS. Places count from the row's last but one item."""
    of_rows = {row: plain_states("sasrec", network, TABLE[LISTS[row][:-1]]) for row in (0, 3, 4)}
    return torch.stack([of_rows[row][place - 1] for row, place in TARGETS])


def expected_losses(network: Any, config: Any) -> torch.Tensor:
    """Return the loss of each of TARGETS."""
    states = training_states(network)
    ids = IDS
    shares = torch.zeros(ROWS).index_put(
        (torch.arange(2, 11),),
        torch.tensor([5, 5, 3, 3, 3, 1, 1, 1, 1]) / 23,
    )
    sample = torch.tensor(SAMPLE)
    settings = {"hits": find_hits(ids, sample)}
    arguments = (states, TABLE[ids], TABLE[sample])
    if config.loss == "full":
        return item_losses.full_softmax(states, TABLE[2:11], ids - 2)
    if config.loss == "gbce":
        return item_losses.gbce(*arguments, num_items=9, t=0.75, **settings)
    if config.loss == "ccl":
        return item_losses.cosine_contrastive(*arguments, margin=0.4, weight=150.0, **settings)
    if config.loss in ("sampled", "bce"):
        function = {"sampled": item_losses.sampled_softmax, "bce": item_losses.bce}[config.loss]
        return function(*arguments, **settings)
    pool = ids
    if config.loss == "mixed":
        pool = torch.cat([ids, sample])
        shares = (8 * shares + 5 / 9) / 13
    return item_losses.corrected_softmax(
        states,
        TABLE[ids],
        TABLE[pool],
        hits=find_hits(ids, pool),
        probabilities=shares[pool],
        positive_probabilities=shares[ids],
    )


@pytest.mark.parametrize("loss", ["full", "sampled", "gbce", "bce", "in_batch", "mixed", "ccl"])
@pytest.mark.parametrize("mean", ["targets", "rows"])
def test_loss_is_mean_over_targets_or_rows(loss: str, mean: str) -> None:
    network = network_of("sasrec", loss=loss, loss_mean=mean, unit_vectors=loss == "ccl").train()
    config = network._config
    sample = {"full": None, "in_batch": []}.get(loss, SAMPLE)
    outputs = outputs_of(network, {"item": LISTS}, sample=sample)
    losses = network.loss(outputs, BATCH)
    expected = expected_losses(network, config)
    rows = torch.tensor([row for row, _ in TARGETS])
    if mean == "targets":
        assert losses.mean().item() == pytest.approx(expected.mean().item(), rel=1e-4)
        assert losses[1] == losses[2] == 0
        return
    for row in range(len(LISTS)):
        own = expected[rows == row]
        mean_loss = own.mean().item() if len(own) else 0.0
        assert losses[row].item() == pytest.approx(mean_loss, rel=1e-4)


def test_batch_loss_limits_pool() -> None:
    network = network_of("sasrec", loss="in_batch", negatives=3).train()
    outputs = outputs_of(network, {"item": LISTS}, sample=[])
    some = network.loss(outputs, BATCH)
    # By ids 3 3 4 4 5 8 9 10: elements 0, 2 and 5
    pool = torch.tensor([3, 4, 8])
    states = training_states(network)
    ids = IDS
    expected = item_losses.corrected_softmax(
        states,
        TABLE[ids],
        TABLE[pool],
        hits=find_hits(ids, pool),
        probabilities=network.frequencies[pool - 2],
        positive_probabilities=network.frequencies[ids - 2],
    )
    assert some.mean().item() == pytest.approx(expected.mean().item(), rel=1e-4)


def test_settings_of_losses() -> None:
    samples = {
        loss: SASRecConfig(loss=loss, negatives=9, unit_vectors=True).table_sample()
        for loss in ("full", "in_batch", "sampled", "mixed", "ccl")
    }
    assert samples == {"full": None, "in_batch": 0, "sampled": 9, "mixed": 9, "ccl": 9}
    assert SASRecConfig(loss="mixed").needs_frequencies()
    assert not SASRecConfig(loss="sampled").needs_frequencies()
    rejects("unit_vectors: must be true for loss ccl, got false", SASRecConfig, loss="ccl")


@pytest.mark.parametrize("sample", [None, [4, 4, 9]])
def test_item_dropout_has_one_mask_per_item(sample: Sequence[int] | None) -> None:
    loss = "full" if sample is None else "sampled"
    network = network_of("sasrec", loss=loss, item_dropout=0.5).train()
    outputs = outputs_of(network, {"item": [[4, 4, 9, 5]]}, sample=sample)
    values = outputs["values"]
    masks = values / TABLE[[4, 4, 9, 5]]
    assert masks.unique().tolist() == [0, 2]
    assert torch.equal(values[0], values[1])
    rows = outputs["table"] if sample else outputs["table"][[4, 4, 9]]
    assert torch.equal(rows, values[:3])
    assert torch.equal(outputs["inputs"], values)


def test_item_dropout_is_for_training_alone() -> None:
    network = network_of("sasrec", item_dropout=0.5)
    outputs = outputs_of(network, {"item": LISTS})
    assert torch.equal(outputs["table"], TABLE)


@pytest.mark.parametrize("name", ["sasrec", "two_tower"])
def test_best_metric_selects_weights(name: str) -> None:
    config = models.config_class(name)(k=3, best_metric="recall")
    metrics = {"ndcg_at_3": 0.5, "recall_at_3": 0.25}
    assert config.score(metrics) == 0.25
    assert config.replace(best_metric="ndcg").score(metrics) == 0.5


# -- Aligned lists and evaluations
def test_aligned_lists_are_added_to_items() -> None:
    network = network_of("sasrec", INPUTS)
    lists = {"item": [[2, 5]], "action": [[3, 0]], "target": [[]], "seen": [[]]}
    query = network.queries(outputs_of(network, lists))[0]
    state = plain_states("sasrec", network, TABLE[[2, 5]] + TABLE[[3, 0]])[-1]
    torch.testing.assert_close(query, state, rtol=1e-4, atol=1e-5)
    assert network._config.sequences(INPUTS) == NAMES


def test_evaluation_loss_is_of_targets() -> None:
    network = network_of("sasrec", INPUTS, loss="sampled")
    items = [[2, 5], [3, 4, 6], [7]]
    lists = {
        "item": items,
        "action": [[11] * len(row) for row in items],
        "target": [[8, 1, 9], [], []],
        "seen": [[2, 5], [3], []],
    }
    losses = network.loss(outputs_of(network, lists), BATCH)
    action = TABLE[11]
    first = plain_states("sasrec", network, TABLE[[2, 5]] + action)[-1]
    second = plain_states("sasrec", network, TABLE[[3, 4]] + action)[-1]
    expected = [
        -(TABLE[2:11] @ first).log_softmax(0)[[6, 7]].mean().item(),
        -(TABLE[2:11] @ second).log_softmax(0)[4].item(),
        0.0,
    ]
    assert losses.tolist() == pytest.approx(expected, rel=1e-4)


# -- Configurations of earlier versions
def test_earlier_sasrec_is_recbole_with_row_means() -> None:
    stored = SASRecConfig(hidden=256, dropout=0.5).to_dict()
    for added in ("block", "loss", "loss_mean", "negatives", "temperature", "unit_vectors"):
        del stored[added]
    found = stored_model(stored, where="config.yaml")
    assert found == SASRecConfig(block="recbole", loss_mean="rows", hidden=256, dropout=0.5)
    current = SASRecConfig()
    assert stored_model(current.to_dict(), where="config.yaml") == current


@pytest.mark.parametrize(("std", "expected"), [(None, 64**-0.5), (0.02, 0.02)])
def test_weight_std_is_deviation_of_matrices(std: float | None, expected: float) -> None:
    torch.manual_seed(0)
    network = SASRecConfig(embedding_dim=64, weight_std=std).build(PLAIN)
    weights = dict(network.named_parameters())
    assert weights["blocks.1.first.weight"].std().item() == pytest.approx(expected, rel=0.05)
    assert weights["positions"].std().item() == pytest.approx(std or (2 / 69) ** 0.5, rel=0.2)
    assert weights["norm.weight"].eq(1).all()
    assert weights["blocks.0.first.bias"].eq(0).all()


def test_inputs_return_frequencies() -> None:
    shares = INPUTS.frequencies_of("item")
    assert shares is not None
    assert (shares * 23).tolist() == pytest.approx([5, 5, 3, 3, 3, 1, 1, 1, 1])
    assert INPUTS.frequencies_of("action") is None


def test_earlier_run_resumes_with_recbole_alone() -> None:
    config = recipes.next_item(schema=LISTS_SCHEMA).replace(workload={"model": {"hidden": 256}})
    stored = config.to_dict()
    for added in ("block", "loss_mean", "negatives"):
        del stored["workload"]["model"][added]
    rejected = compare_settings(stored, config).rejected
    assert [change.field for change in rejected] == [
        "workload.model.loss_mean",
        "workload.model.block",
    ]
    same = config.replace(workload={"model": {"block": "recbole", "loss_mean": "rows"}})
    assert compare_settings(stored, same).rejected == ()
