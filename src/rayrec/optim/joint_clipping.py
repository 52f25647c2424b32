"""Clipping by the norm of all gradients of a click model, those of its tables included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from rayrec.optim.table_adam import TableAdam


class JointlyClippedOptimizer(CombinedOptimizer):
    """Multiplies all gradients by max_norm / norm before each step if their joint 2-norm is above max_norm, as
    torch.nn.utils.clip_grad_norm_ does; every worker by the same number."""

    def __init__(
        self, sharded: TableAdam, replicated: Sequence[TableAdam], network: KeyedOptimizer, *, max_norm: float
    ) -> None:
        """`sharded`: of the parts of tables that this worker holds; `replicated`: of tables that every worker holds whole;
        `network`: of weights whose gradients are equal on every worker."""
        super().__init__([sharded, *replicated, network])
        self._sharded, self._replicated, self._network, self._max_norm = sharded, replicated, network, max_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Collective."""
        gradients = [
            parameter.grad
            for group in self._network.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        scale = min(1.0, self._max_norm / (self._norm(gradients) + 1e-6))
        for tables in (self._sharded, *self._replicated):
            tables.gradient_scale = scale
        if scale != 1.0:
            for gradient in gradients:
                gradient.mul_(scale)
        super().step(closure)

    def _norm(self, of_network: list[torch.Tensor]) -> float:
        squares = _sum_over_workers(self._sharded.squared_norm()) + sum(
            tables.squared_norm() for tables in self._replicated
        )
        return math.sqrt(squares + torch.nn.utils.get_total_norm(of_network).item() ** 2)


def _sum_over_workers(value: float) -> float:
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device="cuda" if distributed.get_backend() == "nccl" else "cpu")
    distributed.all_reduce(total)
    return total.item()
