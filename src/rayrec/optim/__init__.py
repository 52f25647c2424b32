"""Optimizers of networks and tables, and their settings."""

from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule, PlateauConfig, SparseOptimizerConfig

__all__ = ["DenseOptimizerConfig", "LearningRateSchedule", "PlateauConfig", "SparseOptimizerConfig"]
