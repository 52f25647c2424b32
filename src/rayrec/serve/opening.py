"""Opens what is to be scored: checks checkpoint and input, reaches Ray, and plans who scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa

from rayrec.checkpoint import Checkpoint, open_checkpoint, verify
from rayrec.checkpoint.folders import refuse_pickles
from rayrec.config import InputError
from rayrec.data.placement import TaskPlacement
from rayrec.data.ray_tasks import input_errors
from rayrec.launch import cluster
from rayrec.launch.node_storage import require_reachable
from rayrec.observe.console import Console
from rayrec.serve.scoring import Pool, plan_pool, scored_dataset, weight_bytes
from rayrec.workloads.scoring import Device, Scoring, ScoringContext

if TYPE_CHECKING:
    import ray.data

    from rayrec.workloads.base import TrainConfig


@dataclass(frozen=True)
class Opened:
    """Rows that are scored once the Dataset is read."""

    scoring: Scoring
    checkpoint: Checkpoint
    pool: Pool
    device: Device

    def dataset(self, first_block: int = 0) -> ray.data.Dataset:
        """The scores of the blocks from one on."""
        num_actors = max(1, min(self.pool.num_actors, self.scoring.num_blocks - first_block))
        pool = dataclasses.replace(self.pool, num_actors=num_actors)
        return scored_dataset(self.scoring, first_block=first_block, pool=pool, device=self.device)

    def tables(self, console: Console, *, what: str = "score (rows)", first_row: int = 0) -> Iterator[pa.Table]:
        """The scores from row `first_row` on, in order, whole blocks being scored; progress goes to the console."""
        first_block, begin = self.scoring.block_of(first_row)
        skip, done = first_row - begin, first_row
        with console.preparing(), input_errors():
            dataset = self.dataset(first_block)
            for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2):
                assert isinstance(table, pa.Table)
                yield table.slice(skip)
                done += max(0, len(table) - skip)
                skip = max(0, skip - len(table))
                console.progress(what, done, self.scoring.rows)


@dataclass(frozen=True)
class Request:
    """What a caller wants scored, and how."""

    checkpoint: str
    path: str
    config: TrainConfig
    batch_rows: int | None
    device: Device
    console: Console

    def open(self, *, evaluating: bool, spare_cpus: int, slice_by: tuple[str, ...] = ()) -> Opened:
        """`spare_cpus` stay free for whatever the caller does with the scores meanwhile. Raises InputError for an unusable
        checkpoint or input, and damaged weights."""
        if self.batch_rows is not None and self.batch_rows < 1:
            raise InputError(f"batch_rows: {self.batch_rows} must be at least 1")
        checkpoint = open_checkpoint(self.checkpoint)
        refuse_pickles(checkpoint.path, checkpoint.manifest()["files"])
        # Here, not in the actors: a pipeline of Ray Data 2.60 that fails at its first block leaves its actors, and the CPUs
        # they hold, behind.
        verify(checkpoint, "model.")
        connect = cache(self._connect)
        scoring = self.config.workload.open_scoring(
            ScoringContext(
                config=self.config,
                checkpoint=checkpoint.path,
                path=self.path,
                evaluating=evaluating,
                batch_rows=self.batch_rows,
                connect=connect,
                console=self.console,
                slice_by=slice_by,
            )
        )
        connect()
        cluster.ship_code(type(self.config.workload))
        pool = plan_pool(
            cluster.alive_nodes(),
            weight_bytes=weight_bytes(checkpoint),
            blocks=scoring.num_blocks,
            spare_cpus=spare_cpus,
            device=self.device,
        )
        return Opened(scoring, checkpoint, pool, self.device)

    def _connect(self) -> TaskPlacement:
        wanted = self.config.cluster
        cluster.connect(
            wanted.address,
            num_cpus=wanted.num_cpus,
            object_store_bytes=wanted.object_store_bytes,
            log_to_driver=self.console.verbose,
        )
        require_reachable((self.checkpoint, self.path))
        cpus = sum(node.resources.get("CPU", 0.0) for node in cluster.alive_nodes())
        return TaskPlacement(num_cpus=min(1.0, cpus))
