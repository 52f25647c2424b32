"""Configurations of optimizers and the learning-rate schedule."""

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
"""Size of a weight, a gradient and a state value, all float32."""
LEARNING_RATE_FLOOR: Final = 1e-7  # Absolute, as in MLPerf


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(Config):
    """Linear warm-up, constant phase, and decay to a floor. The default is a constant learning
    rate.

    This is the policy of MLPerf's DLRM (Mattson et al. 2020; `LRPolicyScheduler` in
    facebookresearch/dlrm) without its off-by-one error: there the constant phase has (W-1)/W of the
    base rate, and decay fails with warm-up 0.
    """

    warmup_steps: Natural = 0
    """Number of steps over which the learning rate rises linearly. The last of them has the base
    learning rate.
    """
    decay_start_step: Natural = 0
    """Number of steps before the decay. The first reduced learning rate is at this step, counted
    from 0.
    """
    decay_steps: Natural = 0
    """Number of decay steps. The learning rate then stays at its floor. 0 disables decay."""
    warmup_fraction: Fraction = 0.0
    """Initial fraction of the run's steps for the warm-up, as an alternative to warmup_steps."""
    decay_fraction: Fraction = 0.0
    """Final fraction of the run's steps for the decay, instead of decay_start_step and decay_steps.
    0 disables decay.
    """
    decay: Literal["quadratic", "linear", "cosine"] = "quadratic"
    """Shape of the decay."""
    final_fraction: Fraction = 0.0
    """Final fraction of the base learning rate after the decay, with a floor of 1e-7."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_fraction and self.warmup_steps:
            raise InputError("warmup_fraction and warmup_steps: set only one")
        if self.decay_fraction and self.decay_steps:
            raise InputError("decay_fraction and decay_steps: set only one")
        if self.decay_steps and self.decay_start_step < self.warmup_steps:
            raise InputError(
                f"decay_start_step: must be at least warmup_steps {self.warmup_steps}, got "
                f"{self.decay_start_step}"
            )

    def for_steps(self, total: int) -> LearningRateSchedule:
        """Return this schedule for a run of `total` steps, with fractions converted to steps."""
        schedule = self
        if self.warmup_fraction:
            schedule = schedule.replace(
                warmup_fraction=0.0, warmup_steps=max(1, round(total * self.warmup_fraction))
            )
        if self.decay_fraction:
            start = max(schedule.warmup_steps, total - max(1, round(total * self.decay_fraction)))
            # One step later than MLPerf's rule, so that the last step still learns.
            schedule = schedule.replace(
                decay_fraction=0.0, decay_start_step=start + 1, decay_steps=max(1, total - start)
            )
        return schedule

    def factor(self, step: int) -> float:
        """Return the fraction of the base learning rate in step `step` (from 0), before the floor.
        With W warm-up steps, it is (step + 1) / W below W. In decay step k (from 1) of N, s is (N -
        k) / N. It falls from 1 to `final_fraction` as s^2, s or (1 - cos(pi s)) / 2.
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
        """Return the learning rate of step `step` (from 0). The decay stops at 1e-7, or at `base`
        if this is lower.
        """
        rate = base * self.factor(step)
        return (
            max(rate, min(base, LEARNING_RATE_FLOOR))
            if self.decay_steps and step >= self.decay_start_step
            else rate
        )


@dataclass(frozen=True, kw_only=True)
class PlateauConfig(Config):
    """Reduction of the learning rates when evaluations stop improving, besides the schedule, as in
    torch's ReduceLROnPlateau.
    """

    patience: Natural = 0
    """Number of consecutive evaluations without improvement after which `factor` multiplies all
    learning rates. 0 disables it.
    """
    factor: Part = 0.1
    """Factor of the learning rates."""
    min_improvement: Finite = 1e-6
    """Minimum increase of the score, over the last improved evaluation, that counts as an
    improvement.
    """
    min_learning_rate: Finite = 1e-6
    """Minimum learning rate after reductions."""

    def learning_rate(self, scheduled: float, *, scale: float) -> float:
        """Return the learning rate for the schedule's one and `scale`, the product of all factors
        so far.
        """
        return max(scheduled * scale, min(scheduled, self.min_learning_rate))


