"""A click log in a ready-made format: written once by `preprocess`, read in place of the raw log with the same batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayrec import storage
from rayrec.data.encoded import EncodedRows
from rayrec.data.log import LogIndex, Segment
from rayrec.data.position import Block, Piece
from rayrec.data.preprocessor import Preprocessor

FORMATS = ("binary", "npy", "npz", "parquet")


@dataclass(frozen=True)
class ReadyDataset:
    path: str
    index: LogIndex
    preprocessor: str
    manifest: dict[str, Any]


def is_ready(path: str) -> bool:
    return storage.exists(storage.join(path, "dataset.json"))


def open_ready(path: str, *, verify: bool = False) -> ReadyDataset:
    raise NotImplementedError


def read(segments: Sequence[Segment], order: np.ndarray, preprocessor: Preprocessor) -> EncodedRows:
    raise NotImplementedError


def stream_ready(
    pieces: Sequence[tuple[Block, Piece]], preprocessor: Preprocessor, *, in_memory: bool = False, prefetch_blocks: int = 2
) -> Iterator[EncodedRows]:
    raise NotImplementedError
