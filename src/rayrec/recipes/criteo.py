"""Recipes for Criteo's click logs."""

from typing import Literal

from rayrec.data.encoding.encoder import MultiHot
from rayrec.data.encoding.presets import (
    FUXICTR_X4,
    MLPERF_V1,
    RAY_TEMPLATE,
    RAYREC,
    TERABYTE_CATEGORIES,
    TORCHREC_2024,
    Preset,
)
from rayrec.datasets.criteo import FULL_DAYS, KAGGLE_SPLIT, SCHEMA, SMALL_DAYS, TERABYTE_SPLIT
from rayrec.datasets.published_files import RemoteFile
from rayrec.models.base import ClickModelConfig, TableInit
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.optim.config import (
    DenseOptimizerConfig,
    LearningRateSchedule,
    PlateauConfig,
    SparseOptimizerConfig,
)
from rayrec.schema import Schema
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.workload import ClickWorkload
from rayrec.workloads.run_config import DataConfig, EarlyStoppingConfig, ScalingConfig


def criteo_demo(path: str | None = None) -> TrainConfig:
    """Train a small DLRM on any log in Criteo's format: a laptop, a minute or two."""
    model = DLRMConfig(
        interaction="dot",
        embedding_dim=16,
        bottom_mlp=(128, 64, 16),
        top_mlp=(128, 64, 1),
        embedding_penalty=3e-4,
        first_order=True,
    )
    preset = RAYREC.replace(split=KAGGLE_SPLIT, min_count=2)
    # With a small eps, rare categories memorize their rows, because their first updates have the
    # full learning rate. This eps damps updates of categories with fewer than a few hundred rows.
    tables = SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.1, eps=0.005)
    config = adam_config("criteo_demo", path, preset, model, tables)
    return config.replace(
        epochs=2, batch_size=1024, min_steps_per_epoch=128, scaling={"num_workers": 2}
    )


def criteo_kaggle(path: str | None = None) -> TrainConfig:
    """Train the DLRM of the Criteo Kaggle benchmark: dimension 16, 13-512-256-64-16, dot,
    512-256-1.
    """
    model = DLRMConfig(
        interaction="dot", embedding_dim=16, bottom_mlp=(512, 256, 64, 16), top_mlp=(512, 256, 1)
    )
    config = adam_config(
        "criteo_kaggle", path, RAYREC.replace(split=KAGGLE_SPLIT, min_count=10), model
    )
    return config.replace(
        train_data={"files": ("train",)}, batch_size=2048, scaling={"num_workers": 2}
    )


_TABLES = SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.02)


def adam_config(
    recipe: str,
    path: str | None,
    preset: Preset,
    model: ClickModelConfig,
    tables: SparseOptimizerConfig = _TABLES,
    *,
    schema: Schema = SCHEMA,
) -> TrainConfig:
    """Configure a click model with Adam for the network, falling learning rates and early
    stopping.
    """
    return TrainConfig(
        recipe=recipe,
        workload=ClickWorkload(
            schema=schema,
            preset=preset,
            model=model,
            sparse_optimizer=tables,
            dense_optimizer=DenseOptimizerConfig(kind="adam", learning_rate=0.001),
            schedule=LearningRateSchedule(decay_fraction=0.8),
        ),
        train_data=DataConfig(path=path),
        early_stopping=EarlyStoppingConfig(patience=3),
    )


def criteo_kaggle_distilled(path: str | None = None) -> TrainConfig:
    """Train a DLRM a quarter as wide, distilled from a criteo_kaggle model:
    --workload.teacher.checkpoint RUN.
    """
    small = DLRMConfig(
        interaction="dot", embedding_dim=4, bottom_mlp=(64, 16, 4), top_mlp=(128, 64, 1)
    )
    return criteo_kaggle(path).replace(
        recipe="criteo_kaggle_distilled", workload={"model": small, "teacher": {"weight": 0.5}}
    )


def criteo_small(path: str | None = None) -> TrainConfig:
    """Train DLRM on five days of Criteo 1TB: days 0 to 3 for training, day 23 for evaluation;
    dimension 64, dot.
    """
    return _terabyte("criteo_small", path, days=SMALL_DAYS, num_workers=4)


def criteo_full(path: str | None = None) -> TrainConfig:
    """Train DLRM on all 24 days of Criteo 1TB: days 0 to 22 for training, day 23 for evaluation;
    dimension 64, dot.
    """
    return _terabyte("criteo_full", path, days=FULL_DAYS, num_workers=8)


def _names(days: tuple[RemoteFile, ...]) -> tuple[str, ...]:
    return tuple(day.name.removesuffix(".gz") for day in days)


def _terabyte(
    recipe: str, path: str | None, *, days: tuple[RemoteFile, ...], num_workers: int
) -> TrainConfig:
    preset = RAYREC.replace(split=TERABYTE_SPLIT, min_count=10, max_num_embeddings=40_000_000)
    model = DLRMConfig(
        interaction="dot", embedding_dim=64, bottom_mlp=(512, 256, 64), top_mlp=(512, 512, 256, 1)
    )
    config = adam_config(recipe, path, preset, model)
    scaling = {"num_workers": num_workers, "use_gpu": True}
    return config.replace(train_data={"files": _names(days)}, batch_size=4096, scaling=scaling)


