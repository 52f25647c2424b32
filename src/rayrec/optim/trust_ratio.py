"""Optimizers for large batches, with updates of each parameter scaled by its norm."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, final

import torch


class _TrustRatioOptimizer(torch.optim.Optimizer, ABC):
    """Optimizer that updates each parameter with a gradient by its norms."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    @abstractmethod
    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Update a parameter in place. `group` has its settings."""


@final
class Lamb(_TrustRatioOptimizer):
    """LAMB (You et al. 2020, arXiv 1904.00962, Algorithm 2, with bias correction and phi the
    identity). With Adam's bias-corrected moments m and v of each parameter x: u = m / (sqrt(v) +
    eps) + weight_decay * x, x -= lr * |x| / |u| * u. If one of the norms is 0, their ratio is 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        number = state["step"].item()
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**number)).sqrt_().add_(group["eps"])
        update = (
            (mean / (1 - beta1**number)).div_(root).add_(parameter, alpha=group["weight_decay"])
        )
        update.mul_(_ratio(parameter.norm(), update.norm()))
        parameter.add_(update, alpha=-group["lr"])


@final
class Lars(_TrustRatioOptimizer):
    """LARS (You et al. 2017, arXiv 1708.03888). For each parameter x with gradient g: v = momentum
    * v + lr * r * (g + weight_decay * x), x -= v, with r = trust * |x| / (|g| + weight_decay *
    |x|). If |x| or |g| is 0, r is 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        trust: float,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        )

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        decay = group["weight_decay"]
        norm = parameter.norm()
        gradient_norm = gradient.norm()
        factor = torch.where(
            gradient_norm > 0, _ratio(group["trust"] * norm, gradient_norm + decay * norm), 1.0
        )
        update = gradient.add(parameter, alpha=decay).mul_(factor * group["lr"])
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        parameter.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(update))


def _ratio(norm: torch.Tensor, update_norm: torch.Tensor) -> torch.Tensor:
    """Return norm / update_norm, or 1 if one of them is 0. Stays on the device."""
    return torch.where((norm > 0) & (update_norm > 0), norm / update_norm, 1.0)
