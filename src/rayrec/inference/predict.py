"""Predictions of a checkpoint for any workload, as a Dataset or as Parquet files."""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from rayrec import storage
from rayrec.config import json_hash
from rayrec.data.job import resumable_job
from rayrec.environment.installation import versions
from rayrec.inference.config import ScoringConfig
from rayrec.inference.prediction_files import GROUP_ROWS, PART_ROWS, Parts
from rayrec.inference.scoring import ScoringJob, ScoringRequest
from rayrec.observe.console import Console

if TYPE_CHECKING:
    import ray.data

    from rayrec.workloads.base import TrainConfig


def predict(
    checkpoint: str, path: str, *, config: TrainConfig, options: ScoringConfig | None = None, console: Console | None = None
) -> ray.data.Dataset:
    """Predict the rows of an input, in order. Indexes the input now, and scores it whenever the Dataset is read. The Dataset has
    `row`, the int64 position over all files of the input, from 0, and the workload's columns. Click models have `score` and
    `logit`, float32, and `label` if present. Invalid lines have a position but no prediction. Raises InputError for an unusable
    checkpoint or input. Later damage fails the read."""
    request = ScoringRequest(checkpoint, path, config, options or ScoringConfig(), console or Console())
    return request.open(evaluating=False, spare_cpus=1, as_dataset=True).dataset()


def predict_to(
    checkpoint: str,
    path: str,
    out: str,
    *,
    config: TrainConfig,
    options: ScoringConfig | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Write the predictions of `predict` as part-00000.parquet, part-00001.parquet, ... atomically into folder `out`. After a
    kill, the same call resumes, and writes the same bytes. Returns rows, the workload's description of them, out, checkpoint, and
    rows_per_s from the start of scoring to the last file. Raises InputError for an unusable checkpoint or input, damaged weights,
    an existing `out`, and other inputs when resuming."""
    request = ScoringRequest(checkpoint, path, config, options or ScoringConfig(), console or Console())
    opened = request.open(evaluating=False, spare_cpus=0)
    start = time.monotonic()
    with resumable_job(out, _job_inputs(opened, request), last_file=None) as job, Parts(job.folder) as parts:
        before = parts.rows
        if before:
            request.console.note(f"Resuming {job.folder.path} after {before:,} of {opened.scoring.rows:,} rows")
        if before < opened.scoring.rows:
            for table in opened.tables(request.console, first_row=before):
                parts.write(table)
        assert parts.rows == opened.scoring.rows, f"{parts.rows} of {opened.scoring.rows} rows were written"
        parts.finish()
    return {
        "rows": parts.rows,
        **opened.described,
        "out": storage.absolute(out),
        "rows_per_s": (parts.rows - before) / (time.monotonic() - start),
    }


def _job_inputs(opened: ScoringJob, request: ScoringRequest) -> dict[str, Any]:
    """Return everything that determines the bytes of the files."""
    path = request.path
    is_folder = storage.exists(path) and storage.size_of(path) is None
    files = storage.files_in(path) if is_folder else storage.list_files(path)  # Size and time reveal changes
    return {
        "checkpoint": json_hash(opened.checkpoint.manifest()),
        "input": [storage.absolute(path), *map(list, map(astuple, files))],
        "rows": {**opened.scoring.described, "blocks": list(opened.scoring.block_rows)},
        "batch_rows": request.options.batch_rows,
        "device": request.options.device,
        "files": [PART_ROWS, GROUP_ROWS],
        "versions": versions(),
    }
