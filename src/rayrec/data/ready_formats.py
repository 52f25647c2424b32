"""How rows lie in ready-made files: matrices of fixed-width rows (binary, npy, npz), or named columns (parquet)."""

from __future__ import annotations

import ctypes
import io
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from rayrec.config import InputError
from rayrec.data.columns import RawColumns
from rayrec.data.encoded import Bags, EncodedRows, Ids
from rayrec.data.parsing import RawRows
from rayrec.data.preprocessor import Preprocessor, adapt
from rayrec.native import library
from rayrec.schema import Schema

MAPPED = ("binary", "npy", "npz")
"""Formats whose files a process maps into its memory; any row is written and read on its own."""
FORMATS = (*MAPPED, "parquet")
_ALIGNMENT = 64


@dataclass(frozen=True)
class Matrix:
    """The rows of one raw file in (a part of) a ready-made one: row-major, little-endian."""

    name: str
    """rows: int32 label, integers, ids (binary); dense, labels, sparse, or the number of a sparse column"""
    file: str
    offset: int
    """Byte of the file where the first row starts."""
    dtype: str
    columns: int

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * self.columns


@dataclass(frozen=True)
class FilePlan:
    """A file of matrices, of which everything but the rows is known before the first row is."""

    name: str
    size_bytes: int
    rows: int
    matrices: tuple[Matrix, ...]
    headers: tuple[tuple[int, bytes], ...] = ()
    """(byte of the file, what stands there)"""
    archive: tuple[tuple[str, int, bytes], ...] = ()
    """Of a zip archive: (name, where its local header starts, .npy header) of the member of each matrix."""


def check(format: str, preprocessor: Preprocessor, *, labelled: bool) -> None:
    """Raises InputError where a format cannot hold what the Preprocessor makes."""
    if format not in FORMATS:
        raise InputError(f"format {format!r}: choose one of {', '.join(FORMATS)}")
    if format == "parquet":
        return
    schema, hotness = preprocessor.schema, preprocessor.hotness
    if labelled and schema.weight:
        raise InputError(f"format {format} has no place for the weights of column {schema.weight}; use --format parquet")
    for name, size in zip(preprocessor.inputs.sparse, hotness, strict=True):
        if size is None:
            raise InputError(f"format {format} has no place for the lists of column {name}; use --format parquet")
        if size != 1 and format != "npz":
            raise InputError(
                f"format {format} holds one id a column, {name} has {size}; use --format npz, or parquet"
            )
    if format != "binary":
        return
    if schema.tokens != "hexadecimal":
        raise InputError(
            "format binary holds integers, and with tokens: any dense columns are any numbers; use --format npy, or parquet"
        )
    for name, column in zip(preprocessor.inputs.dense, preprocessor.dense, strict=True):
        zero = np.empty(1, np.float32)
        library().rayrec_transform_dense(
            ctypes.c_void_p(np.zeros(1, np.int64).ctypes.data),
            ctypes.c_int64(1),
            ctypes.byref(column.c_column()),
            ctypes.c_void_p(zero.ctypes.data),
        )
        if zero[0] != np.float32(column.missing_value):
            raise InputError(
                f"format binary stores a missing integer as 0, but in column {name} that is {zero[0]} and missing "
                f"{column.missing_value}; use --format npy, or parquet"
            )


def plan_files(format: str, preprocessor: Preprocessor, stem: str, rows: int) -> list[FilePlan]:
    """The files that hold `rows` rows of one raw file: their names begin with `stem`."""
    num_dense, hotness = len(preprocessor.dense), preprocessor.hotness
    if format == "binary":
        matrix = Matrix("rows", f"{stem}.bin", 0, "<i4", 1 + num_dense + len(hotness))
        return [FilePlan(matrix.file, rows * matrix.row_bytes, rows, (matrix,))]
    plans = [
        _plan_npy("dense", f"{stem}_dense.npy", "<f4", rows, num_dense),
        _plan_npy("labels", f"{stem}_labels.npy", "<i4", rows, 1),
    ]
    if format == "npy":
        dtype = preprocessor.id_dtype.newbyteorder("<").str
        return [*plans, _plan_npy("sparse", f"{stem}_sparse.npy", dtype, rows, len(hotness))]
    return [*plans, _plan_npz(f"{stem}_sparse_multi_hot.npz", rows, [size or 0 for size in hotness])]


