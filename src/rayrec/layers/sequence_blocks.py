"""Layers of networks over lists of items, without padding except in attention. Values of all lists
lie in one tensor, [elements, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn import functional

from rayrec.layers.kernels.list_attention import attend_lists
from rayrec.layers.mlp import init_values, linear_stack

_GROUPS: Final = 4
"""Maximum number of groups of lists in attention on a CPU. In each, lists are at most half as long
as in the one before.
"""

_BUCKET: Final = 0.301
"""Width of a time bucket, in natural logarithms of seconds."""
TIME_BUCKETS: Final = 129
"""Number of time buckets."""

Attention = Callable[..., torch.Tensor]
"""Attention over queries, keys and values, [lists, heads, elements, width], and with times each
pair's bucket, int32 [lists, elements, elements]. Returns for each element a sum over the values up
to it, [lists, heads, elements, any width].
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
    buckets: torch.Tensor | None = None
    """Time bucket of each pair of elements, int32 [lists, width, width]. None without times."""


_NO_LISTS: Final = _Group(slice(0, 0), 1)
"""Group in attention if no list has elements."""


# Elements of three lists of 2, 3 and 1 items, which begin at the items 4, 0 and 7:
#
#   rows       1 1 1 0 0 2     list of each element; longer lists are first
#   index      0 1 2 0 1 0     number of elements before it in its list
#   age        2 1 0 1 0 0     number of elements after it
#   item       0 1 2 4 5 7     position of the element's item among all items
#   last       4 2 5           last element of each list
#   starts     0 3 5 6         first element of each list, longer ones first, and the number of all
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
        self.starts: torch.Tensor | None = None
        self.groups = [_Group(slice(None), width)]

    def _sort(self, starts: torch.Tensor, lengths: torch.Tensor, width: int) -> None:
        order = lengths.argsort(descending=True, stable=True)
        ordered = lengths[order]
        ends = ordered.cumsum(0)
        self.starts = torch.cat([ends.new_zeros(1), ends])
        self.rows = order.repeat_interleave(ordered)
        numbers = torch.arange(self.rows.shape[0], device=lengths.device)
        self.index = numbers - (ends - ordered).repeat_interleave(ordered)
        self.age = lengths[self.rows] - 1 - self.index
        self.item = starts[self.rows] + self.index
        self.last = torch.empty_like(order).index_put((order,), ends - 1)

    @cached_property
    def groups(self) -> list[_Group]:
        """Groups of lists that are padded to one length."""
        assert self.starts is not None
        return _groups(self.starts.diff())

    def measure_times(self, gaps: torch.Tensor, *, to_next: bool) -> None:
        """Set the time buckets of pairs of elements. `gaps`: seconds from each element to the next
        one, or to the time of the answer, float32 [elements]. `to_next`: whether times are measured
        from an earlier element to the one after the later element, which must be known.
        """
        self.groups = [
            replace(group, buckets=_pair_buckets(gaps, group, to_next=to_next))
            for group in self.groups or [_NO_LISTS]
        ]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        """Return the attention of each element to its list's elements up to it, [elements, heads *
        values' width]. Queries, keys and values are [elements, heads, width].
        """
        mixed = []
        for group in self.groups or [_NO_LISTS]:
            parts = [_padded(part[group.elements], group) for part in (query, key, value)]
            if group.buckets is not None:
                parts.append(group.buckets)
            group_values = attention(*parts)
            group_values = group_values.transpose(1, 2).flatten(2).flatten(0, 1)
            if group.padded is not None:
                group_values = _Joined.apply(group_values, group)
            mixed.append(group_values)
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _padded(values: torch.Tensor, group: _Group) -> torch.Tensor:
    """Return a group's values, [elements, heads, width], as [lists, heads, elements, width]."""
    if group.position is not None:
        values = _Padded.apply(values, group)
    return values.unflatten(0, (-1, group.width)).transpose(1, 2)


