"""Parts of a training loop: a setup without a model, and stop signals."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rayrec.workloads.step_timer import StepTimer


@dataclass
class StopSignal:
    """Stop request or preemption notice after some steps or scored batches. By default none."""

    trained: Callable[[], int] = int
    scored: Callable[[], int] = int
    stop_at: float = math.inf
    preempt_at: float = math.inf
    stop_after_scored: float = math.inf
    preempt_after_scored: float = math.inf
    reported: bool = False

    def poll(self) -> tuple[bool, bool]:
        trained = self.trained()
        scored = self.scored()
        return (
            trained >= self.stop_at or self.urgent(),
            trained >= self.preempt_at or scored >= self.preempt_after_scored,
        )

    def urgent(self) -> bool:
        return self.scored() >= self.stop_after_scored

    def preempted(self) -> bool:
        self.reported, before = True, self.reported
        return not before


def fake_setup(pipeline: Any, **parts: Any) -> Any:
    made = {
        "multiply_adds_per_row": None,
        "peak_multiply_adds_per_s": None,
        "model": SimpleNamespace(train=lambda: None, eval=lambda: None),
        "optimizer": SimpleNamespace(param_groups=[{"lr": 0.25}, {"lr": 0.5}]),
        "begin_step": lambda step, total: None,
        "make_metrics": lambda: SimpleNamespace(
            update=lambda output: None, compute=lambda: {"auroc": 0.5}
        ),
        "eval_batches": {"validation": lambda: iter(())},
    }
    return SimpleNamespace(
        **{
            "pipeline": pipeline,
            "clock": StepTimer(),
            **made,
            **parts,
        }
    )
