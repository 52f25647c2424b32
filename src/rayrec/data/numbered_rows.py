"""Rows readable in any order by number: images of idx files, token blocks in shards."""

import math
import posixpath
import zlib
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, final, runtime_checkable

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.storage.cache import gunzip


class RowSource(Protocol):
    """Rows numbered from 0, as read by one process."""

    def __len__(self) -> int: ...

    @property
    def chunk_rows(self) -> Sequence[int]:
        """Row counts of the parts that are cheap to read at once, such as shards, in the order of row numbers."""
        ...

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Read rows `indices`, int64 [n], in the given order as named arrays [n, ...]. Raises InputError for damaged data."""
        ...

    def will_read(self, indices: np.ndarray) -> None:
        """Hint that these rows will be read soon; returns at once."""
        return

    def close(self) -> None:
        """Release the rows."""
        return


@runtime_checkable
class EpochRows(Protocol):
    """Further methods of a RowSource whose rows differ by epoch, such as random crops, or may be unreadable."""

    def read_epoch(self, indices: np.ndarray, epoch: int) -> dict[str, np.ndarray]:
        """Read rows like `read`, as trained in an epoch."""
        ...

    def check(self, indices: np.ndarray, epoch: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Check rows that were read, maybe by another process. Raises InputError for too many unreadable ones."""
        ...


@final
class ArrayRows(RowSource):
    """Rows in memory: named arrays [rows, ...] of equal length."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        lengths = {name: len(array) for name, array in arrays.items()}
        assert len(set(lengths.values())) == 1, lengths
        self._arrays = dict(arrays)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    @property
    def chunk_rows(self) -> Sequence[int]:
        return (len(self),)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[indices] for name, array in self._arrays.items()}


IMAGES, LABELS = "images", "labels"
"""Batch keys: images, uint8 [rows, height, width] or [rows, height, width, 3], and labels if known, int64 [rows]."""
_UINT8: Final = 0x08
_GZIP_HEAD: Final = b"\x1f\x8b"
_FETCH: Final = "rayrec fetch mnist --out {folder} fetches MNIST's"


def read_idx(path: str) -> np.ndarray:
    """Read the uint8 array of an idx file, plain or gzip, local or a URL. Raises InputError if it is missing or damaged."""
    if not storage.exists(path):
        raise InputError(f"{path}: no such file; {_refetch_hint(path)}")
    data = storage.read_bytes(path)
    if data[:2] == _GZIP_HEAD:
        data = _unpacked(data, path)
    if len(data) < 4 or data[:2] != b"\0\0" or not 1 <= data[3] <= 4:
        raise InputError(f"{path}: not an idx file (it begins with {data[:4].hex(' ') or 'nothing'}); {_refetch_hint(path)}")
    if data[2] != _UINT8:
        raise InputError(f"{path}: idx type of images and labels must be bytes, 0x08, got 0x{data[2]:02x}")
    head_bytes = 4 + 4 * data[3]
    if len(data) < head_bytes:
        raise InputError(f"{path}: cut short within its header of {head_bytes} bytes; {_refetch_hint(path)}")
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", count=data[3], offset=4))
    expected = head_bytes + math.prod(shape)
    if len(data) != expected:
        problem = "cut short" if len(data) < expected else "too long"
        sizes = " x ".join(f"{size:,}" for size in shape)
        raise InputError(
            f"{path}: {problem}, has {len(data):,} bytes, but its {sizes} values need {expected:,}; {_refetch_hint(path)}"
        )
    return np.frombuffer(data, np.uint8, offset=head_bytes).reshape(shape)


def _unpacked(data: bytes, path: str) -> bytes:
    """Unpack gzip, at most one piece more than the content's header declares, however well it was compressed."""
    content = bytearray()
    try:
        for chunk in gunzip([data]):
            content += chunk
            dimensions = content[3] if len(content) > 3 else 0
            sizes = np.frombuffer(bytes(content[4 : 4 + 4 * dimensions]), ">u4")
            if dimensions > 4 or len(content) > 4 + 4 * dimensions + math.prod(map(int, sizes)):
                break  # Too long, or not an idx file: the caller raises the error
        return bytes(content)
    except EOFError:
        raise InputError(f"{path}: cut short, not a complete gzip file; {_refetch_hint(path)}") from None
    except zlib.error as error:
        raise InputError(f"{path}: damaged, not a gzip file to its end ({error}); {_refetch_hint(path)}") from None


