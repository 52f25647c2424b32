"""Next-item networks with times, against the formulas of their published code in plain PyTorch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from builders.faults import rejects
from torch.nn import functional

from rayrec import models
from rayrec.batch import DENSE, Batch
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
from rayrec.models.base import (
    CandidateRows,
    ModelInputs,
    stored_model,
    table_key,
    unpooled_features,
)

DIM = 8
HEADS = 2
LENGTH = 6
ROWS = 12
UNTIMED = ModelInputs(
    0,
    ("item",),
    lists=(("item", LENGTH + 1),),
    candidates=(("item", CandidateRows(2, ROWS, missing=1)),),
)
INPUTS = ModelInputs(
    0,
    ("item",),
    lists=UNTIMED.lists,
    aged=("item",),
    candidates=UNTIMED.candidates,
)
TABLE = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
BATCH = Batch({DENSE: torch.zeros(0, 0)}, 1.0)
LISTS = [[2, 5, 3, 8, 4, 4], [7], [], [6, 3, 3], [9, 10, 2, 2, 5, 11]]
TIMES = [
    [0, 0, 5, 90, 86_400, 86_401, 2_000_000],
    [50, 60],
    [0],
    [7, 3_000_000, 3_000_004, 3_000_100],
    [10, 20, 30, 1_000, 70_000, 70_000, 70_000],
]
"""Seconds of each list's items, and of the answer."""
NAMES = ("hstu", "fuxi")


def network_of(name: str, inputs: ModelInputs = INPUTS, **settings: Any) -> Any:
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
    lists: Sequence[Sequence[int]] = LISTS,
    times: Sequence[Sequence[int]] | None = TIMES,
) -> dict[str, torch.Tensor]:
    ids = torch.tensor([item for items in lists for item in items], dtype=torch.int64)
    gaps = None
    if times is not None:
        of_lists = [torch.tensor(own).diff() for own in times]
        gaps = torch.cat(of_lists).float()
    jagged = JaggedEmbeddings(TABLE[ids], torch.tensor([len(items) for items in lists]), gaps)
    rows = torch.zeros(len(lists), 0)
    sample = torch.tensor([3, 4])
    is_sampled = network.training
    embedded = KeyedEmbeddings.in_order(
        ("item",),
        DIM,
        rows,
        {"item": jagged},
        ids={"item": ids, table_key("item"): sample},
        tables={"item": TABLE[sample] if is_sampled else TABLE},
    )
    return network(rows, embedded)


# -- One list in the published codes: [items, dim], with all pairs of items
def buckets_of(seconds: torch.Tensor) -> torch.Tensor:
    return (torch.log(torch.abs(seconds).clamp(min=1)) / 0.301).long().clamp(0, 128)


def pairs_of(times: Sequence[int], *, request_time: bool) -> torch.Tensor:
    """Return the bucket of each pair, of which the published codes know the next item's time."""
    all_times = torch.tensor(times)
    later = all_times[1:] if request_time else all_times[:-1]
    return buckets_of(later.unsqueeze(1) - all_times[:-1].unsqueeze(0))


def by_offset(weights: torch.Tensor, count: int) -> torch.Tensor:
    index = torch.arange(count)
    return weights[(index.unsqueeze(1) - index).abs()]


def heads(values: torch.Tensor) -> torch.Tensor:
    return values.view(len(values), HEADS, -1)


