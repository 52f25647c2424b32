"""Folders in MNIST's format that are made up in a moment: ten simple pictures, moved about, in
noise.
"""

import gzip
from pathlib import Path

import numpy as np


def idx(array: np.ndarray) -> bytes:
    assert array.dtype == np.uint8
    return bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">i4").tobytes() + array.tobytes()


def pictures(labels: np.ndarray, *, seed: int, size: int = 28) -> np.ndarray:
    """(rows, size, size) uint8: for each label a bar at an angle of its own, a little moved, in
    noise.
    """
    chance = np.random.default_rng(seed)
    moved = chance.uniform(-2, 2, (2, len(labels), 1, 1))
    down, right = np.mgrid[:size, :size] - (size - 1) / 2
    angle = (labels * np.pi / 10)[:, None, None]
    across = np.abs((down + moved[0]) * np.cos(angle) - (right + moved[1]) * np.sin(angle))
    along = np.abs((down + moved[0]) * np.sin(angle) + (right + moved[1]) * np.cos(angle))
    ink = np.clip(2.5 - across, 0, 1) * (along < size * 0.4)
    return (ink * 215 + chance.integers(0, 40, ink.shape)).astype(np.uint8)


def write_digits(
    folder: Path, *, train: int, test: int, seed: int = 0, packed: bool = True
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in (("train", train), ("t10k", test)):
        labels = (
            np.random.default_rng(seed + rows).permutation(np.arange(rows) % 10).astype(np.uint8)
        )
        for kind, array in (
            ("images-idx3", pictures(labels, seed=seed + rows)),
            ("labels-idx1", labels),
        ):
            data = gzip.compress(idx(array), 1) if packed else idx(array)
            (folder / (f"{part}-{kind}-ubyte" + ".gz" * packed)).write_bytes(data)
    return folder
