"""Synthetic multi-hot ids: each id becomes a bag that starts with it and goes on with random ids belonging to it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rayrec.config import Config, InputError
from rayrec.native import library

MLPERF_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids a row in each of Criteo's 26 columns in MLPerf's DLRM-DCNv2 benchmark; 214 in all."""


@dataclass(frozen=True, kw_only=True)
class MultiHot(Config):
    """Bags in the way of MLPerf's DLRM-DCNv2 (torchrec_dlrm's materialize_synthetic_multihot_dataset): id i stands for the
    bag [i, h - 1 random ids], always the same ones.

    The random ids are a function of (seed, column, id, place), not drawn one after the other, so no table of them is
    held: the original's needs 24 GB. Distributions and sizes are the original's, the single ids are not.
    """

    sizes: tuple[int, ...] = MLPERF_SIZES
    """Ids a row has in each sparse column."""
    distribution: Literal["uniform", "pareto"] = "uniform"
    """uniform over the table; pareto: (1 - u)^-4 - 1 cut to 32 bits, modulo the table's size (numpy's pareto, a = 0.25)."""
    seed: int = 0
    """Other seeds give other bags."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes or min(self.sizes) < 1:
            raise InputError(f"multi_hot.sizes: {self.sizes} must be 1 or more each")

    def expand(self, ids: Sequence[np.ndarray], num_embeddings: Sequence[int]) -> list[np.ndarray]:
        """(rows) ids of each column -> (rows) where its size is 1, else (rows, size); the dtype stays."""
        return [
            column if size == 1 else self._expand_column(number, column, size, rows)
            for number, (column, size, rows) in enumerate(zip(ids, self.sizes, num_embeddings, strict=True))
        ]

    def _expand_column(self, number: int, ids: np.ndarray, size: int, num_embeddings: int) -> np.ndarray:
        ids = np.ascontiguousarray(ids)
        out = np.empty((len(ids), size), ids.dtype)
        library().rayrec_expand_bags(
            ctypes.c_void_p(ids.ctypes.data),
            ctypes.c_int64(len(ids)),
            ctypes.c_int64(ids.itemsize),
            ctypes.c_int64(size),
            ctypes.c_int64(num_embeddings),
            ctypes.c_uint64(self.seed & (2**64 - 1)),
            ctypes.c_int64(number),
            ctypes.c_int32(self.distribution == "pareto"),
            ctypes.c_void_p(out.ctypes.data),
        )
        return out