def hstu(x: torch.Tensor, buckets: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    count = len(x)
    normed = functional.layer_norm(x, (DIM,), eps=1e-6)
    u, q, k, v = functional.silu(normed @ weights["joint.weight"].T).chunk(4, 1)
    scores = torch.einsum("nhd,mhd->hnm", heads(q), heads(k))
    scores = scores + by_offset(weights["distances"], count) + weights["times"][buckets]
    attention = functional.silu(scores) / LENGTH * torch.ones(count, count).tril()
    mixed = torch.einsum("hnm,mhd->nhd", attention, heads(v)).reshape(count, DIM)
    gated = u * functional.layer_norm(mixed, (DIM,), eps=1e-6)
    return x + gated @ weights["mixed.weight"].T + weights["mixed.bias"]


def fuxi(x: torch.Tensor, buckets: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    count = len(x)
    mask = torch.ones(count, count).tril()
    normed = functional.rms_norm(x, (DIM,), eps=1e-6)
    joint = functional.silu(normed @ weights["joint.weight"].T)
    u, q, k, v = joint.split([3 * DIM, DIM, DIM, DIM], 1)
    scores = functional.silu(torch.einsum("nhd,mhd->hnm", heads(q), heads(k))) / LENGTH
    positions = by_offset(weights["distances"], count) * mask
    times = weights["times"][buckets] * mask
    channels = [
        torch.einsum("nm,mhd->nhd", positions, heads(v)),
        torch.einsum("nm,mhd->nhd", times, heads(v)),
        torch.einsum("hnm,mhd->nhd", scores * mask, heads(v)),
    ]
    mixed = torch.cat(channels, dim=2).reshape(count, 3 * DIM)
    gated = u * functional.rms_norm(mixed, (3 * DIM,), eps=1e-6)
    x = x + gated @ weights["mixed.weight"].T + weights["mixed.bias"]
    normed = functional.rms_norm(x, (DIM,), eps=1e-6)
    inner = functional.silu(normed @ weights["first.weight"].T) * (
        normed @ weights["factor.weight"].T
    )
    return x + inner @ weights["second.weight"].T


def states_of(
    network: Any,
    items: Sequence[int],
    times: Sequence[int],
    *,
    request_time: bool,
) -> torch.Tensor:
    """Return the state after each item of one list."""
    block = hstu if type(network).__name__ == "HSTU" else fuxi
    weights = network.state_dict()
    hidden = TABLE[list(items)] * DIM**0.5 + weights["positions"][: len(items)].flip(0)
    pairs = pairs_of(times, request_time=request_time)
    for number in range(2):
        prefix = f"blocks.{number}."
        own = {key.removeprefix(prefix): weights[key] for key in weights if prefix in key}
        hidden = block(hidden, pairs, own)
    return hidden


def unit(states: torch.Tensor) -> torch.Tensor:
    return functional.normalize(states, dim=-1) / 0.05


@pytest.mark.parametrize("request_time", [False, True])
@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_states_match_published_formulas(
    name: str,
    exported: bool,
    request_time: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: exported)
    network = network_of(name, request_time=request_time)
    outputs = outputs_of(network)
    elements = network._elements(outputs, left_out=0)
    states = network.encode(outputs["inputs"][elements.item], elements)
    for row, (items, times) in enumerate(zip(LISTS, TIMES, strict=True)):
        if not items:
            continue
        is_own = (elements.rows == row) & (elements.index < len(items))
        expected = states_of(network, items, times, request_time=request_time)
        torch.testing.assert_close(states[is_own], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_answer_time_changes_queries_only_if_requested(name: str) -> None:
    later = [[*times[:-1], times[-1] + 50_000_000] for times in TIMES]
    has_items = torch.tensor([bool(items) for items in LISTS])
    for request_time in (False, True):
        network = network_of(name, request_time=request_time)
        first, second = (network.queries(outputs_of(network, times=own)) for own in (TIMES, later))
        differs = (first != second).any(1)
        assert torch.equal(differs, has_items if request_time else torch.zeros(5, dtype=bool))


@pytest.mark.parametrize("name", NAMES)
def test_row_without_items_has_no_times(name: str) -> None:
    network = network_of(name, request_time=True)
    alone = network.queries(outputs_of(network, [[]], [[0]]))
    among = network.queries(outputs_of(network))[LISTS.index([])]
    torch.testing.assert_close(among, alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_times_are_equal_times(name: str) -> None:
    network = network_of(name, request_time=True)
    equal = [[5] * (len(items) + 1) for items in LISTS]
    unknown, known = (network.queries(outputs_of(network, times=times)) for times in (None, equal))
    assert torch.equal(unknown, known)


@pytest.mark.parametrize("request_time", [False, True])
def test_loss_knows_time_of_target_only_if_requested(request_time: bool) -> None:
    network = network_of("hstu", loss="full", request_time=request_time)
    losses = network.loss(outputs_of(network), BATCH)
    items = LISTS[3]
    # The last item is a target only, with a known time if it is requested
    states = states_of(network, items[:-1], TIMES[3][:-1], request_time=request_time)
    logits = unit(states) @ functional.normalize(TABLE[2:], dim=1).T
    expected = functional.cross_entropy(logits, torch.tensor(items[1:]) - 2)
    assert losses[3].item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_step_without_targets_has_gradients(name: str) -> None:
    network = network_of(name).train().requires_grad_(True)
    outputs = outputs_of(network, [[7], []], [[1, 2], [0]])
    losses = network.loss(outputs, BATCH)
    losses.sum().backward()
    assert losses.tolist() == [0, 0]
    assert all(parameter.grad is not None for parameter in network.parameters())


# -- Settings
@pytest.mark.parametrize("name", NAMES)
def test_logs_without_times_have_no_weights_of_times(name: str) -> None:
    timed = network_of(name).state_dict()
    for network in (network_of(name, UNTIMED), network_of(name, times=False)):
        without = network.state_dict()
        assert timed.keys() - without.keys() == {"blocks.0.times", "blocks.1.times"}


@pytest.mark.parametrize("name", NAMES)
def test_models_of_before_have_no_times(name: str) -> None:
    stored = models.config_class(name)().to_dict()
    del stored["times"], stored["request_time"]
    found = stored_model(stored, where="config.yaml")
    assert (found.reads_ages, found.reads_request_time) == (False, False)


def test_request_time_needs_times() -> None:
    config = models.config_class("hstu")
    rejects("request_time: must be false without times", config, times=False, request_time=True)
    rejects("request_time: the log has no times", config(request_time=True).sequences, UNTIMED)


def test_summed_lists_have_no_ages() -> None:
    two_tower = models.config_class("two_tower")()
    inputs = ModelInputs(0, ("user", "item"), lists=(("user", 5),), aged=("user",))
    rejects("ages must not be summed, got user", unpooled_features, two_tower, inputs)
