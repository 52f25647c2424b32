"""Scores rows of any workload with a checkpoint: as a Dataset, as Parquet files, or summed up in metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray

from rayrec import storage
from rayrec.checkpoint import open_checkpoint, verify
from rayrec.config import InputError
from rayrec.data.placement import TaskPlacement
from rayrec.data.ray_tasks import input_errors
from rayrec.launch import cluster
from rayrec.observe.console import Console
from rayrec.serve.parts import Parts
from rayrec.serve.scoring import plan_pool, scored_dataset, weight_bytes
from rayrec.workloads.scoring import Device, Scoring, ScoringContext

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig


def predict(
    checkpoint: str,
    path: str,
    *,
    config: TrainConfig,
    batch_rows: int | None = None,
    device: Device = "cpu",
    console: Console | None = None,
) -> ray.data.Dataset:
    """The predictions for an input, in its order: `row` int64 and the workload's own columns; a click model's are `score` and
    `logit` float32 and, where there is one, `label`.

    `row` is the 0-based position in the input, its files one after the other; a faulty line has a position but no
    prediction. The input is opened now (a log is indexed); it is scored when the Dataset is read, each time anew. `config` is
    that of the checkpoint's config.yaml; `batch_rows` None leaves it to the workload. Raises InputError for an unusable
    checkpoint or input; what is damaged later fails the read.
    """
    request = _Request(checkpoint, path, config, batch_rows, device, console or Console())
    return request.open(evaluating=False, spare_cpus=1).dataset


def predict_to(
    checkpoint: str,
    path: str,
    out: str,
    *,
    config: TrainConfig,
    batch_rows: int | None = None,
    device: Device = "cpu",
    console: Console | None = None,
) -> dict[str, Any]:
    """Writes what `predict` gives as part-00000.parquet, part-00001.parquet, ... into folder `out`, which appears
    complete or not at all. Returns rows, what the workload tells of them, out, and rows_per_s from the start of scoring to the
    last file.

    Raises InputError for an unusable checkpoint or input, damaged weights, and where `out` exists.
    """
    request = _Request(checkpoint, path, config, batch_rows, device, console or Console())
    with storage.writing_folder(out) as folder:
        opened = request.open(evaluating=False, spare_cpus=0)
        start = time.monotonic()
        with Parts(folder) as parts:
            for table in opened.tables(request.console):
                parts.write(table)
    if parts.rows != opened.scoring.rows:
        raise AssertionError(f"{parts.rows} of {opened.scoring.rows} rows were written")
    return {
        "rows": parts.rows,
        **opened.scoring.described,
        "out": storage.absolute(out),
        "rows_per_s": parts.rows / (time.monotonic() - start),
        "checkpoint": opened.checkpoint,
    }


def evaluate(
    checkpoint: str,
    path: str,
    *,
    config: TrainConfig,
    batch_rows: int | None = None,
    device: Device = "cpu",
    console: Console | None = None,
) -> dict[str, Any]:
    """Scores every labelled row of an input exactly once -> the workload's metrics (a click model's: auroc, logloss,
    normalized_entropy, calibration, label_rate), rows, what the workload tells of them, and checkpoint.

    Raises InputError for an unusable checkpoint or input, damaged weights, and an input without labels.
    """
    request = _Request(checkpoint, path, config, batch_rows, device, console or Console())
    opened = request.open(evaluating=True, spare_cpus=0)
    totals = opened.scoring.make_totals()
    for table in opened.tables(request.console):
        totals.update(table)
    if totals.rows != opened.scoring.rows:
        raise AssertionError(f"{totals.rows} of {opened.scoring.rows} rows were scored")
    return {
        **totals.compute(),
        "rows": totals.rows,
        **opened.scoring.described,
        "checkpoint": opened.checkpoint,
    }


@dataclass(frozen=True)
class _Opened:
    """Rows that are scored once the Dataset is read."""

    dataset: ray.data.Dataset
    scoring: Scoring
    checkpoint: str

    def tables(self, console: Console) -> Iterator[pa.Table]:
        """The scores, in order."""
        done = 0
        with console.preparing(), input_errors():
            for table in self.dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2):
                yield table
                done += len(table)
                console.progress("score (rows)", done, self.scoring.rows)


@dataclass(frozen=True)
class _Request:
    """What a caller wants scored, and how."""

    checkpoint: str
    path: str
    config: TrainConfig
    batch_rows: int | None
    device: Device
    console: Console

    def open(self, *, evaluating: bool, spare_cpus: int) -> _Opened:
        """Checks checkpoint and input, reaches Ray, and plans who scores."""
        if self.batch_rows is not None and self.batch_rows < 1:
            raise InputError(f"batch_rows: {self.batch_rows} must be at least 1")
        checkpoint = open_checkpoint(self.checkpoint)
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
        return _Opened(scored_dataset(scoring, pool=pool, device=self.device), scoring, checkpoint.path)

    def _connect(self) -> TaskPlacement:
        wanted = self.config.cluster
        cluster.connect(
            wanted.address,
            num_cpus=wanted.num_cpus,
            object_store_bytes=wanted.object_store_bytes,
            log_to_driver=self.console.verbose,
        )
        cpus = sum(node.resources.get("CPU", 0.0) for node in cluster.alive_nodes())
        return TaskPlacement(num_cpus=min(1.0, cpus))
