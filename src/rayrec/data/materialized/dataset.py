"""Preprocessed click log: written once by `preprocess`, read instead of the raw log, with the same
batches. Its index has the segments of the raw log, with the same rows, file grouping and sort
order. Blocks, epoch orders and positions are identical.
"""

import functools
import hashlib
import json
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.arrow import as_numpy
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.engine import TaskContext, grouped
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import MAPPED, LogIndex, Segment, numbered, row_numbers
from rayrec.data.materialized.formats import (
    MappedRange,
    MappedRows,
    combine,
    damaged,
    file_checksum,
    from_named_columns,
)
from rayrec.data.materialized.torchrec_arrays import PRESET
from rayrec.data.sampled_rows import all_sampled_rows, log_segments

VERSION = 1
MANIFEST = "dataset.json"


# Folder of a preprocessed dataset:
#
#   dataset.json      last; rows, sets, files with CRC-32, segments, matrices, Preprocessor's hash
#   preprocessor/     the Preprocessor that made the rows
#   STEM_*.npy        npy: dense, labels and sparse of each raw file, rows at their places
#   STEM.bin          binary: rows of 32-bit integers
#   part-*.parquet    parquet: a file per task, a row group per segment
#
# Its segments are the raw log's, so that row orders and stored positions stay the same.
@dataclass(frozen=True)
class PreprocessedDataset:
    """Folder written by `preprocess`."""

    path: str
    index: LogIndex
    """Index of the raw log. Its file paths are virtual paths below this folder."""
    preprocessor: str
    """Folder of the Preprocessor that made the rows."""
    manifest: dict[str, Any]
    maps: MappedRows
    """Row storage of all formats but parquet."""
    _checked: list[Preprocessor] = field(default_factory=list, repr=False, compare=False)

    @property
    def format(self) -> str:
        return self.manifest["format"]

    @property
    def adopted(self) -> bool:
        """Return whether another program wrote the arrays, so that rayrec does not know the raw
        values of the ids.
        """
        return self.manifest["preset"] == PRESET

    @property
    def labelled(self) -> bool:
        return self.manifest["labelled"]

    @property
    def sets(self) -> dict[str, tuple[int, int]]:
        """Row ranges of train, validation and test. Empty if the log was not split."""
        return {name: (start, stop) for name, (start, stop) in self.manifest["sets"].items()}

    @property
    def size_bytes(self) -> int:
        return sum(file["bytes"] for file in self.manifest["files"])

    def list_files(self) -> list[storage.File]:
        """List the manifest and its files without reading them."""
        names = [MANIFEST, *(file["name"] for file in self.manifest["files"])]
        return list(storage.find_files([storage.join(self.path, name) for name in names]).values())

    def check_preprocessor(self, preprocessor: Preprocessor) -> None:
        """Check that the rows were made with this Preprocessor, whose hash is computed once. Raises
        InputError.
        """
        if any(checked is preprocessor for checked in self._checked):
            return
        if preprocessor.hash() != self.manifest["preprocessor"]:
            fix = "make it again with `rayrec preprocess`"
            if self.adopted:
                fix = "adopt it with the model's: --preprocessor RUN --out DIR"
            raise InputError(
                f"{self.path}: made with Preprocessor {self.manifest['preprocessor']}, not with "
                f"{preprocessor.hash()}. Use the one in {self.preprocessor}, or {fix}."
            )
        self._checked[:] = [preprocessor]


_OPENED: dict[str, PreprocessedDataset] = {}


def write_manifest(folder: str, manifest: dict[str, Any]) -> None:
    """Write dataset.json, which makes the folder a preprocessed dataset."""
    # One line per entry. Indented JSON would be ten times as long for a large log.
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in manifest.items()
    )
    storage.write_bytes(storage.join(folder, MANIFEST), f"{{\n{lines}\n}}\n".encode())


def compute_hash(files: list[dict[str, Any]]) -> str:
    """Hash the names, sizes and checksums of the files."""
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


def open_preprocessed(path: str, *, verify: bool = False) -> PreprocessedDataset:
    """Open a preprocessed dataset and check file sizes. `verify` also compares checksums. Raises
    InputError if the folder is not a preprocessed dataset, has another version, or is incomplete or
    damaged.
    """
    dataset = _load(storage.absolute(path).rstrip("/"))
    _check_files(dataset.path, dataset.manifest["files"], verify=verify)
    return dataset


