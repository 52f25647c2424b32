"""DLRM's interaction: dot products of all pairs of a row's vectors, with gradients."""

import ctypes
from functools import lru_cache
from typing import Any, Final

import torch
from torch.utils.flop_counter import register_flop_formula

from rayrec.layers.kernels.kernel_threads import run_kernel, vectorized
from rayrec.layers.keyed_embeddings import Order, feature_positions
from rayrec.native import c_fields

_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1}  # rayrec_values_kind of native/kernels.h
_ROWS_AT_ONCE: Final = 256
"""Number of rows that a thread takes at a time, about 70 us of work."""


def pairwise_dots(dense: torch.Tensor, sparse: torch.Tensor, order: Order) -> torch.Tensor:
    """Concatenate the dense vector and the products of all vector pairs, dtype of `dense` [rows,
    dim + pairs]. Pairs are (0, 1), (0, 2), ..., (1, 2), ... with the dense vector first, then the
    features (Naumov et al., DLRM, 2019). On CPU, a kernel reads and writes each value once and sums
    in float32. `sparse`: [rows, features * dim], with the features in `order`.
    """
    if dense.is_cpu and dense.dtype in _KINDS and sparse.dtype in _KINDS:
        return _KernelDots.apply(dense, sparse, feature_positions(order))
    return _OperatorDots.apply(dense, sparse, *_indices(order, dense.shape[1], dense.device))


class _KernelDots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dense: torch.Tensor, sparse: torch.Tensor, positions: list[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(dense, sparse)
        ctx.places = positions
        return torch.ops.rayrec.pairwise_dots(dense, sparse, positions)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *torch.ops.rayrec.pairwise_dots_backward(
            gradients[0], *ctx.saved_tensors, ctx.places
        ), None


class _OperatorDots(torch.autograd.Function):
    """Implementation with torch operators, for any device."""

    @staticmethod
    def forward(
        ctx: Any,
        dense: torch.Tensor,
        sparse: torch.Tensor,
        pair_of: torch.Tensor,
        column_of: torch.Tensor,
    ) -> torch.Tensor:
        rows, dim = dense.shape
        num_vectors = 1 + sparse.shape[1] // dim
        vectors = torch.cat([dense, sparse.to(dense.dtype)], dim=1).view(rows, num_vectors, dim)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).view(rows, num_vectors * num_vectors)
        # gather with an expanded index uses all threads, index_select along columns uses one.
        pairs = torch.gather(dots, 1, pair_of.expand(rows, -1))
        ctx.save_for_backward(vectors, column_of)
        ctx.sparse_dtype = sparse.dtype
        return torch.cat([dense, pairs], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        vectors, column_of = ctx.saved_tensors
        rows, num_vectors, dim = vectors.shape
        # float32: gathering two-byte columns is slower, and table updates are float32
        gradient = gradients[0].float()
        # d(x_i . x_j) goes to both vectors: a symmetric gradient matrix times the vectors.
        symmetric = torch.gather(gradient, 1, column_of.expand(rows, -1)).view(
            rows, num_vectors, num_vectors
        )
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        result = torch.bmm(symmetric, vectors.float())
        dense_gradient = (result[:, 0] + gradient[:, :dim]).to(vectors.dtype)
        sparse_gradient = result[:, 1:].reshape(rows, (num_vectors - 1) * dim).to(ctx.sparse_dtype)
        return dense_gradient, sparse_gradient, None, None


@lru_cache(maxsize=16)
def _indices(order: Order, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each pair among the dot products, and the output column of each dot
    product.
    """
    num_vectors = len(order) + 1
    position_of = torch.empty(num_vectors, dtype=torch.long)
    position_of[torch.tensor([0, *(feature + 1 for feature in order)])] = torch.arange(num_vectors)
    first, second = torch.triu_indices(num_vectors, num_vectors, offset=1)
    first, second = position_of[first], position_of[second]
    columns = torch.zeros(num_vectors, num_vectors, dtype=torch.long)
    columns[first, second] = columns[second, first] = dim + torch.arange(first.numel())
    pair_of = first * num_vectors + second
    return pair_of.view(1, -1).to(device), columns.view(1, -1).to(device)


class _CDots(ctypes.Structure):
    """Mirror of rayrec_dots in native/kernels.h."""

    _fields_ = c_fields(
        "void* dense sparse; int64* places; int64 vectors dim; int32 dense_kind sparse_kind; "
        "void* out dense_gradient sparse_gradient"
    )


def _structure(
    dense: torch.Tensor, sparse: torch.Tensor, positions: list[int], *results: torch.Tensor
) -> _CDots:
    # A ctypes structure keeps a reference to an array that is set on a field of pointer type.
    # Tensors have none: callers keep them until the kernel has returned.
    array = (ctypes.c_int64 * len(positions))(*positions)  # The structure keeps it alive
    kinds = _KINDS[dense.dtype], _KINDS[sparse.dtype]
    pointers = [tensor.data_ptr() for tensor in (dense, sparse, *results)]
    return _CDots(*pointers[:2], array, len(positions) + 1, dense.shape[1], *kinds, *pointers[2:])


def _dots(dense: torch.Tensor, sparse: torch.Tensor, positions: list[int]) -> torch.Tensor:
    dense, sparse = dense.contiguous(), sparse.contiguous()
    output = dense.new_empty(
        len(dense), dense.shape[1] + len(positions) * (len(positions) + 1) // 2
    )
    arguments = _structure(dense, sparse, positions, output)
    run_kernel(vectorized("rayrec_pairwise_dots"), arguments, len(dense), at_once=_ROWS_AT_ONCE)
    return output


def _dots_backward(
    gradient: torch.Tensor, dense: torch.Tensor, sparse: torch.Tensor, positions: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    gradient, dense, sparse = gradient.contiguous(), dense.contiguous(), sparse.contiguous()
    gradients = torch.empty_like(dense), torch.empty_like(sparse)
    arguments = _structure(dense, sparse, positions, gradient, *gradients)
    run_kernel(
        vectorized("rayrec_pairwise_dots_backward"), arguments, len(dense), at_once=_ROWS_AT_ONCE
    )
    return gradients


# Registered as torch operators for its profiler and modes
_OPERATORS: Final = torch.library.Library("rayrec", "FRAGMENT")
_OPERATORS.define("pairwise_dots(Tensor dense, Tensor sparse, int[] places) -> Tensor")
_OPERATORS.define(
    "pairwise_dots_backward(Tensor gradient, Tensor dense, Tensor sparse, int[] places) -> "
    "(Tensor, Tensor)"
)
_OPERATORS.impl("pairwise_dots", _dots, "CPU")
_OPERATORS.impl("pairwise_dots_backward", _dots_backward, "CPU")


@register_flop_formula([torch.ops.rayrec.pairwise_dots])
def _forward_operations(dense: Any, sparse: Any, positions: Any, *_: Any, **__: Any) -> int:
    """Return two operations per multiply-add of the full product, as in `_OperatorDots`, on every
    device.
    """
    rows, dim = dense
    return int(2 * rows * (len(positions) + 1) ** 2 * dim)


@register_flop_formula([torch.ops.rayrec.pairwise_dots_backward])
def _backward_operations(
    gradient: Any, dense: Any, sparse: Any, positions: Any, *_: Any, **__: Any
) -> int:
    return _forward_operations(dense, sparse, positions)
