"""Click models for custom click logs."""

from rayrec.data.encoding.presets import RAYREC
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.optim.config import SparseOptimizerConfig
from rayrec.recipes.criteo import adam_config
from rayrec.schema import Feature, PlaceholderSchema, Schema
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.settings import read_schema

PLACEHOLDER = PlaceholderSchema(label="label", dense=(), sparse=("user", "item"))
"""Placeholder for the schema from `--schema FILE`."""

PLACEHOLDER_OF_LISTS = PlaceholderSchema(
    label="label",
    sparse=("user", "item", "history"),
    lists=("history",),
    features=(Feature(name="history", vocabulary="item", max_length=50),),
)
"""Placeholder schema for a log with lists."""


def clicks(path: str | None = None, schema: Schema | str = PLACEHOLDER) -> TrainConfig:
    """Train a DLRM with cross layers on your own log (CSV or Parquet) with columns from a schema
    file: --schema FILE.
    """
    model = DLRMConfig(
        interaction="cross",
        embedding_dim=16,
        bottom_mlp=(64, 16),
        top_mlp=(128, 64, 1),
        cross_layers=2,
        cross_low_rank=64,
        embedding_penalty=1e-3,
        top_dropout=0.1,
        first_order=True,
        piecewise_numbers=True,
    )
    preset = RAYREC.replace(dense="by_skew")
    tables = SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.1, eps=0.005)
    config = adam_config("clicks", path, preset, model, tables, schema=read_schema(schema))
    # On a small log, a network that overfits still ranks well when its probabilities are already
    # too extreme. Its batches are small, for which Adam's usual 0.001 is too fast.
    workload = {"best_metric": "logloss", "dense_optimizer": {"learning_rate": 5e-4}}
    # A few thousand validation rows are noisy: two epochs without improvement end training.
    return config.replace(
        epochs=3,
        batch_size=1024,
        min_steps_per_epoch=512,
        early_stopping={"patience": 8},
        workload=workload,
    )


def clicks_din(path: str | None = None, schema: Schema | str = PLACEHOLDER_OF_LISTS) -> TrainConfig:
    """Train DIN on your own log, with a list of earlier items in its schema file: --schema FILE."""
    from rayrec.models.ranking.din import DINConfig

    workload = {
        "model": DINConfig(embedding_dim=16, attention=(64,), mlp=(128, 64)),
        "dense_optimizer": {"learning_rate": 0.003},
    }
    return clicks(path, schema).replace(
        recipe="clicks_din", workload=workload, min_steps_per_epoch=128
    )


RECIPES = (clicks, clicks_din)
