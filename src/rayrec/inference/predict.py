"""Predictions of a checkpoint for any workload, as a Dataset or as Parquet files."""

from __future__ import annotations

import itertools
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, final

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec import storage
from rayrec.config import json_hash
from rayrec.data.job import JobFolder, resumable_job
from rayrec.environment.installation import versions
from rayrec.inference.config import PredictionConfig
from rayrec.inference.scoring import ScoringJob, ScoringRequest
from rayrec.observe.console import Console

if TYPE_CHECKING:
    import ray.data

    from rayrec.workloads.base import TrainConfig

PART_ROWS = 1 << 20
"""Rows per file, about 12 MB of click scores."""
GROUP_ROWS = 1 << 17
"""Rows per row group, independent of the incoming tables, so that equal rows produce equal
bytes.
"""
_HEADER = struct.Struct("<QI")


def predict(
    checkpoint: str,
    path: str,
    *,
    config: TrainConfig,
    options: PredictionConfig | None = None,
    console: Console | None = None,
) -> ray.data.Dataset:
    """Predict the rows of an input, in order. Indexes the input now, and scores it whenever the
    Dataset is read. The Dataset has `row`, the int64 position over all files of the input, from 0,
    and the workload's columns. Click models have `score` and `logit`, float32, and `label` if
    present; retrieval models `items`, lists of the users' ids, the best first, and `scores`. Both
    have the input's own columns `options.keep`, with their values and types there. Invalid lines
    have a position but no prediction. Raises InputError for an unusable checkpoint or input. Later
    damage fails the read.
    """
    options = options or PredictionConfig()
    request = ScoringRequest(checkpoint, path, config, options, console or Console())
    opened = request.open(evaluating=False, spare_cpus=1, as_dataset=True, predicting=options)
    return opened.dataset()


