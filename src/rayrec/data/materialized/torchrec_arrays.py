"""Click logs preprocessed by TorchRec's scripts: discovery and validation of their arrays, which
rayrec reads in place.

`npy_preproc_criteo.py`, `contiguous_preproc_criteo.py` and `shuffle_preproc_criteo.py` write three
arrays per day: day_N_dense.npy, float32 [rows, 13]; day_N_sparse.npy, int32 or int64 [rows, 26];
day_N_labels.npy, int32 [rows, 1]. `materialize_synthetic_multihot_dataset.py` writes
day_N_sparse_multi_hot.npz: arrays "0", "1", ... [rows, ids], one per feature.
"""

from __future__ import annotations

import os
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, Literal

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.arrow import json_reply
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.logs.faults import LABEL_FAULT, Fault, Faults, distinct_labels
from rayrec.data.materialized.formats import FilePlan, Matrix, combine
from rayrec.schema import Schema

IdFiles = Literal["sparse", "sparse_contig_freq", "sparse_multi_hot"]
"""Suffixes of id files."""
PRESET: Final = "adopted"
"""Preset of a Preprocessor that takes ids from the arrays unchanged."""
MAX_FAULTY_ROWS: Final = 100_000
"""Maximum number of excluded rows, whose row numbers are stored."""
_NAME: Final = re.compile(
    r"(?P<stem>.+?)_(?P<part>dense|labels|sparse|sparse_contig_freq)\.npy"
    r"|(?P<npz>.+)_sparse_multi_hot\.npz"
)
_ID_FILES: Final[tuple[IdFiles, ...]] = ("sparse", "sparse_contig_freq", "sparse_multi_hot")
_TASK_BYTES: Final = 64 << 20
"""Bytes read and checked per task."""
_LOCAL_HEADER_BYTES: Final = 30
_NOT_FINITE: Final = "a number is not finite"
UNLABELLED: Final = -1
"""Label that TorchRec's scripts write for an unlabelled row."""


@dataclass(frozen=True)
class Day:
    """Arrays of one raw log file."""

    name: str
    """File name prefix, such as day_0 or train."""
    rows: int
    plans: tuple[FilePlan, ...]
    """Files of dense values, labels and ids, with their matrices."""
    paths: tuple[str, ...]
    """Path of each file in `plans`."""

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for plan in self.plans for matrix in plan.matrices]

    @property
    def hotness(self) -> list[int]:
        """Number of ids per row in each sparse column."""
        ids = self.plans[2].matrices
        return (
            [matrix.columns for matrix in ids] if ids[0].name != "sparse" else [1] * ids[0].columns
        )


# Adoption of TorchRec's arrays:
#
#   find_days      names and headers only; a missing, truncated or unlike file is an error here
#   row_ranges     tasks of _TASK_BYTES with the same rows in all arrays of one day
#   scan           checksums, smallest and largest ids, invalid rows; a reply of JSON per task
#   ScanResult     replies in order of rows: a file's checksum is combined from those of its parts,
#                  so that each byte is read once
#
# The arrays stay where they are; the manifest refers to them by byte offsets.
def find_days(folders: Sequence[str], *, ids: IdFiles | None, names: Sequence[str]) -> list[Day]:
    """Find the days stored in the folders and read the headers of their files. Returns the days in
    the order of `names`, or all in natural order if it is empty. `ids` selects the id files; None
    takes the only kind present. Raises InputError if no or several kinds of ids are found, a file
    is missing, truncated or unlike those of TorchRec's scripts, or the columns of the days
    differ.
    """
    files_by_stem = _named_files(folders)
    folder_names = " and ".join(folders)
    kinds = [kind for kind in _ID_FILES if any(kind in files for files in files_by_stem.values())]
    if not kinds:
        raise InputError(
            f"{folder_names}: TorchRec's ids not found, such as day_0_sparse.npy or "
            "day_0_sparse_multi_hot.npz"
        )
    if ids is None and len(kinds) > 1:
        raise InputError(
            f"{folder_names}: found ids in files *_{' and *_'.join(kinds)}. Choose one with --ids "
            f"{kinds[0]}."
        )
    kind = ids or kinds[0]
    days: list[Day] = []
    for name in names or sorted(files_by_stem, key=_natural_key):
        files = files_by_stem.get(name, {})
        missing = [part for part in ("dense", "labels", kind) if part not in files]
        if missing:
            ending = "npz" if missing[0] == "sparse_multi_hot" else "npy"
            raise InputError(
                f"{folder_names}: {name}_{missing[0]}.{ending} not found. Copy it, or set the "
                "days with --files."
            )
        days.append(_day(name, [files["dense"], files["labels"], files[kind]]))
        _check_same_columns(days[-1], days[0])
    return days


