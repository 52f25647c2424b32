"""Opens a checkpoint and the rows to score, and plans the pool that scores them, in this process or on Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa

from rayrec import machine
from rayrec.checkpoint import Checkpoint, open_checkpoint, verify
from rayrec.checkpoint.discovery import refuse_pickles
from rayrec.cluster import connection
from rayrec.cluster.connection import is_in_process
from rayrec.cluster.layout import Node
from rayrec.config import InputError
from rayrec.data.engine import StreamEngine, TaskPlacement, ThreadEngine
from rayrec.inference.pool import Pool, plan_pool, scored_tables, weight_bytes
from rayrec.observe.console import Console
from rayrec.workloads.base import ScoringContext
from rayrec.workloads.scoring import Device, Scoring

if TYPE_CHECKING:
    import ray.data

    from rayrec.workloads.base import TrainConfig


@dataclass(frozen=True)
class ScoringJob:
    """Rows that are scored once they are read."""

    scoring: Scoring
    checkpoint: Checkpoint
    pool: Pool
    device: Device
    on_ray: bool
    """Whether the pool's members are processes on Ray; else they are threads of this one."""

    def dataset(self, first_block: int = 0) -> ray.data.Dataset:
        """The scores of the blocks from one on."""
        from rayrec.inference.pool import scored_dataset

        assert self.on_ray
        num_actors = max(1, min(self.pool.num_actors, self.scoring.num_blocks - first_block))
        pool = dataclasses.replace(self.pool, num_actors=num_actors)
        return scored_dataset(self.scoring, first_block=first_block, pool=pool, device=self.device)

    def tables(self, console: Console, *, what: str = "score (rows)", first_row: int = 0) -> Iterator[pa.Table]:
        """The scores from row `first_row` on, in order, whole blocks being scored; progress goes to the console."""
        first_block, begin = self.scoring.block_of(first_row)
        skip, done = first_row - begin, first_row
        with console.preparing():
            for table in self._tables(first_block):
                yield table.slice(skip)
                done += max(0, len(table) - skip)
                skip = max(0, skip - len(table))
                console.progress(what, done, self.scoring.rows)

    def _tables(self, first_block: int) -> Iterator[pa.Table]:
        if not self.on_ray:
            yield from scored_tables(self.scoring, first_block=first_block, pool=self.pool, device=self.device)
            return
        from rayrec.ingest.ray_engine import input_errors

        with input_errors():
            for table in self.dataset(first_block).iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=2
            ):
                assert isinstance(table, pa.Table)
                yield table


@dataclass(frozen=True)
class ScoringRequest:
    """What a caller wants scored, and how."""

    checkpoint: str
    path: str
    config: TrainConfig
    batch_rows: int | None
    device: Device
    console: Console

    def open(
        self,
        *,
        evaluating: bool,
        spare_cpus: int,
        slice_by: tuple[str, ...] = (),
        ranking_k: tuple[int, ...] = (),
        as_dataset: bool = False,
    ) -> ScoringJob:
        """`spare_cpus` stay free for whatever the caller does with the scores meanwhile; `as_dataset`: the caller wants a
        Dataset, which only Ray has. Raises InputError for an unusable checkpoint or input, and damaged weights."""
        if self.batch_rows is not None and self.batch_rows < 1:
            raise InputError(f"batch_rows: {self.batch_rows} must be at least 1")
        checkpoint = open_checkpoint(self.checkpoint)
        refuse_pickles(checkpoint.path, checkpoint.manifest()["files"])
        # Here, not in the actors: a pipeline of Ray Data 2.60 that fails at its first block leaves its actors, and the CPUs
        # they hold, behind.
        verify(checkpoint, "model.")
        on_ray = as_dataset or not is_in_process(self.config.cluster.address)
        engine = cache(self._engine_on_ray if on_ray else self._engine_here)
        scoring = self.config.workload.open_scoring(
            ScoringContext(
                config=self.config,
                checkpoint=checkpoint.path,
                path=self.path,
                evaluating=evaluating,
                batch_rows=self.batch_rows,
                engine=engine,
                console=self.console,
                slice_by=slice_by,
                ranking_k=ranking_k,
            )
        )
        engine()
        if on_ray:
            connection.ship_code(self.config)
        pool = plan_pool(
            connection.alive_nodes() if on_ray else [self._this_machine()],
            weight_bytes=weight_bytes(checkpoint),
            blocks=scoring.num_blocks,
            spare_cpus=spare_cpus,
            device=self.device,
            shared_weights=not on_ray and scoring.thread_safe,
        )
        return ScoringJob(scoring, checkpoint, pool, self.device, on_ray)

    def _engine_here(self) -> StreamEngine:
        return ThreadEngine(self._cpus_here())

    def _cpus_here(self) -> int:
        return machine.usable_cpus(granted=self.config.cluster.num_cpus)

    def _this_machine(self) -> Node:
        resources = {
            "CPU": float(self._cpus_here()),
            "memory": float(machine.memory().available),
        }
        if self.device == "cuda":
            import torch

            resources["GPU"] = float(torch.cuda.is_available())
        return Node("this machine", resources)

    def _engine_on_ray(self) -> StreamEngine:
        from rayrec.cluster.node_storage import require_reachable
        from rayrec.ingest.ray_engine import RayEngine

        wanted = self.config.cluster
        connection.connect(
            wanted.address,
            num_cpus=wanted.num_cpus,
            object_store_bytes=wanted.object_store_bytes,
            log_to_driver=self.console.verbose,
        )
        require_reachable((self.checkpoint, self.path))
        cpus = sum(node.resources.get("CPU", 0.0) for node in connection.alive_nodes())
        return RayEngine(TaskPlacement(num_cpus=min(1.0, cpus)))
