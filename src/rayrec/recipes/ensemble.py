"""Models of several kinds as one, on Criteo's click logs."""

from __future__ import annotations

from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.recipes.criteo import criteo_demo
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys import ClickWorkload


def criteo_ensemble(path: str | None = None) -> TrainConfig:
    """A small DLRM and a FinalNet as one model, on any log in Criteo's format: the best scores on thousands of rows."""
    demo = criteo_demo(path)
    assert isinstance(demo.workload, ClickWorkload)
    model = EnsembleConfig.in_place_of(demo.workload.model)
    return demo.replace(recipe="criteo_ensemble", workload={"model": model})


RECIPES = (criteo_ensemble,)
