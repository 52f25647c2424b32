"""DLRM recipes for Criteo's click logs."""

from rayrec.data.encoding.encoder import MultiHot
from rayrec.data.encoding.presets import MLPERF_V1, RAYREC, TORCHREC_2024
from rayrec.datasets.criteo import FULL_DAYS, KAGGLE_SPLIT, SCHEMA, SMALL_DAYS, TERABYTE_SPLIT
from rayrec.datasets.published_files import RemoteFile
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule, SparseOptimizerConfig
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.workload import ClickWorkload
from rayrec.workloads.run_config import DataConfig, EarlyStoppingConfig, ScalingConfig


def criteo_demo(path: str | None = None) -> TrainConfig:
    """Train a small DLRM on any log in Criteo's format: a laptop, a minute or two."""
    return TrainConfig(
        recipe="criteo_demo",
        workload=ClickWorkload(
            schema=SCHEMA,
            preset=RAYREC.replace(split=KAGGLE_SPLIT, min_count=2),
            model=DLRMConfig(
                interaction="dot", embedding_dim=16, bottom_mlp=(128, 64, 16), top_mlp=(128, 64, 1), embedding_penalty=3e-4
            ),
            # With a small eps, rare categories memorize their rows, because their first updates have the full learning rate. This
            # eps damps updates of categories with fewer than a few hundred rows.
            sparse_optimizer=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.1, eps=0.005),
            dense_optimizer=DenseOptimizerConfig(kind="adam", learning_rate=0.001),
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
    """Train the DLRM of the Criteo Kaggle benchmark: dimension 16, 13-512-256-64-16, dot, 512-256-1."""
    return TrainConfig(
        recipe="criteo_kaggle",
        workload=ClickWorkload(
            schema=SCHEMA,
            preset=RAYREC.replace(split=KAGGLE_SPLIT, min_count=10),
            model=DLRMConfig(interaction="dot", embedding_dim=16, bottom_mlp=(512, 256, 64, 16), top_mlp=(512, 256, 1)),
            sparse_optimizer=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.02),
            dense_optimizer=DenseOptimizerConfig(kind="adam", learning_rate=0.001),
            schedule=LearningRateSchedule(decay_fraction=0.8),
        ),
        train_data=DataConfig(path=path, files=("train",)),
        epochs=1,
        batch_size=2048,
        scaling=ScalingConfig(num_workers=2),
        early_stopping=EarlyStoppingConfig(patience=3),
    )


def criteo_kaggle_distilled(path: str | None = None) -> TrainConfig:
    """Train a DLRM a quarter as wide, distilled from a criteo_kaggle model: --workload.teacher.checkpoint RUN."""
    small = DLRMConfig(interaction="dot", embedding_dim=4, bottom_mlp=(64, 16, 4), top_mlp=(128, 64, 1))
    return criteo_kaggle(path).replace(recipe="criteo_kaggle_distilled", workload={"model": small, "teacher": {"weight": 0.5}})


def criteo_small(path: str | None = None) -> TrainConfig:
    """Train DLRM on five days of Criteo 1TB: days 0 to 3 for training, day 23 for evaluation; dimension 64, dot."""
    return _terabyte("criteo_small", path, days=SMALL_DAYS, num_workers=4)


def criteo_full(path: str | None = None) -> TrainConfig:
    """Train DLRM on all 24 days of Criteo 1TB: days 0 to 22 for training, day 23 for evaluation; dimension 64, dot."""
    return _terabyte("criteo_full", path, days=FULL_DAYS, num_workers=8)


def _names(days: tuple[RemoteFile, ...]) -> tuple[str, ...]:
    return tuple(day.name.removesuffix(".gz") for day in days)


