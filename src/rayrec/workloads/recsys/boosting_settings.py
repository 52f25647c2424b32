"""Settings of runs that train boosted trees (`ClickModelConfig.BOOSTED`): defaults, and what is
rejected before anything starts.
"""

from __future__ import annotations

from typing import Any, Final

from rayrec.config import InputError
from rayrec.imports import require
from rayrec.models.base import ClickModelConfig
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.workloads.base import TrainConfig

_EVALUATE_EVERY: Final = 10
"""Trees between two evaluations."""


def with_rounds(config: TrainConfig, model: ClickModelConfig) -> TrainConfig:
    """Return the configuration with a step per tree of a boosted model, and an evaluation after
    every ten. Other models keep theirs.
    """
    if not model.BOOSTED:
        return config
    steps = config.steps or _max_trees(model)
    return config.replace(steps=steps, evaluate_every=config.evaluate_every or _EVALUATE_EVERY)


def check_boosting(config: TrainConfig, model: ClickModelConfig) -> None:
    """Check that trees can be trained with the other settings and packages. Other models pass.
    Raises InputError.
    """
    if isinstance(model, EnsembleConfig) and any(member.BOOSTED for member in model.models):
        raise InputError(
            "model: LightGBM trains no ensemble with networks. Train each model alone, with one "
            "Preprocessor (--workload.preprocessor), and merge them with rayrec ensemble."
        )
    if not model.BOOSTED:
        return
    require("lightgbm", extra="lightgbm")
    trees = _max_trees(model)
    if config.steps is not None and config.steps > trees:
        raise InputError(
            f"steps: must be at most workload.model.trees {trees}, because a step is a tree, got "
            f"{config.steps}. Raise --workload.model.trees."
        )
    required: tuple[tuple[str, Any, Any], ...] = (
        ("scaling.num_workers", config.scaling.max_workers, 1),
        ("scaling.use_gpu", config.scaling.use_gpu, False),
        ("plateau.patience", config.plateau.patience, 0),
        ("init_from", config.init_from, None),
    )
    for name, value, only in required:
        if value != only:
            raise InputError(
                f"{name}: must be {only} for LightGBM, which trains all trees in one worker on "
                f"CPUs, at one learning rate, got {value}. Set it."
            )


def reject_plan(model: ClickModelConfig) -> None:
    """Check that a model has a plan: sharded tables and measured speed. Raises InputError for
    trees.
    """
    if model.BOOSTED:
        raise InputError(
            "plan: LightGBM's trees are not sharded. One worker on CPUs needs a byte per row and "
            "column, 60 bytes per row, and 56 bytes per category."
        )


def _max_trees(model: Any) -> int:
    trees: int = model.trees
    return trees
