"""Functions of ranks with a small click model, each in a separate process."""

import json
import logging
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import distributed

from rayrec import checkpoint
from rayrec.batch import DENSE, Batch
from rayrec.checkpoint import Checkpoint
from rayrec.checkpoint.state import all_tensors, restore_all
from rayrec.data.encoded_rows import Ids, JaggedIds
from rayrec.data.engine import InProcess
from rayrec.ingest.batches import sparse_features
from rayrec.models.ranking.din import DINConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.optim.config import DenseOptimizerConfig, SparseOptimizerConfig
from rayrec.schema import Feature, Label, Schema
from rayrec.sharding.planner import ShardingConfig
from rayrec.workloads.base import TrainConfig, WorkerContext
from rayrec.workloads.recsys.workload import ClickWorkload
from rayrec.workloads.run_config import ScalingConfig

MANY = [
    1460,
    583,
    4000,
    3000,
    305,
    24,
    1251,
    633,
    3,
    931,
    568,
    2500,
    319,
    27,
    1499,
    2700,
    10,
    565,
    217,
    4,
    3500,
    18,
    15,
    900,
    105,
    800,
]
EQUAL = [50] * 24
SHARED = [40, 900, 40]
"""Tables of a model with several labels: features 0 and 2 share one, the lists of feature 1 have
weights.
"""
SEQUENCES = [40, 9, 40]
"""Tables of a model whose feature 2 is a sequence of feature 0's categories; they share a table."""
NUMBERS: list[int] = []
"""Tables of a model without categories."""
CASES = {
    "many": MANY,
    "equal": EQUAL,
    "shared": SHARED,
    "sequences": SEQUENCES,
    "numbers": NUMBERS,
}
BY_ADAM = {"adam": SHARED, "adam_sequences": SEQUENCES}
DIM = 8
ROWS = 12
STEPS = 3


DLRM = DLRMConfig(
    interaction="dot",
    embedding_dim=DIM,
    bottom_mlp=(8, DIM),
    top_mlp=(8, 1),
)
SGD: dict[str, Any] = {
    "sparse_optimizer": SparseOptimizerConfig(kind="sgd", learning_rate=0.5),
    "dense_optimizer": DenseOptimizerConfig(kind="sgd", learning_rate=0.1),
}
ADAM: dict[str, Any] = {
    # With an eps that does not make much of the last digits of small gradients.
    "sparse_optimizer": SparseOptimizerConfig(
        kind="adam", learning_rate=0.05, eps=0.01, weight_decay=0.1
    ),
    "max_gradient_norm": 0.5,
}


def workload(tables: list[int], **settings: Any) -> ClickWorkload:
    model = DINConfig(embedding_dim=DIM, attention=(4,), mlp=(8,)) if tables == SEQUENCES else DLRM
    return ClickWorkload(schema=schema(tables), model=model, **{**SGD, **settings})


def schema(tables: list[int]) -> Schema:
    sparse = tuple(f"cat_{number}" for number in range(len(tables)))
    plain = Schema(
        tokens="hexadecimal",
        label="label",
        dense=("int_0", "int_1"),
        sparse=sparse,
    )
    if tables == SHARED:
        return plain.replace(
            tokens="any",
            labels=(Label(name="other"), Label(name="seconds", kind="number")),
            lists=("cat_1", "cat_2"),
            features=(
                Feature(name="cat_1", weights="weights"),
                Feature(name="cat_2", vocabulary="cat_0"),
            ),
        )
    if tables == SEQUENCES:
        sequence = Feature(name="cat_2", vocabulary="cat_0", max_length=4)
        return plain.replace(tokens="any", lists=("cat_2",), features=(sequence,))
    return plain


def context(
    configuration: TrainConfig, rank: int, world_size: int, *, node: str = "", device: str = "cpu"
) -> WorkerContext:
    engine: Any = None
    return WorkerContext(configuration, rank, world_size, torch.device(device), engine, node)


def config(tables: list[int], world_size: int, **settings: Any) -> TrainConfig:
    return TrainConfig(
        recipe="small",
        workload=workload(tables, **settings),
        batch_size=ROWS // world_size,
        scaling=ScalingConfig(num_workers=world_size),
    )


def prepared(tables: list[int], inputs: Schema | None = None) -> Any:
    preprocessor = InProcess(
        SimpleNamespace(
            constants={},
            dense=(),
            dense_names=(),
            sparse=[],
            multi_hot=object(),
        )
    )
    return SimpleNamespace(
        inputs=inputs or schema(tables),
        num_embeddings=tables,
        sets={"train": SimpleNamespace(rows=10_000)},
        preprocessor=preprocessor,
        teacher=None,
        training_clips=None,
    )


