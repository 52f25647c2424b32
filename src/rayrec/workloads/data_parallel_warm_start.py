"""The start of a data-parallel model with the weights of another run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rayrec.checkpoint import Checkpoint, untied
from rayrec.workloads.base import RunContext, WarmStart
from rayrec.workloads.stored_settings import require_same_optimizer, require_same_weights, stored_settings

if TYPE_CHECKING:
    from rayrec.workloads.data_parallel import DataParallelWorkload


def warm_start(workload: DataParallelWorkload, context: RunContext, prepared: Any, checkpoint: Checkpoint) -> WarmStart:
    """See `Workload.warm_start`."""
    require_same_optimizer(
        checkpoint, stored_settings(checkpoint), "optimizer", workload.optimizer, fields=("kind", "momentum")
    )
    with torch.random.fork_rng(devices=[]):
        weights = untied(workload.build(prepared).state_dict())
    wanted = {name: list(tensor.shape) for name, tensor in weights.items()}
    require_same_weights(checkpoint, checkpoint.manifest()["tensors"], wanted)
    return WarmStart(checkpoint.path, context.engine.share({}), {"weights": len(wanted)})