def _terabyte(recipe: str, path: str | None, *, days: tuple[RemoteFile, ...], num_workers: int) -> TrainConfig:
    return TrainConfig(
        recipe=recipe,
        workload=ClickWorkload(
            schema=SCHEMA,
            preset=RAYREC.replace(split=TERABYTE_SPLIT, min_count=10, max_num_embeddings=40_000_000),
            model=DLRMConfig(interaction="dot", embedding_dim=64, bottom_mlp=(512, 256, 64), top_mlp=(512, 512, 256, 1)),
            sparse_optimizer=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.02),
            dense_optimizer=DenseOptimizerConfig(kind="adam", learning_rate=0.001),
            schedule=LearningRateSchedule(decay_fraction=0.8),
        ),
        train_data=DataConfig(path=path, files=_names(days)),
        epochs=1,
        batch_size=4096,
        scaling=ScalingConfig(num_workers=num_workers, use_gpu=True),
        early_stopping=EarlyStoppingConfig(patience=3),
    )


def mlperf_dlrm(path: str | None = None) -> TrainConfig:
    """Train MLPerf's first DLRM: mlperf-v1 preset with ids modulo 40 million, dimension 128, dot, SGD 1.0, global batch 2048."""
    return TrainConfig(
        recipe="mlperf_dlrm",
        workload=ClickWorkload(
            schema=SCHEMA,
            preset=MLPERF_V1.replace(split=TERABYTE_SPLIT.replace(test_first=True), token_modulo=40_000_000),
            model=DLRMConfig(interaction="dot", embedding_dim=128, bottom_mlp=(512, 256, 128), top_mlp=(1024, 1024, 512, 256, 1)),
            sparse_optimizer=SparseOptimizerConfig(kind="sgd", learning_rate=1.0),
            dense_optimizer=DenseOptimizerConfig(kind="sgd", learning_rate=1.0),
        ),
        train_data=DataConfig(path=path, files=_names(FULL_DAYS)),
        epochs=1,
        batch_size=256,
        evaluate_every=102_400,
        scaling=ScalingConfig(num_workers=8, use_gpu=True),
    )


def mlperf_dcnv2(path: str | None = None) -> TrainConfig:
    """Train MLPerf's DLRM-DCNv2: ids modulo 40 million as synthetic bags of 214 ids per row, Adagrad 0.005, batch 65536."""
    return TrainConfig(
        recipe="mlperf_dcnv2",
        workload=ClickWorkload(
            schema=SCHEMA,
            preset=TORCHREC_2024.replace(split=TERABYTE_SPLIT, min_count=1, max_num_embeddings=40_000_000, multi_hot=MultiHot()),
            model=DLRMConfig(
                interaction="cross", embedding_dim=128, bottom_mlp=(512, 256, 128), top_mlp=(1024, 1024, 512, 256, 1)
            ),
            sparse_optimizer=SparseOptimizerConfig(kind="adagrad", learning_rate=0.005),
            dense_optimizer=DenseOptimizerConfig(kind="adagrad", learning_rate=0.005),
        ),
        train_data=DataConfig(path=path, files=_names(FULL_DAYS)),
        epochs=1,
        batch_size=8192,
        evaluate_every=3_200,
        scaling=ScalingConfig(num_workers=8, use_gpu=True),
    )


def criteo_ensemble(path: str | None = None) -> TrainConfig:
    """Train a small DLRM, a FinalNet and a logistic regression as one model, on any log in Criteo's format."""
    from rayrec.models.ranking.finalnet import FinalNetConfig
    from rayrec.models.ranking.linear import LinearConfig

    demo = criteo_demo(path)
    assert isinstance(demo.workload, ClickWorkload)
    model = EnsembleConfig.of_kinds((DLRMConfig, FinalNetConfig, LinearConfig), demo.workload.model)
    return demo.replace(recipe="criteo_ensemble", workload={"model": model})


RECIPES = (
    criteo_demo,
    criteo_kaggle,
    criteo_kaggle_distilled,
    criteo_small,
    criteo_full,
    criteo_ensemble,
    mlperf_dlrm,
    mlperf_dcnv2,
)
PUBLISHED = {
    "criteo_kaggle": "criteo_kaggle",
    "criteo_kaggle_distilled": "criteo_kaggle",
    "criteo_small": "criteo_small",
    "criteo_full": "criteo_full",
    "mlperf_dlrm": "criteo_full",
    "mlperf_dcnv2": "criteo_full",
}
"""Published data set of each recipe."""
