"""HuggingFace's GPT-2 with its matrix products from oneDNN on CPU, where torch's own come from the slower MKL."""

from __future__ import annotations

from typing import final

import torch
from torch import nn
from transformers import GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from rayrec.layers.mlp import linear_stack

_LEAST_MULTIPLY_ADDS = 4_000_000
"""Of a product that is worth oneDNN's set-up, forward and backward: 0.1 ms, which half as many take."""


def through_onednn(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """The same model: its layers keep their parameters and names, and learn another way to multiply. Sums are rounded
    differently."""
    for module in model.modules():
        # Replacing the modules would mean to know where transformers keeps them, and to tie the weights again.
        if type(module) is Conv1D:
            module.__class__ = _Conv1D
        elif type(module) is nn.Linear:
            module.__class__ = _Linear
    return model


@final
class _Conv1D(Conv1D):
    """GPT-2's linear layer, whose weight is (in_features, out_features)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _product(x, self.weight.t(), self.bias) if _pays(x, self.nf) else super().forward(x)


@final
class _Linear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _product(input, self.weight, self.bias) if _pays(input, self.out_features) else super().forward(input)


def _pays(inputs: torch.Tensor, out_features: int) -> bool:
    """Whether torch would have MKL multiply, and for long enough; in bf16 it asks oneDNN itself."""
    if torch.compiler.is_compiling() or not inputs.is_cpu or inputs.dtype != torch.float32:
        return False
    return not torch.is_autocast_enabled("cpu") and inputs.numel() * out_features >= _LEAST_MULTIPLY_ADDS


def _product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """(..., in_features) by (out_features, in_features), of any strides."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    outputs = linear_stack(rows, [weight, bias], relus=(False,), dtype=torch.float32)
    return outputs.view(*inputs.shape[:-1], weight.shape[0])
