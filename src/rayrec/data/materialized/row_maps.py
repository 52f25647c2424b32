"""Random row access to files of mapped formats, memory-mapped or loaded into memory."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rayrec import host_resources, storage
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows, Ids
from rayrec.data.encoding.encoder import CDenseColumn, c_dense_column
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.materialized.formats import Matrix
from rayrec.native import c_fields, call


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
        f"{storage.join(path, name)}: {cause}: the dataset is damaged. Copy it again, or make it again with `rayrec preprocess`."
    )


@dataclass(frozen=True)
class MappedRows:
    """Files of one preprocessed dataset. They stay mapped, or in memory, as long as this object exists."""

    path: str
    manifest: dict[str, Any]
    _contents: dict[str, tuple[np.ndarray, mmap.mmap | None]] = field(default_factory=dict, repr=False)
    """Bytes of each file by name, with the memory map if it is mapped."""
    _matrices: dict[tuple[int, str], tuple[Matrix, np.ndarray, int]] = field(default_factory=dict, repr=False)
    """Matrix, rows and address of the first row, by raw file number and matrix name."""

    def load(self, files: Sequence[int]) -> None:
        """Load the rows of raw files into memory. Raises InputError if they do not fit."""
        names = {matrix[1] for number in files for matrix in self.manifest["matrices"][number]}
        loaded = {name for name, (_, mapped) in self._contents.items() if mapped is None}
        to_load = {name: size for name, size in self._sizes.items() if name in names - loaded}
        needed, free = sum(to_load.values()), host_resources.memory().available
        if needed > free:
            raise InputError(
                f"{self.path}: {needed / 1e9:.1f} GB do not fit into the {free / 1e9:.1f} GB of free memory. Set in_memory off."
            )
        for name, size in to_load.items():
            content = np.empty(size, np.uint8)
            if storage.read_into(storage.join(self.path, name), 0, content) != size:
                raise damaged(self.path, name, "became shorter")
            self._contents[name] = content, None
        for key in [key for key, (matrix, _, _) in self._matrices.items() if matrix.file in to_load]:
            del self._matrices[key]

    def read(self, runs: Sequence[MappedRange], order: np.ndarray, preprocessor: Preprocessor) -> EncodedRows:
        """Read rows `order` (int64) of the concatenated runs."""
        format, labelled = self.manifest["format"], self.manifest["labelled"]
        if format == "binary":
            return self._unpack(runs, order, preprocessor)
        labels = {}
        if labelled:
            labels[preprocessor.schema.label or ""] = self._gather("labels", runs, order).reshape(-1).astype(np.float32)
        dense = self._gather("dense", runs, order)
        if format == "npy":
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

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {file["name"]: file["bytes"] for file in self.manifest["files"]}

    def _content(self, name: str) -> np.ndarray:
        if name not in self._contents:
            size = self._sizes[name]
            try:
                with open(storage.join(self.path, name), "rb") as file:
                    if os.fstat(file.fileno()).st_size != size:
                        raise damaged(self.path, name, f"size must be {size} bytes, got {os.fstat(file.fileno()).st_size}")
                    mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else None
            except FileNotFoundError:
                raise damaged(self.path, name, "not found") from None
            self._contents[name] = np.frombuffer(mapped, np.uint8) if mapped else np.empty(0, np.uint8), mapped
        return self._contents[name][0]

    def _matrix(self, file: int, name: str) -> tuple[Matrix, np.ndarray, int]:
        key = file, name
        if key not in self._matrices:
            matrix = next(Matrix(*stored) for stored in self.manifest["matrices"][file] if stored[0] == name)
            rows = self.manifest["file_rows"][file]
            content = self._content(matrix.file)[matrix.offset : matrix.offset + rows * matrix.row_bytes]
            values = content.view(matrix.dtype).reshape(rows, matrix.columns)
            self._matrices[key] = matrix, values, values.ctypes.data
        return self._matrices[key]

    def _c_runs(self, name: str, runs: Sequence[MappedRange]) -> tuple[_CRuns, tuple[np.ndarray, np.ndarray]]:
        """Return the runs as a kernel argument, and the arrays to keep alive during the call."""
        addresses = np.empty(len(runs), np.uint64)
        for number, run in enumerate(runs):
            matrix, values, address = self._matrix(run.file, name)
            assert run.first + run.stop - run.start <= len(values)
            addresses[number] = address + run.first * matrix.row_bytes
            mapped = self._contents[matrix.file][1]
            if mapped is not None:
                start = matrix.offset + run.first * matrix.row_bytes
                down = start % mmap.PAGESIZE
                mapped.madvise(mmap.MADV_WILLNEED, start - down, (run.stop - run.start) * matrix.row_bytes + down)
        starts = np.array([run.start for run in runs], np.int64)
        return _CRuns(addresses.ctypes.data, starts.ctypes.data, len(runs)), (addresses, starts)

    def _gather(self, name: str, runs: Sequence[MappedRange], order: np.ndarray, *, transposed: bool = False) -> np.ndarray:
        """Gather rows of a matrix as [rows, columns], or [columns, rows] if transposed. Mixed dtypes are promoted."""
        matrix, values, _ = self._matrix(runs[0].file, name)
        dtypes = [self._matrix(run.file, name)[1].dtype for run in runs]
        shape = (matrix.columns, len(order)) if transposed else (len(order), matrix.columns)
        if len(set(dtypes)) > 1:
            out = np.empty(shape, np.result_type(*dtypes))
            of_run = np.searchsorted([run.start for run in runs], order, "right") - 1
            for dtype in set(dtypes):
                same_dtype = [run for run, other in zip(runs, dtypes, strict=True) if other == dtype]
                mask = np.isin(of_run, [runs.index(run) for run in same_dtype])
                out[(..., mask) if transposed else mask] = self._gather(name, same_dtype, order[mask], transposed=transposed)
            return out
        out = np.empty(shape, values.dtype)
        if out.size:
            c_runs, buffers = self._c_runs(name, runs)
            sizes = (len(order), matrix.columns, values.itemsize, ctypes.c_int32(transposed))
            call("rayrec_gather_rows", ctypes.byref(c_runs), order, *sizes, out)
            del buffers
        return out

    def _unpack(self, runs: Sequence[MappedRange], order: np.ndarray, preprocessor: Preprocessor) -> EncodedRows:
        """Read rows of format binary in one pass."""
        num_dense, num_sparse = len(preprocessor.dense), len(preprocessor.sparse)
        dense = np.empty((len(order), num_dense), np.float32)
        ids = np.empty((num_sparse, len(order)), np.int32)
        labels = np.empty(len(order), np.float32)
        c_runs, buffers = self._c_runs("rows", runs)
        sizes = (len(order), ctypes.c_int32(num_dense), ctypes.c_int32(num_sparse))
        rules = (CDenseColumn * num_dense)(*map(c_dense_column, preprocessor.dense))
        call("rayrec_unpack_rows", ctypes.byref(c_runs), order, *sizes, rules, dense, ids, labels)
        del buffers
        columns: Any = ids.astype(preprocessor.id_dtype, copy=False)
        return EncodedRows(dense, columns, {preprocessor.schema.label or "": labels} if self.manifest["labelled"] else {})
