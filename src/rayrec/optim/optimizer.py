"""Updates of replicated tables by the rules of the fused kernels, so that results do not depend on
the plan.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper

from rayrec.collectives import sum_over_workers
from rayrec.optim.config import SparseOptimizerConfig
from rayrec.optim.table_adam import TableAdam

_STATE = "momentum1"  # TorchRec's name for the first state of fused optimizers


def data_parallel_optimizer(
    config: SparseOptimizerConfig, named_parameters: Mapping[str, torch.nn.Parameter]
) -> KeyedOptimizer:
    """Return the optimizer of data-parallel tables by parameter name. Its state has sharded tables'
    names and shapes.
    """
    # Comparisons, because mypy narrows no `in`.
    if (
        config.kind == "sgd"  # noqa: PLR1714
        or config.kind == "adagrad"
        or config.kind == "rowwise_adagrad"
    ):
        rule = partial(
            DataParallelTableOptimizer,
            kind=config.kind,
            learning_rate=config.learning_rate,
            eps=config.eps,
        )
        return KeyedOptimizerWrapper(dict(named_parameters), rule)
    return TableAdam.from_parameters(config, named_parameters)


class DataParallelTableOptimizer(torch.optim.Optimizer):
    """SGD, Adagrad and row-wise Adagrad with the arithmetic of fbgemm's kernels, on dense gradients
    of tables [rows, columns]. torch's Adagrad and TorchRec's RowWiseAdagrad have other state, and
    compute 0 / 0 in untouched rows if eps is 0.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        kind: Literal["sgd", "adagrad", "rowwise_adagrad"],
        learning_rate: float,
        eps: float,
    ) -> None:
        super().__init__(parameters, {"lr": learning_rate, "eps": eps})
        self._kind = kind
        for group in self.param_groups:
            for table in group["params"]:
                if kind != "sgd":
                    shape = table.shape if kind == "adagrad" else table.shape[:1]
                    self.state[table][_STATE] = torch.zeros(
                        shape, dtype=torch.float32, device=table.device
                    )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._update(table, table.grad, learning_rate=group["lr"], eps=group["eps"])

    def _update(
        self, table: torch.Tensor, gradient: torch.Tensor, *, learning_rate: float, eps: float
    ) -> None:
        if table.is_cuda:
            self._update_all(table, gradient, learning_rate=learning_rate, eps=eps)
            return
        # Most rows are not in the batch, and reading all of them once is expensive enough.
        touched = gradient.any(dim=1).nonzero().squeeze(1)
        gradient = gradient[touched]
        if self._kind == "sgd":
            table.index_add_(0, touched, gradient, alpha=-learning_rate)
            return
        state = self.state[table][_STATE]
        squares = gradient.square() if self._kind == "adagrad" else gradient.square().mean(dim=1)
        sums = state[touched] + squares
        state[touched] = sums
        rates = learning_rate / (sums.sqrt() + eps)
        table.index_add_(
            0,
            touched,
            gradient * (rates if self._kind == "adagrad" else rates.unsqueeze(1)),
            alpha=-1,
        )

    def _update_all(
        self, table: torch.Tensor, gradient: torch.Tensor, *, learning_rate: float, eps: float
    ) -> None:
        """Update without finding touched rows, for which a GPU's host would wait. Rows without a
        gradient stay.
        """
        if self._kind == "sgd":
            table.add_(gradient, alpha=-learning_rate)
            return
        state = self.state[table][_STATE]
        state += gradient.square() if self._kind == "adagrad" else gradient.square().mean(dim=1)
        # 0 / 0 if eps is 0
        rates = torch.where(state > 0, learning_rate / (state.sqrt() + eps), 0.0)
        table.add_(gradient * (rates if self._kind == "adagrad" else rates.unsqueeze(1)), alpha=-1)


class JointlyClippedOptimizer(CombinedOptimizer):
    """Joint clipping: if the 2-norm of all gradients exceeds max_norm, multiplies them by max_norm
    / norm before each step, equally on all workers, as torch.nn.utils.clip_grad_norm_.
    """

    def __init__(
        self,
        sharded: TableAdam,
        replicated: Sequence[TableAdam],
        network: KeyedOptimizer,
        *,
        max_norm: float,
    ) -> None:
        """`sharded`: this worker's table parts. `replicated`: tables on every worker. `network`:
        weights equal on all workers.
        """
        super().__init__([sharded, *replicated, network])
        self._sharded = sharded
        self._replicated = replicated
        self._network = network
        self._max_norm = max_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Clip the gradients and apply the step. Collective."""
        gradients = [
            parameter.grad
            for group in self._network.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        # Each worker has other tables, but the norm of all gradients limits them. In float64,
        # because the squares of many rows differ by orders of magnitude.
        squares = float(sum_over_workers(np.array(self._sharded.squared_norm(), np.float64)))
        squares += sum(tables.squared_norm() for tables in self._replicated)
        norm = math.sqrt(squares + torch.nn.utils.get_total_norm(gradients).item() ** 2)
        scale = min(1.0, self._max_norm / (norm + 1e-6))
        for tables in (self._sharded, *self._replicated):
            tables.gradient_scale = scale
        if scale != 1.0:
            for gradient in gradients:
                gradient.mul_(scale)
        super().step(closure)
