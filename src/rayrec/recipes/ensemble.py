"""Models of several kinds as one, on Criteo's click logs."""

from __future__ import annotations

from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.recipes.criteo import criteo_demo
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys import ClickWorkload


def criteo_ensemble(path: str | None = None) -> TrainConfig:
    """A small DLRM, a FinalNet and a logistic regression as one model, on any log in Criteo's format of some thousand rows."""
    from rayrec.models.ranking.finalnet import FinalNetConfig
    from rayrec.models.ranking.linear import LinearConfig

    demo = criteo_demo(path)
    assert isinstance(demo.workload, ClickWorkload)
    model = EnsembleConfig.of_kinds((DLRMConfig, FinalNetConfig, LinearConfig), demo.workload.model)
    return demo.replace(recipe="criteo_ensemble", workload={"model": model})


RECIPES = (criteo_ensemble,)