def _check_same_columns(day: Day, first_day: Day) -> None:
    """Check that a day has the columns of the first one. Raises InputError."""
    for one, first in zip(day.matrices, first_day.matrices, strict=False):
        if one.columns != first.columns:
            raise InputError(
                f"{one.file}: array {one.name} must have {first.columns} columns as in "
                f"{first.file}, got {one.columns}"
            )
    if len(day.matrices) != len(first_day.matrices):
        raise InputError(
            f"{day.plans[2].name}: columns do not match those of {first_day.plans[2].name}"
        )


def _named_files(folders: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the file paths by stem and part. Raises InputError if two folders contain the same
    file.
    """
    files_by_stem: dict[str, dict[str, str]] = {}
    for folder in folders:
        for file in storage.list_files(folder):
            match = _NAME.fullmatch(storage.name_of(file.path))
            if match is None:
                continue
            stem = match["npz"] or match["stem"]
            part = match["part"] or "sparse_multi_hot"
            if part in files_by_stem.setdefault(stem, {}):
                raise InputError(
                    f"{file.path}: {files_by_stem[stem][part]} has the same name. Keep one of them."
                )
            files_by_stem[stem][part] = file.path
    return files_by_stem


def _natural_key(name: str) -> list[int | str]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _day(name: str, paths: Sequence[str]) -> Day:
    dense, labels, ids = paths
    plans = (
        _npy(dense, "dense", kinds="f", sizes=(4,)),
        _npy(labels, "labels", kinds="iuf", sizes=(1, 2, 4, 8)),
        _npz(ids) if ids.endswith(".npz") else _npy(ids, "sparse", kinds="i", sizes=(4, 8)),
    )
    if plans[1].matrices[0].columns != 1:
        raise InputError(f"{labels}: {plans[1].matrices[0].columns} labels per row, must be 1")
    for plan, path in zip(plans, paths, strict=True):
        if plan.rows != plans[0].rows:
            raise InputError(
                f"{path}: must have {plans[0].rows:,} rows like {plans[0].name}, got {plan.rows:,}"
            )
    return Day(name, plans[0].rows, plans, tuple(paths))


def _npy(path: str, name: str, *, kinds: str, sizes: Sequence[int]) -> FilePlan:
    size_bytes = os.path.getsize(path)
    with open(path, "rb") as file:
        rows, matrix = _matrix(file, path, name, path, kinds, sizes)
    expected = matrix.offset + rows * matrix.row_bytes
    if size_bytes != expected:
        raise InputError(
            f"{path}: size must be {expected:,} bytes by its header, got {size_bytes:,}. Copy it "
            "again."
        )
    return FilePlan(matrix.file, size_bytes, rows, (matrix,))


# Arrays inside an archive are mapped as if they were files, so that members must be stored, not
# compressed. The local header before a member repeats its name and extra field, with lengths that
# may differ from those in the central directory. Only the local ones lead to the array.
def _npz(path: str) -> FilePlan:
    matrices: list[Matrix] = []
    rows: list[int] = []
    size_bytes = os.path.getsize(path)
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            members = archive.infolist()
            names = {member.filename: member for member in members}
            if set(names) != {f"{number}.npy" for number in range(len(members))}:
                raise InputError(
                    f"{path}: arrays must be 0, 1, 2, ..., got {', '.join(sorted(names)[:4])}, ..."
                )
            for number in range(len(members)):
                member = names[f"{number}.npy"]
                if member.compress_type != zipfile.ZIP_STORED:
                    raise InputError(
                        f"{path}: is compressed and cannot be mapped. Write it with numpy.savez."
                    )
                file.seek(member.header_offset)
                lengths = struct.unpack("<HH", file.read(_LOCAL_HEADER_BYTES)[-4:])
                start = file.seek(member.header_offset + _LOCAL_HEADER_BYTES + sum(lengths))
                count, matrix = _matrix(
                    file, f"{path}: array {number}", str(number), path, "i", (4, 8)
                )
                if matrix.offset - start + count * matrix.row_bytes != member.file_size:
                    raise InputError(
                        f"{path}: size of array {number} does not match its header. Copy it again."
                    )
                rows.append(count)
                matrices.append(matrix)
    except (zipfile.BadZipFile, struct.error) as error:
        raise InputError(f"{path}: cannot be read ({error}). Copy it again.") from None
    if len(set(rows)) != 1:
        raise InputError(f"{path}: number of rows differs between its arrays. Make it again.")
    return FilePlan(storage.name_of(path), size_bytes, rows[0], tuple(matrices))


def _matrix(
    file: BinaryIO, source: str, name: str, path: str, kinds: str, sizes: Sequence[int]
) -> tuple[int, Matrix]:
    """Read the .npy header at the file's current offset and return (rows, matrix)."""
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, by_columns, dtype = read(file)
    except (ValueError, EOFError) as error:
        raise InputError(f"{source}: not a NumPy array ({' '.join(str(error).split())})") from None
    expected = " or ".join({"f": "float", "i": "int", "u": "uint"}[kind] for kind in kinds)
    if dtype.kind not in kinds or dtype.itemsize not in sizes or dtype.byteorder == ">":
        raise InputError(
            f"{source}: must be {expected} of {' or '.join(str(8 * size) for size in sizes)} "
            f"bits, got {dtype}"
        )
    if len(shape) not in (1, 2) or not shape[0] or not shape[-1]:
        raise InputError(f"{source}: shape must be rows and columns, got {shape}")
    columns = shape[1] if len(shape) == 2 else 1
    if by_columns and columns > 1:
        raise InputError(
            f"{source}: must be stored row by row. Write it again with numpy.ascontiguousarray."
        )
    return shape[0], Matrix(
        name, storage.name_of(path), file.tell(), dtype.newbyteorder("<").str, columns
    )


@dataclass(frozen=True)
class RowRange:
    """Row range [start, stop) of day number `day`."""

    day: int
    start: int
    stop: int


def row_ranges(days: Sequence[Day]) -> list[RowRange]:
    """Split the rows of all days into ranges of one task each."""
    return [
        RowRange(number, start, min(start + step, day.rows))
        for number, day in enumerate(days)
        for step in [max(1, _TASK_BYTES // sum(matrix.row_bytes for matrix in day.matrices))]
        for start in range(0, day.rows, step)
    ]


def scan(row_range: RowRange, *, days: Sequence[Day]) -> pa.Table:
    """Scan all arrays of a row range: checksums, minimum and maximum id of each column, and invalid
    rows.
    """
    day = days[row_range.day]
    ranges: list[list[Any]] = []
    min_ids: list[int] = []
    max_ids: list[int] = []
    faulty: dict[str, np.ndarray] = {}
    unlabelled = 0
    labels = list[str]()
    for plan, path in zip(day.plans, day.paths, strict=True):
        for matrix in plan.matrices:
            start = matrix.offset + row_range.start * matrix.row_bytes
            data = np.empty((row_range.stop - row_range.start) * matrix.row_bytes, np.uint8)
            if storage.read_into(path, start, data) != len(data):
                raise InputError(f"{path}: became shorter while it was read. Copy it again.")
            rows = data.view(matrix.dtype).reshape(-1, matrix.columns)
            ranges.append([matrix.file, matrix.name, start, len(data), zlib.crc32(data.data)])
            if matrix.name == "dense":
                finite = np.isfinite(rows)
                faulty[_NOT_FINITE] = (
                    np.empty(0, np.int64) if finite.all() else np.flatnonzero(~finite.all(axis=1))
                )
            elif matrix.name == "labels":
                wrong = np.flatnonzero((rows[:, 0] != 0) & (rows[:, 0] != 1))
                # a row has one fault
                faulty[LABEL_FAULT] = wrong[~np.isin(wrong, faulty[_NOT_FINITE])]
                unlabelled = int(np.count_nonzero(rows[:, 0] == UNLABELLED))
                if len(wrong) > unlabelled:
                    labels = distinct_labels(
                        f"{label:g}"
                        for label in np.unique(rows[:, 0]).tolist()
                        if label != UNLABELLED
                    )
            else:
                axis = 0 if matrix.name == "sparse" else None
                min_ids += np.atleast_1d(rows.min(axis=axis)).tolist()
                max_ids += np.atleast_1d(rows.max(axis=axis)).tolist()
    return json_reply(
        {
            "rows": row_range.stop - row_range.start,
            "ranges": ranges,
            "lowest": min_ids,
            "highest": max_ids,
            "faults": {kind: len(rows) for kind, rows in faulty.items()},
            "faulty": {
                kind: (rows[:MAX_FAULTY_ROWS] + row_range.start).tolist()
                for kind, rows in faulty.items()
            },
            "unlabelled": unlabelled,
            "labels": labels,
        }
    )


@dataclass
class ScanResult:
    """Merged result of scanning all rows."""

    min_ids: np.ndarray
    """Minimum id of each column, int64 [columns]."""
    max_ids: np.ndarray
    """Maximum id of each column, int64 [columns]."""
    labelled: bool = True
    """Whether to use the labels. False if no row has one."""
    faults: Faults = field(default_factory=Faults)
    faulty_rows: list[np.ndarray] = field(default_factory=list)
    """Rows to exclude from each day, ascending, int64."""
    ranges: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Tuples (file, first byte, byte count, CRC-32), one per array."""

    @classmethod
    def merge(cls, days: Sequence[Day], results: Iterator[dict[str, Any]]) -> ScanResult:
        """Merge the results of `scan` for `row_ranges(days)`, in order. Raises InputError if only
        some days have labels.
        """
        columns = len(days[0].hotness)
        self = cls(
            np.full(columns, np.iinfo(np.int64).max), np.full(columns, np.iinfo(np.int64).min)
        )
        merged: dict[tuple[str, str], tuple[str, int, int, int]] = {}
        by_day = [_DayFaults() for _ in days]
        for row_range, reply in zip(row_ranges(days), results, strict=True):
            np.minimum(self.min_ids, reply["lowest"], out=self.min_ids)
            np.maximum(self.max_ids, reply["highest"], out=self.max_ids)
            for file, array, start, length, checksum in reply["ranges"]:
                _, first, before, crc_before = merged.get((file, array), (file, start, 0, 0))
                merged[file, array] = (
                    file,
                    first,
                    before + length,
                    combine(crc_before, checksum, length),
                )
            if reply["labels"]:
                self.faults.add(Faults(labels={"labels": reply["labels"]}))
            by_day[row_range.day].add(reply)
        self.ranges = list(merged.values())
        bare = [
            day.name
            for day, day_faults in zip(days, by_day, strict=True)
            if day_faults.unlabelled == day.rows
        ]
        self.labelled = len(bare) < len(days)
        if bare and self.labelled:
            labelled_days = " ".join(day.name for day in days if day.name not in bare)
            raise InputError(
                f"{bare[0]}: all labels are {UNLABELLED}, so unlabelled. Exclude it with --files "
                f"{labelled_days}."
            )
        # Without labels in any day, the label -1 is the normal case and no fault.
        for day, day_faults in zip(days, by_day, strict=True):
            if not self.labelled:
                day_faults.rows.pop(LABEL_FAULT, None)
                del day_faults.counts[LABEL_FAULT]
            self.faults.add(day_faults.faults(day))
            rows = [np.empty(0, np.int64), *map(np.array, day_faults.rows.values())]
            self.faulty_rows.append(np.unique(np.concatenate(rows).astype(np.int64)))
        return self


@dataclass
class _DayFaults:
    """Invalid rows of one day."""

    unlabelled: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Number of invalid rows by kind."""
    rows: dict[str, list[int]] = field(default_factory=dict)
    """First invalid rows by kind, at most one more than can be stored."""

    def add(self, reply: dict[str, Any]) -> None:
        """Add the rows of one result of `scan`."""
        self.unlabelled += reply["unlabelled"]
        self.counts += Counter(reply["faults"])
        for kind, rows in reply["faulty"].items():
            stored = self.rows.setdefault(kind, [])
            stored += rows[: MAX_FAULTY_ROWS + 1 - len(stored)]

    def faults(self, day: Day) -> Faults:
        """Return the counts, and the first rows of each kind in row order."""
        files = {_NOT_FINITE: day.paths[0], LABEL_FAULT: day.paths[1]}
        first = [
            Fault(files[kind], None, kind, "", row)
            for kind, rows in self.rows.items()
            for row in rows[: Faults.keep]
        ]
        return Faults(dict(self.counts), sorted(first, key=lambda fault: fault.row or 0))


def build_preprocessor(
    num_dense: int, hotness: Sequence[int], num_embeddings: Sequence[int]
) -> Preprocessor:
    """Build the Preprocessor of adopted arrays: dense columns int_0, ... unchanged, sparse columns
    cat_0, ... of ids modulo num_embeddings. A column with several ids per row is a list.
    """
    names = tuple(f"cat_{number}" for number in range(len(hotness)))
    schema = Schema(
        label="label",
        dense=tuple(f"int_{number}" for number in range(num_dense)),
        sparse=names,
        tokens="any",
        integers=names,
        lists=tuple(name for name, size in zip(names, hotness, strict=True) if size > 1),
    )
    return Preprocessor(
        preset=PRESET,
        schema=schema,
        dense=tuple(DenseColumn(kind="identity") for _ in range(num_dense)),
        sparse=tuple(
            SparseColumn(rows, None, first_id=0, unknown_id=0, missing_id=0)
            for rows in num_embeddings
        ),
        tokens=np.empty(0, np.uint64),
    )
