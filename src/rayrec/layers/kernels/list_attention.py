"""Softmax attention within lists whose elements lie one after the other."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from rayrec.layers.kernels.dropout import CDropout, draw_seed
from rayrec.layers.kernels.kernel_threads import run_kernel, vectorized
from rayrec.native import c_fields

_AT_ONCE: Final = 2
"""Number of heads of lists that a thread takes at a time."""


def attend_lists(
    projected: Sequence[torch.Tensor],
    starts: torch.Tensor,
    *,
    heads: int,
    dropout: float,
    causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention of each element to its list's elements, in the dtype of `projected`
    [elements, dim], on a CPU.

    Args:
        projected: Queries, keys and values side by side, [elements, 3 * dim], or queries [elements,
            dim], then keys and values [elements, 2 * dim], on a CPU.
        starts: First element of each list, then the number of elements, int64 [lists + 1].
        heads: Number of heads, which divide `dim`.
        dropout: Probability of dropping a weight, below 1.
        causal: Whether elements attend only to those up to them.
        scale: Factor of the scores; None for 1 / sqrt(width of a head).
    """
    seed = draw_seed() if dropout else 0
    if scale is None:
        scale = (_width(projected) // heads) ** -0.5
    # Sums are float32 with bfloat16, too
    settings = _Settings(heads, causal, scale, dropout, seed)
    result: torch.Tensor = _ListAttention.apply(
        starts, settings, *(part.float() for part in projected)
    )
    return result.to(projected[0].dtype)


class _ListAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        starts: torch.Tensor,
        settings: _Settings,
        *projected: torch.Tensor,
    ) -> torch.Tensor:
        out, log_sums = torch.ops.rayrec.attend_lists(projected, starts, *settings)
        ctx.settings = settings
        ctx.save_for_backward(starts, log_sums, *projected)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        starts, log_sums, *projected = ctx.saved_tensors
        slopes = torch.ops.rayrec.attend_lists_backward(
            gradients[0], log_sums, projected, starts, *ctx.settings
        )
        return None, None, *slopes


class _CListAttention(ctypes.Structure):
    """Mirror of rayrec_list_attention in native/kernels.h."""

    _fields_ = [
        *c_fields(
            "void* query key value starts; int64 heads width query_stride memory_stride; "
            "int32 causal; float scale"
        ),
        ("dropout", CDropout),
        *c_fields("void* out log_sums gradient query_gradient key_gradient value_gradient"),
    ]


class _Settings(NamedTuple):
    """Last arguments of the operators."""

    heads: int
    causal: bool
    scale: float
    dropout: float
    seed: int


def _attend(
    projected: Sequence[torch.Tensor], starts: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    projected = [part.contiguous() for part in projected]
    elements = len(projected[0])
    out = projected[0].new_empty(elements, _width(projected))
    arguments = _structure(projected, starts, _Settings(*settings))
    log_sums = projected[0].new_empty(elements, arguments.heads)
    # Tensors are variables of this call, which outlive the kernel
    arguments.out = out.data_ptr()
    arguments.log_sums = log_sums.data_ptr()
    _run("rayrec_attend_lists", arguments, starts)
    return out, log_sums


def _attend_backward(
    gradient: torch.Tensor,
    log_sums: torch.Tensor,
    projected: Sequence[torch.Tensor],
    starts: torch.Tensor,
    *settings: Any,
) -> list[torch.Tensor]:
    projected = [part.contiguous() for part in projected]
    gradient = gradient.contiguous()
    gradients = [torch.empty_like(part) for part in projected]
    arguments = _structure(projected, starts, _Settings(*settings))
    arguments.log_sums = log_sums.data_ptr()
    arguments.gradient = gradient.data_ptr()
    addresses = _addresses(gradients)
    arguments.query_gradient, arguments.key_gradient, arguments.value_gradient = addresses
    _run("rayrec_attend_lists_backward", arguments, starts)
    return gradients


def _run(name: str, arguments: _CListAttention, starts: torch.Tensor) -> None:
    items = (len(starts) - 1) * arguments.heads
    run_kernel(vectorized(name), arguments, items, at_once=_AT_ONCE)


def _structure(
    projected: Sequence[torch.Tensor], starts: torch.Tensor, settings: _Settings
) -> _CListAttention:
    return _CListAttention(
        *_addresses(projected),
        starts.data_ptr(),
        settings.heads,
        _width(projected) // settings.heads,
        projected[0].shape[1],
        projected[-1].shape[1],
        settings.causal,
        settings.scale,
        CDropout.with_seed(settings.dropout, settings.seed),
    )


def _addresses(parts: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """Return the addresses of the first query, key and value."""
    row_bytes = _width(parts) * parts[0].element_size()
    query = parts[0].data_ptr()
    key = query + row_bytes if len(parts) == 1 else parts[1].data_ptr()
    return query, key, key + row_bytes


def _width(parts: Sequence[torch.Tensor]) -> int:
    """Return the width of queries with all heads."""
    return parts[0].shape[1] // (3 if len(parts) == 1 else 1)


# Registered as torch operators for its profiler and modes
_OPERATORS: Final = torch.library.Library("rayrec", "FRAGMENT")
_OPERATORS.define(
    "attend_lists(Tensor[] projected, Tensor starts, int heads, bool causal, float scale, "
    "float dropout, int seed) -> (Tensor, Tensor)"
)
_OPERATORS.define(
    "attend_lists_backward(Tensor gradient, Tensor log_sums, Tensor[] projected, Tensor starts, "
    "int heads, bool causal, float scale, float dropout, int seed) -> Tensor[]"
)
_OPERATORS.impl("attend_lists", _attend, "CPU")
_OPERATORS.impl("attend_lists_backward", _attend_backward, "CPU")


def _products(projected: Sequence[torch.Tensor], starts: torch.Tensor, causal: bool) -> int:
    """Return the operations to multiply all pairs of elements that attend, two per multiply-add."""
    lengths = starts.diff()
    pairs = lengths * (lengths + 1) // 2 if causal else lengths.square()
    return 2 * int(pairs.sum()) * _width(projected)


@register_flop_formula([torch.ops.rayrec.attend_lists], get_raw=True)
def _forward_operations(
    projected: Any, starts: Any, heads: int, causal: bool, *_: Any, **__: Any
) -> int:
    return 2 * _products(projected, starts, causal)


@register_flop_formula([torch.ops.rayrec.attend_lists_backward], get_raw=True)
def _backward_operations(
    gradient: Any,
    log_sums: Any,
    projected: Any,
    starts: Any,
    heads: int,
    causal: bool,
    *_: Any,
    **__: Any,
) -> int:
    return 5 * _products(projected, starts, causal)
