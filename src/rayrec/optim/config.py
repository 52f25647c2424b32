"""Optimizers and the learning-rate schedule as configurations, so that a recipe names what learns and how fast."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, final

from rayrec.bounds import Finite, Fraction, Natural, Part, Positive, Share
from rayrec.config import Config, InputError

if TYPE_CHECKING:
    import torch
    from torchrec.optim.keyed import KeyedOptimizer

FLOAT_BYTES: Final = 4
"""Of a weight, a gradient and a state value: all are float32."""
LEARNING_RATE_FLOOR: Final = 1e-7  # absolute, as in MLPerf


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(Config):
    """Linear warm-up, hold, decay to a floor; all zero is a constant learning rate.

    The policy of MLPerf's DLRM (Mattson et al. 2020; `LRPolicyScheduler` in facebookresearch/dlrm), with its off-by-one
    fixed: there the hold keeps (W-1)/W of the base and warm-up 0 with decay fails.
    """

    warmup_steps: Natural = 0
    """Steps over which the learning rate rises linearly; the last of them has the base learning rate."""
    decay_start_step: Natural = 0
    """Steps before the decay: the first of the lower learning rates is that of this step, counted from 0."""
    decay_steps: Natural = 0
    """Steps of the decay, after which the learning rate stays at its floor; 0 never decays."""
    warmup_fraction: Fraction = 0.0
    """In place of warmup_steps: the first part of the run's steps, over which it rises."""
    decay_fraction: Fraction = 0.0
    """In place of decay_start_step and decay_steps: the last part of the run's steps, over which it decays; 0 never decays."""
    decay: Literal["quadratic", "linear", "cosine"] = "quadratic"
    """How it decays."""
    final_fraction: Fraction = 0.0
    """Share of the base learning rate that the decay ends at; never below 1e-7."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_fraction and self.warmup_steps:
            raise InputError("warmup_fraction and warmup_steps: give one of the two")
        if self.decay_fraction and self.decay_steps:
            raise InputError("decay_fraction and decay_steps: give one of the two")
        if self.decay_steps and self.decay_start_step < self.warmup_steps:
            raise InputError(
                f"decay_start_step {self.decay_start_step} lies inside the warm-up; "
                f"let the decay start at step {self.warmup_steps} (warmup_steps) or later"
            )

    def for_steps(self, total: int) -> LearningRateSchedule:
        """The same schedule for a run of `total` steps, with fractions turned into steps."""
        schedule = self
        if self.warmup_fraction:
            schedule = schedule.replace(warmup_fraction=0.0, warmup_steps=max(1, round(total * self.warmup_fraction)))
        if self.decay_fraction:
            start = max(schedule.warmup_steps, total - max(1, round(total * self.decay_fraction)))
            # One step later than MLPerf's rule would have it, so that the last step still learns.
            schedule = schedule.replace(decay_fraction=0.0, decay_start_step=start + 1, decay_steps=max(1, total - start))
        return schedule

    def factor(self, step: int) -> float:
        """Share of the base learning rate in step `step` (from 0), before the floor.

        With W warm-up steps: (step + 1) / W below W. With N decay steps, in the k-th of them (from 1), s = (N - k) / N: s^2, s
        or (1 - cos(pi s)) / 2, between `final_fraction` and 1.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if not self.decay_steps or step < self.decay_start_step:
            return 1.0
        left = max(0, self.decay_start_step + self.decay_steps - step - 1) / self.decay_steps
        match self.decay:
            case "quadratic":
                shape = left**2
            case "linear":
                shape = left
            case "cosine":
                shape = (1 - math.cos(math.pi * left)) / 2
        return self.final_fraction + (1 - self.final_fraction) * shape

    def learning_rate(self, step: int, *, base: float) -> float:
        """Learning rate of step `step` (from 0): the decay stops at 1e-7, or at `base` where that is less."""
        rate = base * self.factor(step)
        if self.decay_steps and step >= self.decay_start_step:
            return max(rate, min(base, LEARNING_RATE_FLOOR))
        return rate


@dataclass(frozen=True, kw_only=True)
class PlateauConfig(Config):
    """Lower learning rates when evaluations get no better, on top of the schedule: torch's ReduceLROnPlateau."""

    patience: Natural = 0
    """Evaluations in a row without an improvement after which all learning rates are multiplied by `factor`, and again after as
    many more; 0: never."""
    factor: Part = 0.1
    """What learning rates are multiplied by."""
    min_improvement: Finite = 1e-6
    """An evaluation improves if its score is higher by more than this than that of the last evaluation that improved."""
    min_learning_rate: Finite = 1e-6
    """Learning rates are not lowered below this."""

    def learning_rate(self, scheduled: float, *, scale: float) -> float:
        """A learning rate of the schedule times `scale`, the product of the factors so far."""
        return max(scheduled * scale, min(scheduled, self.min_learning_rate))