def predict_to(
    checkpoint: str,
    path: str,
    out: str,
    *,
    config: TrainConfig,
    options: PredictionConfig | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Write the predictions of `predict` as part-00000.parquet, part-00001.parquet, ... atomically
    into folder `out`. After a kill, the same call resumes, and writes the same bytes. Returns rows,
    the workload's description of them, out, checkpoint, and rows_per_s from the start of scoring to
    the last file. Raises InputError for an unusable checkpoint or input, damaged weights, an
    existing `out`, and other inputs when resuming.
    """
    options = options or PredictionConfig()
    request = ScoringRequest(checkpoint, path, config, options, console or Console())
    opened = request.open(evaluating=False, spare_cpus=0, predicting=options)
    start = time.monotonic()
    inputs = {
        **_job_inputs(opened, request),
        "keep": list(options.keep),
        "k": options.k,
        "exclude_seen": options.exclude_seen,
    }
    with (
        resumable_job(out, inputs, last_file=None) as job,
        Parts(job.folder) as parts,
    ):
        before = parts.rows
        if before:
            request.console.note(
                f"Resuming {job.folder.path} after {before:,} of {opened.scoring.rows:,} rows"
            )
        if before < opened.scoring.rows:
            for table in opened.tables(request.console, first_row=before):
                parts.write(table)
        assert parts.rows == opened.scoring.rows, (
            f"{parts.rows} of {opened.scoring.rows} rows were written"
        )
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
    assert path is not None
    is_folder = storage.exists(path) and storage.size_of(path) is None
    # Size and time reveal changes
    files = storage.files_in(path, recursive=True) if is_folder else storage.list_files(path)
    return {
        "checkpoint": json_hash(opened.checkpoint.manifest()),
        "input": [storage.absolute(path), *map(list, map(astuple, files))],
        "rows": {**opened.scoring.described, "blocks": list(opened.scoring.block_rows)},
        "batch_rows": request.options.batch_rows,
        "device": request.options.device,
        "files": [PART_ROWS, GROUP_ROWS],
        "versions": versions(),
    }


# -- numbered Parquet files, resumable after a kill


@final
class Parts:
    """Writer of part-00000.parquet, part-00001.parquet, ... in a folder. A context manager, which
    closes the journal. It resumes in a folder with files: at a URL after the last complete file, in
    a local folder after the last table. A file is written once all its rows are complete. Until
    then a journal contains them.
    """

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._exit = ExitStack()
        names = set(storage.list_folder(folder.path))
        self._number = next(number for number in itertools.count() if _name(number) not in names)
        """Number of the next file."""
        self._is_local = not storage.is_url(folder.path)
        self._journal_folder = (
            folder.aid() if self._is_local else self._exit.enter_context(storage.Scratch("journal"))
        )
        os.makedirs(self._journal_folder, exist_ok=True)
        self._journal = self._new_journal()
        self.rows = self._journal.rows
        """Rows written so far, including earlier calls."""
        if self._number:  # All files but the last one are full
            filesystem, inner = storage.resolve(storage.join(folder.path, _name(self._number - 1)))
            self.rows += (self._number - 1) * PART_ROWS + pq.read_metadata(
                inner,
                filesystem=filesystem,
            ).num_rows

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()
        self._exit.close()

    def write(self, table: pa.Table) -> None:
        start = 0
        while start < len(table):
            chunk = table.slice(start, PART_ROWS - self._journal.rows)
            self._journal.append(chunk)
            if not self.rows and self._is_local:
                self._folder.done("predict", 0, {})
            start += len(chunk)
            self.rows += len(chunk)
            if self._journal.rows == PART_ROWS:
                self._end_part()

    def finish(self) -> None:
        """Write the remaining rows as the last file."""
        if self._journal.rows:
            self._end_part()

    def _new_journal(self) -> _Journal:
        return _Journal(os.path.join(self._journal_folder, f"journal-{self._number:05d}"))

    def _end_part(self) -> None:
        with storage.writing(storage.join(self._folder.path, _name(self._number))) as path:
            _write_parquet((table for _, table in self._journal.entries()), path)
        if not self._number:
            self._folder.done("predict", 0, {})
        self._journal.remove()
        self._number += 1
        self._journal = self._new_journal()


def _name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def _write_parquet(tables: Iterator[pa.Table], path: str) -> None:
    waiting = []
    num_waiting = 0
    with ExitStack() as opened:
        writer: pq.ParquetWriter | None = None
        for table in itertools.chain(tables, [None]):
            if table is not None:
                waiting.append(table)
                num_waiting += len(table)
            while num_waiting >= GROUP_ROWS or (table is None and num_waiting):
                merged = pa.concat_tables(waiting)
                if writer is None:
                    # Dictionaries only for columns with repeated values.
                    is_float = {
                        field.name: pa.types.is_floating(field.type) for field in merged.schema
                    }
                    repeating = [
                        name
                        for name in is_float
                        if name == "label" or not (name == "row" or is_float[name])
                    ]
                    writer = opened.enter_context(
                        pq.ParquetWriter(path, merged.schema, use_dictionary=repeating)
                    )
                # A single chunk, because chunk boundaries would change the bytes of the file.
                writer.write_table(
                    merged.slice(0, GROUP_ROWS).combine_chunks(),
                    row_group_size=GROUP_ROWS,
                )
                waiting = [merged.slice(GROUP_ROWS)]
                num_waiting = len(waiting[0])


@final
class _Journal:
    """Local file of tables, readable after a kill, with byte count, CRC-32 and Arrow stream per
    table. An incomplete one ends it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.rows = 0
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115
        complete_bytes = 0
        for end, table in self.entries():
            complete_bytes = end
            self.rows += len(table)
        self._file.truncate(complete_bytes)

    def append(self, table: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        data = sink.getvalue()
        for chunk in (_HEADER.pack(data.size, zlib.crc32(data)), memoryview(data)):
            while len(chunk):
                chunk = chunk[self._file.write(chunk) :]
        self.rows += len(table)

    def entries(self) -> Iterator[tuple[int, pa.Table]]:
        """Yield the end offset and table of each complete entry."""
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                length, checksum = _HEADER.unpack(header)
                if length > size - file.tell():
                    return
                data = file.read(length)
                if zlib.crc32(data) != checksum:
                    return
                with pa.ipc.open_stream(data) as stream:
                    yield file.tell(), stream.read_all()

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        os.remove(self.path)
