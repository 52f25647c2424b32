"""Cross layers, which multiply their results by the input of the first layer, with an MLP after or
next to them.
"""

from collections.abc import Sequence
from typing import Literal, Unpack, final

import torch
from torch import nn

from rayrec.layers.mlp import (
    LogitTower,
    Precision,
    Tower,
    TowerSettings,
    apply_linear,
    compute_dtype,
    init_values,
    linear_stack,
    xavier_linear,
)

Structure = Literal["parallel", "stacked", "stacked_parallel"]


@final
class CrossLayer(nn.Module):
    """Layer x0 * (W x + b) + x for two inputs [rows, width], in the precision's dtype (Wang et al.,
    "DCN V2", WWW 2021). With `low_rank`, W is a product of two matrices of this rank. With `gated`,
    the product is also multiplied by sigmoid(W_g x), and initial biases are uniform in [0, 1) (Wang
    et al., "Towards Deeper, Lighter and Interpretable Cross Network", CIKM 2023).
    """

    def __init__(
        self,
        width: int,
        *,
        low_rank: int | None = None,
        gated: bool = False,
        precision: Precision = "fp32",
    ) -> None:
        super().__init__()
        self.down = None if low_rank is None else xavier_linear(width, low_rank, bias=False)
        self.linear = xavier_linear(width if low_rank is None else low_rank, width)
        self.gate = xavier_linear(width, width, bias=False) if gated else None
        if gated:
            init_values(self.linear.bias, nn.init.uniform_)
        self._dtype = compute_dtype(precision)

    def forward(self, first: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the layer for `first`, x0, and `inputs`, x."""
        last = (self.linear.weight, self.linear.bias)
        parameters = last if self.down is None else (self.down.weight, None, *last)
        factor = linear_stack(
            inputs, parameters, relus=(False,) * (len(parameters) // 2), dtype=self._dtype
        )
        if self.gate is not None:
            gate = apply_linear(inputs, self.gate.weight, None, dtype=self._dtype)
            factor = factor * gate.sigmoid()
        return torch.addcmul(inputs, first, factor)


@final
class Crosses(nn.ModuleList):
    """Stack of `CrossLayer`s, [rows, width], in the precision's dtype."""

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        crossed = first
        for cross in self:
            crossed = cross(first, crossed)
        return crossed


@final
class CrossMixture(nn.Module):
    """Cross layers of low-rank experts (Wang et al., "DCN V2", WWW 2021): x <- sum over experts e
    of g_e(x) x0 * (U_e tanh(C_e tanh(V_e x)) + b) + x. g is the softmax of a common linear gate.
    Shapes as in `Crosses`.
    """

    def __init__(
        self, width: int, *, layers: int, experts: int, low_rank: int, precision: Precision
    ) -> None:
        super().__init__()

        def matrices(rows: int, columns: int) -> nn.ParameterList:
            """Return stacked matrices of the experts of each layer, each drawn separately."""
            matrices_by_layer = [
                [
                    init_values(torch.empty(rows, columns), nn.init.xavier_normal_)
                    for _ in range(experts)
                ]
                for _ in range(layers)
            ]
            return nn.ParameterList(
                torch.stack(layer_matrices) for layer_matrices in matrices_by_layer
            )

        self.down = matrices(low_rank, width)
        self.core = matrices(low_rank, low_rank)
        self.up = matrices(width, low_rank)
        self.biases = nn.ParameterList(torch.zeros(width) for _ in range(layers))
        self.gate = xavier_linear(width, experts, bias=False)
        self._dtype = compute_dtype(precision)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        crossed = first
        # Indices: r rows, w width, e experts, k and j the low rank.
        for down, core, up, bias in zip(self.down, self.core, self.up, self.biases, strict=True):
            expert_weights = self.gate(crossed.float()).softmax(1).to(self._dtype)
            hidden = torch.einsum("rw,ekw->rek", crossed, down.to(self._dtype)).tanh()
            hidden = torch.einsum("rek,ejk->rej", hidden, core.to(self._dtype)).tanh()
            mixed = torch.einsum(
                "rej,ewj->rw", hidden * expert_weights.unsqueeze(2), up.to(self._dtype)
            )
            # The shares sum to 1, so the bias of the mixture equals each expert's bias.
            crossed = torch.addcmul(crossed, first, mixed + bias.to(self._dtype))
        return crossed


@final
class CrossAndDeep(nn.Module):
    """Cross layers and an MLP, [rows, width] to float32 logits [rows]. The MLP takes the output of
    the cross layers (stacked), or the same inputs, with the logit computed from both concatenated
    outputs (parallel). `stacked_parallel` has both MLPs. Without `mlp`, the logit is computed from
    the cross layers only.
    """

    def __init__(
        self,
        width: int,
        crosses: Crosses | CrossMixture,
        *,
        mlp: Sequence[int],
        stacked_mlp: Sequence[int] = (),
        structure: Structure,
        **settings: Unpack[TowerSettings],
    ) -> None:
        """`mlp`: layer widths of the only MLP, or of the parallel one in addition to
        `stacked_mlp`.
        """
        super().__init__()
        self.crosses = crosses
        precision = settings.get("precision", "fp32")
        self.deep: Tower | None = None
        self.stacked: Tower | None = None
        if structure == "stacked" or not mlp:
            self.last = LogitTower(width, mlp, **settings)
        else:
            self.deep = Tower(width, mlp, **settings)
            if structure == "stacked_parallel":
                self.stacked = Tower(width, stacked_mlp, **settings)
            crossed = width if self.stacked is None else self.stacked.out_features
            self.last = LogitTower(crossed + self.deep.out_features, (), precision=precision)
        self._dtype = compute_dtype(precision)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first = inputs.to(self._dtype)
        crossed = self.crosses(first)
        crossed = crossed if self.stacked is None else self.stacked(crossed)
        return self.last(
            crossed if self.deep is None else torch.cat([crossed, self.deep(first)], dim=1)
        )
