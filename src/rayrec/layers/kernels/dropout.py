"""Dropout, on CPUs by a kernel that draws the same random numbers again in the backward pass."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch
from torch.nn import functional

from rayrec.layers.kernels.kernel_threads import run_kernel, uses_kernels, vectorized
from rayrec.native import c_fields

_LEVELS: Final = 1 << 31
"""Number of probabilities on CPUs."""
_DTYPES: Final = (torch.float32, torch.bfloat16)
_MAX_SEED: Final = (1 << 63) - 1
_BLOCK: Final = 1 << 14
"""Number of values that a thread takes at a time, about 5 us of work."""


class CDropout(ctypes.Structure):
    """Mirror of rayrec_dropout in native/kernels.h."""

    _fields_ = c_fields("uint64 seed; int32 threshold; float factor")

    @classmethod
    def with_seed(cls, probability: float, seed: int) -> CDropout:
        """Return dropout with a probability, whose random numbers follow from the seed."""
        threshold = min(round(probability * _LEVELS), _LEVELS - 1)
        factor = _LEVELS / (_LEVELS - threshold) if probability < 1 else 0.0
        return cls(seed, threshold, factor)


class _CDroppedValues(ctypes.Structure):
    """Mirror of rayrec_dropped_values in native/kernels.h."""

    _fields_ = [
        ("dropout", CDropout),
        *c_fields("void* values out; int64 count block_values"),
    ]


def draw_seed() -> int:
    """Return a seed from torch's generator."""
    return int(torch.randint(_MAX_SEED, ()))


# torch draws a number of 64 bits by Mersenne Twister for each value, which takes as long as several
# layers, and saves a mask for the backward pass.
def dropped(values: torch.Tensor, probability: float) -> torch.Tensor:
    """Return `torch.nn.functional.dropout` in training. For float32 and bfloat16 on CPUs,
    probabilities are multiples of 2^-31, and random numbers follow from torch's generator.
    """
    if not probability:
        return values
    if not uses_kernels(values) or values.dtype not in _DTYPES:
        return functional.dropout(values, probability)
    result: torch.Tensor = _Dropped.apply(values.float(), probability, draw_seed())
    return result.to(values.dtype)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, probability: float, seed: int) -> torch.Tensor:
        ctx.probability = probability
        ctx.seed = seed
        return torch.ops.rayrec.drop_values(values, probability, seed)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = torch.ops.rayrec.drop_values(gradients[0], ctx.probability, ctx.seed)
        return gradient, None, None


def _drop_values(values: torch.Tensor, probability: float, seed: int) -> torch.Tensor:
    values = values.contiguous()
    out = torch.empty_like(values)
    # Both tensors are variables of this call, which outlive the kernel
    arguments = _CDroppedValues(
        CDropout.with_seed(probability, seed),
        values.data_ptr(),
        out.data_ptr(),
        values.numel(),
        _BLOCK,
    )
    blocks = -(-values.numel() // _BLOCK)
    run_kernel(vectorized("rayrec_drop_values"), arguments, blocks, at_once=1)
    return out


# Registered as a torch operator for its profiler and modes
_OPERATORS: Final = torch.library.Library("rayrec", "FRAGMENT")
_OPERATORS.define("drop_values(Tensor values, float probability, int seed) -> Tensor")
_OPERATORS.impl("drop_values", _drop_values, "CPU")