@dataclass(frozen=True, kw_only=True)
class SparseOptimizerConfig(Config):
    """Optimizer of the tables. sgd, adagrad and rowwise_adagrad run in the backward pass, fused;
    kinds of Adam run after it.
    """

    kind: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "sparse_adam"] = (
        "rowwise_adagrad"
    )
    """Update rule. State per table: rowwise_adagrad one float per row, adagrad one per weight, the
    kinds of Adam two per weight. adam and adamw update all rows in each step, as in torch.optim,
    and sparse_adam only the batch's rows.
    """
    learning_rate: Finite = 0.01
    """Base learning rate, before the schedule."""
    eps: Finite = 1e-8
    """Term added to the root of the accumulated squares (all except sgd). At 1e-8, a row's first
    update has the full learning rate for any gradient. About 10 / global batch damps rows of rare
    categories, which overfit otherwise.
    """
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay rates of the running mean and square of the gradient (adam, adamw, sparse_adam)."""
    weight_decay: Finite = 0.0
    """L2 penalty on full tables in each step (adam, adamw). adam adds weight_decay times the table
    to its gradient, and adamw decouples it. `model.embedding_penalty` instead applies to the
    batch's rows, with every kind.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_custom_update and not self.eps:
            raise InputError(
                f"SparseOptimizerConfig.eps: must be above 0 for {self.kind}, got 0. Set 1e-8."
            )
        if self.weight_decay and self.kind not in ("adam", "adamw"):
            raise InputError(
                f"SparseOptimizerConfig.weight_decay: must be 0 for {self.kind}, which only "
                "updates a batch's rows. Choose kind adam or adamw, or set model.embedding_penalty."
            )

    @property
    def has_custom_update(self) -> bool:
        """Whether rayrec updates tables after the backward pass, by `optim/table_adam.py`."""
        return self.kind in ("adam", "adamw", "sparse_adam")

    def state_bytes(self, rows: int, columns: int) -> int:
        """Return the optimizer state size, in bytes, of a table (or part) of shape (rows,
        columns).
        """
        return {"sgd": 0, "adagrad": rows * columns, "rowwise_adagrad": rows}.get(
            self.kind, 2 * rows * columns
        ) * FLOAT_BYTES

    def build(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Return the class and keyword arguments for `apply_optimizer_in_backward(cls, parameters,
        kwargs)`. The dict is new in each call, because TorchRec changes it. For the summed gradient
        g of a touched row, fbgemm's Adagrad rules are h += g^2 (adagrad) or h += mean(g^2)
        (rowwise_adagrad), w -= learning_rate * g / (sqrt(h) + eps). They have no weight decay here,
        because fbgemm 1.8 silently ignores it on CPU. Kinds with `has_custom_update` return torch's
        Adam, for TorchRec's estimate of the state size, and `disable_fused_update` replaces it
        before tables are sharded.
        """
        import torch
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        if self.has_custom_update:
            return torch.optim.Adam, {
                "lr": self.learning_rate,
                "eps": self.eps,
                "betas": self.betas,
            }
        if self.kind == "sgd":
            return torch.optim.SGD, {"lr": self.learning_rate}
        rule = torch.optim.Adagrad if self.kind == "adagrad" else RowWiseAdagrad
        return rule, {"lr": self.learning_rate, "eps": self.eps}


@dataclass(frozen=True, kw_only=True)
class DenseOptimizerConfig(Config):
    """Optimizer of replicated and FSDP parameters, which no fused kernel updates."""

    kind: Literal["sgd", "adagrad", "adam", "adamw", "lamb", "lars"] = "adam"
    """Update rule, as in torch.optim. lamb and lars are for large batches and scale each
    parameter's update by its norm.
    """
    learning_rate: Finite = 0.001
    """Base learning rate, before the schedule."""
    eps: Finite = 1e-8
    """Term added to the denominator (all except sgd and lars)."""
    weight_decay: Finite = 0.0
    """L2 penalty, decoupled from the gradient with adamw."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay rates of the running mean and square of the gradient (adam, adamw, lamb)."""
    momentum: Finite = 0.0
    """Fraction of the last update in the next one (sgd, lars)."""
    trust_coefficient: Finite = 0.001
    """Ratio of a parameter's update norm to its norm at learning rate 1 (lars)."""
    nesterov: bool = False
    """Whether to use Nesterov momentum (sgd)."""
    decay_matrices_only: bool = False
    """Whether to exclude parameters with less than two dimensions, such as biases and norms, from
    weight decay.
    """
    max_gradient_norm: Positive | None = None
    """Maximum joint 2-norm of the gradients of all dense parameters, without embedding tables. None
    disables clipping.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        without_momentum = self.nesterov and not (self.kind == "sgd" and self.momentum > 0)
        if without_momentum or (self.momentum and self.kind not in ("sgd", "lars")):
            raise InputError(
                "momentum: must be 0 except for sgd and lars, and nesterov is for sgd with "
                f"momentum, got {self.kind}, momentum {self.momentum}, nesterov {self.nesterov}"
            )

    @property
    def needs_full_parameters(self) -> bool:
        """Whether an update needs the norm of a full parameter. FSDP shards parameters."""
        return self.kind in ("lamb", "lars")

    def state_bytes(self, weights: int) -> int:
        """Return the optimizer state size for a weight count, in bytes."""
        per_weight = {
            "sgd": int(self.momentum > 0),
            "adagrad": 1,
            "adam": 2,
            "adamw": 2,
            "lamb": 2,
            "lars": 1,
        }
        return weights * per_weight[self.kind] * FLOAT_BYTES

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the torch optimizer of the parameters, without clipping (see `build_keyed`)."""
        import torch

        from rayrec.optim.trust_ratio import Lamb, Lars

        parameters = list(params)
        shared: dict[str, Any] = {
            "lr": self.learning_rate,
            "weight_decay": self.weight_decay,
            "fused": self._fused(parameters),
        }
        # torch rejects an empty list, but a network may have all of its weights in tables
        groups: list[Any] = parameters or [{"params": []}]
        if self.decay_matrices_only:
            groups = [{"params": [parameter for parameter in parameters if parameter.dim() > 1]}]
            groups.append(
                {
                    "params": [parameter for parameter in parameters if parameter.dim() <= 1],
                    "weight_decay": 0.0,
                }
            )
        plain = {name: value for name, value in shared.items() if name != "fused"}
        match self.kind:
            case "lamb":
                return Lamb(groups, eps=self.eps, betas=self.betas, **plain)
            case "lars":
                return Lars(groups, momentum=self.momentum, trust=self.trust_coefficient, **plain)
            case "sgd":
                return torch.optim.SGD(
                    groups, momentum=self.momentum, nesterov=self.nesterov, **shared
                )
            case "adagrad":
                return torch.optim.Adagrad(groups, eps=self.eps, **shared)
            case "adam":
                return torch.optim.Adam(groups, eps=self.eps, betas=self.betas, **shared)
            case "adamw":
                return torch.optim.AdamW(groups, eps=self.eps, betas=self.betas, **shared)

    def build_named(self, named_parameters: Mapping[str, torch.nn.Parameter]) -> NamedOptimizer:
        """Return the optimizer with its state by parameter name, without clipping. Does not import
        TorchRec.
        """
        return NamedOptimizer(self.build(named_parameters.values()), named_parameters)

    def build_keyed(self, named_parameters: Mapping[str, torch.nn.Parameter]) -> KeyedOptimizer:
        """Return the optimizer by parameter name with clipping, for TorchRec's CombinedOptimizer
        and checkpoints. Clipping uses the norm on this process, which is the norm of the mean
        gradient after DDP's average.
        """
        from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
        from torchrec.optim.keyed import KeyedOptimizerWrapper

        keyed = KeyedOptimizerWrapper(dict(named_parameters), self.build)
        if self.max_gradient_norm is None:
            return keyed
        return GradientClippingOptimizer(
            keyed, clipping=GradientClipping.NORM, max_gradient=self.max_gradient_norm
        )

    def _fused(self, parameters: Sequence[torch.nn.Parameter]) -> bool | None:
        """Return True for a fused update, which is 3-5 times faster on CPU, or None for torch's
        default.
        """
        import torch
        from torch.distributed.tensor import DTensor

        # torch does not guarantee a fused Adagrad on CUDA
        device_types = {"cpu"} if self.kind == "adagrad" else {"cpu", "cuda"}
        usable = bool(parameters) and all(
            parameter.device.type in device_types
            and torch.is_floating_point(parameter)
            and not isinstance(parameter, DTensor)
            for parameter in parameters
        )
        return True if usable else None


@final
class NamedOptimizer:
    """Optimizer whose state dict has parameter names, for checkpoints. torch's has numbers, which
    depend on the grouping.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named_parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self.optimizer = optimizer
        self.params = dict(named_parameters)

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Return `state`: parameter name -> state name -> live values. To load, fill these
        values.
        """
        return {
            "state": {
                name: state
                for name, value in self.params.items()
                if (state := self.state.get(value))
            }
        }

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
    """Set the learning rate of step `step` (from 0) in each parameter group of a torch, keyed or
    combined optimizer. `base_rates` has one base learning rate per group, from `learning_rates` of
    a new optimizer (after a restore the groups have scheduled ones). Call this before `zero_grad`
    of the same step: there a fused optimizer passes the learning rate to its kernel.
    """
    for group, base in zip(optimizer.param_groups, base_rates, strict=True):
        group["lr"] = schedule.learning_rate(step, base=base)  # type: ignore[index]


def learning_rates(
    optimizer: torch.optim.Optimizer | KeyedOptimizer | NamedOptimizer,
) -> list[float]:
    """Return the current learning rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]
