"""Recipes: functions that return the complete configuration of a run. One file a family."""

from __future__ import annotations

from collections.abc import Callable

from rayrec.recipes.criteo import criteo_demo, criteo_kaggle
from rayrec.workloads.base import TrainConfig

__all__ = ["ALL", "criteo_demo", "criteo_kaggle"]

ALL: dict[str, Callable[[], TrainConfig]] = {recipe.__name__: recipe for recipe in (criteo_demo, criteo_kaggle)}
"""Every recipe by its name."""