# Reading all bytes takes as long as a first epoch, so the record of a pass is worth keeping. It
# names sizes and times, which change with the files.
def open_verified(path: str, context: TaskContext) -> PreprocessedDataset:
    """Open a preprocessed dataset and compare the CRC-32 of its files in data tasks. Skips this if
    a record in the cache folder shows that files with the same names, sizes, times and checksums
    passed before. Raises the errors of `open_preprocessed`.
    """
    dataset = _load(storage.absolute(path).rstrip("/"))
    path = dataset.path
    files = dataset.manifest["files"]
    stored_files = _check_files(path, files, verify=False)
    assert context.cache_folder is not None
    record = storage.join(
        context.cache_folder, "verified", f"{hashlib.sha256(path.encode()).hexdigest()[:16]}.json"
    )
    state = [
        [file["name"], file["bytes"], file["crc32"], stored_files[file["name"]].modified_ns]
        for file in files
    ]
    version = {"path": path, "files": hashlib.sha256(json.dumps(state).encode()).hexdigest()}
    if not storage.exists(record) or storage.read_json(record) != version:
        _compare_checksums(path, files, context)
        storage.write_json(record, version)
    return dataset


def _load(path: str) -> PreprocessedDataset:
    if not storage.exists(storage.join(path, MANIFEST)):
        raise InputError(
            f"{path}: {MANIFEST} not found. Make a preprocessed dataset with `rayrec preprocess "
            f"LOG --out {path}`."
        )
    manifest = storage.read_json(storage.join(path, MANIFEST))
    if manifest.get("version") != VERSION:
        raise InputError(
            f"{path}: preprocessed dataset must have version {VERSION}, got "
            f"{manifest.get('version')}. Run `rayrec preprocess`."
        )
    if manifest["format"] in MAPPED and storage.is_url(path):
        raise InputError(
            f"{path}: {manifest['format']} needs a file system. Copy it to one, or preprocess to "
            "parquet."
        )
    # Its mapped files and in-memory rows remain valid.
    if path in _OPENED and _OPENED[path].manifest == manifest:
        return _OPENED[path]
    raw_files = [
        storage.join(path, f"{number:05d}", name)
        for number, name in enumerate(manifest["raw_files"])
    ]
    segments = numbered(
        ((raw_files[number], *rows) for number, *rows in manifest["segments"]), manifest["format"]
    )
    index = LogIndex(segments, Faults.from_dict(manifest["faults"]))
    preprocessor = storage.join(path, "preprocessor")
    _OPENED[path] = PreprocessedDataset(
        path, index, preprocessor, manifest, MappedRows(path, manifest)
    )
    return _OPENED[path]


def _check_files(
    path: str, files: Sequence[dict[str, Any]], *, verify: bool
) -> dict[str, storage.File]:
    """Check the sizes of the manifest's files and return all files of the folder by relative
    path.
    """
    stored = storage.files_below(path)
    for file in files:
        name = file["name"]
        size = file["bytes"]
        if name not in stored:
            raise damaged(path, name, "not found")
        if stored[name].size_bytes != size:
            raise damaged(path, name, f"size must be {size} bytes, got {stored[name].size_bytes}")
        if verify and file_checksum(storage.join(path, name)) != file["crc32"]:
            raise damaged(path, name, "checksum does not match")
    return stored


def open_dataset(segment: Segment) -> tuple[PreprocessedDataset, int]:
    """Return the segment's dataset and raw file number."""
    file_folder = storage.parent_folder(segment.path)
    folder = storage.parent_folder(file_folder)
    number = storage.name_of(file_folder)
    if folder not in _OPENED:
        _load(folder)
    return _OPENED[folder], int(number)


