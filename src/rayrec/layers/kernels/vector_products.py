"""Layer of a compressed interaction network: products of all vector pairs, summed with weights, and
their gradients.
"""

import ctypes
from functools import lru_cache
from typing import Any, Final

import torch
from torch.utils.flop_counter import register_flop_formula

from rayrec.layers.kernels.kernel_threads import run_kernel, uses_kernels, vectorized
from rayrec.native import c_fields

_MIN_BLOCK_ROWS: Final = 64
"""Minimum number of rows that a thread takes, and sums the weights' gradients over, at a time."""
_MAX_BLOCKS: Final = 32
"""Maximum number of such sums, which would need gigabytes for long batches with many outputs."""
_PAIRS_AT_ONCE: Final = 8
_OUTPUTS_AT_ONCE: Final = 16
"""Multiples of which native/kernels.h demands the pairs and the outputs."""


def sum_products(
    first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Multiply all vectors of `first` and `second` by elements, and return weighted sums [rows,
    outputs, dim] in the first dtype. On CPU, a kernel keeps the products in registers and sums in
    float32. If `second` is `first`, it computes each product once.

    Args:
        first: Vectors, [rows, num_first, dim].
        second: Vectors, [rows, num_second, dim].
        weight: Factors of the products, float32 [outputs, num_first * num_second].
        bias: Added to all values of an output, float32 [outputs].
    """
    if uses_kernels(first):
        return _Products.apply(first.float(), second.float(), weight, bias, second is first).to(
            first.dtype
        )
    products = (first.unsqueeze(2) * second.unsqueeze(1)).flatten(1, 2)
    return weight.to(first.dtype) @ products + bias.to(first.dtype).unsqueeze(1)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        first: torch.Tensor,
        second: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        same: bool,
    ) -> torch.Tensor:
        shape = (first.shape[1], second.shape[1], same)
        packed = _packed(weight, *shape)
        ctx.shape = shape
        ctx.save_for_backward(first, second, packed)
        return torch.ops.rayrec.sum_products(first, second, packed, bias, same)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        first, second, packed = ctx.saved_tensors
        first_slopes, second_slopes, sums = torch.ops.rayrec.sum_products_backward(
            gradient, first, second, packed, ctx.shape[2]
        )
        slopes = _unpacked(sums, gradient.shape[1], *ctx.shape)
        return first_slopes, second_slopes, slopes, gradient.sum((0, 2)), None


@lru_cache(maxsize=64)
def _pairs(num_first: int, num_second: int, same: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs that are multiplied, int32 [pairs, 2], padded with (0, 0), and the place of
    each pair's weight, int64 [pairs], without padding. With `same`, the second is not below the
    first.
    """
    if same:
        first, second = torch.triu_indices(num_first, num_second)
    else:
        first, second = torch.cartesian_prod(torch.arange(num_first), torch.arange(num_second)).T
    pairs = torch.zeros(_up_to_multiple(len(first), _PAIRS_AT_ONCE), 2, dtype=torch.int32)
    pairs[: len(first), 0] = first
    pairs[: len(first), 1] = second
    return pairs, first * num_second + second


def _packed(weight: torch.Tensor, num_first: int, num_second: int, same: bool) -> torch.Tensor:
    """Return the weights [pairs, outputs] as the kernel reads them."""
    pairs, positions = _pairs(num_first, num_second, same)
    by_pair = weight.detach().t()
    if same:
        square = by_pair.unflatten(0, (num_first, num_second))
        # Each product but a square counts for two pairs.
        both = square + square.transpose(0, 1)
        both.diagonal(dim1=0, dim2=1).mul_(0.5)
        by_pair = both.flatten(0, 1)[positions]
    packed = weight.new_zeros(len(pairs), _up_to_multiple(len(weight), _OUTPUTS_AT_ONCE))
    packed[: len(positions), : len(weight)] = by_pair
    return packed


def _unpacked(
    sums: torch.Tensor, outputs: int, num_first: int, num_second: int, same: bool
) -> torch.Tensor:
    """Return the gradient of the weights, from that of the packed ones."""
    _, positions = _pairs(num_first, num_second, same)
    by_pair = sums[: len(positions), :outputs].t()
    if not same:
        return by_pair.contiguous()
    slopes = by_pair.new_empty(outputs, num_first * num_second)
    turned = positions % num_second * num_second + positions // num_second
    slopes[:, positions] = by_pair
    slopes[:, turned] = by_pair
    return slopes


def _up_to_multiple(value: int, base: int) -> int:
    return -(-value // base) * base


class _CProducts(ctypes.Structure):
    """Mirror of rayrec_products in native/kernels.h."""

    _fields_ = c_fields(
        "void* first second pairs weight bias; int64 rows firsts seconds dim count outputs width "
        "block_rows; void* out first_gradient second_gradient weight_gradient"
    )


def _sum_products(
    first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, same: bool
) -> torch.Tensor:
    first = first.contiguous()
    second = second.contiguous()
    rows, num_first, dim = first.shape
    padded = bias.new_zeros(weight.shape[1])
    padded[: len(bias)] = bias
    out = first.new_empty(rows, len(bias), dim)
    pairs, _ = _pairs(num_first, second.shape[1], same)
    # All tensors are variables of this call, which outlive the kernel.
    arguments = _structure(first, second, pairs, weight, out)
    arguments.bias = padded.data_ptr()
    run_kernel(vectorized("rayrec_sum_products"), arguments, _blocks(rows), at_once=1)
    return out


def _sum_products_backward(
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    weight: torch.Tensor,
    same: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first = first.contiguous()
    second = second.contiguous()
    gradient = gradient.contiguous()
    first_slopes = torch.empty_like(first)
    second_slopes = torch.empty_like(second)
    sums = weight.new_zeros(_blocks(len(first)), *weight.shape)
    pairs, _ = _pairs(first.shape[1], second.shape[1], same)
    arguments = _structure(first, second, pairs, weight, gradient)
    arguments.first_gradient = first_slopes.data_ptr()
    arguments.second_gradient = second_slopes.data_ptr()
    arguments.weight_gradient = sums.data_ptr()
    run_kernel(vectorized("rayrec_sum_products_backward"), arguments, len(sums), at_once=1)
    return first_slopes, second_slopes, sums.sum(0)


def _block_rows(rows: int) -> int:
    """Return the rows of a block, which determine the order of sums: not by the threads."""
    return max(_MIN_BLOCK_ROWS, -(-rows // _MAX_BLOCKS))


def _blocks(rows: int) -> int:
    return -(-rows // _block_rows(rows))


def _structure(
    first: torch.Tensor,
    second: torch.Tensor,
    pairs: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
) -> _CProducts:
    rows, num_first, dim = first.shape
    addresses = [tensor.data_ptr() for tensor in (first, second, pairs, weight)]
    sizes = (rows, num_first, second.shape[1], dim, len(pairs), out.shape[1], weight.shape[1])
    return _CProducts(*addresses, None, *sizes, _block_rows(rows), out.data_ptr())


# Registered as torch operators for its profiler and modes
_OPERATORS: Final = torch.library.Library("rayrec", "FRAGMENT")
_OPERATORS.define(
    "sum_products(Tensor first, Tensor second, Tensor weight, Tensor bias, bool same) -> Tensor"
)
_OPERATORS.define(
    "sum_products_backward(Tensor gradient, Tensor first, Tensor second, Tensor weight, bool same) "
    "-> (Tensor, Tensor, Tensor)"
)
_OPERATORS.impl("sum_products", _sum_products, "CPU")
_OPERATORS.impl("sum_products_backward", _sum_products_backward, "CPU")


def _operations(first: Any, second: Any, outputs: int) -> int:
    """Return two operations per multiply-add of all pairs, as with torch's operators."""
    rows, num_first, dim = first
    return int(2 * rows * num_first * second[1] * dim * outputs)


@register_flop_formula([torch.ops.rayrec.sum_products])
def _forward_operations(first: Any, second: Any, weight: Any, bias: Any, *_: Any, **__: Any) -> int:
    return _operations(first, second, bias[0])


@register_flop_formula([torch.ops.rayrec.sum_products_backward])
def _backward_operations(gradient: Any, first: Any, second: Any, *_: Any, **__: Any) -> int:
    return 2 * _operations(first, second, gradient[1])
