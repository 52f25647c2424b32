"""Detection of a raw log or preprocessed data at a path, and its index."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError, first_of
from rayrec.data.arrow import json_reply, parse_reply
from rayrec.data.encoding.preprocessor import stored_schema
from rayrec.data.engine import Engine, TaskContext, grouped
from rayrec.data.features.lookups import current_tables, with_contents
from rayrec.data.formats.columns import check_extra
from rayrec.data.formats.content import (
    count_names,
    reject_foreign_content,
    text_head,
)
from rayrec.data.formats.csv import Csv
from rayrec.data.formats.lakehouse import find_version, list_log, pinned
from rayrec.data.formats.parquet import Parquet, open_parquet
from rayrec.data.formats.registry import find_format
from rayrec.data.logs.faults import (
    HEAD_BYTES,
    LABEL_FAULT,
    Faults,
    likely_cause,
)
from rayrec.data.logs.index import CachedIndex, LogIndex, SegmentEntry, numbered
from rayrec.data.logs.partitions import with_partitions
from rayrec.data.logs.random_log import check_random, index_random, random_files
from rayrec.data.logs.rewritten import check_schema, read_file
from rayrec.data.logs.table_log import (
    column_names,
    file_columns,
    index_tables,
    is_table,
)
from rayrec.data.logs.table_parser import find_lengths, label_faults
from rayrec.data.logs.text_log import Chunk, cut, index_chunk
from rayrec.data.logs.text_parser import MAX_LINE_BYTES, parse
from rayrec.data.materialized.dataset import (
    MANIFEST,
    PreprocessedDataset,
    open_preprocessed,
    open_verified,
)
from rayrec.data.sequences.build import EventsLog
from rayrec.data.sequences.source import Rows, cached_lists, check_lists, find_lists
from rayrec.schema import Schema
from rayrec.storage.cache import (
    is_packed,
    read_head,
    remove_older,
    unpack,
    unpacked_path,
)

CHUNK_BYTES = 32 << 20
"""Bytes of text per indexing task."""
CHUNKS_PER_TASK = 256
"""Maximum number of small files per indexing task."""
SNIFFED_FILES = 256
"""Maximum number of files in a store that one process checks for packed ones. Data tasks check
more.
"""


# Packed files are unpacked, since only plain text can be read from the middle:
#
#   known       the cache has the file's version: no reading
#   new         a data task each; files of other versions are removed afterwards
#   plain       as it is
def plain_files(files: Sequence[storage.File], context: TaskContext) -> list[storage.File]:
    """Return the files as splittable text. Gzip and zip files are unpacked once to the cache
    folder, where older versions are removed.
    """
    packed = [
        file
        for file, is_packed in zip(files, _are_packed(files, context.engine), strict=True)
        if is_packed
    ]
    if not packed:
        return list(files)
    assert context.cache_folder is not None
    folder = storage.absolute(storage.join(context.cache_folder, "unpacked"))
    targets = {file: unpacked_path(file, folder) for file in packed}
    unpacked = storage.find_files(list(targets.values()))
    new = [file for file in packed if targets[file] not in unpacked]
    if new:
        names = first_of([file.path for file in new], 3)
        context.note(f"Unpacking {names} to {folder} (once, because packed files cannot be split)")
        for _ in context.engine.run("unpack", functools.partial(_unpack_task, folder=folder), new):
            pass
        unpacked |= storage.find_files([targets[file] for file in new])
        remove_older(folder, [storage.name_of(path) for path in targets.values()])
    return [unpacked[targets[file]] if file in targets else file for file in files]


def _are_packed(files: Sequence[storage.File], engine: Engine) -> list[bool]:
    """Return whether each file is gzip or zip, by its first bytes. Data tasks check many files of
    a store.
    """
    paths = [file.path for file in files]
    if not paths or not storage.is_url(paths[0]) or len(paths) <= SNIFFED_FILES:
        return list(storage.in_parallel(is_packed, paths, path=paths[0] if paths else ""))
    groups = [paths[start : start + SNIFFED_FILES] for start in range(0, len(paths), SNIFFED_FILES)]
    tables = engine.run("open", _sniff_task, groups, block_bytes=1 << 12)
    return [is_packed for table in tables for is_packed in table.column("packed").to_pylist()]


def _sniff_task(paths: Sequence[str]) -> pa.Table:
    return pa.table(
        {"packed": pa.array(storage.in_parallel(is_packed, paths, path=paths[0]), pa.bool_())}
    )


def _unpack_task(file: storage.File, *, folder: str) -> pa.Table:
    return json_reply(unpack(file, folder).path)


def _index_table(chunks: Sequence[Chunk], *, schema: Schema, segment_bytes: int) -> pa.Table:
    """Index some chunks: a large one, or several small files whose requests to a store run in
    parallel.
    """
    index = functools.partial(index_chunk, schema=schema, segment_bytes=segment_bytes)
    entries = []
    total = Faults()
    for new, faults in storage.in_parallel(index, chunks, path=chunks[0].path):
        entries += new
        total.add(faults)
    return json_reply({"entries": entries, "faults": total.to_dict()})


Consume = Callable[[pa.Table, Mapping[str, Any], int], None]
"""Consumer of a task's table, its reply, and the log's row at which the task began."""


# The first row of a task depends on all tasks before it, so replies are merged in order.
def index_with(
    run: Callable[[], Iterable[pa.Table]],
    files: Sequence[storage.File],
    schema: Schema,
    *,
    segment_bytes: int,
    context: TaskContext,
    consume: Consume | None = None,
) -> LogIndex:
    """Return the cached index of text files, or merge the tables of the indexing tasks that `run`
    starts, in order. Reports if the log was edited since it was last indexed.
    """
    cache = CachedIndex.at(
        context.cache_folder,
        files=files,
        schema=schema,
        segment_bytes=segment_bytes,
    )
    if cached := cache.read():
        return cached
    entries: list[SegmentEntry] = []
    faults = Faults()
    rows = 0
    done = 0
    size = sum(file.size_bytes for file in files)
    for table in run():
        reply = parse_reply(table)
        if consume is not None:
            consume(table, reply, rows)
        new = [SegmentEntry(*entry) for entry in reply["entries"]]
        entries.extend(new)
        faults.add(Faults.from_dict(reply["faults"]))
        rows += sum(entry.rows for entry in new)
        done += sum(entry.stop - entry.start for entry in new)
        context.progress("index (bytes)", done, size)
    return cache.keep(LogIndex(numbered(entries), faults), context.note)


def index_log(
    files: Sequence[storage.File],
    schema: Schema,
    *,
    segment_bytes: int,
    context: TaskContext,
) -> LogIndex:
    """Parse the full log once to number its rows and count its faults, at about 5 million Criteo
    rows/s per core. With a cache folder, returns a cached index of the same files. Reports if the
    log was edited since it was last indexed.
    """

    def run() -> Iterable[pa.Table]:
        group_bytes = max(CHUNK_BYTES, segment_bytes)
        groups = grouped(
            cut(files, group_bytes),
            lambda chunk: chunk.stop - chunk.start,
            max_bytes=group_bytes,
            max_items=CHUNKS_PER_TASK,
        )
        function = functools.partial(_index_table, schema=schema, segment_bytes=segment_bytes)
        return context.engine.run("index", function, groups, block_bytes=1 << 16)

    return index_with(run, files, schema, segment_bytes=segment_bytes, context=context)


_ORDER_FILES: Final = 64
"""Maximum number of files whose order of columns is compared."""

TextIndexer = Callable[..., LogIndex]
"""Function that indexes text files, with the signature of `index_log`."""


@dataclass(frozen=True)
class LogSource:
    """Data at a path, inspected once. No other module distinguishes raw logs from preprocessed
    data.
    """

    path: str
    names: tuple[str, ...]
    """Log files in the folder, in this order. Empty: all files."""
    is_preprocessed: bool

    @classmethod
    def at(cls, path: str, names: Sequence[str] = ()) -> LogSource:
        return cls(path, tuple(names), storage.exists(storage.join(path, MANIFEST)))

    @property
    def is_random(self) -> bool:
        """True for random:ROWS[:SEED], whose rows are made when they are read."""
        return self.path.startswith("random:")

    def require_raw(self, fix: str = "give the raw log it was made from") -> None:
        """Check that the data is a raw log. Raises InputError."""
        if self.is_preprocessed:
            raise InputError(f"{self.path}: is preprocessed data; {fix}")

    def dataset(self) -> PreprocessedDataset | None:
        """Open the preprocessed data; None for a raw log. Raises InputError if it is damaged."""
        return open_preprocessed(self.path) if self.is_preprocessed else None

    def preprocessor(self) -> str | None:
        """Return the Preprocessor folder of preprocessed data; None for a raw log."""
        dataset = self.dataset()
        return None if dataset is None else dataset.preprocessor

    def list_files(self) -> list[storage.File]:
        """List the files without reading them."""
        dataset = self.dataset()
        return self._log_files() if dataset is None else dataset.list_files()

    def _log_files(self) -> list[storage.File]:
        return random_files(self.path) if self.is_random else list_log(self.path, self.names)

    def pinned(self) -> str:
        """Return the path with the current version if it is a table's folder, so that later calls
        read the same rows. Other paths are returned unchanged.
        """
        return self.path if self.is_preprocessed or self.is_random else pinned(self.path)

    def raw_files(self, schema: Schema | None = None) -> list[storage.File]:
        """List the files of a raw log. Raises InputError for preprocessed data, including other
        programs' data, and for content that no format reads, unless the schema names one that may.
        """
        self.require_raw()
        try:
            files = self._log_files()
        except InputError:
            # Another program's files have other names
            if os.path.isdir(self.path) and storage.table_kind(self.path) is None:
                reject_foreign_files(self.path, storage.list_files(self.path))
            raise
        reject_foreign_files(self.path, files)
        first = next((file for file in files if file.size_bytes), None)
        if first is None or self.is_random:
            return files
        if isinstance(find_format(first.path, schema), Csv):
            reject_foreign_content(first)
        return files

    def event_files(self, schema: Schema) -> list[storage.File]:
        """List the files of a log of events, whose lists have the schema. Raises InputError for
        data that is no such log.
        """
        if self.is_random:
            raise InputError(f"{self.path}: has no users and items; give a log of events")
        return self.raw_files(schema.events)

    def existing_lists(self, rows: Rows = "log") -> LogSource | None:
        """Return the source of lists of events that were built before; None for other data."""
        folder = None if self.is_random or self.is_preprocessed else find_lists(self.path, rows)
        return None if folder is None else LogSource(folder, (), is_preprocessed=False)

    def lists(
        self,
        schema: Schema,
        context: TaskContext,
        *,
        max_bad_fraction: float | None = None,
        rows: Rows = "log",
    ) -> LogSource:
        """Return the source of lists: existing ones, or those of events, built once in the cache
        folder. Raises InputError for other lists than the schema's, and an unusable log.
        """
        existing = self.existing_lists(rows)
        if existing is not None:
            check_lists(existing.path, schema)
            return existing
        files = tuple(self.event_files(schema))
        limit = 1.0 if max_bad_fraction is None else max_bad_fraction
        folder = cached_lists(EventsLog(self.path, files, schema, limit), context)
        return LogSource(storage.join(folder, rows), (), is_preprocessed=False)

    def schema(self, schema: Schema, *, preprocessor: str | None = None) -> Schema:
        """Return the schema with what the data decides: `tokens` (hexadecimal for text without a
        header, the log's value for preprocessed data) and the contents of side tables. Its column
        order becomes `header`, unless the schema declares one. A `preprocessor` folder has the
        order of files without a header. A schema with another delimiter than a tab keeps its
        `tokens`.
        """
        # The next reader explains a wrong path or column
        with suppress(InputError):
            schema = self._completed(schema, preprocessor)
        if any(vector.length is None for vector in schema.vectors):
            schema = self._with_vectors(schema)
        return self._with_tables(schema) if schema.tables else schema

    def _with_vectors(self, schema: Schema) -> Schema:
        """Return the schema with the lengths of its vectors in preprocessed data or in the first
        rows. Raises InputError if these have no list.
        """
        folder = self.preprocessor()
        if folder is not None:
            return schema.replace(vectors=stored_schema(folder).vectors)
        lengths: dict[str, int] = {}
        files = [file for file in self.raw_files(schema) if file.size_bytes]
        for file in files[:_ORDER_FILES]:
            if len(lengths) == len(schema.vectors):
                break
            first = next(read_file(find_format(file.path, schema), file.path, schema), None)
            if first is not None:
                table = with_partitions(first, file.path, schema)
                lengths = find_lengths(table, schema, path=file.path) | lengths
        vectors = []
        for vector in schema.vectors:
            length = vector.length or lengths.get(vector.name)
            if length is None:
                raise InputError(
                    f"{self.path}: vectors: the first rows have no list in {vector.name}; give its "
                    f"length, as {{name: {vector.name}, length: 64}}"
                )
            vectors.append(vector.replace(length=length))
        return schema.replace(vectors=tuple(vectors))

    def _with_tables(self, schema: Schema) -> Schema:
        """Return the schema with the contents of its side tables: those of preprocessed data, else
        today's. Raises InputError.
        """
        folder = self.preprocessor()
        if folder is None:
            return with_contents(schema)
        return schema.replace(tables=stored_schema(folder).tables)

    def _completed(self, schema: Schema, preprocessor: str | None) -> Schema:
        has_open_tokens = schema.tokens != "hexadecimal" and schema.delimiter == "\t"
        if not has_open_tokens and schema.header is not None:
            return schema
        folder = self.preprocessor()
        if folder is not None:
            stored = stored_schema(folder)
            schema = schema.replace(tokens=stored.tokens) if has_open_tokens else schema
            return schema if schema.header is not None else _with_stored_header(stored, schema)
        if self.is_random:
            return schema.replace(tokens="hexadecimal") if has_open_tokens else schema
        files = [file for file in list_log(self.path, self.names) if file.size_bytes]
        if files and has_open_tokens:
            schema = _with_tokens(schema, files)
        return (
            self._with_order(schema, files, preprocessor)
            if files and schema.header is None
            else schema
        )

    def _with_order(
        self,
        schema: Schema,
        files: Sequence[storage.File],
        preprocessor: str | None,
    ) -> Schema:
        if not is_table(files, schema):
            return schema
        # Each file costs a request to a store, so that of very many only some are read, evenly
        # spread.
        some = files[:: -(-len(files) // _ORDER_FILES)]
        try:
            orders = dict.fromkeys(
                storage.in_parallel(
                    functools.partial(file_columns, schema=schema),
                    some,
                    path=self.path,
                )
            )
        except InputError:
            if preprocessor is None:
                raise
            return _with_stored_header(stored_schema(preprocessor), schema)
        header = next(iter(orders)) if len(orders) == 1 else ()
        if schema.tokens == "hexadecimal" and header == schema.columns:
            return schema
        return schema.replace(header=header, header_row=True)

    def check_head(self, schema: Schema, *, max_bad_fraction: float = 0.0) -> None:
        """Check the beginning of the data, to report mistakes early. Raises InputError. Errors: no
        files; only empty files; a missing column in the first table; no valid line at the beginning
        of the first text file, with the likely cause; many labels there, and more than
        `max_bad_fraction`, other than 0 and 1. A URL is only checked to be well-formed: reading
        from a store twice costs more than an early message is worth.
        """
        if storage.is_url(self.path):
            storage.resolve(self.path)
            return
        if self.is_preprocessed:
            return
        if schema.sequence is not None:
            if self.existing_lists() is not None:
                return
            schema = schema.events
        files = self.raw_files(schema)
        if self.is_random:
            check_random(self.path, schema)
            return
        first = next((file for file in files if file.size_bytes), None)
        if first is None:
            raise InputError(
                f"{self.path}: no usable rows; {'its files are' if files[1:] else 'it is'} empty"
            )
        if is_table(files, schema):
            rows, faults = _check_table(first.path, schema)
        elif not is_packed(first.path):
            rows, faults = _check_text(first, schema)
        else:
            return
        wrong_labels = faults.wrong_labels(with_rule=is_table(files, schema))
        if wrong_labels and faults.counts[LABEL_FAULT] > max(
            _MANY_WRONG_LABELS,
            max_bad_fraction,
        ) * (rows + faults.total):
            raise InputError(f"{first.path}: {wrong_labels}")

    def is_labelled(self, schema: Schema) -> bool:
        """Return whether the rows have the label column of `schema`, from the first conclusive
        file. Text without a header: from the first line with the right number of columns. Without
        one, the log is labelled and invalid.
        """
        dataset = self.dataset()
        if dataset is not None:
            return dataset.labelled
        if schema.sequence is not None:
            return True
        files = self._log_files()
        if schema.label is None or self.is_random:
            return True
        if is_table(files, schema):
            names = (column_names(file, schema) for file in files)
            return schema.label in next((columns for columns in names if columns), (schema.label,))
        labelled = len(schema.columns)
        for file in files:
            for line in _read_first_lines(file.path):
                columns = line.count(b"\t") + 1
                if columns in (labelled, labelled - 1):
                    return columns == labelled
        return True

    # Little is read, so that a mistake is reported at once. Later files are checked when the log is
    # indexed.
    #
    #   log                          its columns
    #   text without a header        those of the schema
    #   files with equal columns     those of the first file and its folders
    #   rows that name columns       those of the schema, and of the first rows in some files
    def check_extra(self, extra: Sequence[str], schema: Schema) -> None:
        """Check that a raw log has the columns `extra`, whether or not they are the schema's.

        Args:
            extra: Names of the columns.
            schema: Schema of the log, without its labels if the log has none.

        Raises InputError with the nearest names, and for preprocessed and random rows.
        """
        if not extra:
            return
        if self.is_preprocessed or self.is_random:
            kind = "preprocessed data" if self.is_preprocessed else "made up when it is read"
            raise InputError(f"keep: {self.path} is {kind}, without columns; use a raw log")
        files = [file for file in self.raw_files(schema) if file.size_bytes]
        if not is_table(files, schema):
            check_extra(schema.columns, extra, path=self.path)
            return
        some = files[:: -(-len(files) // _ORDER_FILES)] if files else []
        is_sparse = bool(some) and find_format(some[0].path, schema).is_sparse
        columns = functools.partial(column_names, schema=schema)
        by_file = storage.in_parallel(columns, some if is_sparse else some[:1], path=self.path)
        names = {name: None for names in by_file for name in names}
        if is_sparse:
            names |= dict.fromkeys(schema.columns)
        check_extra(tuple(names), extra, path=self.path)

    def index(
        self,
        schema: Schema,
        *,
        segment_bytes: int,
        context: TaskContext,
        max_bad_fraction: float | None = None,
        index_text: TextIndexer = index_log,
        extra: Sequence[str] = (),
    ) -> LogIndex:
        """Return the index; `index_text` indexes text if no index is cached. Rewritten files have
        the columns `extra` in addition to the schema's. Raises InputError if the fraction of
        invalid rows exceeds `max_bad_fraction`; fewer are reported in a note, or in a warning if a
        field of the schema may make them valid. Lists of events are built first.
        """
        if schema.sequence is not None and not self.is_preprocessed:
            source = self.lists(schema, context, max_bad_fraction=max_bad_fraction)
            return source._index(schema, segment_bytes, context, index_text, extra)
        index = self._index(schema, segment_bytes, context, index_text, extra)
        if max_bad_fraction is not None:
            index.check(max_bad_fraction, self.path)
            if index.faults.total:
                fix = index.faults.text_fix()
                show = context.warn if fix else context.note
                show(f"{self.path}: skipping {index.faults.describe()}{fix and '; '}{fix}")
        return index

    def _index(
        self,
        schema: Schema,
        segment_bytes: int,
        context: TaskContext,
        index_text: TextIndexer,
        extra: Sequence[str],
    ) -> LogIndex:
        if self.is_preprocessed:
            return open_verified(self.path, context).index
        if self.is_random:
            return index_random(self.path, schema, segment_bytes=segment_bytes)
        current_tables(schema)  # Raises if a side table is not the one of the model
        files = self.raw_files(schema)
        table = find_version(files[0].path)
        if table is not None:
            context.note(f"Reading {table.title}")
        if is_table(files, schema):
            return index_tables(
                files,
                schema,
                segment_bytes=segment_bytes,
                context=context,
                extra=extra,
            )
        cache = CachedIndex.at(
            context.cache_folder,
            files=files,
            schema=schema,
            segment_bytes=segment_bytes,
        )
        if cached := cache.read():
            return cached
        plain = plain_files(files, context)
        index = index_text(plain, schema, segment_bytes=segment_bytes, context=context)
        if plain != files:  # The next run need not inspect the unpacked files
            cache.write(index)
        return index


def _with_tokens(schema: Schema, files: Sequence[storage.File]) -> Schema:
    """Return the schema with hexadecimal tokens if the files are text without a header, judged by
    the first.
    """
    first = files[0].path
    is_text = isinstance(find_format(first, schema), Csv)
    if schema.header or not is_text or count_names(first, schema):
        return schema
    try:
        hexadecimal = schema.replace(tokens="hexadecimal")
    except InputError:  # Of columns that only tables have
        return schema
    lines = _read_first_lines(first)[:_SAMPLED_LINES]
    return hexadecimal if not lines or _has_rows(lines, hexadecimal) else schema


def _with_stored_header(stored: Schema, schema: Schema) -> Schema:
    return schema.replace(header=stored.header, header_row=stored.header_row)


def reject_foreign_files(path: str, files: Sequence[storage.File]) -> None:
    """Check that the files are not preprocessed by another program. Raises InputError."""
    names = [storage.name_of(file.path) for file in files]
    arrays = [name for name in names if name.endswith(".npy")]
    if arrays:
        folder = storage.parent_folder(files[0].path)
        raise InputError(
            f"{path}: has {arrays[0]}, an array of TorchRec's scripts; `rayrec adopt {folder}` "
            "checks such arrays once and makes the folder usable, without copying them"
        )
    shards = [name for name in names if re.search(r"\.mds(\.\w+)?$", name)]
    if shards:
        raise InputError(
            f"{path}: has {shards[0]}, an MDS shard; click logs must be text, CSV or Parquet; "
            "export the rows to Parquet"
        )


_HEAD_ROWS: Final = 1000
_SAMPLED_LINES: Final = 100
"""Lines at the beginning of a file of which one must be valid text without a header, to take it for
that.
"""
_MANY_WRONG_LABELS: Final = 0.2
"""Fraction of wrong labels among the first rows that cannot be accidental."""


def _check_table(path: str, schema: Schema) -> tuple[int, Faults]:
    """Return the number of valid labels in the first rows, and the faults of the others."""
    label = schema.label
    head = None
    file_format = find_format(path, schema)
    if file_format.name == Parquet.name:
        with open_parquet(path) as parquet:
            check_schema(parquet, path, schema)
            stored = [name for name in parquet.schema_arrow.names if name == label]
            batch = next(parquet.iter_batches(_HEAD_ROWS, columns=stored), None)
            head = None if batch is None else pa.table(batch)
    else:
        head = next(read_file(file_format, path, schema), None)
        head = None if head is None else head.slice(0, _HEAD_ROWS)
    head = None if head is None else with_partitions(head, path, schema)
    if label is None or head is None:
        return 0, Faults()
    faults = label_faults(head, schema, label, path=path)
    return head.num_rows - faults.total, faults


def _check_text(file: storage.File, schema: Schema) -> tuple[int, Faults]:
    """Return the number of valid rows at the beginning, and the faults of the others."""
    stop = min(HEAD_BYTES, file.size_bytes)
    entries, faults = index_chunk(Chunk(file.path, 0, stop, file.size_bytes), schema, HEAD_BYTES)
    rows = sum(entry.rows for entry in entries)
    if not rows:
        cause = likely_cause(read_head(file.path, HEAD_BYTES))
        if cause or not faults.wrong_labels():
            why = f"{faults.describe()}; {cause}" if cause else faults.describe()
            raise InputError(f"{file.path}: its first lines cannot be parsed; {why}")
    return rows, faults


def _has_rows(lines: Sequence[bytes], schema: Schema) -> bool:
    """Return whether some lines are text without a header, with or without a label, or with labels
    other than 0 and 1.
    """
    for form in (schema, schema.unlabelled()):
        raw, faults = parse(form, b"\n".join(lines) + b"\n")
        if raw.rows or faults.wrong_labels():
            return True
    return False


def _read_first_lines(path: str) -> list[bytes]:
    """Return the complete lines in the first 16 * MAX_LINE_BYTES of a file."""
    max_bytes = 16 * MAX_LINE_BYTES
    text = text_head(path, max_bytes)
    lines = text.split(b"\n") if text else []
    return lines if len(text) < max_bytes else lines[:-1]
