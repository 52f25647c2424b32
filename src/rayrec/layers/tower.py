"""Linear layers with batch norm, activation and dropout, as in FuxiCTR's MLP_Block."""

from collections.abc import Sequence
from typing import Literal, TypedDict, Unpack, final

import torch
from torch import nn
from torch.nn import functional

from rayrec.layers.mlp import GlobalBatchNorm, Precision, UninitializedLinear, compute_dtype, init_values


def xavier_linear(in_features: int, out_features: int, *, bias: bool = True) -> UninitializedLinear:
    """Return a linear layer with Xavier normal weights and zero biases, as in FuxiCTR."""
    layer = UninitializedLinear(in_features, out_features, bias=bias)
    init_values(layer.weight, nn.init.xavier_normal_)
    if bias:
        init_values(layer.bias, nn.init.zeros_)
    return layer


@final
class Dice(nn.Module):
    """Activation p x + (1 - p) a x, with learned a, initially 0, and p the sigmoid of x normalized over all workers' rows.
    Source: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = GlobalBatchNorm(features, eps=1e-9, momentum=0.01, affine=False)
        self.slope = nn.Parameter(torch.zeros(features))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        gate = self.norm(inputs.float()).sigmoid()
        return (inputs * (gate + (1 - gate) * self.slope)).to(inputs.dtype)


class TowerSettings(TypedDict, total=False):
    """Optional settings of a `Tower`."""

    dropout: float
    batch_norm: bool
    precision: Precision


@final
class Tower(nn.Module):
    """Linear layers, each with batch norm, activation and dropout, [rows, in_features] to [rows, sizes[-1]]. Products and
    activations have the precision's dtype. Without sizes, returns its input."""

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        *,
        dropout: float = 0.0,
        batch_norm: bool = False,
        activation: Literal["relu", "dice"] = "relu",
        precision: Precision = "fp32",
    ) -> None:
        super().__init__()
        self.layers, self.norms, self.activations = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for size in sizes:
            self.layers.append(xavier_linear(in_features, size))
            self.norms.append(GlobalBatchNorm(size) if batch_norm else nn.Identity())
            self.activations.append(Dice(size) if activation == "dice" else nn.ReLU())
            in_features = size
        self.out_features = in_features
        self._dropout, self._dtype = dropout, compute_dtype(precision)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.to(self._dtype)
        for layer, norm, activation in zip(self.layers, self.norms, self.activations, strict=True):
            assert isinstance(layer, UninitializedLinear)
            linear = functional.linear(hidden, layer.weight.to(self._dtype), layer.bias.to(self._dtype))
            hidden = functional.dropout(activation(norm(linear)), self._dropout, training=self.training)
        return hidden


@final
class LogitTower(nn.Module):
    """`Tower` with a linear layer to one logit, [rows, in_features] to float32 [rows]."""

    def __init__(self, in_features: int, sizes: Sequence[int], **settings: Unpack[TowerSettings]) -> None:
        super().__init__()
        self.tower = Tower(in_features, sizes, **settings)
        self.logit = xavier_linear(self.tower.out_features, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.logit(self.tower(inputs).float()).squeeze(1)


@final
class Experts(nn.Module):
    """Towers of equal form, [rows, in_features] to [rows, count, sizes[-1]] in the precision's dtype."""

    def __init__(self, in_features: int, sizes: Sequence[int], count: int, **settings: Unpack[TowerSettings]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Tower(in_features, sizes, **settings) for _ in range(count))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([tower(inputs) for tower in self.towers], dim=1)


@final
class Gate(nn.Module):
    """Weighted sum of experts' outputs, with weights from a tower, a linear layer and a softmax over the gate's input."""

    def __init__(self, in_features: int, sizes: Sequence[int], count: int, **settings: Unpack[TowerSettings]) -> None:
        super().__init__()
        self.tower = Tower(in_features, sizes, **settings)
        self.scores = xavier_linear(self.tower.out_features, count)

    def forward(self, inputs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum in the experts' dtype, [rows, width]. `experts`: [rows, count, width]."""
        weights = self.scores(self.tower(inputs).float()).softmax(1).to(experts.dtype)
        return (weights.unsqueeze(1) @ experts).squeeze(1)
