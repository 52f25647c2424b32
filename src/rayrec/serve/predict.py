"""Scores a whole click log with a checkpoint: as a Dataset, as Parquet files, or summed up in metrics."""

from __future__ import annotations

import gc
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.exceptions

from rayrec import storage
from rayrec.checkpoint import verify
from rayrec.config import InputError
from rayrec.data import ready
from rayrec.data.ingest import share_preprocessor
from rayrec.data.labels import has_labels
from rayrec.data.log import select
from rayrec.data.opening import open_log
from rayrec.data.placement import TaskPlacement
from rayrec.data.position import Part, blocks_of_epoch
from rayrec.data.ray_tasks import RayEngine
from rayrec.launch import cluster
from rayrec.metrics import BinaryMetricsAccumulator
from rayrec.observe.console import Console
from rayrec.serve.lines import first_lines
from rayrec.serve.loading import load_preprocessor, open_for_scoring, weight_bytes
from rayrec.serve.scoring import Device, Job, ScoredBlock, plan_pool, scored_dataset

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig

_PART_ROWS = 1 << 20
"""Rows of one Parquet file, about 12 MB."""


def predict(
    checkpoint: str,
    path: str,
    *,
    config: TrainConfig,
    batch_rows: int = 8192,
    device: Device = "cpu",
    console: Console | None = None,
) -> ray.data.Dataset:
    """The scores of a log, in input order: `row` int64, `score` and `logit` float32 and, where there is one, `label`.

    `row` is the 0-based position of the line in the input, its files one after the other; a faulty line has a position
    but no score. The log is indexed now; it is scored when the Dataset is read, each time anew. `config` is that of
    the checkpoint's config.yaml. Raises InputError for an unusable checkpoint or log; damaged weights fail the read.
    """
    scoring = _prepare(
        checkpoint, path, config=config, batch_rows=batch_rows, device=device, console=console, spare_cpus=1
    )
    return scoring.dataset


def predict_to(
    checkpoint: str,
    path: str,
    out: str,
    *,
    config: TrainConfig,
    batch_rows: int = 8192,
    device: Device = "cpu",
    console: Console | None = None,
) -> dict[str, Any]:
    """Writes what `predict` gives as part-00000.parquet, part-00001.parquet, ... into folder `out`, which appears
    complete or not at all. Returns rows, bad_rows, out, and rows_per_s from the start of scoring to the last file.

    Raises InputError for an unusable checkpoint or log, damaged weights, and where `out` exists.
    """
    console = console or Console()
    with storage.writing_folder(out) as folder:
        scoring = _prepare(
            checkpoint, path, config=config, batch_rows=batch_rows, device=device, console=console, spare_cpus=0
        )
        start = time.monotonic()
        with _Parts(folder) as parts:
            for table in scoring.tables(console):
                parts.write(table)
    if parts.rows != scoring.rows:
        raise AssertionError(f"{parts.rows} of {scoring.rows} rows were written")
    return {
        "rows": parts.rows,
        "bad_rows": scoring.bad_rows,
        "out": storage.absolute(out),
        "rows_per_s": parts.rows / (time.monotonic() - start),
        "checkpoint": scoring.checkpoint,
        "preprocessor": scoring.preprocessor_hash,
    }


def evaluate(
    checkpoint: str,
    path: str,
    *,
    config: TrainConfig,
    batch_rows: int = 8192,
    device: Device = "cpu",
    console: Console | None = None,
) -> dict[str, Any]:
    """Scores every row of a labelled log exactly once -> auroc, logloss, normalized_entropy, calibration, rows,
    label_rate, bad_rows, checkpoint, preprocessor (its hash). Keeps 5 bytes a row here.

    Raises InputError for an unusable checkpoint or log, damaged weights, and a log without labels.
    """
    console = console or Console()
    scoring = _prepare(
        checkpoint,
        path,
        config=config,
        batch_rows=batch_rows,
        device=device,
        console=console,
        spare_cpus=0,
        needs_labels=True,
    )
    kept = BinaryMetricsAccumulator()
    for table in scoring.tables(console):
        kept.update(table.column("logit").to_numpy(), table.column("label").to_numpy())
    if kept.rows != scoring.rows:
        raise AssertionError(f"{kept.rows} of {scoring.rows} rows were scored")
    return {
        **kept.compute(),
        "bad_rows": scoring.bad_rows,
        "checkpoint": scoring.checkpoint,
        "preprocessor": scoring.preprocessor_hash,
    }


@dataclass(frozen=True)
class _Scoring:
    """A log ready to be scored."""

    dataset: ray.data.Dataset
    rows: int
    bad_rows: int
    checkpoint: str
    preprocessor_hash: str

    def tables(self, console: Console) -> Iterator[pa.Table]:
        """The scores, in order."""
        done = 0
        with console.preparing(), input_errors():
            for table in self.dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2):
                yield table
                done += len(table)
                console.progress("score (rows)", done, self.rows)


