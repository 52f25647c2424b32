"""Layers of networks over lists of items, without padding except in attention. Values of all lists
lie in one tensor, [elements, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rayrec.layers.mlp import init_values, linear_stack

_GROUPS: Final = 4
"""Maximum number of groups of lists in attention on a CPU. In each, lists are at most half as long
as in the one before.
"""

_LEVELS: Final = 1 << 16
"""Number of probabilities of dropout on the CPU."""
_MAX_SEED: Final = (1 << 63) - 1
"""Maximum seed of dropout on the CPU."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of queries, keys and values, [lists, heads, elements, width], that returns
for each element a sum over the values up to it, in the values' shape.
"""


@dataclass(frozen=True)
class _Group:
    """Lists that are padded to one length."""

    elements: slice
    """Elements of these lists."""
    width: int
    """Length of the longest list."""
    position: torch.Tensor | None = None
    """Element of each value in the padded lists, counted from the group's first, int64 [lists *
    width]. Any after the end of a list. None if all lists have this length.
    """
    padded: torch.Tensor | None = None
    """Position of each element in the padded lists, int64 [elements]."""
    is_inside: torch.Tensor | None = None
    """Whether each value is within its list, bool [lists * width, 1]."""


# Elements of three lists of 2, 3 and 1 items, which begin at the items 4, 0 and 7:
#
#   rows       1 1 1 0 0 2     list of each element; longer lists are first
#   index      0 1 2 0 1 0     number of elements before it in its list
#   age        2 1 0 1 0 0     number of elements after it
#   item       0 1 2 4 5 7     position of the element's item among all items
#   last       4 2 5           last element of each list
#
# In an exported program, sizes may not depend on values, so that all lists are padded to the
# maximum. Elements after the end of a list repeat another item, and nothing reads their values.
@final
class ListElements:
    """Elements of lists, or of their parts, without padding."""

    def __init__(self, starts: torch.Tensor, lengths: torch.Tensor, *, width: int) -> None:
        """Create for lists whose first items have the positions `starts`, int64 [rows], with
        `lengths` from 0 to `width`, int64 [rows].
        """
        if torch.compiler.is_compiling():
            self._pad(starts, lengths, width)
        else:
            self._sort(starts, lengths, width)

    def _pad(self, starts: torch.Tensor, lengths: torch.Tensor, width: int) -> None:
        rows = torch.arange(starts.shape[0], device=starts.device)
        index = torch.arange(width, device=starts.device)
        ends = lengths.unsqueeze(1)
        shape = (starts.shape[0], width)
        self.rows = rows.unsqueeze(1).expand(shape).reshape(-1)
        self.index = index.expand(shape).reshape(-1)
        self.age = (ends - 1 - index).clamp(min=0).reshape(-1)
        self.item = (starts.unsqueeze(1) + index * (index < ends)).reshape(-1)
        self.last = rows * width + (lengths - 1).clamp(min=0)
        self.groups = [_Group(slice(None), width)]

    def _sort(self, starts: torch.Tensor, lengths: torch.Tensor, width: int) -> None:
        order = lengths.argsort(descending=True, stable=True)
        ordered = lengths[order]
        ends = ordered.cumsum(0)
        self.rows = order.repeat_interleave(ordered)
        numbers = torch.arange(self.rows.shape[0], device=lengths.device)
        self.index = numbers - (ends - ordered).repeat_interleave(ordered)
        self.age = lengths[self.rows] - 1 - self.index
        self.item = starts[self.rows] + self.index
        self.last = torch.empty_like(order).index_put((order,), ends - 1)
        self.groups = _groups(ordered)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        """Return the attention of each element to its list's elements up to it, [elements, heads *
        width]. Queries, keys and values are [elements, heads, width].
        """
        mixed = []
        for group in self.groups:
            parts = [_padded(part[group.elements], group) for part in (query, key, value)]
            group_values = attention(*parts).transpose(1, 2).flatten(2).flatten(0, 1)
            if group.padded is not None:
                group_values = _Joined.apply(group_values, group)
            mixed.append(group_values)
        if not mixed:
            return value.flatten(1)
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _padded(values: torch.Tensor, group: _Group) -> torch.Tensor:
    """Return a group's values, [elements, heads, width], as [lists, heads, elements, width]."""
    if group.position is not None:
        values = _Padded.apply(values, group)
    return values.unflatten(0, (-1, group.width)).transpose(1, 2)


def _groups(lengths: torch.Tensor) -> list[_Group]:
    """Divide falling lengths into groups, without lists of length 0."""
    on_host = lengths.cpu()
    longest = int(on_host[0]) if len(on_host) else 0
    limits = [longest >> number for number in range(1, _GROUPS)]
    # A group ends before the first list that is not longer than the next limit
    ends = torch.searchsorted(-on_host, -torch.tensor([*limits, 0])).tolist()
    groups = []
    first = 0
    for start, stop in pairwise([0, *ends]):
        if start == stop:
            continue
        elements = slice(first, first + int(on_host[start:stop].sum()))
        groups.append(_group(lengths[start:stop], elements, int(on_host[start])))
        first = elements.stop
    return groups


