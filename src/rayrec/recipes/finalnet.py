"""FinalNet recipe for Criteo's click logs."""

from rayrec.data.encoding.presets import FUXICTR_X4
from rayrec.datasets.criteo import KAGGLE_SPLIT, SCHEMA
from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule, SparseOptimizerConfig
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.workload import ClickWorkload
from rayrec.workloads.run_config import DataConfig, EarlyStoppingConfig


def criteo_finalnet(path: str | None = None) -> TrainConfig:
    """Train FinalNet of the Criteo Kaggle benchmark: dimension 16, towers 400-400, a feature gate, bucketized integers."""
    from rayrec.models.ranking.finalnet import FinalNetConfig

    return TrainConfig(
        recipe="criteo_finalnet",
        workload=ClickWorkload(
            schema=SCHEMA,
            preset=FUXICTR_X4.replace(split=KAGGLE_SPLIT),
            model=FinalNetConfig(embedding_dim=16),
            sparse_optimizer=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05, eps=0.005),
            dense_optimizer=DenseOptimizerConfig(kind="adam", learning_rate=0.001),
            schedule=LearningRateSchedule(decay_fraction=0.8),
        ),
        train_data=DataConfig(path=path, files=("train",)),
        epochs=1,
        batch_size=4096,
        early_stopping=EarlyStoppingConfig(patience=3),
    )


RECIPES = (criteo_finalnet,)
PUBLISHED = {"criteo_finalnet": "criteo_kaggle"}
