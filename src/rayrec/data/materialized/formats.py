"""Storage layouts of preprocessed formats: fixed-width matrices, memory-mapped or loaded into
memory, or named columns.
"""

import contextlib
import ctypes
import io
import mmap
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from rayrec import host_resources, storage
from rayrec.config import InputError
from rayrec.data.arrow import arrow_numbers, as_numpy
from rayrec.data.encoded_rows import EncodedRows, Ids, JaggedIds, ids_from_arrow, ids_to_arrow
from rayrec.data.encoding.encoder import CDenseColumn, c_dense_column
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.logs.index import WritableFormat
from rayrec.data.raw_block import RawBlock
from rayrec.native import c_fields, call
from rayrec.schema import Schema

WRITABLE_FORMATS = tuple(sorted(get_args(WritableFormat)))


@dataclass(frozen=True)
class Matrix:
    """Matrix of one raw file's rows inside a preprocessed file: row-major, little-endian."""

    name: str
    """Name `rows` (binary: int32 label, integers, ids), `dense`, `labels`, `sparse`, or the number
    of a sparse column.
    """
    file: str
    offset: int
    """Byte offset of the first row in the file."""
    dtype: str
    columns: int

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * self.columns


@dataclass(frozen=True)
class FilePlan:
    """Layout of a matrix file, known before any row is written."""

    name: str
    size_bytes: int
    rows: int
    matrices: tuple[Matrix, ...]
    header: bytes = b""
    """File header, before the rows."""


def row_bytes(preprocessor: Preprocessor) -> int:
    """Estimate the size of a row in memory. A list counts as one id."""
    ids = sum(size or 1 for size in preprocessor.hotness)
    return 4 + 4 * len(preprocessor.inputs.dense) + preprocessor.id_dtype.itemsize * ids


def plan_files(format: str, preprocessor: Preprocessor, stem: str, rows: int) -> list[FilePlan]:
    """Plan the files for `rows` rows of one raw file. Their names begin with `stem`."""
    num_dense = len(preprocessor.inputs.dense)
    hotness = preprocessor.hotness
    if format == "binary":
        matrix = Matrix("rows", f"{stem}.bin", 0, "<i4", 1 + num_dense + len(hotness))
        return [FilePlan(matrix.file, rows * matrix.row_bytes, rows, (matrix,))]
    return [
        _plan_npy("dense", f"{stem}_dense.npy", "<f4", rows, num_dense),
        _plan_npy("labels", f"{stem}_labels.npy", "<i4", rows, 1),
        _plan_npy(
            "sparse",
            f"{stem}_sparse.npy",
            preprocessor.id_dtype.newbyteorder("<").str,
            rows,
            len(hotness),
        ),
    ]