def read(segments: Sequence[Segment], order: np.ndarray, preprocessor: Preprocessor) -> EncodedRows:
    """Read rows `order` (int64) of the concatenated segments, all sampled or none. The result
    equals encoding the raw rows. Raises InputError if the dataset was made with another
    Preprocessor, a file is damaged, or an id is outside its table.
    """
    order = np.ascontiguousarray(order, np.int64)
    if segments[0].sample is not None:
        sources = log_segments(segments)
        clicks = read_clicks(sources, preprocessor.schema.label_names[0])
        rows = read(sources, all_sampled_rows(segments, clicks)[order], preprocessor)
        return replace(rows, row_numbers=row_numbers(segments)[order])
    dataset, _ = open_dataset(segments[0])
    dataset.check_preprocessor(preprocessor)
    assert not len(order) or (
        order.min() >= 0 and order.max() < sum(segment.rows for segment in segments)
    )
    if dataset.format == "parquet":
        table = _read_table(dataset, segments, order)
        rows = from_named_columns(table, preprocessor.inputs)
    else:
        rows = dataset.maps.read(_runs(segments), order, preprocessor)
    invalid = find_invalid_id(rows, preprocessor.num_embeddings)
    if invalid is not None:
        number, column, id_ = invalid
        name, row = _locate_row(dataset, segments, int(order[number]), column)
        size = preprocessor.num_embeddings[column]
        feature = preprocessor.inputs.sparse[column]
        raise damaged(
            dataset.path,
            name,
            f"row {row} column {feature}: id {id_} is outside its table of {size:,} rows",
        )
    return replace(rows, row_numbers=row_numbers(segments)[order])


def read_clicks(segments: Sequence[Segment], label: str) -> np.ndarray:
    """Read the label column of preprocessed segments, [rows]."""
    dataset, _ = open_dataset(segments[0])
    if dataset.format != "parquet":
        return dataset.maps.read_labels(_runs(segments))
    rows = np.arange(sum(segment.rows for segment in segments), dtype=np.int64)
    table = _read_table(dataset, segments, rows, columns=[label])
    return as_numpy(table.column(label).combine_chunks())


def _locate_row(
    dataset: PreprocessedDataset, segments: Sequence[Segment], row: int, column: int
) -> tuple[str, int]:
    """Return the file with this sparse column of row `row` of the segments, and the row number in
    that file.
    """
    if dataset.format == "parquet":
        number = int(row_numbers(segments)[row])
        files = dataset.manifest["parquet"]
        file = files[bisect_right([file["first_row"] for file in files], number) - 1]
        return file["name"], number - file["first_row"]
    run = next(run for run in _runs(segments) if row < run.stop)
    names = {"rows", "sparse", str(column)}  # Of all columns, or of this one
    file_name = next(
        stored[1] for stored in dataset.manifest["matrices"][run.file] if stored[0] in names
    )
    return file_name, run.first + row - run.start


def _runs(segments: Sequence[Segment]) -> list[MappedRange]:
    """Return the row ranges of the segments, merging adjacent ranges of a file."""
    runs: list[MappedRange] = []
    stop = 0
    for segment in segments:
        number = open_dataset(segment)[1]
        start, stop = stop, stop + segment.rows
        last = runs[-1] if runs else None
        if last and last.file == number and last.first + last.stop - last.start == segment.start:
            runs[-1] = MappedRange(number, last.first, last.start, stop)
        else:
            runs.append(MappedRange(number, segment.start, start, stop))
    return runs


