"""Optimizers of networks and tables, and their configurations."""

from rayrec.optim.config import (
    DenseOptimizerConfig,
    LearningRateSchedule,
    NamedOptimizer,
    PlateauConfig,
    SparseOptimizerConfig,
)

__all__ = [
    "DenseOptimizerConfig",
    "LearningRateSchedule",
    "NamedOptimizer",
    "PlateauConfig",
    "SparseOptimizerConfig",
]
