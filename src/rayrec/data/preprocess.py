"""Writes a click log in a ready-made format, by tasks that each encode some segments and write them into place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from rayrec.data.engine import Engine
from rayrec.data.log import LogIndex
from rayrec.data.preprocessor import Preprocessor


def preprocess(
    index: LogIndex,
    *,
    preprocessor: Preprocessor,
    out: str,
    format: str,
    engine: Engine,
    sets: dict[str, tuple[int, int]] | None = None,
    segments_per_task: int = 8,
    shuffle: Literal["none", "full"] = "none",
    seed: int = 0,
    progress: Callable[[int], None] = lambda rows: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    raise NotImplementedError
