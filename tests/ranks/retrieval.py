"""Functions of ranks with retrieval models, each in a separate process."""

import logging
from typing import Any

import numpy as np
from builders.interactions import LISTS, PAIRS
from ranks import click
from torch import distributed

from rayrec.batch import Batch
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.encoding.known_categories import FREQUENCIES
from rayrec.ingest.batches import BatchSlicer
from rayrec.models.base import CandidateRows
from rayrec.models.retrieval.esasrec import ESASRecConfig
from rayrec.models.retrieval.fuxi import FuXiConfig
from rayrec.models.retrieval.hstu import HSTUConfig
from rayrec.models.retrieval.sasrec import SASRecConfig
from rayrec.models.retrieval.simplex import SimpleXConfig
from rayrec.models.retrieval.two_tower import TwoTowerConfig
from rayrec.models.retrieval.youtube_dnn import YoutubeDNNConfig
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.candidates import SampledRows
from rayrec.workloads.recsys.workload import ClickWorkload

USERS = 9
ITEMS = 13
ROWS = (6, 5, 1)
"""Rows of each step. In the last one, the second rank has none."""
RATES = {kind: click.SGD[f"{kind}_optimizer"].learning_rate for kind in ("sparse", "dense")}
TWO_TOWER = TwoTowerConfig(
    embedding_dim=4,
    user_tower=(),
    vector=3,
    temperature=0.5,
)
SMALL: dict[str, Any] = {"embedding_dim": 4, "blocks": 1, "dropout": 0.0}
SASREC = SASRecConfig(**SMALL, hidden=8)
MODELS = {
    "two_tower": TWO_TOWER,
    "sasrec": SASREC,
    "sampled": SASREC.replace(loss="sampled", negatives=7),
    "in_batch": SASREC.replace(loss="in_batch"),
    "mixed": SASREC.replace(loss="mixed", negatives=3),
    "bce": SASREC.replace(loss="bce", negatives=5),
    "ccl": SASREC.replace(loss="ccl", negatives=5, unit_vectors=True),
    "rows": SASREC.replace(loss_mean="rows"),
    "youtube_dnn": YoutubeDNNConfig(embedding_dim=4, loss="full"),
    "simplex": SimpleXConfig(
        embedding_dim=4,
        negatives=7,
        user_weight=0.0,
        dropout=0.0,
    ),
    "esasrec": ESASRecConfig(**SMALL, loss="in_batch"),
    "hstu": HSTUConfig(**SMALL, negatives=7),
    "fuxi": FuXiConfig(**SMALL, negatives=7, request_time=True),
}
AGED = LISTS.replace(features=(LISTS.feature("item").replace(ages="age"),))
"""Lists with times."""


def pairs(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the (user, item) ids of a step, with a repeated item."""
    chance = np.random.default_rng(step)
    item = chance.integers(0, ITEMS, ROWS[step])
    item[-1] = item[0]
    return chance.integers(0, USERS, ROWS[step]), item


def _batch(model: Any, schema: Any, step: int, rank: int, size: int) -> Batch:
    own = slice(rank, None, size)
    rows = ROWS[step]
    sample = model.table_sample()
    sampled = SampledRows(CandidateRows(), ITEMS, sample or 0, seed=0)
    tables = {"table:item": ITEMS if sample is None else sampled}
    if schema is not PAIRS:
        chance = np.random.default_rng(step)
        lists = [
            chance.integers(
                0,
                ITEMS,
                chance.integers(1, 6),
            )
            for _ in range(rows)
        ][own]
        values = np.concatenate([np.empty(0, np.int32), *lists]).astype(np.int32)
        lengths = np.array([len(each) for each in lists], np.int32)
        # Seconds between items, of which each is some constant
        gaps = 10.0 ** (values % 6).astype(np.float32) if schema.aged else None
        ids: list[Any] = [JaggedIds(values, lengths, gaps)]
    else:
        ids = [column[own].astype(np.int32) for column in pairs(step)]
    count = len(range(rows)[own])
    encoded = EncodedRows(np.empty((count, 0), np.float32), ids)
    return BatchSlicer(
        iter([encoded]),
        schema,
        unpooled=("item",),
        tables=tables,
    ).take(
        count,
        loss_weight=size / rows,
        first_row=sum(ROWS[:step]),
    )


def train(folder: str, rank: int) -> None:
    """Save FOLDER/NAME_SIZE/start and, after the steps, FOLDER/NAME_SIZE/end of all models."""
    logging.disable(logging.WARNING)
    size = distributed.get_world_size()
    for name, model in MODELS.items():
        schema = AGED if model.reads_ages else LISTS
        if model is TWO_TOWER:
            schema = PAIRS
        tables = [USERS, ITEMS] if model is TWO_TOWER else [ITEMS]
        workload = ClickWorkload(schema=schema, model=model, **click.SGD)
        config = TrainConfig(
            recipe="small",
            workload=workload,
            batch_size=ROWS[0] // size,
        ).replace(scaling={"num_workers": size})
        prepared = click.prepared(tables, schema)
        if model is not TWO_TOWER:
            runs = {"item": [[3, 4], [1, ITEMS - 4]]}
            prepared.preprocessor.get().constants[FREQUENCIES] = runs
        setup = workload.set_up(click.context(config, rank, size), prepared)
        setup.model.train()
        click.train_batches(
            f"{folder}/{name}_{size}",
            setup,
            [_batch(model, schema, step, rank, size) for step in range(len(ROWS))],
        )