def batch(tables: list[int], step: int, rank: int, world_size: int, *, rows: int = ROWS) -> Batch:
    """Return a rank's part of the same global batch, for any number of ranks."""
    chance = torch.Generator().manual_seed(step)
    ids = [torch.randint(size, (rows,), generator=chance) for size in tables]
    dense = torch.rand(rows, 2, generator=chance)
    labels = torch.rand(rows, generator=chance).round()
    rank_slice = slice(rank * rows // world_size, (rank + 1) * rows // world_size)
    columns: list[Ids] = [column[rank_slice].int().numpy() for column in ids]
    named = {"label": labels[rank_slice]}
    if tables == SHARED:
        lists = [
            torch.randint(size, (rows, 3), generator=chance)[rank_slice].int().numpy()
            for size in tables
        ]
        list_values = torch.rand(rows, 3, generator=chance)[rank_slice].numpy()
        lengths = np.full(len(lists[0]), 3, np.int32)
        columns[1:] = [
            JaggedIds(lists[1].reshape(-1), lengths, list_values.reshape(-1)),
            JaggedIds(lists[2].reshape(-1), lengths),
        ]
        other = torch.rand(rows, generator=chance).round()
        seconds = torch.rand(rows, generator=chance)
        other[torch.rand(rows, generator=chance) < 0.3] = torch.nan
        named |= {"other": other[rank_slice], "seconds": seconds[rank_slice]}
    count = len(labels[rank_slice])
    keys = schema(tables).sparse
    sequences = None
    if tables == SEQUENCES:
        listed = torch.randint(tables[2], (rows, 4), generator=chance).int()
        counts = torch.randint(0, 5, (rows,), generator=chance)[rank_slice]
        bags = JaggedIds(
            listed[rank_slice][torch.arange(4) < counts[:, None]].numpy(), counts.int().numpy()
        )
        sequences = sparse_features([keys[0], keys[2]], [columns[0], bags], count)
        keys, columns = keys[1:2], columns[1:2]
    features = sparse_features(keys, columns, count, weighted=tables == SHARED)
    return Batch(
        {DENSE: dense[rank_slice]}, world_size / rows, features, named, sequence_features=sequences
    )


def train_batches(folder: str, setup: Any, batches: list[Batch]) -> list[float]:
    """Save FOLDER/start, train the batches, and save FOLDER/end. Returns each step's mean loss."""
    checkpoint.save(f"{folder}/start", all_tensors(setup.model, setup.optimizer), state={})
    remaining = iter(batches)
    losses = []
    for step in range(len(batches)):
        setup.begin_step(step, len(batches))
        loss = setup.pipeline.progress(remaining).loss.detach().clone()
        distributed.all_reduce(loss)
        losses.append(loss.item() / distributed.get_world_size())
    checkpoint.save(f"{folder}/end", all_tensors(setup.model, setup.optimizer), state={})
    return losses


def train(
    folder: str,
    tables: list[int],
    rank: int,
    *,
    node: str = "",
    device: str = "cpu",
    **settings: Any,
) -> None:
    """Save FOLDER/start and, after some steps, FOLDER/end; write each step's mean loss to
    FOLDER/losses.json.
    """
    world_size = distributed.get_world_size()
    configuration = config(tables, world_size, **settings)
    place = context(configuration, rank, world_size, node=node, device=device)
    setup = configuration.workload.set_up(place, prepared(tables))
    losses = train_batches(
        folder, setup, [batch(tables, step, rank, world_size) for step in range(STEPS)]
    )
    # TorchRec exchanges a batch's ids ahead only if it finds in the model's forward that they come
    # straight from the batch.
    modules = 2 if tables == SEQUENCES else min(len(tables), 1)
    exchanging = modules if world_size > 1 else 0
    assert len(getattr(setup.pipeline, "_pipelined_modules", [])) == exchanging
    if rank == 0:
        with open(f"{folder}/losses.json", "w") as file:
            json.dump(losses, file)


def train_in_attempts(
    folder: str, tables: list[int], rank: int, *attempts: range, node: str
) -> None:
    """Train the steps of each attempt from the last save, and save FOLDER/STEP after each."""
    world_size = distributed.get_world_size()
    before = None
    network = DLRMConfig(
        interaction="dot", embedding_dim=DIM, bottom_mlp=(128, 64, DIM), top_mlp=(128, 64, 1)
    )
    configuration = config(tables, world_size).replace(workload={"model": network})
    for steps in attempts:
        setup = configuration.workload.set_up(
            context(configuration, rank, world_size, node=node), prepared(tables)
        )
        if before is not None:
            restore_all(Checkpoint(before), setup.model, setup.optimizer)
        batches = iter([batch(tables, step, rank, world_size) for step in steps])
        for step in steps:
            setup.begin_step(step, attempts[-1].stop)
            setup.pipeline.progress(batches)
        before = f"{folder}/{steps.stop}"
        checkpoint.save(before, all_tensors(setup.model, setup.optimizer), state={})


def train_all(folder: str, size: int, rank: int, **options: Any) -> None:
    """Train each case in FOLDER/NAME_SIZE."""
    for name, tables in (CASES | BY_ADAM).items():
        train(
            f"{folder}/{name}_{size}", tables, rank, **options, **(ADAM if name in BY_ADAM else {})
        )


def on_unequal_nodes(folder: str, rank: int) -> None:
    """Simulate ranks 0 and 1 on one machine and rank 2 on another."""
    logging.disable(logging.WARNING)
    os.environ["LOCAL_WORLD_SIZE"], node = ("2", "a") if rank < 2 else ("1", "b")
    train_all(folder, 3, rank, node=node)
    train(
        f"{folder}/rounded_3",
        EQUAL,
        rank,
        node=node,
        sharding=ShardingConfig(exchange_precision="fp16"),
    )
    train_in_attempts(f"{folder}/whole", EQUAL, rank, range(6), node=node)
    train_in_attempts(f"{folder}/parts", EQUAL, rank, range(2), range(2, 4), range(4, 6), node=node)


def alone(folder: str, rank: int) -> None:
    logging.disable(logging.WARNING)
    train_all(folder, 1, rank)


def weights(folder: str) -> str:
    return checkpoint.weights_sha256(Checkpoint(folder))


def on_one_gpu(folder: str, rank: int) -> None:
    """Use the same GPU on all workers, with gloo, because NCCL rejects two ranks on one GPU."""
    logging.disable(logging.WARNING)
    for name, tables in CASES.items():
        train(f"{folder}/{name}_gpu", tables, rank, device="cuda:0")
