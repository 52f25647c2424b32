"""NumPy archives: an array for each column (numpy.savez of a dictionary, as FuxiCTR writes)."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final, final

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.base import Format
from rayrec.schema import Schema

_BLOCK_ROWS: Final = 1 << 15
_ZIP_MAGIC: Final = b"PK\x03\x04"
_NAME_BYTES: Final = 512


@final
class Npz(Format):
    """Columns of one-dimensional arrays, and lists of two-dimensional ones. An archive's column is
    read at once.
    """

    name: ClassVar[str] = "npz"

    def recognizes(self, start: bytes) -> bool:
        # A zip file's first member is named behind the 30 bytes of its header.
        return start.startswith(_ZIP_MAGIC) and b".npy" in start[30:_NAME_BYTES]

    def columns(self, path: str, schema: Schema) -> tuple[str, ...]:
        with _opened(path) as arrays:
            return tuple(arrays.files)

    def tables(
        self, path: str, schema: Schema, columns: Sequence[str] | None
    ) -> Iterator[pa.Table]:
        with _opened(path) as archive:
            names = archive.files if columns is None else columns
            arrays = {name: _column(archive, name, path) for name in names if name in archive.files}
        sizes = {name: len(array) for name, array in arrays.items()}
        if len({*sizes.values()}) > 1:
            shown = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
            raise InputError(f"{path}: arrays must have a value for each row, got {shown} values")
        table = pa.table(arrays)
        for start in range(0, len(table), _BLOCK_ROWS):
            yield table.slice(start, _BLOCK_ROWS)


@contextmanager
def _opened(path: str) -> Iterator[np.lib.npyio.NpzFile]:
    """Open an archive. Objects in it are never unpickled."""
    filesystem, inner = storage.resolve(path)
    try:
        with filesystem.open_input_file(inner) as file, np.load(file, allow_pickle=False) as arrays:
            yield arrays
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path}: cannot be read as npz ({error}); fetch or write it again"
        ) from None


def _column(archive: np.lib.npyio.NpzFile, name: str, path: str) -> pa.Array:
    try:
        array = archive[name]
    except ValueError:
        raise InputError(
            f"{path}: array {name} has Python objects, which are never unpickled; write it as text "
            "or numbers, such as with astype(str)"
        ) from None
    if array.ndim == 2:
        offsets = pa.array(np.arange(0, array.size + 1, max(array.shape[1], 1)), pa.int64())
        return pa.LargeListArray.from_arrays(offsets, _values(array.ravel()))
    if array.ndim != 1:
        raise InputError(
            f"{path}: array {name} has {array.ndim} dimensions; columns have one, lists two"
        )
    return _values(array)


def _values(array: np.ndarray) -> pa.Array:
    # Arrow has no UTF-32, which NumPy's text is.
    return pa.array(array.astype(object) if array.dtype.kind in "US" else array)