@dataclass(frozen=True, kw_only=True)
class SparseOptimizerConfig(Config):
    """Optimizer of the embedding tables. sgd, adagrad and rowwise_adagrad are applied by a fused kernel inside the backward pass,
    the kinds of Adam after it."""

    kind: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "sparse_adam"] = "rowwise_adagrad"
    """Update rule; rowwise_adagrad keeps one float per row, adagrad one per weight, the others but sgd two per weight. adam and
    adamw update every row of a table in each step, as in torch.optim; sparse_adam only the rows of the batch."""
    learning_rate: Finite = 0.01
    """Base learning rate, before the schedule."""
    eps: Finite = 1e-8
    """Added to the root of the accumulated squares (all but sgd). At 1e-8 a row's first update has the full learning
    rate, whatever the gradient; about 10 / global batch damps rows of rare categories, which overfit otherwise."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay of the running mean and square of the gradient (adam, adamw, sparse_adam)."""
    weight_decay: Finite = 0.0
    """L2 penalty on whole tables in each step (adam, adamw): adam adds weight_decay times the table to its gradient, adamw
    decouples it from the gradient. `model.embedding_penalty` acts on the rows of the batch, with every kind."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.own_rule and not self.eps:
            raise InputError(f"SparseOptimizerConfig.eps: {self.kind} divides by it in rows without a gradient; give 1e-8")
        if self.weight_decay and self.kind not in ("adam", "adamw"):
            raise InputError(
                f"SparseOptimizerConfig.weight_decay: {self.kind} updates only the rows of a batch, not whole tables; "
                "choose kind adam or adamw, or penalise the rows of the batch: model.embedding_penalty"
            )

    @property
    def own_rule(self) -> bool:
        """Whether rayrec updates the tables after the backward pass (`optim/table_adam.py`), and no fused kernel in it."""
        return self.kind in ("adam", "adamw", "sparse_adam")

    def state_bytes(self, rows: int, columns: int) -> int:
        """Bytes of state that it keeps for a table, or a part of one, of shape (rows, columns)."""
        if self.own_rule:
            return 2 * rows * columns * FLOAT_BYTES
        values = {"sgd": 0, "adagrad": rows * columns, "rowwise_adagrad": rows}[self.kind]
        return values * FLOAT_BYTES

    def build(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Class and keyword arguments for `apply_optimizer_in_backward(cls, parameters, kwargs)`.

        The arguments are a new dict in each call, since TorchRec changes it. fbgemm's Adagrad rules, for the summed
        gradient g of a touched row, are h += g^2 (adagrad) or h += mean(g^2) (rowwise_adagrad),
        w -= learning_rate * g / (sqrt(h) + eps). They have no weight decay here: fbgemm 1.8 ignores it on the CPU in
        silence. For kinds with `own_rule` this is torch's Adam, by which TorchRec's planner knows the size of the state;
        `leave_to_own_rule` replaces it before tables are sharded.
        """
        import torch
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        if self.own_rule:
            return torch.optim.Adam, {"lr": self.learning_rate, "eps": self.eps, "betas": self.betas}
        if self.kind == "sgd":
            return torch.optim.SGD, {"lr": self.learning_rate}
        rule = torch.optim.Adagrad if self.kind == "adagrad" else RowWiseAdagrad
        return rule, {"lr": self.learning_rate, "eps": self.eps}