def mlperf_dlrm(path: str | None = None) -> TrainConfig:
    """Train MLPerf's first DLRM: mlperf-v1 preset with ids modulo 40 million, dimension 128, dot,
    SGD 1.0, global batch 2048.
    """
    preset = MLPERF_V1.replace(
        split=TERABYTE_SPLIT.replace(test_first=True), token_modulo=40_000_000
    )
    return _full_network_recipe("mlperf_dlrm", path, preset, "dot", "sgd", 1.0).replace(
        batch_size=256, evaluate_every=102_400
    )


def mlperf_dcnv2(path: str | None = None) -> TrainConfig:
    """Train MLPerf's DLRM-DCNv2: ids modulo 40 million as synthetic bags of 214 ids per row,
    Adagrad 0.005, batch 65536.
    """
    preset = TORCHREC_2024.replace(
        split=TERABYTE_SPLIT, min_count=1, max_num_embeddings=40_000_000, multi_hot=MultiHot()
    )
    config = _full_network_recipe("mlperf_dcnv2", path, preset, "cross", "adagrad", 0.005)
    return config.replace(batch_size=8192, evaluate_every=3_200)


def ray_dlrm(path: str | None = None) -> TrainConfig:
    """Train the DLRM of Ray's notebook (its RecsysConfig): ray-template preset, dimension 128,
    cross, Adagrad 0.005, 8 GPUs.
    """
    config = _full_network_recipe(
        "ray_dlrm", path, RAY_TEMPLATE.replace(split=TERABYTE_SPLIT), "cross", "adagrad", 0.005
    )
    return config.replace(
        batch_size=4096,
        evaluate_every=1000,
        log_every=100,
        failure={"max_failures": 2},
        checkpoint={"num_to_keep": 1},
    )


def torchrec_dlrm_mlperf(path: str | None = None) -> TrainConfig:
    """Train torchrec_dlrm's configuration MLPerf: tables of at most 40 million rows, 97.36 GiB, SGD
    5.0, 8 GPUs.
    """
    return _torchrec(
        "torchrec_dlrm_mlperf", path, max_rows=40_000_000, batch_size=8192, num_workers=8
    )


def torchrec_dlrm_mlperf_x2(path: str | None = None) -> TrainConfig:
    """Train torchrec_dlrm's configuration MLPerfx2: tables of at most 80 million rows, 174.03 GiB,
    SGD 5.0, 16 GPUs.
    """
    return _torchrec(
        "torchrec_dlrm_mlperf_x2", path, max_rows=80_000_000, batch_size=4096, num_workers=16
    )


def torchrec_dlrm_full(path: str | None = None) -> TrainConfig:
    """Train torchrec_dlrm's configuration Full Size: a table row for each category, 420.94 GiB, SGD
    5.0, 80 GPUs.
    """
    return _torchrec("torchrec_dlrm_full", path, max_rows=None, batch_size=819, num_workers=80)


def _torchrec(
    recipe: str, path: str | None, *, max_rows: int | None, batch_size: int, num_workers: int
) -> TrainConfig:
    rows = tuple(min(rows, max_rows or rows) for rows in TERABYTE_CATEGORIES)
    preset = MLPERF_V1.replace(split=TERABYTE_SPLIT, token_modulo=max_rows, num_embeddings=rows)
    config = _full_network_recipe(recipe, path, preset, "dot", "sgd", 5.0)
    return config.replace(
        batch_size=batch_size, evaluations_per_epoch=1, scaling={"num_workers": num_workers}
    )


def _full_network_recipe(
    recipe: str,
    path: str | None,
    preset: Preset,
    interaction: Literal["dot", "cross"],
    kind: Literal["sgd", "adagrad"],
    learning_rate: float,
) -> TrainConfig:
    """Configure a DLRM of MLPerf's size on all days of Criteo 1TB, on eight GPUs."""
    return TrainConfig(
        recipe=recipe,
        workload=ClickWorkload(
            schema=SCHEMA,
            preset=preset,
            model=DLRMConfig(
                interaction=interaction,
                embedding_dim=128,
                bottom_mlp=(512, 256, 128),
                top_mlp=(1024, 1024, 512, 256, 1),
            ),
            sparse_optimizer=SparseOptimizerConfig(kind=kind, learning_rate=learning_rate),
            dense_optimizer=DenseOptimizerConfig(kind=kind, learning_rate=learning_rate),
        ),
        train_data=DataConfig(path=path, files=_names(FULL_DAYS)),
        scaling=ScalingConfig(num_workers=8, use_gpu=True),
    )


