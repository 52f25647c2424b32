"""Idx files: correct reading, and rejection of damaged or missing files in one line."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from builders.digits import idx
from builders.faults import rejects

from rayrec.data.numbered_rows import find, read_idx, read_images, read_labels, read_pair, read_part
from rayrec.datasets.fetch import PUBLISHED

IMAGES = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
LABELS = np.array([3, 0, 9, 1, 1], np.uint8)


def test_read_idx_parses_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 255]))
    array = read_idx(str(path))
    assert (array.dtype, array.tolist()) == (np.uint8, [[1, 2, 3], [4, 5, 255]])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("separator", ["-", "."])
def test_read_part_returns_pairs(tmp_path: Path, packed: bool, separator: str) -> None:
    pack = gzip.compress if packed else bytes
    end = ".gz" if packed else ""
    for part, rows in (("train", 5), ("t10k", 2)):
        (tmp_path / f"{part}-images{separator}idx3-ubyte{end}").write_bytes(pack(idx(IMAGES[:rows])))
        (tmp_path / f"{part}-labels{separator}idx1-ubyte{end}").write_bytes(pack(idx(LABELS[:rows])))
    for part, rows in (("train", 5), ("t10k", 2)):
        read = read_part(str(tmp_path), part, num_classes=10)
        assert read.labels is not None
        assert (read.images.tolist(), read.labels.tolist()) == (IMAGES[:rows].tolist(), LABELS[:rows].tolist())
    assert read_part(f"file://{tmp_path}", "t10k", num_classes=10).images.shape == (2, 4, 3)


def test_idx_names_match_fetched_files(tmp_path: Path) -> None:
    for file in PUBLISHED["mnist"]:
        (tmp_path / file.name).touch()
    found = [find(str(tmp_path), part, what) for part in ("train", "t10k") for what in ("images", "labels")]
    assert found == [str(tmp_path / file.name) for file in PUBLISHED["mnist"]]
    plain = tmp_path / "t10k-labels-idx1-ubyte"  # unpacked beside its packed self: the same rows, faster to read
    plain.touch()
    assert find(str(tmp_path), "t10k", "labels") == str(plain)
    (tmp_path / "t10k-labels.idx1-ubyte").touch()
    rejects(r"t10k-labels-idx1-ubyte and t10k-labels\.idx1-ubyte; keep one", find, str(tmp_path), "t10k", "labels")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file .it begins with nothing"),
        (b"\0\0\x08", "not an idx file .it begins with 00 00 08"),
        (b"<html>not found</html>", "not an idx file .it begins with 3c 68 74 6d"),
        (b"\1" + idx(LABELS)[1:], "not an idx file"),
        (bytes([0, 0, 8, 0]), "not an idx file"),
        (b"\0\0\x0d" + idx(LABELS)[3:], "idx type of images and labels must be bytes, 0x08, got 0x0d"),
        (idx(IMAGES)[:10], "cut short within its header of 16 bytes"),
        (idx(IMAGES)[:-1], "cut short, has 75 bytes, but its 5 x 4 x 3 values need 76"),
        (idx(IMAGES) + b"\0", "too long, has 77 bytes, but its 5 x 4 x 3 values need 76"),
        (gzip.compress(idx(IMAGES), mtime=0)[:-9], "cut short, not a complete gzip file"),
        (gzip.compress(idx(IMAGES), mtime=0)[:-8] + bytes(8), "damaged, not a gzip file to its end"),
        (gzip.compress(b"", mtime=0)[:10] + b"\xff" * 30, "damaged, not a gzip file to its end"),
        (gzip.compress(idx(IMAGES), mtime=0) + b"more", "damaged, not a gzip file to its end"),
    ],
    ids=range(13),
)
def test_damaged_files_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    line = rejects(message, read_idx, str(path))
    assert line.startswith(f"{path}: ")
    assert "idx type" in message or f"rayrec fetch mnist --out {tmp_path}" in line


def test_read_idx_rejects_wrong_shapes(tmp_path: Path) -> None:
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    rejects(r"train-images-idx3-ubyte not found.* rayrec fetch mnist --out ", read_part, str(tmp_path), "train", num_classes=10)
    images.write_bytes(idx(IMAGES))
    rejects(r"train-labels-idx1-ubyte not found.* rayrec fetch mnist --out ", read_part, str(tmp_path), "train", num_classes=10)
    rejects(r"nowhere: train-images-idx3-ubyte not found", read_part, str(tmp_path / "nowhere"), "train", num_classes=10)
    rejects(r"nowhere: no such file; get it again .rayrec fetch mnist", read_images, str(tmp_path / "nowhere"))
    labels.write_bytes(idx(LABELS[:4]))
    rejects(r"has 5 images, but .*train-labels-idx1-ubyte has 4 labels", read_pair, str(images), str(labels), num_classes=10)
    labels.write_bytes(idx(np.array([3, 0, 10, 1, 200], np.uint8)))
    rejects(r"label of row 2 must be 0 to 9, got 10; set num_classes to 201", read_part, str(tmp_path), "train", num_classes=10)
    assert read_labels(str(labels), num_classes=201).tolist() == [3, 0, 10, 1, 200]
    rejects(r"must have shape \(rows, height, width\), got \(5,\); name the file of the images", read_images, str(labels))
    rejects(r"must have shape \(rows,\), got \(5, 4, 3\); name the file of the labels", read_labels, str(images), num_classes=10)
