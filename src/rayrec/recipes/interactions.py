"""Retrieval models for interaction logs: users, chosen items and times."""

from rayrec.data.encoding.presets import RAYREC
from rayrec.models.base import TableInit
from rayrec.optim.config import LearningRateSchedule, SparseOptimizerConfig
from rayrec.recipes.criteo import adam_config
from rayrec.schema import Feature, PlaceholderSchema, Schema
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.settings import read_schema

PLACEHOLDER = PlaceholderSchema(label=None, sparse=("user", "item"))
"""Placeholder for the schema from `--schema FILE`."""

PLACEHOLDER_OF_LISTS = PlaceholderSchema(
    label=None, sparse=("item",), lists=("item",), features=(Feature(name="item", max_length=50),)
)
"""Placeholder schema for a log with item lists."""


def next_item(path: str | None = None, schema: Schema | str = PLACEHOLDER_OF_LISTS) -> TrainConfig:
    """Train SASRec on lists of items in time order: --schema FILE."""
    from rayrec.models.retrieval.sasrec import SASRecConfig

    tables = SparseOptimizerConfig(kind="adam", learning_rate=0.001)
    preset = RAYREC.replace(min_count=1)  # A separate id for each training item
    config = adam_config(
        "next_item", path, preset, SASRecConfig(), tables, schema=read_schema(schema)
    )
    # At the full rate, NDCG@10 varies by a tenth from epoch to epoch, and early stopping selects
    # such an epoch.
    schedule = LearningRateSchedule(decay_fraction=0.6, decay="cosine")
    workload = {"table_start": TableInit(kind="normal", std=0.02), "schedule": schedule}
    # A log of few users has few steps an epoch, so its batches are smaller.
    rounds = {"epochs": 40, "batch_size": 128, "min_steps_per_epoch": 32, "eval_batch_size": 256}
    return config.replace(
        workload=workload,
        evaluations_per_epoch=1,
        early_stopping={"patience": 10},
        **rounds,
    )


def two_tower(path: str | None = None, schema: Schema | str = PLACEHOLDER) -> TrainConfig:
    """Train user and item vectors on rows of a user and a chosen item: --schema FILE."""
    from rayrec.models.retrieval.two_tower import TwoTowerConfig

    workload = {
        "model": TwoTowerConfig(),
        "sparse_optimizer": {"kind": "sparse_adam"},
        "schedule": LearningRateSchedule(),
    }
    larger = {
        "epochs": 20,
        "batch_size": 1024,
        "min_steps_per_epoch": 1,
        "eval_batch_size": 1024,
        "early_stopping": {"patience": 3},
    }
    return next_item(path, schema).replace(recipe="two_tower", workload=workload, **larger)


RECIPES = (next_item, two_tower)
