"""Scores the blocks of a log in an ordered stream of Ray Data, by processes that each hold the model once."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, final

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext, ExecutionOptions

from rayrec.config import InputError
from rayrec.data.reading import open_block
from rayrec.serve.lines import good_lines

if TYPE_CHECKING:
    from rayrec.data.position import Block
    from rayrec.data.preprocessor import Preprocessor
    from rayrec.launch.cluster import Node
    from rayrec.schema import Schema
    from rayrec.workloads.base import Scorer, TrainConfig

Device = Literal["cpu", "cuda"]

_PROCESS_BYTES = 1 << 30
"""Memory of a scoring process beside its weights: torch and Ray, a block's text, its columns and activations."""


@dataclass(frozen=True)
class Pool:
    """The processes that score."""

    num_actors: int
    cpus_per_actor: float
    gpus_per_actor: float


def plan_pool(nodes: Sequence[Node], *, weight_bytes: int, blocks: int, spare_cpus: int, device: Device) -> Pool:
    """How many processes score, and with how many cores each: as many as memory lets hold the weights. Pure.

    `spare_cpus` stay free for whatever the caller's Dataset does next, where there are that many. Raises InputError
    where no node can hold the weights or, for "cuda", has a GPU.
    """
    if device == "cuda":
        num_gpus = int(sum(node.resources.get("GPU", 0) for node in nodes))
        if not num_gpus:
            raise InputError("device: cuda needs a GPU, the cluster has none; score on cpu")
        return Pool(max(1, min(num_gpus, blocks)), 1.0, 1.0)
    needed = weight_bytes + _PROCESS_BYTES
    usable = [(node.resources.get("CPU", 0.0), int(node.resources.get("memory", 0) // needed)) for node in nodes]
    usable = [(cpus, fitting) for cpus, fitting in usable if cpus > 0 and fitting > 0]
    if not usable:
        largest = max((node.resources.get("memory", 0) for node in nodes), default=0)
        raise InputError(
            f"scoring needs {needed / 2**30:.1f} GiB of memory on one node for the weights, the largest node offers "
            f"Ray {largest / 2**30:.1f} GiB; use larger nodes"
        )
    cpus_each = max(_cpus_each(cpus, fitting) for cpus, fitting in usable)
    num_actors = sum(int(cpus // cpus_each) for cpus, _ in usable)
    free = sum(cpus for cpus, _ in usable) - num_actors * cpus_each
    while free < spare_cpus and num_actors > 1:
        num_actors -= 1
        free += cpus_each
    if free < spare_cpus:
        cpus_each = max(cpus_each - spare_cpus, cpus_each / 2)
    return Pool(max(1, min(num_actors, blocks)), cpus_each, 0.0)


def _cpus_each(cpus: float, fitting: int) -> float:
    """Cores of each of as many processes as fit on a node, one a core at most."""
    return math.ceil(int(cpus) / min(fitting, int(cpus))) if cpus >= 1 else cpus


@dataclass(frozen=True)
class Job:
    """What every scoring process is told."""

    config: TrainConfig
    checkpoint: str
    """Folder, reachable from every node."""
    preprocessor: ray.ObjectRef
    """In the object store, shared by all processes of a node."""
    blocks: ray.ObjectRef
    """Of a list of ScoredBlock."""
    labelled: bool
    batch_rows: int
    threads: int
    """Of the model's CPU operators."""
    device: Device


@dataclass(frozen=True)
class ScoredBlock:
    """Rows that are read, encoded and scored together, in the order of the log."""

    block: Block
    first_lines: tuple[int, ...]
    """Position in the log of the first line of each part's segment."""
    lines_known: bool
    """Whether every line is a good row, so that rows follow each other without gaps."""


@final
class BlockScorer:
    """One scoring process. The model is loaded with the first block, so that a damaged one fails as a task does."""

    def __init__(self, job: Job) -> None:
        import torch

        self._job = job
        torch.set_num_threads(job.threads)
        logging.getLogger("torch").setLevel(logging.ERROR)  # torchrec's import makes torch.fx warn
        self._blocks: list[ScoredBlock] = ray.get(job.blocks)
        self._preprocessor: Preprocessor = ray.get(job.preprocessor)

    @cached_property
    def _scorer(self) -> Scorer:
        job = self._job
        return job.config.workload.load_scorer(
            job.config, checkpoint=job.checkpoint, preprocessor=self._preprocessor, device=job.device
        )

    def __call__(self, numbers: pa.Table) -> pa.Table:
        """The scores of the blocks whose numbers come in column `block`."""
        return pa.concat_tables([self._score(self._blocks[number.as_py()]) for number in numbers.column("block")])

    def _score(self, scored: ScoredBlock) -> pa.Table:
        job, preprocessor = self._job, self._preprocessor
        schema = preprocessor.schema if job.labelled else preprocessor.schema.unlabelled()
        encoded, num_rows = open_block(scored.block, preprocessor, labelled=job.labelled), scored.block.rows
        logits = np.empty(num_rows, np.float32)
        labels = np.empty(num_rows, np.float32)
        for start in range(0, num_rows, job.batch_rows):
            rows = encoded(start, min(start + job.batch_rows, num_rows))
            logits[start : start + len(rows)] = self._scorer.score(rows)
            if rows.labels is not None:
                labels[start : start + len(rows)] = rows.labels
        columns = {
            "row": pa.array(_rows(scored, schema)),
            "score": pa.array(sigmoid(logits)),
            "logit": pa.array(logits),
        }
        if job.labelled:
            columns["label"] = pa.array(labels)
        return pa.table(columns)


def _rows(scored: ScoredBlock, schema: Schema) -> np.ndarray:
    """int64: where each row of the block stands among all lines of the log."""
    chosen = []
    for part, first_line in zip(scored.block.parts, scored.first_lines, strict=True):
        rows = np.arange(part.start, part.stop, dtype=np.int64)
        chosen.append(first_line + (rows if scored.lines_known else good_lines(part.segment, schema)[rows]))
    return np.concatenate(chosen)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """float32: 1 / (1 + exp(-logit)), without overflow."""
    small = np.exp(-np.abs(logits.astype(np.float64)))  # in (0, 1]
    return (np.where(logits >= 0, 1.0, small) / (1.0 + small)).astype(np.float32)


def scored_dataset(job: Job, *, num_blocks: int, pool: Pool) -> ray.data.Dataset:
    """A Dataset with one block of scores a block of the log, in order. Nothing runs until it is read.

    Its input, the blocks' numbers, lies in the object store already: the pool needs no task to feed it, so it may hold
    all CPUs of a cluster, and a single one is enough.
    """
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options = ExecutionOptions(preserve_order=True)
    with DataContext.current(context):
        numbers = ray.data.from_blocks([pa.table({"block": [number]}) for number in range(num_blocks)])
        return numbers.map_batches(
            BlockScorer,
            fn_constructor_args=(job,),
            batch_size=None,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=pool.num_actors),
            num_cpus=pool.cpus_per_actor,
            num_gpus=pool.gpus_per_actor or None,
        )