def criteo_ensemble(path: str | None = None) -> TrainConfig:
    """Train a small DLRM, a FinalNet and a logistic regression as one model, on any log in Criteo's
    format.
    """
    from rayrec.models.ranking.finalnet import FinalNetConfig
    from rayrec.models.ranking.linear import LinearConfig

    demo = criteo_demo(path)
    assert isinstance(demo.workload, ClickWorkload)
    model = EnsembleConfig.from_kinds(
        (DLRMConfig, FinalNetConfig, LinearConfig), demo.workload.model
    )
    return demo.replace(recipe="criteo_ensemble", workload={"model": model})


# Models with the settings of BARS and the DCNv3 authors for Criteo_x4 evaluate on the last rows in
# log order, while the published results use a random split.


def criteo_finalnet(path: str | None = None) -> TrainConfig:
    """Train FinalNet of the Criteo Kaggle benchmark: dimension 16, towers 400-400, a feature gate,
    bucketized integers.
    """
    from rayrec.models.ranking.finalnet import FinalNetConfig

    preset = FUXICTR_X4.replace(split=KAGGLE_SPLIT)
    model = FinalNetConfig(embedding_dim=16)
    tables = SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05, eps=0.005)
    config = adam_config("criteo_finalnet", path, preset, model, tables)
    return config.replace(train_data={"files": ("train",)}, batch_size=4096)


def criteo_finalnet_x4(path: str | None = None) -> TrainConfig:
    """Train FinalNet with Criteo_x4's settings: towers 1000-1000-1000 and 512, a feature gate,
    dropout 0.4, no tower losses.
    """
    from rayrec.models.ranking.finalnet import FinalNetConfig

    model = FinalNetConfig(
        first_tower=(1000, 1000, 1000),
        second_tower=(512,),
        first_dropout=0.4,
        second_dropout=0.4,
        # The published result used FuxiCTR 2.2, which defined these losses but did not add them.
        tower_losses=False,
    )
    return _x4("criteo_finalnet_x4", path, model, batch_size=8192, seed=2019)


def criteo_finalmlp(path: str | None = None) -> TrainConfig:
    """Train FinalMLP with the settings of Criteo_x4: MLPs with five layers of 1000 and one of 500,
    50 heads, no gates.
    """
    from rayrec.models.ranking.finalmlp import FinalMLPConfig

    model = FinalMLPConfig(
        first_mlp=(1000, 1000, 1000, 1000, 1000),
        second_mlp=(500,),
        first_dropout=0.2,
        second_dropout=0.1,
        heads=50,
    )
    return _x4("criteo_finalmlp", path, model, batch_size=10_000, seed=2019)


def criteo_dcnv3(path: str | None = None) -> TrainConfig:
    """Train DCNv3 with the settings of Criteo_x4: 3 deep and 4 shallow layers, layer norm, one
    head.
    """
    from rayrec.models.ranking.dcnv3 import DCNv3Config

    model = DCNv3Config(
        deep_layers=3, shallow_layers=4, deep_dropout=0.1, shallow_dropout=0.2, heads=1
    )
    return _x4("criteo_dcnv3", path, model, batch_size=4096, seed=2024)


def _x4(
    recipe: str, path: str | None, model: ClickModelConfig, *, batch_size: int, seed: int
) -> TrainConfig:
    """Configure training as in FuxiCTR: Adam on tables and network, an L2 penalty on full tables,
    and joint gradient clipping. Evaluates once per epoch. An epoch without improvement divides the
    learning rates by ten. Two in a row end training.
    """
    tables = SparseOptimizerConfig(kind="adam", learning_rate=0.001, weight_decay=1e-5)
    start = TableInit(kind="normal", std=1e-4)
    schedule = LearningRateSchedule()
    return adam_config(recipe, path, FUXICTR_X4.replace(split=KAGGLE_SPLIT), model, tables).replace(
        workload={"table_start": start, "schedule": schedule, "max_gradient_norm": 10.0},
        train_data={"files": ("train",)},
        epochs=100,  # Early stopping ends training before
        batch_size=batch_size,
        evaluations_per_epoch=1,
        seed=seed,
        plateau=PlateauConfig(patience=1, factor=0.1),
        early_stopping=EarlyStoppingConfig(patience=2, min_improvement=1e-6),
    )


_KAGGLE = (criteo_kaggle, criteo_kaggle_distilled)
_TERABYTE = (
    criteo_full,
    mlperf_dlrm,
    mlperf_dcnv2,
    ray_dlrm,
    torchrec_dlrm_mlperf,
    torchrec_dlrm_mlperf_x2,
    torchrec_dlrm_full,
)
_MODELS = (criteo_finalnet, criteo_finalnet_x4, criteo_finalmlp, criteo_dcnv3)
RECIPES = (
    criteo_demo,
    *_KAGGLE,
    criteo_small,
    *_TERABYTE[:1],
    criteo_ensemble,
    *_TERABYTE[1:],
    *_MODELS,
)
PUBLISHED = {
    "criteo_small": "criteo_small",
    **{recipe.__name__: "criteo_kaggle" for recipe in (*_KAGGLE, *_MODELS)},
    **{recipe.__name__: "criteo_full" for recipe in _TERABYTE},
}
"""Published data set of each recipe."""
