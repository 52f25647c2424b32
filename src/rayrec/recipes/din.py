"""DIN on a log with the items that a user clicked before."""

from __future__ import annotations

from rayrec.data.presets import RAYREC
from rayrec.optim import DenseOptimizerConfig, LearningRateSchedule, SparseOptimizerConfig
from rayrec.schema import Feature, Schema
from rayrec.workloads.base import DataConfig, EarlyStoppingConfig, TrainConfig
from rayrec.workloads.recsys import ClickWorkload

PLACEHOLDER = Schema(
    label="label",
    sparse=("user", "item", "history"),
    lists=("history",),
    features=(Feature(name="history", vocabulary="item", max_length=50),),
    tokens="any",
    delimiter=",",
)
"""Stands for the user's own schema, which `--schema FILE` brings."""


def clicks_din(path: str | None = None, schema: Schema = PLACEHOLDER) -> TrainConfig:
    """DIN on your own log, whose schema file names a list of earlier items: --schema FILE."""
    from rayrec.models.ranking.din import DINConfig

    return TrainConfig(
        recipe="clicks_din",
        workload=ClickWorkload(
            schema=schema,
            preset=RAYREC,
            model=DINConfig(embedding_dim=16, attention=(64,), mlp=(128, 64)),
            sparse_optimizer=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.1, eps=0.005),
            dense_optimizer=DenseOptimizerConfig(kind="adam", learning_rate=0.003),
            schedule=LearningRateSchedule(decay_fraction=0.8),
        ),
        train_data=DataConfig(path=path),
        epochs=3,
        batch_size=1024,
        min_steps_per_epoch=128,
        early_stopping=EarlyStoppingConfig(patience=3),
    )


RECIPES = (clicks_din,)