def _plan_npy(name: str, file: str, dtype: str, rows: int, columns: int) -> FilePlan:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": dtype, "fortran_order": False, "shape": (rows, columns)}
    )
    header = buffer.getvalue()
    matrix = Matrix(name, file, len(header), dtype, columns)
    return FilePlan(file, len(header) + rows * matrix.row_bytes, rows, (matrix,), header)


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials modulo the CRC-32 polynomial, highest power in the lowest bit."""
    bit = 1 << 31
    product = 0
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power(length: int) -> int:
    """Compute x^(8 length) modulo the CRC-32 polynomial."""
    result = 1 << 31
    power = 1 << 23
    while length:
        if length & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        length >>= 1
    return result


# CRC-32 is linear: crc(A + B) = crc(A) * x^(8 |B|) + crc(B), in polynomials over GF(2). So tasks
# compute checksums of their ranges in any order, and nobody reads a file again.
def combine(first: int, second: int, length: int) -> int:
    """Compute the CRC-32 of two concatenated pieces from their CRC-32 values and the length of the
    second.
    """
    return _multiply(_power(length), first) ^ second


def file_checksum(path: str) -> str:
    """Compute the CRC-32 of a file, as 8 hexadecimal digits."""
    checksum = 0
    for data in storage.read_stream(path):
        checksum = zlib.crc32(data, checksum)
    return f"{checksum:08x}"


# Sparse files of full size: tasks write their rows in place, in any order, without appending.
def create_files(folder: str, plans: Sequence[FilePlan]) -> None:
    """Create sparse files of full size, with headers and without rows."""
    for plan in plans:
        with open(storage.join(folder, plan.name), "wb") as file:
            file.truncate(plan.size_bytes)
            file.write(plan.header)
            file.flush()
            os.fsync(file.fileno())


def finish_files(
    folder: str, plans: Sequence[FilePlan], row_ranges: Iterable[tuple[str, int, int, int]]
) -> list[dict[str, Any]]:
    """Return [{name, bytes, crc32}] of the complete files. Combines each file's checksum from its
    header and `row_ranges` (file, start, length, CRC-32), without reading rows again.
    """
    file_ranges: dict[str, list[tuple[int, int, int]]] = {}
    for name, start, length, range_checksum in row_ranges:
        file_ranges.setdefault(name, []).append((start, length, range_checksum))
    files = []
    for plan in plans:
        ranges = sorted(file_ranges.get(plan.name, []))
        with open(storage.join(folder, plan.name), "rb") as file:
            checksum = done = 0
            for start, length, range_checksum in [*ranges, (plan.size_bytes, 0, 0)]:
                file.seek(done)
                checksum = zlib.crc32(file.read(start - done), checksum)
                checksum = combine(checksum, range_checksum, length) if length else checksum
                done = start + length
            assert os.fstat(file.fileno()).st_size == done
        files.append({"name": plan.name, "bytes": plan.size_bytes, "crc32": f"{checksum:08x}"})
    return files


def check(format: str, preprocessor: Preprocessor, *, labelled: bool) -> None:
    """Check that the format can store the Preprocessor's output. Raises InputError."""
    if format not in WRITABLE_FORMATS:
        raise InputError(f"format: must be one of {', '.join(WRITABLE_FORMATS)}, got {format!r}")
    if format == "parquet":
        return
    schema = preprocessor.schema if labelled else preprocessor.schema.unlabelled()
    if schema.weight:
        raise InputError(
            f"format {format} cannot store the weights of column {schema.weight}. Use --format "
            "parquet."
        )
    unsupported = [*(label.name for label in schema.labels), *filter(None, [schema.timestamp])]
    if unsupported:
        raise InputError(
            f"format {format} cannot store columns {', '.join(unsupported)}. Use --format parquet."
        )
    for name, size in zip(preprocessor.inputs.sparse, preprocessor.hotness, strict=True):
        if size is None:
            raise InputError(
                f"format {format} cannot store the lists of column {name}. Use --format parquet."
            )
        if size != 1:
            raise InputError(
                f"format {format} stores one id per column, {name} has {size}. Use --format "
                "parquet."
            )
    if format == "binary":
        _check_binary(preprocessor)


def _check_binary(preprocessor: Preprocessor) -> None:
    """Check that rows of 32-bit integers can store the Preprocessor's output. Raises InputError."""
    if preprocessor.schema.tokens != "hexadecimal":
        raise InputError(
            "format binary stores integers, but tokens: any allows other numbers. Use --format "
            "npy or parquet."
        )
    for name, column in zip(preprocessor.inputs.dense, preprocessor.dense, strict=True):
        integer = np.zeros(1, np.int64)
        zero = np.empty(1, np.float32)
        call("rayrec_transform_dense", integer, 1, ctypes.byref(c_dense_column(column)), zero)
        if zero[0] != np.float32(column.missing_value):
            raise InputError(
                f"format binary stores a missing integer as 0, but in column {name} 0 becomes "
                f"{zero[0]} and missing {column.missing_value}. Use --format npy or parquet."
            )


