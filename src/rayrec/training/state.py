"""The state of a run by plan-free names: weights `model.NAME`, optimizer state `optimizer.PARAMETER.STATE`."""

from __future__ import annotations

from typing import Any

import torch


def model_tensors(model: torch.nn.Module) -> dict[str, Any]:
    """`model.NAME` -> tensor or ShardedTensor, for everything in the model's state dict."""
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def optimizer_tensors(optimizer: Any) -> dict[str, Any]:
    """`optimizer.PARAMETER.STATE` -> tensor or ShardedTensor, of fused and dense optimizers alike.

    Fused states are named after their table (`cat_0.momentum1`); here they are named by state alone.
    """
    return {
        f"optimizer.{parameter}.{state.rsplit('.', 1)[-1]}": value
        for parameter, states in optimizer.state_dict()["state"].items()
        for state, value in states.items()
        if isinstance(value, torch.Tensor) or hasattr(value, "local_shards")
    }


def all_tensors(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything a checkpoint holds. The values share memory with the live ones: filling them restores the run."""
    return {**model_tensors(model), **optimizer_tensors(optimizer)}


def make_state(optimizer: Any) -> None:
    """Brings optimizer state that comes into being at the first step (Adam's) into being, to be filled by a restore.

    It takes a step with zero gradients, which may move weights: restore them afterwards.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, torch.nn.Parameter) and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