def _prepare(
    checkpoint: str,
    path: str,
    *,
    config: TrainConfig,
    batch_rows: int,
    device: Device,
    console: Console | None,
    spare_cpus: int,
    needs_labels: bool = False,
) -> _Scoring:
    console = console or Console()
    if batch_rows < 1:
        raise InputError(f"batch_rows: {batch_rows} must be at least 1")
    opened = open_for_scoring(checkpoint)
    # Here, not in the actors: a pipeline of Ray Data 2.60 that fails at its first block leaves its actors, and the CPUs they
    # hold, behind.
    verify(opened, "model.")
    preprocessor = load_preprocessor(opened)
    labelled = has_labels(path, preprocessor.schema)
    if needs_labels and not labelled:
        raise InputError(
            f"{path}: holds no labels, so there is nothing to compare scores with; `rayrec predict` scores it"
        )
    schema = preprocessor.schema if labelled else preprocessor.schema.unlabelled()
    cluster.connect(
        config.cluster.address,
        num_cpus=config.cluster.num_cpus,
        object_store_bytes=config.cluster.object_store_bytes,
        log_to_driver=console.verbose,
    )
    nodes = cluster.alive_nodes()
    placement = TaskPlacement(num_cpus=min(1.0, sum(node.resources.get("CPU", 0.0) for node in nodes)))
    data = config.eval_data
    with console.preparing(), input_errors():
        index = open_log(
            path,
            schema,
            segment_bytes=data.segment_bytes,
            engine=RayEngine(placement),
            cache_folder=cache_folder(opened.path),
            note=console.note,
            progress=console.progress,
        )
        index.check(config.max_bad_fraction, path)
        if index.faults.total:
            console.note(f"{path}: {index.faults.describe()}; they are left out")
        lines = first_lines(index, segments_per_task=data.segments_per_block, engine=RayEngine(placement))
    parts = [Part(segment, start, stop) for segment, start, stop in select(index, 0, index.rows)]
    rows_follow = not index.faults.total or index.format in ready.FORMATS
    blocks = [
        ScoredBlock(block, tuple(lines[part.segment] for part in block.parts), rows_follow)
        for block in blocks_of_epoch(parts, shuffle="none", seed=0, epoch=0, segments_per_block=data.segments_per_block)
    ]
    pool = plan_pool(nodes, weight_bytes=weight_bytes(opened), blocks=len(blocks), spare_cpus=spare_cpus, device=device)
    job = Job(
        config=config,
        checkpoint=opened.path,
        preprocessor=share_preprocessor(preprocessor),
        blocks=ray.put(blocks),
        labelled=labelled,
        batch_rows=batch_rows,
        threads=max(1, int(pool.cpus_per_actor)),
        device=device,
    )
    return _Scoring(
        dataset=scored_dataset(job, num_blocks=len(blocks), pool=pool),
        rows=index.rows,
        bad_rows=index.faults.total,
        checkpoint=opened.path,
        preprocessor_hash=preprocessor.hash(),
    )


def cache_folder(checkpoint: str) -> str:
    """Where unpacked files and indices are kept: $RAYREC_CACHE, else where the run keeps its own, else ~/.cache/rayrec.

    The run's has the index of the log it was trained on already, and every node can reach it.
    """
    chosen = os.environ.get("RAYREC_CACHE")
    if chosen:
        return chosen
    root = checkpoint.rstrip("/").rsplit("/", 3)[0]  # ROOT/RUN/checkpoints/step_00001000
    of_run = storage.join(root, ".cache")
    if storage.exists(of_run) and (storage.is_url(of_run) or os.access(of_run, os.W_OK)):
        return of_run
    return os.path.join(os.path.expanduser("~"), ".cache", "rayrec")


@contextmanager
def input_errors() -> Iterator[None]:
    """Turns what Ray made of an InputError on its way from a data task into that InputError again.

    Ray Data keeps only the traceback's text of what a function raised (2.60: UserCodeException drops its cause).
    """
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs what it then raises
    message = ""
    try:
        yield
    except ray.exceptions.RayError as error:
        found = re.findall(r"^rayrec\.config\.InputError: (.+)$", str(error), re.MULTILINE)
        if not found:
            raise
        message = found[-1]
    finally:
        logger.setLevel(level)
    if message:
        # Raised here, without the failure as its context: that would keep the failed pipeline, its actors and their
        # CPUs alive as long as anybody holds this exception.
        gc.collect()
        raise InputError(message)


class _Parts:
    """Writes tables that come one after the other into numbered Parquet files."""

    def __init__(self, folder: str) -> None:
        self._folder, self._number, self._in_part = folder, 0, 0
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, table: pa.Table) -> None:
        start = 0
        while start < len(table):
            piece = table.slice(start, _PART_ROWS - self._in_part)
            if self._writer is None:
                name = os.path.join(self._folder, f"part-{self._number:05d}.parquet")
                # Values hardly repeat: a dictionary would only be tried and thrown away.
                self._writer = pq.ParquetWriter(name, table.schema, use_dictionary=["label"])
            self._writer.write_table(piece)
            start += len(piece)
            self._in_part += len(piece)
            self.rows += len(piece)
            if self._in_part == _PART_ROWS:
                self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._in_part, self._number = None, 0, self._number + 1