def _npy_header(dtype: str, shape: tuple[int, ...], start: int = 0) -> bytes:
    """The head of an .npy file that starts at byte `start`, padded so that the data behind it is aligned."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    plain = buffer.getvalue()
    padding = -(start + len(plain)) % _ALIGNMENT
    length = int.from_bytes(plain[8:10], "little") + padding
    return plain[:8] + length.to_bytes(2, "little") + plain[10:-1] + b" " * padding + plain[-1:]


def _plan_npy(name: str, file: str, dtype: str, rows: int, columns: int) -> FilePlan:
    header = _npy_header(dtype, (rows, columns))
    matrix = Matrix(name, file, len(header), dtype, columns)
    return FilePlan(file, len(header) + rows * matrix.row_bytes, rows, (matrix,), ((0, header),))


def _plan_npz(file: str, rows: int, hotness: Sequence[int]) -> FilePlan:
    """An archive as np.savez lays it out, so that readers who reckon where the data starts find it there too."""
    matrices, archive, at = [], [], 0
    for number, size in enumerate(hotness):
        local = len(_member(f"{number}.npy", at, 0, 0).FileHeader(zip64=True))
        header = _npy_header("<i4", (rows, size), at + local)
        matrices.append(Matrix(str(number), file, at + local + len(header), "<i4", size))
        archive.append((f"{number}.npy", at, header))
        at = matrices[-1].offset + rows * matrices[-1].row_bytes
    plan = FilePlan(file, at, rows, tuple(matrices), (), tuple(archive))
    records = archive_records(plan, {matrix.name: 0 for matrix in matrices})
    return FilePlan(file, at + len(records[-1][1]), rows, plan.matrices, tuple(records), plan.archive)


def _member(name: str, start: int, size: int, crc: int) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name)
    member.header_offset, member.file_size, member.compress_size, member.CRC = start, size, size, crc
    member.external_attr = 0o644 << 16
    return member


class _Tail(io.RawIOBase):
    """Takes what is written behind byte `start` of a file that is not there."""

    def __init__(self, start: int) -> None:
        self.start, self.data = start, bytearray()

    def tell(self) -> int:
        return self.start + len(self.data)

    def seek(self, offset: int, whence: int = 0) -> int:
        assert (offset, whence) == (self.tell(), 0)
        return offset

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.data += data
        return len(data)


def archive_records(plan: FilePlan, checksums: dict[str, int]) -> list[tuple[int, bytes]]:
    """(byte of the file, what stands there) of everything in a zip archive but the rows; `checksums`: the CRC-32 of each
    matrix's rows, by its name."""
    records, members = [], []
    for matrix, (name, start, header) in zip(plan.matrices, plan.archive, strict=True):
        length = plan.rows * matrix.row_bytes
        checksum = combine(zlib.crc32(header), checksums[matrix.name], length)
        members.append(_member(name, start, len(header) + length, checksum))
        records.append((start, members[-1].FileHeader(zip64=True) + header))
    last = plan.matrices[-1]
    tail = _Tail(last.offset + plan.rows * last.row_bytes)
    with zipfile.ZipFile(tail, "w") as directory:  # type: ignore[call-overload]
        directory.infolist().extend(members)
    return [*records, (tail.start, bytes(tail.data))]


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials modulo that of CRC-32, highest power in the lowest bit."""
    bit, product = 1 << 31, 0
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power(length: int) -> int:
    """x^(8 length)."""
    result, power = 1 << 31, 1 << 23
    while length:
        if length & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        length >>= 1
    return result


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two pieces of data one after the other, from that of each and the length of the second."""
    return _multiply(_power(length), first) ^ second


def stored(
    format: str,
    raw: RawRows | RawColumns,
    preprocessor: Preprocessor,
    start: int,
    stop: int,
    *,
    path: str,
    first_row: int,
) -> pa.Table:
    """Rows [start, stop) of `raw` as they are stored: a column a matrix (fixed-size lists), or in parquet a column of the
    model's inputs. Raises InputError for a number the format does not hold; `first_row` is that of `raw` in file `path`."""
    order = np.arange(start, stop, dtype=np.int64)
    rows = preprocessor.encode(raw, order)  # type: ignore[arg-type]
    if format == "parquet":
        return named_columns(rows, preprocessor.inputs)
    if format == "binary":
        assert isinstance(raw, RawRows)
        packed, wrong = _pack(raw, rows, preprocessor, start, stop)
        if wrong >= 0:
            row, column = divmod(wrong, packed.shape[1])
            names = (preprocessor.schema.label, *preprocessor.inputs.dense, *preprocessor.inputs.sparse)
            raise InputError(
                f"{path}: row {first_row + start + row} column {names[column]}: format binary holds 32-bit numbers and this "
                "is none; use --format npy, or parquet"
            )
        return _table({"rows": packed})
    labels = np.full(len(rows), -1, np.int32) if rows.labels is None else rows.labels.astype(np.int32)
    matrices = {"dense": rows.dense, "labels": labels.reshape(-1, 1)}
    if format == "npy":
        matrices["sparse"] = _rows_of_columns(rows.ids, len(rows), preprocessor.id_dtype)
        return _table(matrices)
    for number, (name, ids) in enumerate(zip(preprocessor.inputs.sparse, rows.ids, strict=True)):
        assert isinstance(ids, np.ndarray)
        if ids.dtype != np.int32 and ids.size and ids.max() > np.iinfo(np.int32).max:
            row = int(np.flatnonzero(ids.reshape(len(rows), -1).max(1) > np.iinfo(np.int32).max)[0])
            raise InputError(
                f"{path}: row {first_row + start + row} column {name}: format npz holds 32-bit ids and this is none; use "
                "--format parquet"
            )
        matrices[str(number)] = ids.astype(np.int32, copy=False).reshape(len(rows), -1)
    return _table(matrices)


