"""Rows readable in any order by number: arrays, images of idx files, and images in class folders or
tar shards.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import posixpath
import re
import struct
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, Protocol, final, runtime_checkable

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.bounds import Count, Fraction
from rayrec.config import Config, InputError
from rayrec.data.arrow import arrow_rows, arrow_texts, numpy_rows
from rayrec.data.engine import Engine, Shared
from rayrec.storage import cache
from rayrec.storage.cache import gunzip, version_key
from rayrec.storage.filesystems import with_retries
from rayrec.storage.urls import split_options


class RowSource(Protocol):
    """Rows numbered from 0, as read by one process."""

    def __len__(self) -> int: ...

    @property
    def chunk_rows(self) -> Sequence[int]:
        """Row counts of the parts that are cheap to read at once, such as shards, in the order of
        row numbers.
        """

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Read rows `indices`, int64 [n], in the given order as named arrays [n, ...]. Raises
        InputError for damaged data.
        """

    def will_read(self, indices: np.ndarray) -> None:
        """Hint that these rows will be read soon; returns at once."""
        return

    def close(self) -> None:
        """Release the rows."""
        return


# A data task may read the rows elsewhere. So unreadable ones are marked there, and counted here.
@runtime_checkable
class EpochRows(Protocol):
    """Further methods of a RowSource whose rows differ by epoch, such as random crops, or may be
    unreadable.
    """

    def read_epoch(self, indices: np.ndarray, epoch: int) -> dict[str, np.ndarray]:
        """Read rows like `read`, as trained in an epoch."""

    def check(self, indices: np.ndarray, epoch: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Check rows that were read, maybe by another process. Raises InputError for too many
        unreadable ones.
        """


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


IMAGES = "images"
LABELS = "labels"
"""Batch keys: images, uint8 [rows, height, width] or [rows, height, width, 3], and labels if known,
int64 [rows].
"""
_UINT8: Final = 0x08
_GZIP_HEAD: Final = b"\x1f\x8b"
_FETCH: Final = "rayrec fetch mnist --out {folder} fetches MNIST's"


# Layout of an idx file, all integers big-endian:
#
#   bytes    content
#   0, 1     zero
#   2        type: 0x08 for bytes
#   3        number of dimensions d
#   4 ...    d sizes, uint32 each
#   ...      the values, row by row, to the end of the file
def read_idx(path: str) -> np.ndarray:
    """Read the uint8 array of an idx file, plain or gzip, local or a URL. Raises InputError if it
    is missing or damaged.
    """
    if not storage.exists(path):
        raise InputError(f"{path}: no such file; {_refetch_hint(path)}")
    data = storage.read_bytes(path)
    if data[:2] == _GZIP_HEAD:
        data = _unpacked(data, path)
    if len(data) < 4 or data[:2] != b"\0\0" or not 1 <= data[3] <= 4:
        raise InputError(
            f"{path}: not an idx file (it begins with {data[:4].hex(' ') or 'nothing'}); "
            f"{_refetch_hint(path)}"
        )
    if data[2] != _UINT8:
        raise InputError(
            f"{path}: idx type of images and labels must be bytes, 0x08, got 0x{data[2]:02x}"
        )
    head_bytes = 4 + 4 * data[3]
    if len(data) < head_bytes:
        raise InputError(
            f"{path}: cut short within its header of {head_bytes} bytes; {_refetch_hint(path)}"
        )
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", count=data[3], offset=4))
    expected = head_bytes + math.prod(shape)
    if len(data) != expected:
        problem = "cut short" if len(data) < expected else "too long"
        sizes = " x ".join(f"{size:,}" for size in shape)
        raise InputError(
            f"{path}: {problem}, has {len(data):,} bytes, but its {sizes} values need "
            f"{expected:,}; {_refetch_hint(path)}"
        )
    return np.frombuffer(data, np.uint8, offset=head_bytes).reshape(shape)


def _unpacked(data: bytes, path: str) -> bytes:
    """Unpack gzip, at most one piece more than the content's header declares, however well it was
    compressed.
    """
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
        raise InputError(
            f"{path}: cut short, not a complete gzip file; {_refetch_hint(path)}"
        ) from None
    except zlib.error as error:
        raise InputError(
            f"{path}: damaged, not a gzip file to its end ({error}); {_refetch_hint(path)}"
        ) from None


def _refetch_hint(path: str) -> str:
    return f"get it again ({_FETCH.format(folder=posixpath.dirname(path) or '.')})"


def read_images(path: str) -> np.ndarray:
    """Read an idx file as uint8 [rows, height, width]. Raises InputError if it is missing, damaged,
    or not images.
    """
    images = read_idx(path)
    if images.ndim != 3 or 0 in images.shape:
        raise InputError(
            f"{path}: must have shape (rows, height, width), got {images.shape}; name the file of "
            "the images"
        )
    return images


def read_labels(path: str, *, num_classes: int) -> np.ndarray:
    """Read an idx file as uint8 [rows]. Raises InputError if it is missing, damaged, or has values
    other than class numbers.
    """
    labels = read_idx(path)
    if labels.ndim != 1:
        raise InputError(
            f"{path}: must have shape (rows,), got {labels.shape}; name the file of the labels"
        )
    if len(labels) and (largest := int(labels.max())) >= num_classes:
        row = int(np.argmax(labels >= num_classes))
        raise InputError(
            f"{path}: label of row {row} must be 0 to {num_classes - 1}, got {labels[row]}; set "
            f"num_classes to {largest + 1} or more, or fix the file"
        )
    return labels


def find(folder: str, part: str, kind: str) -> str | None:
    """Return the path of the `part` (train or t10k) and kind (`kind`: images or labels) in a
    folder, plain before gzip, with either spelling of the name; None if absent. Raises InputError
    if both spellings exist.
    """
    dimensions = 3 if kind == "images" else 1
    names = [f"{part}-{kind}{separator}idx{dimensions}-ubyte" for separator in "-."]
    candidates = [
        next(
            (
                path
                for end in ("", ".gz")
                if storage.exists(path := storage.join(folder, name + end))
            ),
            None,
        )
        for name in names
    ]
    paths = [path for path in candidates if path is not None]
    if len(paths) > 1:
        raise InputError(
            f"{folder}: has {' and '.join(posixpath.basename(path) for path in paths)}; keep one "
            "of them"
        )
    return paths[0] if paths else None


def read_part(folder: str, part: str, *, num_classes: int) -> dict[str, np.ndarray]:
    """Read the images and labels of `train` or `t10k` in a folder with MNIST's file names. Raises
    InputError like `read_pair`.
    """
    paths = {kind: find(folder, part, kind) for kind in ("images", "labels")}
    for kind, path in paths.items():
        if path is None:
            raise missing(folder, part, kind)
    return read_pair(str(paths["images"]), str(paths["labels"]), num_classes=num_classes)


def missing(folder: str, part: str, kind: str) -> InputError:
    """Return the error for a folder without the file of `part` and kind `kind`."""
    dimensions = 3 if kind == "images" else 1
    return InputError(
        f"{folder}: {part}-{kind}-idx{dimensions}-ubyte not found, plain or .gz; "
        f"{_FETCH.format(folder=folder)}"
    )


def read_pair(images_path: str, labels_path: str, *, num_classes: int) -> dict[str, np.ndarray]:
    """Read IMAGES and LABELS. Raises InputError if a file is missing or damaged, or if their counts
    differ.
    """
    images = read_images(images_path)
    labels = read_labels(labels_path, num_classes=num_classes)
    if len(images) != len(labels):
        raise InputError(
            f"{images_path}: has {len(images):,} images, but {labels_path} has {len(labels):,} "
            "labels; get both from one place"
        )
    return {IMAGES: images, LABELS: labels.astype(np.int64)}


_logger = logging.getLogger(__name__)

READABLE: Final = "readable"
"""Batch key: whether the image could be decoded, uint8 [rows]. If not, it is black."""
_EXTENSIONS: Final = {".jpg", ".jpeg", ".png"}
_MEMBER: Final = re.compile(r"((?:.*/)?[^/.]+)\.(jpg|jpeg|png|cls)", re.IGNORECASE)
"""Name in a tar shard: a key up to the first dot, and the content's kind."""
_MAX_RATIO: Final = 4 / 3
"""Maximum aspect ratio of a random crop."""
_CROP_TRIES: Final = 10


# Where an image lies:
#
#   layout       names             ranges of a row                label
#   folder       a file per image  its file, 0, size of the file  folder below `folder`
#   tar shards   a file per shard  its shard, first byte, size    member KEY.cls
#
# A shard is never unpacked: an image is one read of a byte range, also in a store.
@dataclass(frozen=True)
class ImageIndex:
    """Byte range and label of each image, in the order of row numbers."""

    folder: str
    """Folder that contains the files. Empty if `names` are paths."""
    names: pa.Array
    """File names, large_string."""
    ranges: np.ndarray
    """File number, first byte and size in bytes of each image, int64 [rows, 3]."""
    labels: np.ndarray | None
    """Class number of each image, int64 [rows]. None if unknown."""
    classes: tuple[str, ...]
    """Class names in the order of labels. Empty for tar shards, which store class numbers."""
    is_sharded: bool

    def __len__(self) -> int:
        return len(self.ranges)

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        """Row count of each shard; of all images for folders."""
        return (
            tuple(np.unique(self.ranges[:, 0], return_counts=True)[1].tolist())
            if self.is_sharded
            else (len(self),)
        )

    @property
    def hash(self) -> str:
        """Hash of names, sizes and labels, as 16 hex digits. Reads no image."""
        digest = hashlib.sha256("\n".join([*self.names.to_pylist(), *self.classes]).encode())
        for array in (self.ranges, self.labels):
            digest.update(b"" if array is None else np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def row_path(self, row: int) -> str:
        return storage.join(self.folder, self.names[int(self.ranges[row, 0])].as_py())

    def split(self, rows: int) -> tuple[ImageIndex, ImageIndex]:
        """Split off `rows` images, evenly spread over all. Returns the others first."""
        numbers = np.arange(len(self) + 1) * rows // max(1, len(self))
        rest, split_off = (
            replace(
                self,
                ranges=self.ranges[mask],
                labels=None if self.labels is None else self.labels[mask],
            )
            for mask in (np.diff(numbers) == 0, np.diff(numbers) > 0)
        )
        return rest, split_off

    def content(self, row: int) -> memoryview:
        """Read the bytes of an image. Raises InputError if its file is missing."""
        _, start, size_bytes = self.ranges[row].tolist()
        buffer = np.empty(size_bytes, np.uint8)
        return buffer[: storage.read_into(self.row_path(row), start, buffer)].data


def image_files(path: str) -> tuple[str, dict[str, storage.File]]:
    """List images or tar shards: a folder with all its subfolders, a glob, or a file. Returns the
    folder and the files by name in it, or "" and the files by path. Skips names with a leading dot.
    Raises InputError if there is none, or for other files.
    """
    body = split_options(storage.absolute(path))[0].rstrip("/")
    folder = (
        ""
        if re.search(r"[*?\[]", body) or storage.size_of(path) is not None
        else storage.absolute(path)
    )
    listed = storage.files_in(path, recursive=True) if folder else storage.list_files(path)
    files = {
        split_options(file.path)[0][len(body) + 1 :] if folder else file.path: file
        for file in listed
    }
    files = {
        name: file for name, file in files.items() if not folder or not re.search(r"(^|/)\.", name)
    }
    kinds = {_kind(name): name for name in reversed(files)}
    if not kinds.keys() & (_EXTENSIONS | {".tar"}):
        raise InputError(
            f"{path}: contains no .jpg, .jpeg, .png or .tar files. Pass a folder with one "
            "subfolder per class."
        )
    if extra_kinds := kinds.keys() - ({".tar"} if ".tar" in kinds else _EXTENSIONS):
        raise InputError(
            f"{path}: must contain only images, or only tar shards, got also "
            f"{kinds[min(extra_kinds)]}. Move it elsewhere."
        )
    return folder, files


def _kind(name: str) -> str:
    return posixpath.splitext(split_options(name)[0])[1].lower()


def index_images(
    path: str, engine: Engine, *, classes: Sequence[str] = (), labelled: bool = True
) -> ImageIndex:
    """Index the images of a path: a folder with one subfolder per class, tar shards with members
    KEY.jpg and KEY.cls (the class number), or, without labels, images anywhere.

    Args:
        engine: Engine that scans tar shards. Their indices are cached.
        classes: Class names in the order of labels. Empty takes the names of the subfolders,
            sorted.
        labelled: Whether to raise InputError for images without a class. Otherwise all labels are
            then None.

    Raises InputError for unusable files.
    """
    folder, files = image_files(path)
    is_sharded = _kind(next(iter(files))) == ".tar"
    if is_sharded:
        names = list(files)
        ranges, labels = _scan_shards(list(files.values()), engine)
        problem = (
            f"{path}: each image of a tar shard must have a member KEY.cls with its class number, "
            "found none"
        )
    else:
        # The order of torchvision's ImageFolder.
        names = sorted(files, key=lambda name: (name.partition("/")[0], *posixpath.split(name)))
        ranges = np.array(
            [(row, 0, files[name].size_bytes) for row, name in enumerate(names)], np.int64
        )
        image_folders = [name.partition("/")[0] if folder and "/" in name else "" for name in names]
        classes = classes or sorted(set(image_folders) - {""})
        number = {name: label for label, name in enumerate(classes)}
        unknown = next(
            (
                name
                for name, class_folder in zip(names, image_folders, strict=True)
                if class_folder not in number
            ),
            None,
        )
        labels = (
            None
            if unknown
            else np.array([number[class_folder] for class_folder in image_folders], np.int64)
        )
        problem = (
            f"{path}: {unknown} is not in a subfolder named after a class of the training images"
        )
    if labels is None and labelled:
        raise InputError(f"{problem}. Use PATH/CLASS/NAME.jpg, or shards in WebDataset's layout.")
    return ImageIndex(folder, arrow_texts(names), ranges, labels, tuple(classes), is_sharded)


# Indices of shards are cached by name, size and time of change, so that only new shards are read in
# full when a run starts.
def _scan_shards(
    files: Sequence[storage.File], engine: Engine
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the ranges and labels of all images in tar shards."""
    cached = {
        file.path: storage.join(
            cache.folder(), "images", version_key(file.path, (file.size_bytes, file.modified_ns))
        )
        for file in files
    }
    missing = [path for path, index in cached.items() if not storage.exists(index)]
    for path, table in zip(missing, engine.run("images", scan_shard, missing), strict=True):
        storage.write_bytes(
            cached[path], numpy_rows(table.column("images").combine_chunks()).tobytes()
        )
    shard_samples = [
        np.frombuffer(storage.read_bytes(index), np.int64).reshape(-1, 3)
        for index in cached.values()
    ]
    starts, sizes, labels = np.concatenate(shard_samples).T
    numbers = np.repeat(np.arange(len(files)), [len(samples) for samples in shard_samples])
    return np.stack([numbers, starts, sizes], axis=1), None if (labels < 0).all() else labels.copy()


def scan_shard(path: str) -> pa.Table:
    """Return first byte, size and label of each image in a tar shard, int64 [rows, 3]. The label is
    -1 if all have none. Raises InputError for a damaged or compressed file, and for images of which
    only some have labels.
    """
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}

    def scan(filesystem: Any, inner: str) -> None:
        # A store sends all bytes faster than it answers a request for each image.
        mode: Any = "r|" if storage.is_url(path) else "r:"
        opened = (
            filesystem.open_input_stream if storage.is_url(path) else filesystem.open_input_file
        )
        with opened(inner) as file, tarfile.open(fileobj=file, mode=mode, bufsize=1 << 20) as tar:
            for member in tar:
                match = _MEMBER.fullmatch(member.name) if member.isfile() else None
                if match is not None and match[2].lower() != "cls":
                    images[match[1]] = member.offset_data, member.size
                elif match is not None and (content := tar.extractfile(member)) is not None:
                    labels[match[1]] = int(content.read(32))

    try:
        with_retries(path, scan)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise InputError(
            f"{path}: not a plain tar file with class numbers, or damaged ({error}). Write it "
            "again."
        ) from None
    if not images or (labels and (images.keys() - labels or min(labels.values()) < 0)):
        raise InputError(
            f"{path}: must contain images KEY.jpg or KEY.png, all or none with a class number (0, "
            "...) in KEY.cls"
        )
    return pa.table(
        {
            "images": arrow_rows(
                np.array([(*images[key], labels.get(key, -1)) for key in images], np.int64)
            )
        }
    )


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Config):
    """Size of decoded images, and random changes for training."""

    size: Count = 224
    """Height and width of the network's input, in pixels."""
    resize: Count = 256
    """Shorter side, in pixels, of an evaluation image whose center of `size` pixels is used."""
    crop_scale: tuple[Fraction, Fraction] | None = (0.08, 1.0)
    """Minimum and maximum area of random crops for training, as a fraction of the image. None crops
    the center.
    """
    flip: bool = True
    """Whether to mirror half of the training images, chosen at random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resize < self.size:
            raise InputError(
                f"workload.images.resize: must be at least size {self.size}, got {self.resize}"
            )
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1]:
            raise InputError(
                "workload.images.crop_scale: must be a minimum above 0 and a maximum, got "
                f"{self.crop_scale}"
            )

    def decode(
        self, content: memoryview, mode: Literal["L", "RGB"], key: tuple[int, int, int] | None
    ) -> np.ndarray:
        """Decode, crop and resize an image, uint8 [size, size] or [size, size, 3]. `key`: seed,
        epoch and row, for random changes; None for evaluation. Raises Pillow's errors if it is
        damaged.
        """
        from PIL import Image

        # All draws of an image depend on seed, epoch and row only. Whichever process decodes it,
        # also after a resumption, gets equal pixels.
        draws = None if key is None else np.random.default_rng(key).random(1 + 4 * _CROP_TRIES)
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
            width, height = image.size
            left, top, w, h = self._box(
                width, height, None if draws is None else draws[1:].reshape(-1, 4)
            )
            scale = max(1, int(min(w, h) / self.size))
            # JPEG decodes at 1/2, 1/4 or 1/8, but not below this size.
            image.draft(mode, (width // scale, height // scale))
            x = image.width / width
            y = image.height / height
            plain = image if image.mode == mode else image.convert(mode)  # convert copies
            box = (left * x, top * y, (left + w) * x, (top + h) * y)
            resized = plain.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        is_flipped = self.flip and draws is not None and draws[0] < 0.5
        return np.asarray(
            resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if is_flipped else resized
        )

    def _box(
        self, width: int, height: int, draws: np.ndarray | None
    ) -> tuple[float, float, float, float]:
        """Return the pixels to use: left, top, width, height. Random crops are those of
        torchvision's RandomResizedCrop.
        """
        if self.crop_scale is None or draws is None:
            side = min(width, height) * self.size / self.resize
            return (width - side) / 2, (height - side) / 2, side, side
        low, high = self.crop_scale
        for area, ratio, x, y in draws.tolist():
            pixels = width * height * (low + area * (high - low))
            aspect = _MAX_RATIO ** (2 * ratio - 1)
            w = round(math.sqrt(pixels * aspect))
            h = round(math.sqrt(pixels / aspect))
            if 0 < w <= width and 0 < h <= height:
                return int(x * (width - w + 1)), int(y * (height - h + 1)), w, h
        w = min(width, round(height * _MAX_RATIO))
        h = min(height, round(width * _MAX_RATIO))
        return (width - w) // 2, (height - h) // 2, w, h


@final
@dataclass
class ImageRows(RowSource):
    """Decoded images of an index. Picklable, and may be read by several threads. Implements
    `EpochRows`.
    """

    index: Shared[ImageIndex]
    config: ImageConfig
    mode: Literal["L", "RGB"]
    seed: int | None = None
    """Seed of random changes. None for evaluation."""
    max_unreadable: float = math.inf
    """Maximum number of unreadable images per epoch and worker."""
    _unreadable: tuple[int, int] = (0, 0)
    """Epoch, and number of its unreadable images."""

    def __len__(self) -> int:
        return len(self.index.get())

    @property
    def chunk_rows(self) -> Sequence[int]:
        return self.index.get().chunk_rows

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return self.read_epoch(indices, 0)

    def read_epoch(self, indices: np.ndarray, epoch: int) -> dict[str, np.ndarray]:
        index = self.index.get()
        size = self.config.size
        images = np.zeros((len(indices), size, size, 3)[: 3 + (self.mode == "RGB")], np.uint8)
        readable = np.zeros(len(indices), np.uint8)
        decode = partial(self._decode, index, epoch)
        for number, image in enumerate(
            storage.in_parallel(decode, indices.tolist(), path=index.row_path(0))
        ):
            if image is not None:
                images[number] = image
                readable[number] = 1
        labels = {} if index.labels is None else {LABELS: index.labels[indices]}
        return {IMAGES: images, **labels, READABLE: readable}

    def _decode(self, index: ImageIndex, epoch: int, row: int) -> np.ndarray | None:
        from PIL.Image import DecompressionBombError

        content = index.content(row)
        try:
            return self.config.decode(
                content, self.mode, None if self.seed is None else (self.seed % 2**64, epoch, row)
            )
        except (
            OSError,
            SyntaxError,
            ValueError,
            EOFError,
            struct.error,
            zlib.error,
            DecompressionBombError,
        ):
            return None

    # A damaged image must not stop a run of days. It is trained as a black one without weight,
    # until their number shows that the data are at fault.
    def check(self, indices: np.ndarray, epoch: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Count unreadable images of an epoch and log them. Raises InputError if there are more
        than `max_unreadable`.
        """
        before = self._unreadable[1] if self._unreadable[0] == epoch else 0
        for number, row in enumerate(indices[arrays[READABLE] == 0].tolist(), start=before):
            self._unreadable = (epoch, number + 1)
            path = self.index.get().row_path(row)
            _logger.warning("Skipping image %d, which cannot be decoded: %s", row, path)
            if number + 1 > self.max_unreadable:
                raise InputError(
                    f"{path}: cannot be decoded, like {number:,} images before it in this epoch, "
                    "more than max_bad_fraction allows. Replace them (the log names each), or "
                    "raise --max-bad-fraction."
                )
