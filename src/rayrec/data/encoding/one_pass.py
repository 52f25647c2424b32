"""Indexing of a text log and counting of its training rows in one distributed pass, which reads and parses every line once."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Final, final

import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.arrow import arrow_texts
from rayrec.data.encoding.counts import TASK_BYTES, CountAccumulator, CountingJob, Counts, count_log, tasks_of
from rayrec.data.engine import Engine, TaskContext
from rayrec.data.log_source import CHUNK_BYTES
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import CachedIndex, LogIndex, SegmentEntry, numbered
from rayrec.data.logs.text_log import Chunk, cut, parsed_segments
from rayrec.native import keep_freed_memory
from rayrec.schema import Schema


def _index_and_count(chunks: Sequence[tuple[Chunk, tuple[int, int]]], *, counting: CountingJob, segment_bytes: int) -> pa.Table:
    """Index chunks in a data task, and count segments within bytes [start, stop) of the file. Rows are numbered from 0."""
    keep_freed_memory()
    packer, entries, total, rows = CountAccumulator(counting), [], Faults(), 0
    counted = []
    for chunk, (start, stop) in chunks:
        for entry, faults, raw in parsed_segments(chunk, counting.schema, segment_bytes):
            entries.append(entry)
            total.add(faults)
            if start <= entry.start and entry.stop <= stop:
                packer.add(raw, entry.path, rows)
                counted += [rows, rows + raw.rows]
            rows += raw.rows
    table = packer.table()
    result = {"entries": entries, "faults": total.to_dict(), "counted": [min(counted), max(counted)] if counted else None}
    return table.append_column("index", arrow_texts([json.dumps(result), *[""] * (len(table) - 1)]))


_MARGIN: Final = 0.03
"""Fraction of a log left uncounted at estimated borders of the chosen rows, which only the index determines exactly."""


@final
class CountingIndexer:
    """Indexer of a text log that counts most of the chosen rows in the same pass. Must be closed. Only the index determines the
    chosen rows exactly, so the pass estimates them from file sizes. `counts` adds missed rows, or counts again if too many."""

    def __init__(
        self,
        counting: CountingJob,
        rows_of: Callable[[LogIndex], tuple[int, int]],
        *,
        memory_bytes: int | None = None,
        task_bytes: int = TASK_BYTES,
    ) -> None:
        """Create an indexer. `rows_of` returns the rows [start, stop) of an index to count."""
        self._counting, self._chosen = counting, rows_of
        self._memory_bytes, self._task_bytes = memory_bytes, task_bytes
        self._partial: tuple[Counts, int, int] | None = None
        """Counts of rows [start, stop) of the log, from the pass that indexed it."""

    def index(self, files: Sequence[storage.File], schema: Schema, *, segment_bytes: int, context: TaskContext) -> LogIndex:
        """Index like `index_log`; counts nothing if the index is cached."""
        assert schema == self._counting.schema
        self.close()
        cache = CachedIndex.at(context.cache_folder, files=files, schema=schema, segment_bytes=segment_bytes)
        if cached := cache.read():
            return cached
        range_of = dict(zip([file.path for file in files], self._guess(files), strict=True))
        chunks = [(chunk, range_of[chunk.path]) for chunk in cut(files, max(CHUNK_BYTES, segment_bytes))]
        tasks = tasks_of(chunks, [chunk.stop - chunk.start for chunk, _ in chunks], self._task_bytes)
        function = functools.partial(_index_and_count, counting=self._counting, segment_bytes=segment_bytes)
        total = self._counting.total(self._memory_bytes, None)
        entries: list[SegmentEntry] = []
        faults, rows, done, size = Faults(), 0, 0, sum(file.size_bytes for file in files)
        counted: list[int] = []
        try:
            for table in context.engine.run("index and count", function, tasks):
                total.add(table, first_row=rows)
                result = json.loads(table.column("index")[0].as_py())
                new = [SegmentEntry(*entry) for entry in result["entries"]]
                entries.extend(new)
                faults.add(Faults.from_dict(result["faults"]))
                counted += [rows + row for row in result["counted"] or ()]
                rows += sum(entry.rows for entry in new)
                done += sum(entry.stop - entry.start for entry in new)
                context.progress("index (bytes)", done, size)
        except BaseException:
            total.close()
            raise
        start, stop = (min(counted), max(counted)) if counted else (0, 0)
        assert total.rows == stop - start
        self._partial = total, start, stop
        return cache.keep(LogIndex(numbered(entries), faults), context.note)

    def _guess(self, files: Sequence[storage.File]) -> list[tuple[int, int]]:
        """Return the bytes [start, stop) of each file with chosen rows only, assuming equally long rows, minus a margin."""
        sizes = numbered(SegmentEntry(file.path, 0, file.size_bytes, file.size_bytes) for file in files)
        try:
            start, stop = self._chosen(LogIndex(sizes, Faults()))
        except InputError:  # From the estimate; the index is checked later
            return [(0, 0)] * len(files)
        borders = {size.first_row for size in sizes} | {size.first_row + size.rows for size in sizes}
        margin = int(sum(size.rows for size in sizes) * _MARGIN)
        start += 0 if start in borders else margin
        stop -= 0 if stop in borders else margin
        return [(max(start - size.first_row, 0), min(max(stop - size.first_row, 0), size.rows)) for size in sizes]

    def counts(self, index: LogIndex, *, engine: Engine, progress: Callable[[int], None] | None = None) -> Counts:
        """Return counts of the chosen rows, to be closed by the caller. See `count_log` for the arguments."""
        start, stop = self._chosen(index)
        counts, missing = None, [(start, stop)]
        if self._partial is not None:
            counts, low, high = self._partial
            self._partial, missing = None, [(start, low), (high, stop)]
            if not start <= low <= high <= stop:  # The guess was wrong
                counts.close()
                counts, missing = None, [(start, stop)]
        parts = [part for low, high in missing for part in index.parts(low, high)]
        count = functools.partial(count_log, memory_bytes=self._memory_bytes, task_bytes=self._task_bytes)
        return count(self._counting, parts, engine=engine, progress=progress, into=counts)

    def close(self) -> None:
        """Free unused counts."""
        if self._partial is not None:
            self._partial[0].close()
            self._partial = None

    def __enter__(self) -> CountingIndexer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