@dataclass(frozen=True, kw_only=True)
class DenseOptimizerConfig(Config):
    """Optimizer of replicated parameters, and of those that FSDP splits: all that no fused kernel updates."""

    kind: Literal["sgd", "adagrad", "adam", "adamw", "lamb", "lars"] = "adam"
    """Update rule, as in torch.optim; lamb and lars are for large batches, and scale each parameter's update by its norm."""
    learning_rate: Finite = 0.001
    """Base learning rate, before the schedule."""
    eps: Finite = 1e-8
    """Added to the denominator (all but sgd and lars)."""
    weight_decay: Finite = 0.0
    """L2 penalty; with adamw decoupled from the gradient."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay of the running mean and square of the gradient (adam, adamw, lamb)."""
    momentum: Finite = 0.0
    """Share of the last update that goes into the next (sgd, lars)."""
    trust_coefficient: Finite = 0.001
    """Norm of a parameter's update, as a share of the parameter's norm, at learning rate 1 (lars)."""
    nesterov: bool = False
    """Nesterov's momentum (sgd)."""
    decay_matrices_only: bool = False
    """Weight decay is for parameters of two or more dimensions; biases and normalisations have none."""
    max_gradient_norm: Positive | None = None
    """Clip the gradients of all dense parameters, without embedding tables, to this joint 2-norm; None never clips."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.momentum and self.kind not in ("sgd", "lars")) or (self.nesterov and not self._has_nesterov):
            raise InputError(
                f"momentum {self.momentum}, nesterov {self.nesterov}: momentum is for sgd and lars, nesterov for sgd's"
            )

    @property
    def _has_nesterov(self) -> bool:
        return self.kind == "sgd" and self.momentum > 0

    @property
    def needs_whole_parameters(self) -> bool:
        """Whether an update needs the norm of a whole parameter, which FSDP splits over the workers."""
        return self.kind in ("lamb", "lars")

    def state_bytes(self, weights: int) -> int:
        """Bytes of state that it keeps for so many weights."""
        own = {"sgd": int(self.momentum > 0), "adagrad": 1, "adam": 2, "adamw": 2, "lamb": 2, "lars": 1}
        per_weight = own[self.kind]
        return weights * per_weight * FLOAT_BYTES

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over the parameters, without clipping (`build_keyed` has it)."""
        import torch

        from rayrec.optim.trust_ratio import Lamb, Lars

        parameters = list(params)
        shared: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay, "fused": self._fused(parameters)}
        groups: list[Any] = parameters
        if self.decay_matrices_only:
            groups = [{"params": [parameter for parameter in parameters if parameter.dim() > 1]}]
            groups.append({"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0})
        plain = {name: value for name, value in shared.items() if name != "fused"}
        match self.kind:
            case "lamb":
                return Lamb(groups, eps=self.eps, betas=self.betas, **plain)
            case "lars":
                return Lars(groups, momentum=self.momentum, trust=self.trust_coefficient, **plain)
            case "sgd":
                return torch.optim.SGD(groups, momentum=self.momentum, nesterov=self.nesterov, **shared)
            case "adagrad":
                return torch.optim.Adagrad(groups, eps=self.eps, **shared)
            case "adam":
                return torch.optim.Adam(groups, eps=self.eps, betas=self.betas, **shared)
            case "adamw":
                return torch.optim.AdamW(groups, eps=self.eps, betas=self.betas, **shared)

    def build_named(self, named_parameters: Mapping[str, torch.nn.Parameter]) -> NamedOptimizer:
        """The optimizer with its state under parameter names, without clipping; needs no TorchRec."""
        return NamedOptimizer(self.build(named_parameters.values()), named_parameters)

    def build_keyed(self, named_parameters: Mapping[str, torch.nn.Parameter]) -> KeyedOptimizer:
        """The optimizer under parameter names, for TorchRec's CombinedOptimizer and checkpoints, with the clipping.

        Clipping takes the norm on this process, which is the norm of the mean gradient when DDP has averaged it.
        """
        from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
        from torchrec.optim.keyed import KeyedOptimizerWrapper

        keyed = KeyedOptimizerWrapper(dict(named_parameters), self.build)
        if self.max_gradient_norm is None:
            return keyed
        return GradientClippingOptimizer(keyed, clipping=GradientClipping.NORM, max_gradient=self.max_gradient_norm)

    def _fused(self, parameters: Sequence[torch.nn.Parameter]) -> bool | None:
        """One kernel for the whole update: 3-5 times faster on the CPU; None leaves the choice to torch."""
        import torch
        from torch.distributed.tensor import DTensor

        device_types = {"cpu"} if self.kind == "adagrad" else {"cpu", "cuda"}  # no fused Adagrad on CUDA is promised
        usable = bool(parameters) and all(
            parameter.device.type in device_types and torch.is_floating_point(parameter) and not isinstance(parameter, DTensor)
            for parameter in parameters
        )
        return True if usable else None


@final
class NamedOptimizer:
    """A torch optimizer whose state dict goes by the names of parameters, for checkpoints; unlike torch's, which go by number
    and so change their meaning with the grouping."""

    def __init__(self, optimizer: torch.optim.Optimizer, named_parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.params = dict(named_parameters)

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """`state`: parameter name -> state name -> the live values. There is no `load_state_dict`: fill these."""
        return {"state": {name: state for name, value in self.params.items() if (state := self.state.get(value))}}

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


def set_learning_rates(
    optimizer: torch.optim.Optimizer | KeyedOptimizer | NamedOptimizer,
    *,
    base_rates: Sequence[float],
    schedule: LearningRateSchedule,
    step: int,
) -> None:
    """Give each parameter group of a torch, keyed or combined optimizer the learning rate of step `step` (from 0).

    `base_rates` has one base learning rate per group, as `learning_rates` reads them from a new optimizer (after a
    restore the groups hold scheduled ones). Call it before `zero_grad` of the same step: there a fused optimizer hands
    the learning rate to its kernel, and the update itself happens in the backward pass.
    """
    for group, base in zip(optimizer.param_groups, base_rates, strict=True):
        group["lr"] = schedule.learning_rate(step, base=base)  # type: ignore[index]


def learning_rates(optimizer: torch.optim.Optimizer | KeyedOptimizer | NamedOptimizer) -> list[float]:
    """The learning rate of each parameter group now."""
    return [float(group["lr"]) for group in optimizer.param_groups]
