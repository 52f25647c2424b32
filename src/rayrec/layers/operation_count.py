"""Cost of one row in a model, by torch's formulas."""

import logging
import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from rayrec.compat.torch_compat import TorchDispatchMode, base_operator, uncounted_operators

_logger = logging.getLogger(__name__)


def _attention_flop(
    query: Any, key: Any, value: Any, *arguments: Any, out_val: Any = None, **named: Any
) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _linear_flop(
    inputs: Any, weight: Any, *arguments: Any, out_val: Any = None, **named: Any
) -> int:
    return 2 * math.prod(inputs.shape) * weight.shape[0]


_UNCOUNTED = uncounted_operators(_attention_flop, _linear_flop)
"""Formulas for products that torch 2.13 does not count."""


@final
class CountProducts(TorchDispatchMode):
    """Mode that counts the operations of matrix products, convolutions and attention by torch's
    formulas. torch's FlopCounterMode counts the same, but imports torch's compiler, which takes 2 s
    at the start of every run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        """Operation count, two per multiply-add."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Needs the compiler

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        packet = base_operator(function)
        count = _UNCOUNTED.get(packet) or flop_registry.get(packet)
        if count is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=result)
        return result


def counted(model: torch.nn.Module, forward: Callable[[], Any]) -> float | None:
    """Return the multiply-adds of `forward()`, which calls `model`, or None, with a warning, if
    torch cannot count them.
    """
    training = model.training
    model.eval()  # No random numbers and no changes of statistics
    try:
        with CountProducts() as counter:
            forward()
    except Exception as error:  # User models under a dispatch mode can fail, but may still train
        _logger.warning("Cannot count the multiply-adds of a step: %s", error)
        return None
    finally:
        model.train(training)
    return counter.operations / 2
