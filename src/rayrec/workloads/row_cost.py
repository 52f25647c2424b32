"""What one row costs a replicated model to compute, as torch counts it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from rayrec.batch import TensorBatch
from rayrec.data.rows import RowSource
from rayrec.workloads.base import WorkerContext
from rayrec.workloads.replicated import ReplicatedWorkload

_logger = logging.getLogger(__name__)


def _attention_flop(query: Any, key: Any, value: Any, *arguments: Any, out_shape: Any = None, **named: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _linear_flop(inputs: Any, weight: Any, *arguments: Any, out_shape: Any = None, **named: Any) -> int:
    return 2 * math.prod(inputs) * weight[0]


_UNCOUNTED: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop,
    **({torch.ops.mkldnn._linear_pointwise: _linear_flop} if torch.backends.mkldnn.is_available() else {}),
}
"""Products that torch 2.13 does not count on its own: a function of the arguments' shapes."""


@torch.no_grad()
def multiply_adds_per_row(
    workload: ReplicatedWorkload, model: torch.nn.Module, sets: Mapping[str, RowSource], context: WorkerContext
) -> float | None:
    """Multiply-adds of one row's forward pass in matrix products, convolutions and attention, as torch counts them; None where
    no evaluation set has a row to measure with, and with a warning where torch cannot count."""
    source = next((source for source in sets.values() if len(source)), None)
    if source is None:
        return None
    try:
        return _counted_multiply_adds(workload, model, source, context)
    except Exception as error:  # anybody's model under a mode that catches its operations: no reason not to train it
        _logger.warning("what a step computes is not known (%s)", error)
        return None


def _counted_multiply_adds(
    workload: ReplicatedWorkload, model: torch.nn.Module, source: RowSource, context: WorkerContext
) -> float:
    batch = TensorBatch(
        {name: torch.from_numpy(array) for name, array in source.read(np.zeros(1, np.int64)).items()}, 1.0
    )
    counter = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
    model.eval()  # which draws nothing by chance and leaves no statistics behind
    try:
        with counter:
            workload.measure(model, batch.to(context.device).tensors)
    finally:
        model.train()
    return counter.get_total_flops() / 2
