"""Cross layers, which multiply what they compute by the features that the first of them got, and an MLP after or next to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import torch
from torch import nn

from rayrec.layers.mlp import Precision, compute_dtype, linear_stack, start_values
from rayrec.layers.tower import LogitTower, Norm, Tower, xavier_linear

Structure = Literal["parallel", "stacked"]


@final
class CrossLayer(nn.Module):
    """x0 * (W x + b) + x (Wang et al., "DCN V2", WWW 2021): (rows, width) twice -> (rows, width), in the precision's type.

    With `low_rank` W is a product of two matrices of this rank. With `gated` the product is also multiplied by sigmoid(W_g x) and
    biases start uniform in [0, 1) (Wang et al., "Towards Deeper, Lighter and Interpretable Cross Network", CIKM 2023).
    """

    def __init__(
        self, width: int, *, low_rank: int | None = None, gated: bool = False, precision: Precision = "fp32"
    ) -> None:
        super().__init__()
        self.down = None if low_rank is None else xavier_linear(width, low_rank, bias=False)
        self.linear = xavier_linear(width if low_rank is None else low_rank, width)
        self.gate = xavier_linear(width, width, bias=False) if gated else None
        if gated:
            start_values(self.linear.bias, nn.init.uniform_)
        self._dtype = compute_dtype(precision)

    def forward(self, first: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """`first`: x0, `inputs`: x."""
        last = (self.linear.weight, self.linear.bias)
        parameters = last if self.down is None else (self.down.weight, None, *last)
        factor = linear_stack(inputs, parameters, relus=(False,) * (len(parameters) // 2), dtype=self._dtype)
        if self.gate is not None:
            gate = linear_stack(inputs, (self.gate.weight, None), relus=(False,), dtype=self._dtype)
            factor = factor * gate.sigmoid()
        return torch.addcmul(inputs, first, factor)


@final
class CrossAndDeep(nn.Module):
    """Cross layers and an MLP: (rows, width) -> float32 logits (rows,).

    The MLP takes what the cross layers give (stacked), or the same inputs as they do, and the logit is computed from both outputs
    side by side (parallel). Without `mlp` the logit is computed from the cross layers alone.
    """

    def __init__(
        self,
        width: int,
        *,
        cross_layers: int,
        mlp: Sequence[int],
        structure: Structure,
        low_rank: int | None = None,
        gated: bool = False,
        dropout: float = 0.0,
        norm: Norm = "none",
        precision: Precision = "fp32",
    ) -> None:
        super().__init__()
        self.crosses = nn.ModuleList(
            CrossLayer(width, low_rank=low_rank, gated=gated, precision=precision) for _ in range(cross_layers)
        )
        self.deep: Tower | None = None
        if structure == "parallel" and mlp:
            self.deep = Tower(width, mlp, dropout=dropout, norm=norm, precision=precision)
            self.last = LogitTower(width + self.deep.out_features, (), precision=precision)
        else:
            self.last = LogitTower(width, mlp, dropout=dropout, norm=norm, precision=precision)
        self._dtype = compute_dtype(precision)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first = crossed = inputs.to(self._dtype)
        for cross in self.crosses:
            crossed = cross(first, crossed)
        return self.last(crossed if self.deep is None else torch.cat([crossed, self.deep(first)], dim=1))
