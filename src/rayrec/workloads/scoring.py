"""What serving and a workload agree on, so that the same processes score clicks, images and texts."""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, final

import numpy as np
import pyarrow as pa

from rayrec.checkpoint import Checkpoint
from rayrec.config import InputError

Device = Literal["cpu", "cuda"]

PREFIX = "model."
"""Of the weights' names in a checkpoint."""
KEY = "key:"
"""Prefix of the columns with each row's slice: key:day, key:COLUMN."""
GROUP = "group:"
"""The column that holds the keys of the rows' groups, int64, where a click model's schema has a group."""


class Totals(Protocol):
    """Sums up the tables of an evaluation."""

    @property
    def rows(self) -> int:
        """Rows so far."""
        ...

    def update(self, table: pa.Table) -> None: ...

    def compute(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Scoring:
    """The rows of an input, ready to be scored in blocks that follow each other."""

    block_rows: tuple[int, ...]
    """Rows of each block, which follow each other."""
    load: Callable[[Device], Callable[[int], pa.Table]]
    """Called once in each scoring process or thread; picklable. Loads the model; what it returns scores a block by its number,
    into a table with a row for each: `row` (int64, its 0-based place in the input) and the workload's own columns."""
    make_totals: Callable[[], Totals]
    """Takes the same tables where `evaluating` was asked for."""
    described: dict[str, Any]
    """What a result tells beside rows and metrics; plain JSON values."""
    thread_safe: bool = False
    """Whether several threads may call what one `load` returned, so that they share the weights."""
    is_clicks: bool = False
    """Whether tables have `logit` and, where `evaluating` was asked for, `label` and the keys of `slice_by`."""

    @property
    def rows(self) -> int:
        return sum(self.block_rows)

    @property
    def num_blocks(self) -> int:
        return len(self.block_rows)

    def block_of(self, row: int) -> tuple[int, int]:
        """The number of the block that holds a row, and that block's first row; behind the last row the number of blocks."""
        ends = list(itertools.accumulate(self.block_rows))
        number = bisect_right(ends, row)
        return number, ends[number - 1] if number else 0


class OpenBlock(Protocol):
    """Rows of an input that are scored together, open in a scoring process."""

    @property
    def rows(self) -> int: ...

    def score(self, start: int, stop: int) -> Mapping[str, np.ndarray | list[str]]:
        """Score rows from `start` to before `stop`; return their values by name, as many in each."""
        ...

    def columns(self, scored: dict[str, Any]) -> dict[str, pa.Array]:
        """Return the columns of the block's table, given the values of all rows that `score` gave."""
        ...


@final
@dataclass(frozen=True)
class BlockScorer:
    """Scores blocks of an input by their numbers, batch by batch. For any threads."""

    open_block: Callable[[int], OpenBlock]
    batch_rows: int

    def __call__(self, number: int) -> pa.Table:
        block = self.open_block(number)
        scored: dict[str, Any] = {}
        for start in range(0, block.rows, self.batch_rows):
            stop = min(start + self.batch_rows, block.rows)
            for name, values in block.score(start, stop).items():
                assert len(values) == stop - start, name
                if isinstance(values, list):
                    scored.setdefault(name, []).extend(values)
                    continue
                if name not in scored:
                    scored[name] = np.empty((block.rows, *values.shape[1:]), values.dtype)
                scored[name][start:stop] = values
        return pa.table(block.columns(scored))


def check_weights(checkpoint: str, wanted: dict[str, list[int]]) -> None:
    """Raises InputError where a checkpoint's weights are not those of its config.yaml and Preprocessor. Reads none."""
    entries = Checkpoint(checkpoint).manifest()["tensors"]
    stored = {name.removeprefix(PREFIX): entries[name]["shape"] for name in entries if name.startswith(PREFIX)}
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            raise InputError(
                f"{checkpoint}: {name} has shape {stored.get(name)}, its config.yaml asks for {wanted.get(name)}; "
                "the files are not of one checkpoint, or the recipe's network has changed since"
            )
