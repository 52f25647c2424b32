"""A DLRM as a user of TorchRec writes it without a framework: torchrun's processes, TorchRec's
model, planner, sharding and pipeline, batches cut from NumPy arrays that were preprocessed before.

Usage: torchrun --nproc-per-node N plain_dlrm.py FOLDER; `rayrec preprocess --format npy --split
sevenths` wrote the folder. Trains one epoch with the network, the optimizers, the learning rates,
their schedule and the number of steps of recipe criteo_demo, without its first_order and penalty.
Prints JSON: `first_step_s`, when the first step was done (Unix time), and `auroc` of the test rows.
"""

import gc
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

GLOBAL_BATCH = 2048
MIN_STEPS = 128
DIMENSION = 16
BOTTOM = [128, 64, DIMENSION]
TOP = [128, 64, 1]
DENSE_LEARNING_RATE = 0.001
TABLE_LEARNING_RATE = 0.1
TABLE_EPS = 0.005
DECAY_FRACTION = 0.8
"""Share of the steps, at the end, over which both learning rates fall, by the square of the steps
left.
"""
LOWEST_LEARNING_RATE = 1e-7
DEVICE = torch.device("cpu")


class Rows:
    """The arrays of one set, of which this process reads every `world_size`-th batch."""

    def __init__(self, folder: Path, name: str) -> None:
        first, end = json.loads((folder / "dataset.json").read_text())["sets"][name]
        self._dense, self._sparse, self._labels = (
            torch.from_numpy(np.load(folder / f"train_{part}.npy")[first:end])
            for part in ("dense", "sparse", "labels")
        )
        self._keys = [f"cat_{number}" for number in range(self._sparse.shape[1])]

    def batches(self, *, global_batch: int, shuffled: bool) -> Iterator[Batch]:
        """Yield batches, equally many and of equal size in each process. Drops the remaining
        rows.
        """
        rank = distributed.get_rank()
        world_size = distributed.get_world_size()
        rows = len(self)
        order = (
            torch.randperm(rows, generator=torch.Generator().manual_seed(0))
            if shuffled
            else torch.arange(rows)
        )
        shard_rows = rows // world_size
        for indices in order[rank * shard_rows : (rank + 1) * shard_rows].split(
            global_batch // world_size
        ):
            ids = self._sparse[indices].T.reshape(-1)
            lengths = torch.ones(len(ids), dtype=torch.int32)
            yield Batch(
                dense_features=self._dense[indices],
                sparse_features=KeyedJaggedTensor(
                    keys=self._keys, values=ids.long(), lengths=lengths
                ),
                labels=self._labels[indices, 0],
            )

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def num_embeddings(self) -> list[int]:
        return [int(column.max()) + 1 for column in self._sparse.T]


def sharded_model(num_embeddings: list[int]) -> DistributedModelParallel:
    tables = [
        EmbeddingBagConfig(
            name=f"t_{i}", feature_names=[f"cat_{i}"], num_embeddings=size, embedding_dim=DIMENSION
        )
        for i, size in enumerate(num_embeddings)
    ]
    model = DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=13,
        dense_arch_layer_sizes=BOTTOM,
        over_arch_layer_sizes=TOP,
    )
    settings = {"lr": TABLE_LEARNING_RATE, "eps": TABLE_EPS}
    apply_optimizer_in_backward(RowWiseAdagrad, model.sparse_arch.parameters(), settings)
    train = DLRMTrain(model)
    sharders = get_default_sharders()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=distributed.get_world_size(), compute_device="cpu"),
        batch_size=GLOBAL_BATCH,
    )
    plan = planner.collective_plan(train, sharders, distributed.GroupMember.WORLD)
    return DistributedModelParallel(train, device=DEVICE, plan=plan, sharders=sharders)


def rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rates in a step, counted from 0, of `steps`."""
    start = steps - max(1, round(steps * DECAY_FRACTION))
    return 1.0 if step <= start else ((steps - step) / (steps - start)) ** 2


def set_rates(optimizer: CombinedOptimizer, bases: list[float], factor: float) -> None:
    for group, base in zip(optimizer.param_groups, bases, strict=True):
        group["lr"] = max(base * factor, LOWEST_LEARNING_RATE)


def auroc(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Compute the AUROC over all processes. Equal logits have their mean rank."""
    gathered = [
        [torch.empty_like(part) for _ in range(distributed.get_world_size())]
        for part in (logits, labels)
    ]
    for parts, part in zip(gathered, (logits, labels), strict=True):
        distributed.all_gather(parts, part)
    scores, positive = (torch.cat(parts).numpy() for parts in gathered)
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    hits = int((positive > 0).sum())
    return float(
        (ranks[positive > 0].sum() - hits * (hits + 1) / 2) / (hits * (len(positive) - hits))
    )


def trained(folder: Path) -> dict[str, float]:
    torch.manual_seed(0)
    train = Rows(folder, "train")
    test = Rows(folder, "test")
    sizes = [max(pair) for pair in zip(train.num_embeddings, test.num_embeddings, strict=True)]
    model = sharded_model(sizes)
    network = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(
        network, lambda params: torch.optim.Adam(params, lr=DENSE_LEARNING_RATE)
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    bases = [group["lr"] for group in optimizer.param_groups]
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, execute_all_batches=True)
    global_batch = min(GLOBAL_BATCH, len(train) // MIN_STEPS)
    batches = train.batches(global_batch=global_batch, shuffled=True)
    first_step_s = 0.0
    world_size = distributed.get_world_size()
    steps = math.ceil((len(train) // world_size) / (global_batch // world_size))
    for step in itertools.count():
        # zero_grad, first in `progress`, hands it to the tables
        set_rates(optimizer, bases, rate_factor(step, steps))
        try:
            pipeline.progress(batches)
        except StopIteration:
            break
        first_step_s = first_step_s or time.time()
    model.eval()
    evaluation = TrainPipelineSparseDist(model, optimizer, DEVICE, execute_all_batches=True)
    batches = test.batches(global_batch=GLOBAL_BATCH, shuffled=False)
    outputs = []
    with torch.no_grad():
        while True:
            try:
                outputs.append(evaluation.progress(batches))
            except StopIteration:
                break
    logits, labels = (torch.cat([output[index] for output in outputs]) for index in (1, 2))
    return {"first_step_s": first_step_s, "auroc": auroc(logits.detach(), labels)}


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")
    result = trained(folder)
    if distributed.get_rank() == 0:
        print(json.dumps(result))
    # A thread of a group that model or pipeline still refer to, or of one whose store is gone, ends
    # the process by `std::terminate` while Python shuts down.
    gc.collect()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