def _group(lengths: torch.Tensor, elements: slice, width: int) -> _Group:
    """Return the group of lists with these lengths, of at most `width`."""
    if elements.stop - elements.start == len(lengths) * width:
        return _Group(elements, width)
    index = torch.arange(width, device=lengths.device)
    is_inside = index < lengths.unsqueeze(1)
    first = (lengths.cumsum(0) - lengths).unsqueeze(1)
    position = ((first + index) * is_inside).reshape(-1)
    flat = is_inside.reshape(-1)
    return _Group(elements, width, position, flat.nonzero().squeeze(1), flat.unsqueeze(1))


# Both directions of both are a selection of rows. torch's backward pass of a selection would add up
# row by row.
class _Padded(torch.autograd.Function):
    """Padding of a group's values, [elements, ...] to [lists * width, ...]."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: _Group) -> torch.Tensor:
        ctx.group = group
        return values[group.position]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient[ctx.group.padded], None


class _Joined(torch.autograd.Function):
    """Removal of padding, [lists * width, ...] to [elements, ...]."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, group: _Group) -> torch.Tensor:
        ctx.group = group
        return padded[group.padded]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        group = ctx.group
        return gradient[group.position].mul_(group.is_inside), None


def softmax_attention(dropout: float) -> Attention:
    """Return causal attention whose weights are dropped with a probability."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not dropout or not query.is_cpu:
            return functional.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=True,
            )
        width = query.shape[2]
        is_later = torch.ones(width, width, dtype=torch.bool).triu(1)
        scores = (query * query.shape[3] ** -0.5) @ key.transpose(2, 3)
        weights = scores.masked_fill_(is_later, -torch.inf).softmax(3)
        return dropped(weights, dropout) @ value

    return attend


# torch draws a number of 64 bits by Mersenne Twister for each value, which takes as long as several
# layers.
def dropped(values: torch.Tensor, probability: float) -> torch.Tensor:
    """Return `torch.nn.functional.dropout` in training. On the CPU, probabilities are multiples of
    1 / 65,536, and random numbers follow from torch's generator.
    """
    if not probability:
        return values
    if not values.is_cpu:
        return functional.dropout(values, probability)
    threshold = round(probability * _LEVELS)
    generator = np.random.Generator(np.random.SFC64(int(torch.randint(_MAX_SEED, ()))))
    mask = generator.integers(0, _LEVELS, tuple(values.shape), np.uint16) >= threshold
    factors = torch.from_numpy(mask).to(values.dtype).mul_(_LEVELS / (_LEVELS - threshold))
    return values * factors


def silu_attention(bias: torch.Tensor | None, *, max_length: int) -> Attention:
    """Return causal attention that weights values by SiLU(score) / max_length, without a softmax.
    `bias`: constant of each distance between elements, [max_length], that is added to the score.
    """

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = query @ key.transpose(2, 3)
        if bias is not None:
            scores = scores + by_distance(bias, scores.shape[2])
        weights = (functional.silu(scores) / max_length).tril()
        return weights.to(value.dtype) @ value

    return attend


def by_distance(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return the value of each pair's distance, for elements up to the first, [width, width]."""
    index = torch.arange(width, device=values.device)
    return values[(index.unsqueeze(1) - index).clamp(min=0)]


def linear(
    inputs: torch.Tensor,
    layer: nn.Linear,
    dtype: torch.dtype,
    *,
    relu: bool = False,
) -> torch.Tensor:
    """Return the layer's product with `inputs` [elements, in_features], in the dtype."""
    return linear_stack(inputs, [layer.weight, layer.bias], relus=(relu,), dtype=dtype)


def joint_projection(
    query: torch.Tensor,
    memory: torch.Tensor,
    layer: nn.Linear,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return queries, keys and values side by side, [elements, 3 * dim], the queries from `query`,
    keys and values from `memory`, [elements, dim] both.
    """
    if query is memory:
        return linear(query, layer, dtype)
    dim = query.shape[1]
    parts = (slice(0, dim), slice(dim, None))
    return torch.cat(
        [
            linear_stack(
                inputs,
                [layer.weight[part], layer.bias[part]],
                relus=(False,),
                dtype=dtype,
            )
            for inputs, part in zip((query, memory), parts, strict=True)
        ],
        dim=1,
    )


def attended(
    elements: ListElements,
    projected: torch.Tensor,
    *,
    heads: int,
    attention: Attention,
) -> torch.Tensor:
    """Return the attention of queries, keys and values that are side by side, [elements, 3 * dim],
    as [elements, dim].
    """
    query, key, value = projected.unflatten(1, (3, heads, -1)).unbind(1)
    return elements.attend(query, key, value, attention)


def normal_values(values: torch.Tensor, std: float = 0.02) -> torch.Tensor:
    """Fill with normal values in place, and return the tensor."""
    return init_values(values, lambda tensor: nn.init.normal_(tensor, std=std))


def xavier_values(values: torch.Tensor) -> torch.Tensor:
    """Fill with Xavier normal values in place, and return the tensor."""
    return init_values(values, nn.init.xavier_normal_)
