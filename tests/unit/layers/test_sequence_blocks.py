"""Places of lists, and attention over them, against padded lists."""

import pytest
import torch
from builders.faults import raising
from torch.nn import functional

from rayrec.layers import mlp, sequence_blocks
from rayrec.layers.sequence_blocks import (
    ListElements,
    attended,
    joint_projection,
    linear,
    silu_attention,
    softmax_attended,
    time_buckets,
)

WIDTH = 20
HEADS = 2
LENGTHS = torch.tensor([3, 20, 0, 7, 20, 1, 9, 2, 0, 5])
STARTS = LENGTHS.cumsum(0) - LENGTHS
SILU = silu_attention(torch.randn(WIDTH), max_length=WIDTH)


def attention_of(
    name: str,
    elements: ListElements,
    projected: torch.Tensor,
) -> torch.Tensor:
    """Attend in lists, with queries apart from keys and values if `name` says so."""
    if name == "silu":
        return attended(elements, projected, heads=HEADS, attention=SILU)
    parts = (projected,)
    if name == "softmax of two":
        parts = projected.split((projected.shape[1] // 3, 2 * projected.shape[1] // 3), dim=1)
    return softmax_attended(elements, parts, heads=HEADS, dropout=0.0)


def test_list_elements_match_example() -> None:
    elements = ListElements(torch.tensor([4, 0, 7]), torch.tensor([2, 3, 1]), width=3)
    assert elements.rows.tolist() == [1, 1, 1, 0, 0, 2]
    assert elements.index.tolist() == [0, 1, 2, 0, 1, 0]
    assert elements.age.tolist() == [2, 1, 0, 1, 0, 0]
    assert elements.item.tolist() == [0, 1, 2, 4, 5, 7]
    assert elements.last.tolist() == [4, 2, 5]


def test_groups_waste_less_than_half() -> None:
    elements = ListElements(STARTS, LENGTHS, width=WIDTH)
    assert [(group.width, group.elements) for group in elements.groups] == [
        (20, slice(0, 40)),
        (9, slice(40, 56)),
        (5, slice(56, 64)),
        (2, slice(64, 67)),
    ]
    assert ListElements(STARTS[:0], LENGTHS[:0], width=WIDTH).groups == []


def expected_attention(name: str, projected: torch.Tensor) -> torch.Tensor:
    """Attend in each list alone."""
    parts = []
    for start, length in zip(STARTS.tolist(), LENGTHS.tolist(), strict=True):
        own = projected[start : start + length].unflatten(1, (3, HEADS, -1))
        query, key, value = own.permute(1, 2, 0, 3).unsqueeze(1)
        if name == "silu":
            mixed = SILU(query, key, value)[0]
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)[0]
        parts.append(mixed.transpose(0, 1).flatten(1))
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["softmax", "softmax of two", "silu"])
@pytest.mark.parametrize("exported", [False, True])
def test_attention_and_gradient_match_each_list_alone(
    name: str,
    exported: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: exported)
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(int(LENGTHS.sum()), 3 * HEADS * 4, generator=generator)
    projected.requires_grad_()
    has_item = LENGTHS > 0
    elements = ListElements(STARTS[has_item], LENGTHS[has_item], width=WIDTH)
    mixed = attention_of(name, elements, projected[elements.item])
    rows = has_item.nonzero().squeeze(1)[elements.rows]
    is_own = elements.index < LENGTHS[rows]
    number = (STARTS[rows] + elements.index)[is_own]
    assert len(number) == len(projected)
    expected = expected_attention(name, projected)
    torch.testing.assert_close(mixed[is_own], expected[number])
    weights = torch.randn(expected.shape, generator=generator)
    gradients = [
        torch.autograd.grad((values * weights[order]).sum(), projected)[0]
        for values, order in ((mixed[is_own], number), (expected, slice(None)))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_attention_without_elements_has_width_and_gradients() -> None:
    """On a worker whose lists are empty, in a step of others."""
    none = ListElements(STARTS[:0], LENGTHS[:0], width=WIDTH)
    bias = torch.randn(WIDTH, requires_grad=True)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mixed = silu_attention(bias, max_length=WIDTH)(query, key, value)
        return torch.cat([mixed, value], dim=3)

    projected = torch.randn(0, 3 * HEADS * 4, requires_grad=True)
    mixed = attended(none, projected, heads=HEADS, attention=attend)
    assert mixed.shape == (0, 2 * HEADS * 4)
    gradients = torch.autograd.grad(mixed.sum(), (projected, bias))
    assert [gradient.shape for gradient in gradients] == [projected.shape, bias.shape]
    assert not gradients[1].any()


def test_time_buckets_are_logarithmic() -> None:
    seconds = torch.tensor([0.0, 0.9, 1.34, 1.36, -1.36, 60, 3600, 86_400, 31_536_000, 1e18])
    assert time_buckets(seconds).tolist() == [0, 0, 0, 1, 1, 13, 27, 37, 57, 128]


@pytest.mark.parametrize("to_next", [False, True])
@pytest.mark.parametrize("exported", [False, True])
def test_pair_buckets_match_each_list_alone(
    to_next: bool,
    exported: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: exported)
    gaps = (10 ** (7 * torch.rand(int(LENGTHS.sum())))).floor()
    has_item = LENGTHS > 0
    elements = ListElements(STARTS[has_item], LENGTHS[has_item], width=WIDTH)
    elements.measure_times(gaps[elements.item], to_next=to_next)
    buckets = {}
    for group in elements.groups:
        assert group.buckets is not None
        rows = elements.rows[group.elements].unique_consecutive()
        buckets |= dict(zip(rows.tolist(), group.buckets, strict=True))
    lengths = LENGTHS[has_item].tolist()
    for row, own in enumerate(gaps.split(lengths)):
        ends = own.double().cumsum(0)
        times = ends - own
        later = ends if to_next else times
        expected = time_buckets(later.unsqueeze(1) - times).tril()
        assert torch.equal(buckets[row][: len(own), : len(own)].tril(), expected)


def test_linear_avoids_compiled_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN would, and each step has another number."""
    monkeypatch.setattr(mlp, "linear_pointwise", raising(AssertionError("by oneDNN")))
    layer = torch.nn.Linear(4, 3)
    inputs = torch.randn(5, 4, requires_grad=True)
    outputs = linear(inputs, layer, torch.float32, relu=True)
    torch.testing.assert_close(outputs, layer(inputs).relu(), rtol=0, atol=0)
    outputs.sum().backward()
    parts = joint_projection(inputs, inputs + 1, torch.nn.Linear(4, 12), torch.float32)
    assert [part.shape for part in parts] == [(5, 4), (5, 8)]


def test_group_limit_is_four() -> None:
    lengths = torch.arange(64)
    elements = ListElements(lengths.cumsum(0) - lengths, lengths, width=64)
    assert len(elements.groups) == sequence_blocks._GROUPS == 4
    assert elements.last[lengths > 0].sort().values[-1] == len(elements.rows) - 1
