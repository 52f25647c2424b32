"""Functions of ranks with metrics, each in a separate process. Imports little, because each rank
does it.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rayrec.batch import StepOutput
from rayrec.collectives import gathered_rows
from rayrec.config import InputError
from rayrec.metrics import binary as metrics
from rayrec.metrics.means import RowMetrics
from rayrec.metrics.recommended import RECOMMENDED, RecommendedItems


def cases() -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(3)
    count = 9000
    labels = (generator.random(count) < 0.3).astype(np.uint8)
    smooth = (generator.normal(size=count) + labels).astype(np.float32)
    # one key on most rows
    skewed = np.where(np.arange(count) < 8000, np.float32(-2), smooth).astype(np.float32)
    # sorted: each rank another range
    logits = [
        smooth,
        smooth.round(1),
        skewed,
        np.zeros(count, np.float32),
        np.sort(smooth),
    ]
    return [
        *((each, labels) for each in logits),
        (smooth, np.zeros(count, np.uint8)),
        (smooth[:3], np.array([0, 1, 0], np.uint8)),
        (smooth[:0], labels[:0]),
    ]


def bounds(count: int, world_size: int) -> list[list[int]]:
    if world_size == 2:
        return [[0, count // 5, count], [0, 0, count]]
    return [
        [0, count // 2, count // 2, count],
        [0, 0, count // 7, count],
        [0, count, count, count],
    ]


def metrics_of_ranks(folder: str, rank: int) -> None:
    """Write FOLDER/RANK.pt: whether a NaN of rank 0 was rejected, and the metrics of all cases and
    bounds.
    """
    world_size = dist.get_world_size()
    results: list[Any] = []
    for logits, labels in cases():
        for edges in bounds(len(labels), world_size):
            own = slice(edges[rank], edges[rank + 1])
            accumulator = metrics.BinaryMetricsAccumulator()
            accumulator.update(logits[own], labels[own])
            results.append(accumulator.compute())
    refused = 0
    try:  # NaN on one rank only: all must leave
        metrics.distributed_binary_metrics([math.nan if rank == 0 else 0.0], [1])
    except InputError:
        refused = 1
    torch.save((refused, results), f"{folder}/{rank}.pt")


def gathered_rows_of_ranks(folder: str, rank: int) -> None:
    """Gather different numbers of rows per rank, one of them none; the gradient sums all ranks'
    losses.
    """
    del folder
    size = dist.get_world_size()
    counts = [(3 * place + 2) % 5 * (place != size - 1) for place in range(size)]
    starts = np.cumsum([0, *counts])
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(sum(counts), 3, generator=generator).to(dtype).requires_grad_()
        factors = [torch.randn(sum(counts), 3, generator=generator).to(dtype) for _ in range(size)]
        local_rows = whole.detach()[starts[rank] : starts[rank + 1]].clone().requires_grad_()
        rows, own = gathered_rows(local_rows)
        assert torch.equal(rows, whole)
        assert torch.equal(rows[own], local_rows)
        (rows * factors[rank]).sum().backward()
        assert local_rows.grad is not None
        assert torch.equal(
            local_rows.grad,
            sum(factors[1:], factors[0])[starts[rank] : starts[rank + 1]],
        )


def recommended_of_ranks(folder: str, rank: int) -> None:
    """Count the recommended items of ranks with different rows, one of them without any."""
    del folder
    numbers = np.random.default_rng(0).integers(-1, 50, (30, 4)).astype(np.int32)
    edges = [0, 21, 30, 30]
    items = RecommendedItems(50, (1, 4), np.arange(50))
    batches = RowMetrics(recommended=items)
    own = torch.from_numpy(numbers[edges[rank] : edges[rank + 1]])
    targets = torch.ones(len(own), dtype=torch.int64)
    measures = {RECOMMENDED: own, "targets": targets}
    batches.update(StepOutput(torch.tensor(0.0), measures=measures))
    expected: dict[str, float] = {"targets": 30}
    for k in (1, 4):
        first = numbers[:, :k][numbers[:, :k] >= 0]
        expected[f"coverage_at_{k}"] = len(np.unique(first)) / 50
        expected[f"popularity_at_{k}"] = first.mean()
    assert batches.compute() == expected