# A list's times are sums of its own gaps, and do not depend on other lists in the batch.
def _pair_buckets(gaps: torch.Tensor, group: _Group, *, to_next: bool) -> torch.Tensor:
    """Return the time bucket of each pair of a group's elements, the later one first, int32 [lists,
    width, width].
    """
    part = gaps[group.elements]
    if group.position is not None:
        part = part[group.position]
    ends = part.unflatten(0, (-1, group.width)).double().cumsum(1)
    times = functional.pad(ends[:, :-1], (1, 0))
    later = ends if to_next else times
    return time_buckets(later.unsqueeze(2) - times.unsqueeze(1))


def time_buckets(seconds: torch.Tensor) -> torch.Tensor:
    """Return the bucket of durations by the logarithm of their absolute value, int32, as in HSTU's
    published code.
    """
    logarithms = seconds.float().abs().clamp(min=1).log()
    return (logarithms / _BUCKET).to(torch.int32).clamp(max=TIME_BUCKETS - 1)


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


def silu_attention(
    bias: torch.Tensor | None,
    *,
    max_length: int,
    times: torch.Tensor | None = None,
) -> Attention:
    """Return causal attention that weights values by SiLU(score) / max_length, without a softmax.
    Constants are added to the score: `bias` has one for each distance between elements,
    [max_length], `times` one for each time bucket, [TIME_BUCKETS].
    """

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        buckets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scores = query @ key.transpose(2, 3)
        if bias is not None:
            constants = by_distance(bias, scores.shape[2])
            if times is not None and buckets is not None:
                constants = constants + by_time(times, buckets).unsqueeze(1)
            scores = scores + constants
        weights = (functional.silu(scores) / max_length).tril()
        return weights.to(value.dtype) @ value

    return attend


def by_distance(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return the value of each pair's distance, for elements up to the first, [width, width]."""
    index = torch.arange(width, device=values.device)
    return values[(index.unsqueeze(1) - index).clamp(min=0)]


def by_time(values: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
    """Return the value of each pair's time bucket, in the shape of the buckets."""
    return values.index_select(0, buckets.flatten()).view(buckets.shape)


def linear(
    inputs: torch.Tensor,
    layer: nn.Linear,
    dtype: torch.dtype,
    *,
    relu: bool = False,
) -> torch.Tensor:
    """Return the layer's product with `inputs` [elements, in_features], in the dtype."""
    outputs = _product(inputs, layer.weight, layer.bias, dtype)
    return outputs.relu() if relu else outputs


# oneDNN compiles a program for each number of rows and keeps a thousand of them. Each step has
# another number of elements, so that compiling takes up to a third of a small step.
def _product(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    if dtype == torch.float32:
        return functional.linear(inputs, weight, bias)
    return linear_stack(inputs, [weight, bias], relus=(False,), dtype=dtype)


def joint_projection(
    query: torch.Tensor,
    memory: torch.Tensor,
    layer: nn.Linear,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """Return queries from `query`, and keys and values from `memory`, [elements, dim] both. They
    are side by side, [elements, 3 * dim]. If the inputs differ, queries are apart: [elements, dim],
    then [elements, 2 * dim].
    """
    if query is memory:
        return (linear(query, layer, dtype),)
    dim = query.shape[1]
    parts = (slice(0, dim), slice(dim, None))
    return tuple(
        _product(inputs, layer.weight[part], layer.bias[part], dtype)
        for inputs, part in zip((query, memory), parts, strict=True)
    )


def softmax_attended(
    elements: ListElements,
    projected: Sequence[torch.Tensor],
    *,
    heads: int,
    dropout: float,
) -> torch.Tensor:
    """Return causal attention with a softmax, [elements, dim]. `projected`: result of
    `joint_projection`. `dropout`: probability of dropping a weight.
    """
    # Exported programs and GPUs have torch's attention, which needs padding
    if elements.starts is not None and projected[0].is_cpu:
        return attend_lists(projected, elements.starts, heads=heads, dropout=dropout)
    attention = partial(functional.scaled_dot_product_attention, dropout_p=dropout, is_causal=True)
    return attended(elements, torch.cat([*projected], dim=1), heads=heads, attention=attention)


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
