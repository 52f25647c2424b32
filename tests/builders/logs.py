"""Logs of tests, opened."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from builders.engines import LoopEngine

from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.encoding.counts import Counts, count_log
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import RAYREC, Preset, make_preprocessor
from rayrec.data.engine import TaskContext
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import LogIndex
from rayrec.data.raw_block import RawBlock
from rayrec.datasets.criteo import SCHEMA
from rayrec.schema import Schema


def open_index(
    path: str | Path,
    schema: Schema = SCHEMA,
    *,
    segment_bytes: int = 20_000,
    engine: Any = None,
    cache: str | Path | None = None,
    note: Callable[[str], None] = lambda _: None,
    extra: Sequence[str] = (),
) -> LogIndex:
    """Open a log. A packed file and a table need a `cache` that stays."""
    with tempfile.TemporaryDirectory() as folder:
        context = TaskContext(engine or LoopEngine(), str(cache or folder), note)
        return LogSource.at(str(path)).index(
            schema, segment_bytes=segment_bytes, context=context, extra=extra
        )


def rows_of(part: Any) -> list[tuple[bytes, ...]]:
    """Return the rows of a batch, or of encoded rows, of Criteo's columns as comparable values."""
    if isinstance(part, EncodedRows):
        arrays = (part.dense, np.ascontiguousarray(part.ids.T), part.label)
    else:
        ids = part.sparse_features.values().reshape(len(SCHEMA.sparse), -1).numpy().T
        arrays = (
            part.tensors["dense"].numpy(),
            ids,
            part.labels["label"].numpy(),
        )
    return [tuple(value.tobytes() for value in row) for row in zip(*arrays, strict=True)]


def unlabelled(lines: list[bytes]) -> bytes:
    return b"".join(line.partition(b"\t")[2] for line in lines)


def learn(index: LogIndex, schema: Schema = SCHEMA, preset: Preset = RAYREC) -> Preprocessor:
    parts = list(index.parts(0, index.rows))
    with count_log(preset.counting(schema), parts, engine=LoopEngine()) as counts:
        return make_preprocessor(preset, schema, counts)


def made_from(raw: RawBlock, schema: Schema, preset: Preset, path: str = "day_0") -> Preprocessor:
    """Build the Preprocessor of all rows of a block, which are those of a file."""
    return make_preprocessor(preset, schema, counts_of(raw, schema, preset, path))


def counts_of(raw: RawBlock, schema: Schema, preset: Preset, path: str = "day_0") -> Counts:
    job = preset.counting(schema)
    counts = job.empty()
    counts.add_source(raw, path)
    counts.add_rows(job.derivation.counted(raw), 0)
    return counts
