"""ResNet18 on MNIST as Ray's PyTorch tutorial trains it, without Ray: DataLoader,
DistributedSampler, DDP, Adam.

Usage: python plain_ddp.py JSON with `path` (folder of the four idx files), `workers`, `steps`,
`warm_steps`, `batch_size` (of all workers), `learning_rate`, `seed`, `loader_workers`, `precision`.
Prints JSON: `losses` (per step a list, each worker's own), `rows_per_s` of all workers behind the
warm-up.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rayrec.data.numbered_rows import read_part
from rayrec.workloads.vision import ResNetConfig


def data_set(path: str) -> TensorDataset:
    """Return images from -1 to 1, float32 [rows, 1, 28, 28], and labels, int64 [rows]."""
    digits = read_part(path, "train", num_classes=10)
    images = torch.tensor(digits["images"])
    labels = torch.tensor(digits["labels"])
    return TensorDataset((images.unsqueeze(1).float() / 255 - 0.5) / 0.5, labels.long())


def epochs(loader: DataLoader, sampler: DistributedSampler) -> Iterator[Any]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def train(rank: int, arguments: dict[str, Any], scratch: str) -> None:
    """Train as one worker. Writes results into the scratch folder."""
    workers = arguments["workers"]
    steps = arguments["steps"]
    warm_steps = arguments["warm_steps"]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    if workers > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{scratch}/init", rank=rank, world_size=workers
        )
    rows = data_set(arguments["path"])
    sampler: Any = DistributedSampler(
        rows, num_replicas=workers, rank=rank, shuffle=True, seed=arguments["seed"]
    )
    batch_size = arguments["batch_size"] // workers
    loader_workers = arguments["loader_workers"]
    loader = DataLoader(
        rows,
        batch_size,
        sampler=sampler,
        num_workers=loader_workers,
        persistent_workers=loader_workers > 0,
    )
    torch.manual_seed(arguments["seed"])
    model: torch.nn.Module = ResNetConfig().build()
    if workers > 1:
        model = DistributedDataParallel(model)
    loss_of = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments["learning_rate"])
    bf16 = arguments["precision"] == "bf16"
    losses = []
    num_rows = 0
    start_s = 0.0
    model.train()
    batches = epochs(loader, sampler)
    for step in range(steps):
        if step == warm_steps:
            start_s = time.perf_counter()
        images, labels = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        num_rows += len(labels) if step >= warm_steps else 0
    result = {
        "losses": torch.stack(losses).tolist(),
        "rows_per_s": num_rows / (time.perf_counter() - start_s),
    }
    with open(f"{scratch}/{rank}.json", "w") as file:
        json.dump(result, file)


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    workers = arguments["workers"]
    with tempfile.TemporaryDirectory() as scratch:
        if workers == 1:
            train(0, arguments, scratch)
        else:
            torch.multiprocessing.spawn(train, (arguments, scratch), nprocs=workers)
        results = []
        for rank in range(workers):
            with open(f"{scratch}/{rank}.json") as file:
                results.append(json.load(file))
    losses = [list(step) for step in zip(*(worker["losses"] for worker in results), strict=True)]
    return {"losses": losses, "rows_per_s": sum(worker["rows_per_s"] for worker in results)}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
