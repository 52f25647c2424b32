"""DLRM on Criteo's click logs."""

from __future__ import annotations

from rayrec.data.counting import VocabularyConfig
from rayrec.datasets.criteo import KAGGLE_SPLIT, SCHEMA
from rayrec.models.dlrm import DLRMConfig
from rayrec.optim import DenseOptimizerConfig, LearningRateSchedule, SparseOptimizerConfig
from rayrec.workloads.base import DataConfig, EarlyStoppingConfig, ScalingConfig, TrainConfig
from rayrec.workloads.recsys import ClickWorkload


def criteo_demo(path: str | None = None) -> TrainConfig:
    """A small DLRM on any log in Criteo's format: a laptop, a minute or two."""
    return TrainConfig(
        recipe="criteo_demo",
        workload=ClickWorkload(
            schema=SCHEMA,
            split=KAGGLE_SPLIT,
            vocabulary=VocabularyConfig(min_count=2),
            model=DLRMConfig(
                interaction="dot",
                embedding_dim=16,
                bottom_mlp=(128, 64, 16),
                top_mlp=(256, 128, 1),
                embedding_penalty=3e-3,
            ),
            sparse_optimizer=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05),
            dense_optimizer=DenseOptimizerConfig(kind="adam", learning_rate=0.002),
            schedule=LearningRateSchedule(decay_fraction=0.8),
        ),
        train_data=DataConfig(path=path),
        epochs=2,
        batch_size=1024,
        min_steps_per_epoch=128,
        scaling=ScalingConfig(num_workers=2),
        early_stopping=EarlyStoppingConfig(patience=3),
    )


def criteo_kaggle(path: str | None = None) -> TrainConfig:
    """DLRM of the Criteo Kaggle benchmark: dimension 16, 13-512-256-64-16, dot, 512-256-1."""
    return TrainConfig(
        recipe="criteo_kaggle",
        workload=ClickWorkload(
            schema=SCHEMA,
            split=KAGGLE_SPLIT,
            vocabulary=VocabularyConfig(min_count=10),
            model=DLRMConfig(interaction="dot", embedding_dim=16, bottom_mlp=(512, 256, 64, 16), top_mlp=(512, 256, 1)),
            sparse_optimizer=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.02),
            dense_optimizer=DenseOptimizerConfig(kind="adam", learning_rate=0.001),
            schedule=LearningRateSchedule(decay_fraction=0.8),
        ),
        train_data=DataConfig(path=path),
        epochs=1,
        batch_size=2048,
        scaling=ScalingConfig(num_workers=2),
        early_stopping=EarlyStoppingConfig(patience=3),
    )