def best_format(preprocessor: Preprocessor, out: str) -> str:
    """Return the fastest format for `out` that can store every labelled row. Never `binary`, which
    has only 32-bit integers.
    """
    if not storage.is_url(out):
        with contextlib.suppress(InputError):
            check("npy", preprocessor, labelled=True)
            return "npy"
    return "parquet"


def stored(
    format: str,
    raw: RawBlock,
    preprocessor: Preprocessor,
    start: int,
    stop: int,
    *,
    path: str,
    first_row: int,
) -> pa.Table:
    """Encode rows [start, stop) of `raw` into a table: one fixed-size list column per matrix, or
    named columns for parquet. Raises InputError if the format cannot store a number. `first_row` is
    its number in file `path`, for errors.
    """
    rows = preprocessor.encode(raw, np.arange(start, stop, dtype=np.int64))
    if format == "parquet":
        return named_columns(rows, preprocessor.inputs)
    if format == "binary":
        packed, wrong = _pack(raw, rows, preprocessor, start, stop)
        if wrong >= 0:
            row, column = divmod(wrong, packed.shape[1])
            names = (
                preprocessor.schema.label,
                *preprocessor.inputs.dense,
                *preprocessor.inputs.sparse,
            )
            raise InputError(
                f"{path}: row {first_row + start + row} column {names[column]}: must be a 32-bit "
                "number for format binary. Use --format npy or parquet."
            )
        return _table({"rows": packed})
    labels = rows.label.astype(np.int32) if rows.labels else np.full(len(rows), -1, np.int32)
    sparse = np.empty((len(rows), len(rows.ids)), preprocessor.id_dtype)
    # Keeps the written rows in the CPU cache for all columns.
    for base in range(0, len(rows), 1024):
        for number, column in enumerate(rows.ids):
            assert isinstance(column, np.ndarray)
            sparse[base : base + 1024, number] = column[base : base + 1024]
    return _table({"dense": rows.dense, "labels": labels.reshape(-1, 1), "sparse": sparse})


def _pack(
    raw: RawBlock, rows: EncodedRows, preprocessor: Preprocessor, start: int, stop: int
) -> tuple[np.ndarray, int]:
    """Return int32 [rows, 1 + dense + sparse], and the flat index of the first number that does not
    fit, or -1.
    """
    integers = np.ascontiguousarray(preprocessor.derivation.applied(raw).numbers[start:stop])
    minimums = np.array(
        [
            np.iinfo(np.int64).min if each.kind == "signed_log" else each.lowest
            for each in preprocessor.dense
        ],
        np.int64,
    )
    ids = np.ascontiguousarray(rows.ids)
    num_dense = len(preprocessor.dense)
    num_sparse = len(preprocessor.sparse)
    out = np.empty((len(rows), 1 + num_dense + num_sparse), np.int32)
    label = rows.label if rows.labels else None
    columns = (ctypes.c_int32(num_dense), ctypes.c_int32(num_sparse))
    wrong = call(
        "rayrec_pack_rows", integers, minimums, ids, ids.itemsize, label, len(rows), *columns, out
    )
    return out, wrong


def _table(matrices: dict[str, np.ndarray]) -> pa.Table:
    return pa.table(
        {
            name: pa.FixedSizeListArray.from_arrays(
                arrow_numbers(matrix.reshape(-1)), matrix.shape[1]
            )
            for name, matrix in matrices.items()
            if matrix.shape[1]
        }
    )


def table_matrix(table: pa.Table, name: str) -> np.ndarray:
    """Return a matrix [rows, columns] of a table, or table slice, made by `stored`."""
    column = table.column(name).combine_chunks()
    return as_numpy(column.flatten()).reshape(table.num_rows, column.type.list_size)