def _refetch_hint(path: str) -> str:
    return f"get it again ({_FETCH.format(folder=posixpath.dirname(path) or '.')})"


def read_images(path: str) -> np.ndarray:
    """Read an idx file as uint8 [rows, height, width]. Raises InputError if it is missing, damaged, or not images."""
    images = read_idx(path)
    if images.ndim != 3 or 0 in images.shape:
        raise InputError(f"{path}: must have shape (rows, height, width), got {images.shape}; name the file of the images")
    return images


def read_labels(path: str, *, num_classes: int) -> np.ndarray:
    """Read an idx file as uint8 [rows]. Raises InputError if it is missing, damaged, or has values other than class numbers."""
    labels = read_idx(path)
    if labels.ndim != 1:
        raise InputError(f"{path}: must have shape (rows,), got {labels.shape}; name the file of the labels")
    if len(labels) and (largest := int(labels.max())) >= num_classes:
        row = int(np.argmax(labels >= num_classes))
        raise InputError(
            f"{path}: label of row {row} must be 0 to {num_classes - 1}, got {labels[row]}; set num_classes to {largest + 1} or "
            "more, or fix the file"
        )
    return labels


def find(folder: str, part: str, kind: str) -> str | None:
    """Return the path of the `part` (train or t10k) and kind (`kind`: images or labels) in a folder, plain before gzip, with
    either spelling of the name; None if absent. Raises InputError if both spellings exist."""
    dimensions = 3 if kind == "images" else 1
    names = [f"{part}-{kind}{separator}idx{dimensions}-ubyte" for separator in "-."]
    candidates = [
        next((path for end in ("", ".gz") if storage.exists(path := storage.join(folder, name + end))), None) for name in names
    ]
    paths = [path for path in candidates if path is not None]
    if len(paths) > 1:
        raise InputError(f"{folder}: has {' and '.join(posixpath.basename(path) for path in paths)}; keep one of them")
    return paths[0] if paths else None


def read_part(folder: str, part: str, *, num_classes: int) -> dict[str, np.ndarray]:
    """Read the images and labels of `train` or `t10k` in a folder with MNIST's file names. Raises InputError like `read_pair`."""
    paths = {kind: find(folder, part, kind) for kind in ("images", "labels")}
    for kind, path in paths.items():
        if path is None:
            raise missing(folder, part, kind)
    return read_pair(str(paths["images"]), str(paths["labels"]), num_classes=num_classes)


def missing(folder: str, part: str, kind: str) -> InputError:
    """Return the error for a folder without the file of `part` and kind `kind`."""
    dimensions = 3 if kind == "images" else 1
    return InputError(f"{folder}: {part}-{kind}-idx{dimensions}-ubyte not found, plain or .gz; {_FETCH.format(folder=folder)}")


def read_pair(images_path: str, labels_path: str, *, num_classes: int) -> dict[str, np.ndarray]:
    """Read IMAGES and LABELS. Raises InputError if a file is missing or damaged, or if their counts differ."""
    images, labels = read_images(images_path), read_labels(labels_path, num_classes=num_classes)
    if len(images) != len(labels):
        raise InputError(
            f"{images_path}: has {len(images):,} images, but {labels_path} has {len(labels):,} labels; get both from one place"
        )
    return {IMAGES: images, LABELS: labels.astype(np.int64)}
