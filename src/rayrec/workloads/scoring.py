"""Scoring interface between inference and workloads, of all kinds, and checks of checkpoints to
score with or start from.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, final

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.checkpoint import Checkpoint
from rayrec.config import Config, InputError
from rayrec.metrics.means import Accumulator

Device = Literal["cpu", "cuda"]

PREFIX = "model."
"""Prefix of weight names in a checkpoint."""
KEY = "key:"
"""Prefix of slice columns: key:day, key:COLUMN."""
GROUP = "group:"
"""Column of each row's group key, int64, if a click model's schema has a group."""


@dataclass(frozen=True)
class Scoring:
    """Input rows, ready to be scored in consecutive blocks."""

    block_rows: tuple[int, ...]
    """Row count of each block."""
    load: Callable[[Device], Callable[[int], pa.Table]]
    """Load the model, once in each scoring process or thread. Picklable. The result scores a block,
    given its number. Its table has a row for each input row: `row` (0-based position in the input,
    int64) and the workload's columns.
    """
    make_totals: Callable[[], Accumulator]
    """Create totals for these tables, if `evaluating`."""
    described: dict[str, Any]
    """Additional JSON values of a result, besides rows and metrics."""
    thread_safe: bool = False
    """Thread safety of the `load` result. If True, threads share it and its weights."""
    is_clicks: bool = False
    """Flag for tables with `logit` and, if `evaluating`, `label` and the keys of `slice_by`."""
    is_ranking: bool = False
    """Flag for tables with the measures and best items of a retrieval model that ranks all known
    items, and the keys of `slice_by`.
    """
    bounded: tuple[str, ...] = ()
    """Columns of numbers with bounds, each with a column `rayrec.data.encoding.clipping.COLUMN` of
    the tables.
    """
    set_name: str = ""
    """Name of the run's set, test or validation, whose rows are scored. Empty if all rows of a path
    are.
    """
    first_row: int = 0
    """Number of the first scored row in its log."""
    rows_key: str = ""
    """Hash of the own set's rows, equal for equal rows under any path. Empty if all rows of a path
    are scored.
    """

    @property
    def rows(self) -> int:
        return sum(self.block_rows)

    @property
    def num_blocks(self) -> int:
        return len(self.block_rows)

    def find_block(self, row: int) -> tuple[int, int]:
        """Return the number and first row of the block that contains a row. After the last row, the
        number is the block count.
        """
        ends = list(itertools.accumulate(self.block_rows))
        number = bisect_right(ends, row)
        return number, ends[number - 1] if number else 0


class OpenBlock(Protocol):
    """Block of rows opened for scoring."""

    @property
    def rows(self) -> int: ...

    def score(self, start: int, stop: int) -> Mapping[str, np.ndarray | list[str]]:
        """Score rows [start, stop) and return their values by name, one per row."""

    def columns(self, scored: dict[str, Any]) -> dict[str, pa.Array]:
        """Return the columns of the block's table, given the concatenated outputs of `score`."""


@final
@dataclass(frozen=True)
class BlockScorer:
    """Scores input blocks by number, batch by batch. Thread-safe."""

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


def check_weights(checkpoint: str, expected: Mapping[str, list[int]]) -> None:
    """Check that a checkpoint's weights match its config.yaml and Preprocessor. Reads no weights.
    Raises InputError.
    """
    if mismatch := mismatched_weight(Checkpoint(checkpoint), expected):
        raise InputError(
            f"{checkpoint}: {mismatch}. Its files are from different checkpoints, or the recipe's "
            "network has changed. Copy the full checkpoint folder, or restore the network."
        )


def mismatched_weight(checkpoint: Checkpoint, expected: Mapping[str, list[int]]) -> str | None:
    """Describe the first weight with another name (without `PREFIX`) or shape than `expected`, or
    return None.
    """
    entries = checkpoint.manifest()["tensors"]
    stored = {
        name.removeprefix(PREFIX): entries[name]["shape"]
        for name in entries
        if name.startswith(PREFIX)
    }
    for name in sorted(stored.keys() | expected.keys()):
        if stored.get(name) != expected.get(name):
            return (
                f"{name}: shape must be {expected.get(name, 'absent')}, got "
                f"{stored.get(name, 'absent')}"
            )
    return None


def stored_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Load the config.yaml of a checkpoint. Raises InputError if it is not a run configuration."""
    import yaml

    path = storage.join(checkpoint.path, "config.yaml")
    try:
        values = yaml.safe_load(storage.read_bytes(path).decode())
    # ValueError: not UTF-8, or an invalid date
    except (yaml.YAMLError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("workload"), dict):
        raise InputError(
            f"{path}: must be the configuration of a run. Copy the full checkpoint folder."
        )
    return values


def require_same_optimizer(
    checkpoint: Checkpoint,
    stored: Mapping[str, Any],
    group: str,
    optimizer: Config,
    *,
    fields: Iterable[str],
) -> None:
    """Raise InputError if optimizer settings `fields`, which determine state, differ from the
    checkpoint. `group`: their field.
    """
    current = optimizer.to_dict()
    previous = {**type(optimizer)().to_dict(), **(stored["workload"].get(group) or {})}
    for field in fields:
        if bool(previous[field]) != bool(current[field]) or (
            isinstance(current[field], str) and previous[field] != current[field]
        ):
            raise InputError(
                f"init_from {checkpoint.path}: optimizer state does not match: trained with "
                f"workload.{group}.{field} {previous[field]}, this run has {current[field]}. Use "
                "the same value."
            )


def require_same_weights(checkpoint: Checkpoint, expected: Mapping[str, list[int]]) -> None:
    """Check that the weights of a checkpoint have the names (without `PREFIX`) and shapes
    `expected`. Raises InputError.
    """
    if mismatch := mismatched_weight(checkpoint, expected):
        raise InputError(
            f"init_from {checkpoint.path}: {mismatch}. Use the model and settings of its "
            "config.yaml."
        )
