"""Train and serve models from raw logs on Ray. Names are imported on first use, so `import rayrec`
does not load torch.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayrec import recipes
    from rayrec.cluster.restart_policy import SuperviseConfig
    from rayrec.commands.data import (
        adopt,
        draft_schema,
        fetch,
        generate,
        preprocess,
        sequences,
        split,
        validate,
        vocabulary,
    )
    from rayrec.commands.inference import compare, ensemble, evaluate, export, predict, predict_to
    from rayrec.commands.runs import doctor, profile, report
    from rayrec.commands.serving import serving
    from rayrec.commands.train import plan, supervise, train, tune
    from rayrec.config import InputError
    from rayrec.data.frames import transform
    from rayrec.data.numbered_rows import ArrayRows
    from rayrec.inference.config import ComparisonGates
    from rayrec.models.base import ClickModelConfig, ModelInputs
    from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule
    from rayrec.prepare.config import PreparationConfig
    from rayrec.prepare.validate import Gates
    from rayrec.schema import Schema
    from rayrec.workloads.base import TrainConfig
    from rayrec.workloads.data_parallel.workload import DataParallelWorkload
    from rayrec.workloads.run_config import DataConfig, ScalingConfig

__version__ = "0.1.0"
__all__ = [
    "ArrayRows",
    "ClickModelConfig",
    "ComparisonGates",
    "DataConfig",
    "DataParallelWorkload",
    "DenseOptimizerConfig",
    "Gates",
    "InputError",
    "LearningRateSchedule",
    "ModelInputs",
    "PreparationConfig",
    "ScalingConfig",
    "Schema",
    "SuperviseConfig",
    "TrainConfig",
    "adopt",
    "compare",
    "doctor",
    "draft_schema",
    "ensemble",
    "evaluate",
    "export",
    "fetch",
    "generate",
    "plan",
    "predict",
    "predict_to",
    "preprocess",
    "profile",
    "recipes",
    "report",
    "sequences",
    "serving",
    "split",
    "supervise",
    "train",
    "transform",
    "tune",
    "validate",
    "vocabulary",
]

_RENAMED = {"ReplicatedWorkload": "DataParallelWorkload"}
"""New names by old names, which are accepted for one release."""


@functools.cache
def _homes() -> dict[str, str]:
    """Return the module of each public name, from the imports for type checkers above."""
    import ast

    with open(__file__) as file:
        nodes = ast.walk(ast.parse(file.read()))
    return {
        alias.name: str(node.module)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        from rayrec.config import renamed

        warnings.warn(
            renamed(f"rayrec.{name}", f"rayrec.{_RENAMED[name]}"),
            FutureWarning,
            stacklevel=2,
        )
        name = _RENAMED[name]
    if name not in __all__:
        raise AttributeError(f"module 'rayrec' has no attribute {name!r}")
    if name == "recipes":
        return importlib.import_module("rayrec.recipes")
    return getattr(importlib.import_module(_homes()[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
