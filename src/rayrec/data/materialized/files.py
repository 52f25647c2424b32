"""Which files hold the rows of the mapped formats, and where in them: known before the first row is, checksums too."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from rayrec import storage
from rayrec.data.encoding.preprocessor import Preprocessor

WRITTEN = ("binary", "npy", "parquet")
"""Formats that `rayrec preprocess` writes; npz files come from other programs."""
_ALIGNMENT = 64
_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class Matrix:
    """The rows of one raw file in (a part of) a preprocessed one: row-major, little-endian."""

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
    header: bytes = b""
    """First bytes of the file, before its rows."""


def row_bytes(preprocessor: Preprocessor) -> int:
    """About what a row takes in memory, where a list counts as one id."""
    ids = sum(size or 1 for size in preprocessor.hotness)
    return 4 + 4 * len(preprocessor.dense) + preprocessor.id_dtype.itemsize * ids


def plan_files(format: str, preprocessor: Preprocessor, stem: str, rows: int) -> list[FilePlan]:
    """The files that hold `rows` rows of one raw file: their names begin with `stem`."""
    num_dense, hotness = len(preprocessor.dense), preprocessor.hotness
    if format == "binary":
        matrix = Matrix("rows", f"{stem}.bin", 0, "<i4", 1 + num_dense + len(hotness))
        return [FilePlan(matrix.file, rows * matrix.row_bytes, rows, (matrix,))]
    return [
        _plan_npy("dense", f"{stem}_dense.npy", "<f4", rows, num_dense),
        _plan_npy("labels", f"{stem}_labels.npy", "<i4", rows, 1),
        _plan_npy("sparse", f"{stem}_sparse.npy", preprocessor.id_dtype.newbyteorder("<").str, rows, len(hotness)),
    ]


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the head of an .npy file, padded so that the data behind it is aligned."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    plain = buffer.getvalue()
    padding = -len(plain) % _ALIGNMENT
    length = int.from_bytes(plain[8:10], "little") + padding
    return plain[:8] + length.to_bytes(2, "little") + plain[10:-1] + b" " * padding + plain[-1:]


def _plan_npy(name: str, file: str, dtype: str, rows: int, columns: int) -> FilePlan:
    header = _npy_header(dtype, (rows, columns))
    matrix = Matrix(name, file, len(header), dtype, columns)
    return FilePlan(file, len(header) + rows * matrix.row_bytes, rows, (matrix,), header)


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


def file_checksum(path: str) -> str:
    """CRC-32 of a file, 8 hexadecimal digits."""
    filesystem, inner = storage.resolve(path)
    checksum = 0
    with filesystem.open_input_stream(inner, compression=None) as file:
        while data := file.read(_READ_BYTES):
            checksum = zlib.crc32(data, checksum)
    return f"{checksum:08x}"


def create_files(folder: str, plans: Sequence[FilePlan]) -> None:
    """Files at their full size, without their rows, which take no room yet."""
    for plan in plans:
        with open(storage.join(folder, plan.name), "wb") as file:
            file.truncate(plan.size_bytes)
            file.write(plan.header)
            file.flush()
            os.fsync(file.fileno())


def finish_files(
    folder: str, plans: Sequence[FilePlan], written: Iterable[tuple[str, int, int, int]]
) -> list[dict[str, Any]]:
    """[{name, bytes, crc32}] of files all rows of which are written: (file, start, length, CRC-32) of each stretch.

    The checksum of a file is put together from those of its rows as they were written, so that nothing is read again.
    """
    of_file: dict[str, list[tuple[int, int, int]]] = {}
    for name, *stretch in written:
        of_file.setdefault(name, []).append((stretch[0], stretch[1], stretch[2]))
    files = []
    for plan in plans:
        ranges = sorted(of_file.get(plan.name, []))
        with open(storage.join(folder, plan.name), "rb") as file:
            checksum = done = 0
            for start, length, of_range in [*ranges, (plan.size_bytes, 0, 0)]:
                file.seek(done)
                checksum = zlib.crc32(file.read(start - done), checksum)
                checksum = combine(checksum, of_range, length) if length else checksum
                done = start + length
            assert os.fstat(file.fileno()).st_size == done
        files.append({"name": plan.name, "bytes": plan.size_bytes, "crc32": f"{checksum:08x}"})
    return files
