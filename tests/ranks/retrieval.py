"""Functions of ranks with retrieval models, each in a separate process."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from builders.interactions import LISTS, PAIRS
from torch import distributed

from rayrec import checkpoint
from rayrec.batch import Batch
from rayrec.checkpoint.state import all_tensors
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.engine import InProcess
from rayrec.ingest.batches import BatchSlicer
from rayrec.models.retrieval.sasrec import SASRecConfig
from rayrec.models.retrieval.two_tower import TwoTowerConfig
from rayrec.optim.config import DenseOptimizerConfig, SparseOptimizerConfig
from rayrec.workloads.base import TrainConfig, WorkerContext
from rayrec.workloads.recsys.workload import ClickWorkload
from rayrec.workloads.run_config import ScalingConfig

USERS, ITEMS = 9, 13
ROWS = (6, 5, 1)
"""Rows of each step. In the last one, the second rank has none."""
RATES = {"sparse": 0.5, "dense": 0.1}
TWO_TOWER = TwoTowerConfig(embedding_dim=4, user_tower=(), vector=3, temperature=0.5)
SASREC = SASRecConfig(embedding_dim=4, hidden=8, blocks=1, dropout=0.0)


def pairs(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the (user, item) ids of a step, with a repeated item."""
    chance = np.random.default_rng(step)
    item = chance.integers(0, ITEMS, ROWS[step])
    item[-1] = item[0]
    return chance.integers(0, USERS, ROWS[step]), item


def _batch(schema: Any, step: int, rank: int, size: int) -> Batch:
    own, rows, tables = slice(rank, None, size), ROWS[step], {"table:item": ITEMS if schema is LISTS else 0}
    if schema is LISTS:
        chance = np.random.default_rng(step)
        lists = [chance.integers(0, ITEMS, chance.integers(1, 6)) for _ in range(rows)][own]
        values = np.concatenate([np.empty(0, np.int32), *lists]).astype(np.int32)
        ids: list[Any] = [JaggedIds(values, np.array([len(each) for each in lists], np.int32))]
    else:
        ids = [column[own].astype(np.int32) for column in pairs(step)]
    count = len(range(rows)[own])
    encoded = EncodedRows(np.empty((count, 0), np.float32), ids)
    slicer = BatchSlicer(iter([encoded]), schema, unpooled=("item",), tables=tables)
    return slicer.take(count, loss_weight=size / rows)


def train(folder: str, rank: int) -> None:
    """Save FOLDER/NAME_SIZE/start and, after the steps, FOLDER/NAME_SIZE/end of both models."""
    logging.disable(logging.WARNING)
    size = distributed.get_world_size()
    optimizers: dict[str, Any] = {
        "sparse_optimizer": SparseOptimizerConfig(kind="sgd", learning_rate=RATES["sparse"]),
        "dense_optimizer": DenseOptimizerConfig(kind="sgd", learning_rate=RATES["dense"]),
    }
    for name, model, schema, tables in (("two_tower", TWO_TOWER, PAIRS, [USERS, ITEMS]), ("sasrec", SASREC, LISTS, [ITEMS])):
        workload = ClickWorkload(schema=schema, model=model, **optimizers)
        scaling = ScalingConfig(num_workers=size)
        config = TrainConfig(recipe="small", workload=workload, batch_size=ROWS[0] // size, scaling=scaling)
        prepared = SimpleNamespace(
            inputs=schema,
            num_embeddings=tables,
            sets={"train": SimpleNamespace(rows=10_000)},
            preprocessor=InProcess(SimpleNamespace(sparse=[], multi_hot=object())),
            teacher=None,
        )
        place = WorkerContext(config, rank, size, torch.device("cpu"), None, "")  # type: ignore[arg-type]
        setup = workload.set_up(place, prepared)  # type: ignore[arg-type]
        setup.model.train()
        checkpoint.save(f"{folder}/{name}_{size}/start", all_tensors(setup.model, setup.optimizer), state={})
        batches = iter([_batch(schema, step, rank, size) for step in range(len(ROWS))])
        for step in range(len(ROWS)):
            setup.begin_step(step, len(ROWS))
            setup.pipeline.progress(batches)
        checkpoint.save(f"{folder}/{name}_{size}/end", all_tensors(setup.model, setup.optimizer), state={})