def _rows_of_columns(ids: Sequence[Ids], rows: int, dtype: np.dtype) -> np.ndarray:
    out = np.empty((rows, len(ids)), dtype)
    for base in range(0, rows, 1024):  # so that the rows written stay in the cache while all columns are
        for number, column in enumerate(ids):
            assert isinstance(column, np.ndarray)
            out[base : base + 1024, number] = column[base : base + 1024]
    return out


def _pack(
    raw: RawRows, rows: EncodedRows, preprocessor: Preprocessor, start: int, stop: int
) -> tuple[np.ndarray, int]:
    """int32 (rows, 1 + dense + sparse), and where the first number stands that does not fit (-1: none)."""
    raw = adapt(raw, integer_buckets=preprocessor.integer_buckets, file_minimum=preprocessor.file_minimum)
    integers = np.ascontiguousarray(raw.integers[start:stop])
    lowest = np.array(
        [np.iinfo(np.int64).min if column.kind == "signed_log" else column.lowest for column in preprocessor.dense],
        np.int64,
    )
    ids = np.ascontiguousarray(rows.ids)
    num_dense, num_sparse = len(preprocessor.dense), len(preprocessor.sparse)
    out = np.empty((len(rows), 1 + num_dense + num_sparse), np.int32)
    pack = library().rayrec_pack_rows
    pack.restype = ctypes.c_int64
    wrong = pack(
        ctypes.c_void_p(integers.ctypes.data),
        ctypes.c_void_p(lowest.ctypes.data),
        ctypes.c_void_p(ids.ctypes.data),
        ctypes.c_int64(ids.itemsize),
        ctypes.c_void_p(None if rows.labels is None else rows.labels.ctypes.data),
        ctypes.c_int64(len(rows)),
        ctypes.c_int32(num_dense),
        ctypes.c_int32(num_sparse),
        ctypes.c_void_p(out.ctypes.data),
    )
    return out, wrong


def _table(matrices: dict[str, np.ndarray]) -> pa.Table:
    return pa.table(
        {
            name: pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])
            for name, matrix in matrices.items()
            if matrix.shape[1]
        }
    )


def matrix_of(table: pa.Table, name: str) -> np.ndarray:
    """(rows, columns): a matrix of a table that `stored` made, or of a slice of one."""
    column = table.column(name).combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=True).reshape(table.num_rows, column.type.list_size)


def named_columns(rows: EncodedRows, schema: Schema) -> pa.Table:
    """Encoded rows as columns with the names of `schema`: label int8, weight and dense float32, ids as they are."""
    columns: dict[str, pa.Array] = {}
    if rows.labels is not None:
        assert schema.label
        columns[schema.label] = pa.array(rows.labels.astype(np.int8))
    if rows.weights is not None:
        assert schema.weight
        columns[schema.weight] = pa.array(rows.weights)
    for number, name in enumerate(schema.dense):
        columns[name] = pa.array(np.ascontiguousarray(rows.dense[:, number]))
    for name, ids in zip(schema.sparse, rows.ids, strict=True):
        if isinstance(ids, Bags):
            columns[name] = pa.LargeListArray.from_arrays(pa.array(ids.offsets()), pa.array(ids.values))
        elif ids.ndim == 2:
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(ids.reshape(-1)), ids.shape[1])
        else:
            columns[name] = pa.array(ids)
    return pa.table(columns)


def from_named_columns(table: pa.Table, schema: Schema) -> EncodedRows:
    """The inverse of `named_columns`, for a table of one chunk a column."""
    columns = {name: column.combine_chunks() for name, column in zip(table.column_names, table.columns, strict=True)}
    dense = np.empty((table.num_rows, len(schema.dense)), np.float32)
    for number, name in enumerate(schema.dense):
        dense[:, number] = columns[name].to_numpy()
    labels = columns[schema.label].to_numpy().astype(np.float32) if schema.label in columns else None
    weights = columns[schema.weight].to_numpy() if schema.weight in columns else None
    return EncodedRows(dense, [_ids(columns[name]) for name in schema.sparse], labels, weights)


def _ids(column: pa.Array) -> Ids:
    if pa.types.is_large_list(column.type):
        lengths = np.diff(column.offsets.to_numpy()).astype(np.int32)
        return Bags(column.flatten().to_numpy(), lengths)
    if pa.types.is_fixed_size_list(column.type):
        return column.flatten().to_numpy().reshape(-1, column.type.list_size)
    return column.to_numpy()


def row_bytes(preprocessor: Preprocessor) -> int:
    """About what a row takes in memory, where a list counts as one id."""
    ids = sum(size or 1 for size in preprocessor.hotness)
    return 4 + 4 * len(preprocessor.dense) + preprocessor.id_dtype.itemsize * ids
