"""The backward pass of a ReLU on CPU, with what the layer before it needs of its result."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from rayrec.layers.kernel_threads import run_kernel, vectorized

_BLOCK: Final = 64
"""Rows that a thread takes at a time, and over which it sums."""


def relu_backward_(gradient: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sets `gradient` (rows, columns) to 0 where `output` (rows, columns) is not above 0, in place; gives it transposed (columns,
    rows) and summed over rows (columns,). All float32 and contiguous, on CPU. Both are read once, where a product that needs the
    transposed gradient would copy it again. The sum is the same for any number of threads."""
    turned, sums = torch.ops.rayrec.relu_backward_(gradient, output)
    return turned, sums


def _relu_backward(gradient: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = gradient.shape
    blocks = -(-rows // _BLOCK)
    turned, sums = gradient.new_empty(columns, rows), gradient.new_zeros(blocks, columns)
    pointers = [tensor.data_ptr() for tensor in (output, gradient, turned, sums)]
    run_kernel(vectorized("rayrec_relu_backward"), _CRelu(*pointers, rows, columns, _BLOCK), blocks, at_once=1)
    return turned, sums.sum(0)


class _CRelu(ctypes.Structure):
    """rayrec_relu of native/kernels.h."""

    _fields_ = [
        ("output", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("turned", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
    ]


# An operator of torch, so that its profiler and modes see it.
_OPERATORS: Final = torch.library.Library("rayrec", "FRAGMENT")
_OPERATORS.define("relu_backward_(Tensor(a!) gradient, Tensor output) -> (Tensor, Tensor)")
_OPERATORS.impl("relu_backward_", _relu_backward, "CPU")