def named_columns(rows: EncodedRows, schema: Schema) -> pa.Table:
    """Convert encoded rows to columns named by the schema. Label is int8; weight, dense, list
    weights, seconds between a list's ids, and further labels are float32; timestamp is int64, in
    microseconds since 1970-01-01 00:00 UTC. Ids keep their type.
    """
    columns: dict[str, pa.Array] = {}
    if schema.label in rows.labels:
        columns[schema.label] = arrow_numbers(rows.labels[schema.label].astype(np.int8))
    if rows.weights is not None:
        assert schema.weight
        columns[schema.weight] = arrow_numbers(rows.weights)
    for number, name in enumerate(schema.dense):
        columns[name] = arrow_numbers(np.ascontiguousarray(rows.dense[:, number]))
    for name, ids in zip(schema.sparse, rows.ids, strict=True):
        columns[name] = ids_to_arrow(ids)
        if isinstance(ids, JaggedIds) and ids.weights is not None:
            columns[_number_column(schema, name)] = ids_to_arrow(ids, ids.weights)
    columns |= {
        name: arrow_numbers(values) for name, values in rows.labels.items() if name != schema.label
    }
    if rows.timestamps is not None:
        columns[_timestamp_column(schema)] = arrow_numbers(rows.timestamps)
    return pa.table(columns)


def _number_column(schema: Schema, name: str) -> str:
    """Return the column with the numbers of a list's ids: weights, or seconds in that of ages."""
    feature = schema.feature(name)
    return feature.weights or feature.ages or ""


def _timestamp_column(schema: Schema) -> str:
    """Return the column of the rows' times, which may be a model input of the same name too."""
    assert schema.timestamp is not None
    is_input = schema.timestamp in (*schema.dense, *schema.sparse)
    return f"{schema.timestamp}.timestamp" if is_input else schema.timestamp


