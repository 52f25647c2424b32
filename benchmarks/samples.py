"""Synthetic images and text for the benchmarks without --data, with the same bytes on every
machine.
"""

import os
import tempfile
from pathlib import Path

import numpy as np

SIDE = 28
WORDS = 5_000


def synthetic_digits(rows: int, test_rows: int) -> str:
    """Generate four plain idx files under MNIST's names, once per machine, and return their folder.
    A class is a pattern of blocks. An image is its class's pattern, moved by up to three pixels,
    with noise.
    """
    folder = _folder(f"digits-{rows}-{test_rows}")
    if (folder / "done").exists():
        return str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    coarse = random.random((10, 7, 7)) < 0.4
    patterns = np.kron(coarse, np.ones((4, 4), bool))
    for name, count in (("train", rows), ("t10k", test_rows)):
        labels = random.integers(0, 10, count, dtype=np.uint8)
        images = np.empty((count, SIDE, SIDE), np.uint8)
        for row, label in enumerate(labels):
            moved = np.roll(patterns[label], random.integers(-3, 4, 2), axis=(0, 1))
            images[row] = (
                moved * random.integers(100, 256, dtype=np.int64) * random.random((SIDE, SIDE))
            )
        write_idx(folder / f"{name}-images-idx3-ubyte", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte", labels)
    (folder / "done").touch()
    return str(folder)


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write uint8 values of any shape in the format of MNIST's files."""
    head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    path.write_bytes(head + values.tobytes())


def synthetic_images(rows: int) -> str:
    """Generate JPEG files of 256 x 256 pixels, about 16 kB each, in ten class folders, once per
    machine, and return the folder. A class is a tint of smooth noise.
    """
    from PIL import Image

    folder = _folder(f"images-{rows}")
    if (folder / "done").exists():
        return str(folder / "train")
    random = np.random.default_rng(0)
    tints = random.integers(0, 100, (10, 3))
    for row in range(rows):
        path = folder / "train" / f"class_{row % 10}" / f"{row:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = (random.integers(0, 156, (32, 32, 3)) + tints[row % 10]).astype(np.uint8)
        Image.fromarray(coarse).resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)
    (folder / "done").touch()
    return str(folder / "train")


def synthetic_text(characters: int) -> str:
    """Generate a text of about `characters` characters, once per machine, and return its path. Each
    word is sampled from four frequent successors of the previous word, or by Zipf's law, so that
    models can learn from it.
    """
    path = _folder(f"text-{characters}") / "text.txt"
    if path.exists():
        return str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = ["".join(random.choice(letters, random.integers(2, 9))) for _ in range(WORDS)]
    following = np.minimum(random.zipf(1.3, (WORDS, 4)), WORDS) - 1
    fragments = []
    length = 0
    word = 0
    while length < characters:
        word = int(
            following[word, random.integers(4)]
            if random.random() < 0.7
            else min(random.zipf(1.3), WORDS) - 1
        )
        fragments.append(words[word] + (".\n" if random.random() < 0.08 else " "))
        length += len(fragments[-1])
    temporary = path.with_suffix(".part")
    temporary.write_text("".join(fragments))
    temporary.rename(path)
    return str(path)


def _folder(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"rayrec-benchmark-{os.getuid()}" / name
