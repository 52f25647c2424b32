"""Recipes for Criteo's click logs of models other than DLRM. Those with the settings of BARS and the DCNv3 authors for Criteo_x4
evaluate on the last rows in log order, while the published results use a random split."""

from rayrec.data.encoding.presets import FUXICTR_X4
from rayrec.datasets.criteo import KAGGLE_SPLIT, SCHEMA
from rayrec.models.base import ClickModelConfig, TableInit
from rayrec.optim.config import DenseOptimizerConfig, PlateauConfig, SparseOptimizerConfig
from rayrec.recipes.criteo import adam_config
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.workload import ClickWorkload
from rayrec.workloads.run_config import DataConfig, EarlyStoppingConfig

_MAX_EPOCHS = 100
"""Epoch limit. Early stopping ends training before."""


def criteo_finalnet(path: str | None = None) -> TrainConfig:
    """Train FinalNet of the Criteo Kaggle benchmark: dimension 16, towers 400-400, a feature gate, bucketized integers."""
    from rayrec.models.ranking.finalnet import FinalNetConfig

    preset, model = FUXICTR_X4.replace(split=KAGGLE_SPLIT), FinalNetConfig(embedding_dim=16)
    tables = SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05, eps=0.005)
    config = adam_config("criteo_finalnet", path, preset, model, tables)
    return config.replace(train_data={"files": ("train",)}, batch_size=4096)


def criteo_finalnet_x4(path: str | None = None) -> TrainConfig:
    """Train FinalNet with Criteo_x4's settings: towers 1000-1000-1000 and 512, a feature gate, dropout 0.4, no tower losses."""
    from rayrec.models.ranking.finalnet import FinalNetConfig

    model = FinalNetConfig(
        first_tower=(1000, 1000, 1000),
        second_tower=(512,),
        first_dropout=0.4,
        second_dropout=0.4,
        tower_losses=False,  # The published result used FuxiCTR 2.2, which defined these losses but did not add them.
    )
    return _x4("criteo_finalnet_x4", path, model, batch_size=8192, seed=2019)


def criteo_finalmlp(path: str | None = None) -> TrainConfig:
    """Train FinalMLP with the settings of Criteo_x4: MLPs with five layers of 1000 and one of 500, 50 heads, no gates."""
    from rayrec.models.ranking.finalmlp import FinalMLPConfig

    model = FinalMLPConfig(
        first_mlp=(1000, 1000, 1000, 1000, 1000), second_mlp=(500,), first_dropout=0.2, second_dropout=0.1, heads=50
    )
    return _x4("criteo_finalmlp", path, model, batch_size=10_000, seed=2019)


def criteo_dcnv3(path: str | None = None) -> TrainConfig:
    """Train DCNv3 with the settings of Criteo_x4: 3 deep and 4 shallow layers, layer norm, one head."""
    from rayrec.models.ranking.dcnv3 import DCNv3Config

    model = DCNv3Config(deep_layers=3, shallow_layers=4, deep_dropout=0.1, shallow_dropout=0.2, heads=1)
    return _x4("criteo_dcnv3", path, model, batch_size=4096, seed=2024)


def _x4(recipe: str, path: str | None, model: ClickModelConfig, *, batch_size: int, seed: int) -> TrainConfig:
    """Configure training as in FuxiCTR: Adam on tables and network, an L2 penalty on full tables, and joint gradient clipping.
    Evaluates once per epoch. An epoch without improvement divides the learning rates by ten. Two in a row end training."""
    return TrainConfig(
        recipe=recipe,
        workload=ClickWorkload(
            schema=SCHEMA,
            preset=FUXICTR_X4.replace(split=KAGGLE_SPLIT),
            model=model,
            table_start=TableInit(kind="normal", std=1e-4),
            sparse_optimizer=SparseOptimizerConfig(kind="adam", learning_rate=0.001, weight_decay=1e-5),
            dense_optimizer=DenseOptimizerConfig(kind="adam", learning_rate=0.001),
            max_gradient_norm=10.0,
        ),
        train_data=DataConfig(path=path, files=("train",)),
        epochs=_MAX_EPOCHS,
        batch_size=batch_size,
        evaluations_per_epoch=1,
        seed=seed,
        plateau=PlateauConfig(patience=1, factor=0.1),
        early_stopping=EarlyStoppingConfig(patience=2, min_improvement=1e-6),
    )


RECIPES = (criteo_finalnet, criteo_finalnet_x4, criteo_finalmlp, criteo_dcnv3)
PUBLISHED = {recipe.__name__: "criteo_kaggle" for recipe in RECIPES}