def from_named_columns(table: pa.Table, schema: Schema) -> EncodedRows:
    """Convert a table back to encoded rows. Inverse of `named_columns`."""
    columns = {
        name: column.combine_chunks()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    dense = np.empty((table.num_rows, len(schema.dense)), np.float32)
    for number, name in enumerate(schema.dense):
        dense[:, number] = as_numpy(columns[name])
    names = (name for name in schema.label_names if name in columns)
    labels = {name: as_numpy(columns[name]).astype(np.float32, copy=False) for name in names}
    weights = as_numpy(columns[schema.weight]) if schema.weight in columns else None
    ids = [
        ids_from_arrow(columns[name], columns.get(_number_column(schema, name)))
        for name in schema.sparse
    ]
    timestamp = _timestamp_column(schema) if schema.timestamp is not None else None
    timestamps = as_numpy(columns[timestamp]) if timestamp in columns else None
    return EncodedRows(dense, ids, labels, weights, timestamps=timestamps)


# Pointers to the addresses and the first positions of some runs of rows, as in native/kernels.h.
# The arrays behind them must live as long as the call.
class _CRuns(ctypes.Structure):
    _fields_ = c_fields("void* rows starts; int64 count")


@dataclass(frozen=True)
class MappedRange:
    """Contiguous rows of one raw file, at positions [start, stop) of the rows to read."""

    file: int
    """Raw file number."""
    first: int
    """Row number of the first row in its file."""
    start: int
    stop: int


def damaged(path: str, name: str, cause: str) -> InputError:
    return InputError(
        f"{storage.join(path, name)}: {cause}: the dataset is damaged. Copy it again, or make it "
        "again with `rayrec preprocess`."
    )


@dataclass(frozen=True)
class MappedRows:
    """Files of one preprocessed dataset. They stay mapped, or in memory, as long as this object
    exists.
    """

    path: str
    manifest: dict[str, Any]
    _contents: dict[str, tuple[np.ndarray, mmap.mmap | None]] = field(
        default_factory=dict, repr=False
    )
    """Bytes of each file by name, with the memory map if it is mapped."""
    _matrices: dict[tuple[int, str], tuple[Matrix, np.ndarray, int]] = field(
        default_factory=dict, repr=False
    )
    """Matrix, rows and address of the first row, by raw file number and matrix name."""

    def load(self, files: Sequence[int]) -> None:
        """Load the rows of raw files into memory. Raises InputError if they do not fit."""
        names = {matrix[1] for number in files for matrix in self.manifest["matrices"][number]}
        loaded = {name for name, (_, mapped) in self._contents.items() if mapped is None}
        to_load = {name: size for name, size in self._sizes.items() if name in names - loaded}
        needed = sum(to_load.values())
        free = host_resources.memory().available
        if needed > free:
            raise InputError(
                f"{self.path}: {needed / 1e9:.1f} GB do not fit into the {free / 1e9:.1f} GB of "
                "free memory. Set in_memory off."
            )
        for name, size in to_load.items():
            content = np.empty(size, np.uint8)
            if storage.read_into(storage.join(self.path, name), 0, content) != size:
                raise damaged(self.path, name, "became shorter")
            self._contents[name] = content, None
        for key in [
            key for key, (matrix, _, _) in self._matrices.items() if matrix.file in to_load
        ]:
            del self._matrices[key]

    def read(
        self, runs: Sequence[MappedRange], order: np.ndarray, preprocessor: Preprocessor
    ) -> EncodedRows:
        """Read rows `order` (int64) of the concatenated runs."""
        format = self.manifest["format"]
        labelled = self.manifest["labelled"]
        if format == "binary":
            return self._unpack(runs, order, preprocessor)
        labels = {}
        if labelled:
            labels[preprocessor.schema.label or ""] = (
                self._gather("labels", runs, order).reshape(-1).astype(np.float32)
            )
        dense = self._gather("dense", runs, order)
        if format != "npz":
            columns: Any = self._gather("sparse", runs, order, transposed=True)
            for number in self.manifest.get("modulo", ()):
                columns[number] %= preprocessor.num_embeddings[number]
            return EncodedRows(dense, columns.astype(preprocessor.id_dtype, copy=False), labels)
        ids: list[Ids] = []
        for number, size in enumerate(preprocessor.hotness):
            column = self._gather(str(number), runs, order)
            if number in self.manifest.get("modulo", ()):
                column %= preprocessor.num_embeddings[number]
            column = column.astype(preprocessor.id_dtype, copy=False)
            ids.append(column.reshape(-1) if size == 1 else column)
        return EncodedRows(dense, ids, labels)

    def read_labels(self, runs: Sequence[MappedRange]) -> np.ndarray:
        """Read the labels of the runs, int32 [rows]."""
        name = "rows" if self.manifest["format"] == "binary" else "labels"
        parts = []
        for run in runs:
            _, values, _ = self._matrix(run.file, name)
            stop = run.first + run.stop - run.start
            parts.append(values[run.first : stop, 0])
        return np.concatenate(parts)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {file["name"]: file["bytes"] for file in self.manifest["files"]}

    def _content(self, name: str) -> np.ndarray:
        if name not in self._contents:
            size = self._sizes[name]
            try:
                with open(storage.join(self.path, name), "rb") as file:
                    if os.fstat(file.fileno()).st_size != size:
                        raise damaged(
                            self.path,
                            name,
                            f"size must be {size} bytes, got {os.fstat(file.fileno()).st_size}",
                        )
                    mapped = (
                        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else None
                    )
            except FileNotFoundError:
                raise damaged(self.path, name, "not found") from None
            self._contents[name] = (
                np.frombuffer(mapped, np.uint8) if mapped else np.empty(0, np.uint8),
                mapped,
            )
        return self._contents[name][0]

    def _matrix(self, file: int, name: str) -> tuple[Matrix, np.ndarray, int]:
        key = file, name
        if key not in self._matrices:
            matrix = next(
                Matrix(*stored) for stored in self.manifest["matrices"][file] if stored[0] == name
            )
            rows = self.manifest["file_rows"][file]
            content = self._content(matrix.file)[
                matrix.offset : matrix.offset + rows * matrix.row_bytes
            ]
            values = content.view(matrix.dtype).reshape(rows, matrix.columns)
            self._matrices[key] = matrix, values, values.ctypes.data
        return self._matrices[key]

    def _c_runs(
        self, name: str, runs: Sequence[MappedRange]
    ) -> tuple[_CRuns, tuple[np.ndarray, np.ndarray]]:
        """Return the runs as a kernel argument, and the arrays to keep alive during the call."""
        # Addresses in mapped files. `_matrices` keeps the maps open as long as this object exists.
        addresses = np.empty(len(runs), np.uint64)
        for number, run in enumerate(runs):
            matrix, values, address = self._matrix(run.file, name)
            assert run.first + run.stop - run.start <= len(values)
            addresses[number] = address + run.first * matrix.row_bytes
            mapped = self._contents[matrix.file][1]
            if mapped is not None:
                start = matrix.offset + run.first * matrix.row_bytes
                down = start % mmap.PAGESIZE
                mapped.madvise(
                    mmap.MADV_WILLNEED,
                    start - down,
                    (run.stop - run.start) * matrix.row_bytes + down,
                )
        starts = np.array([run.start for run in runs], np.int64)
        return _CRuns(addresses.ctypes.data, starts.ctypes.data, len(runs)), (addresses, starts)

    def _gather(
        self, name: str, runs: Sequence[MappedRange], order: np.ndarray, *, transposed: bool = False
    ) -> np.ndarray:
        """Gather rows of a matrix as [rows, columns], or [columns, rows] if transposed. Mixed
        dtypes are promoted.
        """
        matrix, values, _ = self._matrix(runs[0].file, name)
        dtypes = [self._matrix(run.file, name)[1].dtype for run in runs]
        shape = (matrix.columns, len(order)) if transposed else (len(order), matrix.columns)
        if len(set(dtypes)) > 1:
            out = np.empty(shape, np.result_type(*dtypes))
            run_numbers = np.searchsorted([run.start for run in runs], order, "right") - 1
            for dtype in set(dtypes):
                same_dtype = [
                    run for run, other in zip(runs, dtypes, strict=True) if other == dtype
                ]
                mask = np.isin(run_numbers, [runs.index(run) for run in same_dtype])
                out[(..., mask) if transposed else mask] = self._gather(
                    name, same_dtype, order[mask], transposed=transposed
                )
            return out
        out = np.empty(shape, values.dtype)
        if out.size:
            # The buffers are local variables, so they live until the call has returned.
            c_runs, _buffers = self._c_runs(name, runs)
            sizes = (len(order), matrix.columns, values.itemsize, ctypes.c_int32(transposed))
            call("rayrec_gather_rows", ctypes.byref(c_runs), order, *sizes, out)
        return out

    def _unpack(
        self, runs: Sequence[MappedRange], order: np.ndarray, preprocessor: Preprocessor
    ) -> EncodedRows:
        """Read rows of format binary in one pass."""
        num_dense = len(preprocessor.dense)
        num_sparse = len(preprocessor.sparse)
        dense = np.empty((len(order), num_dense), np.float32)
        ids = np.empty((num_sparse, len(order)), np.int32)
        labels = np.empty(len(order), np.float32)
        # The buffers and rules are local variables, so they live until the call has returned.
        c_runs, _buffers = self._c_runs("rows", runs)
        sizes = (len(order), ctypes.c_int32(num_dense), ctypes.c_int32(num_sparse))
        rules = (CDenseColumn * num_dense)(*map(c_dense_column, preprocessor.dense))
        call("rayrec_unpack_rows", ctypes.byref(c_runs), order, *sizes, rules, dense, ids, labels)
        columns: Any = ids.astype(preprocessor.id_dtype, copy=False)
        return EncodedRows(
            dense,
            columns,
            {preprocessor.schema.label or "": labels} if self.manifest["labelled"] else {},
        )
