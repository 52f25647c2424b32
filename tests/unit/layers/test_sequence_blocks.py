"""Places of lists, and attention over them, against padded lists."""

import pytest
import torch
from torch.nn import functional

from rayrec.layers import sequence_blocks
from rayrec.layers.sequence_blocks import (
    ListElements,
    attended,
    dropped,
    silu_attention,
    softmax_attention,
)

WIDTH = 20
HEADS = 2
LENGTHS = torch.tensor([3, 20, 0, 7, 20, 1, 9, 2, 0, 5])
STARTS = LENGTHS.cumsum(0) - LENGTHS
ATTENTION = {
    "softmax": softmax_attention(0.0),
    "silu": silu_attention(torch.randn(WIDTH), max_length=WIDTH),
}


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
        mixed = ATTENTION[name](query, key, value)[0]
        parts.append(mixed.transpose(0, 1).flatten(1))
    return torch.cat(parts)


@pytest.mark.parametrize("name", ATTENTION)
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
    mixed = attended(elements, projected[elements.item], heads=HEADS, attention=ATTENTION[name])
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


def test_attention_dropout_keeps_mean() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 4, 8) for _ in range(3))
    plain = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    repeated = [tensor.expand(4000, -1, -1, -1) for tensor in (query, key, value)]
    mean = softmax_attention(0.3)(*repeated).mean(0, keepdim=True)
    torch.testing.assert_close(mean, plain, rtol=0, atol=0.1)


def test_dropout_repeats_with_seed() -> None:
    values = torch.ones(100, 1000, requires_grad=True)
    torch.manual_seed(3)
    first = dropped(values, 0.2)
    again = dropped(values, 0.2)
    torch.manual_seed(3)
    torch.testing.assert_close(dropped(values, 0.2), first, rtol=0, atol=0)
    assert not torch.equal(again, first)
    assert first.unique().tolist() == [0.0, pytest.approx(1.25, rel=1e-4)]
    assert (first == 0).float().mean().item() == pytest.approx(0.2, abs=0.01)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), values)[0], first.detach())
    assert dropped(values, 0.0) is values


def test_group_limit_is_four() -> None:
    lengths = torch.arange(64)
    elements = ListElements(lengths.cumsum(0) - lengths, lengths, width=64)
    assert len(elements.groups) == sequence_blocks._GROUPS == 4
    assert elements.last[lengths > 0].sort().values[-1] == len(elements.rows) - 1