def _read_table(
    dataset: PreprocessedDataset,
    segments: Sequence[Segment],
    order: np.ndarray,
    *,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Read the row groups with the requested rows, and all or some columns. A segment that is split
    between two sets has two row groups.
    """
    files = dataset.manifest["parquet"]
    first_rows = [file["first_row"] for file in files]
    groups: list[tuple[int, int]] = []
    bounds = [0]
    for segment in segments:
        row = segment.first_row
        end = segment.first_row + segment.rows
        while row < end:
            file = bisect_right(first_rows, row) - 1
            starts = np.cumsum([first_rows[file], *files[file]["row_groups"]])
            group = int(np.searchsorted(starts, row, "right")) - 1
            assert starts[group] == row
            groups.append((file, group))
            row = int(starts[group + 1])
            bounds.append(bounds[-1] + int(starts[group + 1] - starts[group]))
        assert row == end
    edges = np.array(bounds)
    group_numbers = np.searchsorted(edges, order, "right") - 1
    is_read = np.zeros(len(groups), bool)
    is_read[group_numbers] = True
    is_read[0] |= not len(order)  # For the schema.
    rows_read = np.cumsum(np.where(is_read, np.diff(edges), 0))
    before = edges[1:] - rows_read  # Rows of preceding groups that are not read.
    opened: dict[int, pq.ParquetFile] = {}
    tables = []
    try:
        for number in np.flatnonzero(is_read):
            file, group = groups[number]
            path = storage.join(dataset.path, files[file]["name"])
            if file not in opened:
                filesystem, inner = storage.resolve(path)
                opened[file] = pq.ParquetFile(
                    filesystem.open_input_file(inner), pre_buffer=storage.is_url(path)
                )
            tables.append(opened[file].read_row_group(group, columns=columns, use_threads=False))
    except (OSError, pa.ArrowInvalid) as error:
        raise damaged(
            dataset.path,
            files[file]["name"],
            f"cannot be read ({str(error).partition(chr(10))[0]})",
        ) from None
    finally:
        for reader in opened.values():
            reader.close()
    return pa.concat_tables(tables).combine_chunks().take(pa.array(order - before[group_numbers]))


_TASK_BYTES = 256 << 20
"""Bytes read per task. Larger files are split; small files share a task."""
_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class _ByteRange:
    """Byte range [start, stop) of file number `file`."""

    file: int
    name: str
    start: int
    stop: int


def _compare_checksums(path: str, files: Sequence[Mapping[str, Any]], context: TaskContext) -> None:
    ranges = [
        _ByteRange(number, file["name"], start, min(start + _TASK_BYTES, file["bytes"]))
        for number, file in enumerate(files)
        for start in range(0, file["bytes"], _TASK_BYTES)
    ]
    groups = grouped(
        ranges, lambda part: part.stop - part.start, max_bytes=_TASK_BYTES, max_items=len(ranges)
    )
    total = sum(file["bytes"] for file in files)
    done = 0
    checksums = [0] * len(files)
    task = functools.partial(_checksums, path=path)
    for group, table in zip(
        groups, context.engine.run("verify", task, groups, block_bytes=1 << 12), strict=True
    ):
        for part, checksum in zip(group, table.column("crc32").to_pylist(), strict=True):
            checksums[part.file] = combine(checksums[part.file], checksum, part.stop - part.start)
            done += part.stop - part.start
            if (
                part.stop == files[part.file]["bytes"]
                and f"{checksums[part.file]:08x}" != files[part.file]["crc32"]
            ):
                raise damaged(path, part.name, "checksum does not match")
        context.progress("verify (bytes)", done, total)


def _checksums(group: Sequence[_ByteRange], *, path: str) -> pa.Table:
    buffer = np.empty(_READ_BYTES, np.uint8)
    checksums = []
    for part in group:
        checksum = 0
        for start in range(part.start, part.stop, _READ_BYTES):
            chunk = buffer[: min(_READ_BYTES, part.stop - start)]
            if storage.read_into(storage.join(path, part.name), start, chunk) != len(chunk):
                raise damaged(path, part.name, "became shorter")
            checksum = zlib.crc32(chunk.data, checksum)
        checksums.append(checksum)
    return pa.table({"crc32": pa.array(checksums, pa.int64())})


def find_invalid_id(
    rows: EncodedRows, num_embeddings: Sequence[int]
) -> tuple[int, int, int] | None:
    """Return (row index, sparse column number, id) of the first id outside [0, num_embeddings) of
    its column, column by column. None if all ids are valid. One pass over the ids, about 1 ns per
    id.
    """
    for column, (ids, size) in enumerate(zip(rows.ids, num_embeddings, strict=True)):
        values = ids.values if isinstance(ids, JaggedIds) else ids
        if not values.size:
            continue
        # Negative ids become the largest values.
        unsigned = values.view(np.dtype(f"u{values.itemsize}"))
        if int(unsigned.max()) < size:
            continue
        index = int(np.argmax(unsigned.reshape(-1) >= size))
        if isinstance(ids, JaggedIds):
            row = int(np.searchsorted(ids.offsets, index, side="right")) - 1
        else:
            row = index // (values.size // len(rows))
        return row, column, int(values.reshape(-1)[index])
    return None
