"""Number of scored rows that a click model was trained on, found by their content."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rayrec import storage
from rayrec.checkpoint import SUMMARY
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import LogIndex, Segment, SegmentRange
from rayrec.hashing import GOLDEN, mix64
from rayrec.workloads.data_versions import data_versions
from rayrec.workloads.recsys.scorer import load_preprocessor
from rayrec.workloads.recsys.scoring import cache_folder, encode_parts, open_run_log
from rayrec.workloads.recsys.settings import ClickSettings

if TYPE_CHECKING:
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.workloads.base import TrainConfig
    from rayrec.workloads.run_config import DataConfig

MAX_ROWS: Final = 1 << 20
"""Maximum rows that are compared one by one: of the training set, and of the rows in segments
unknown to it.
"""
_MAX_LOG_BYTES: Final = 4 << 30
"""Maximum bytes of a run's log to read for the comparison, unless it is the scored log, which has
to be read anyway.
"""
_MAX_UNSEEN_ROWS: Final = 1 << 17
"""Maximum held-out rows that show how often rows repeat."""
_RUNS: Final = (1, 8, 64)
"""Lengths of runs of rows to compare. Longer ones are for logs in which rows repeat."""
_EXCESS: Final = 0.05
"""Difference between two shares of repeated rows that matters, in addition to three standard
errors.
"""


# Which scored rows were trained on:
#
#   segments with the checksum of a trained one   all their rows in the training set
#   rows of other segments                        by content, with their neighbours (_RUNS)
#   too many or too large to read                 unknown: None
#
# The run's held-out rows tell how often rows repeat at random. A length of runs counts only if no
# held-out row would.
def count_training_rows(config: TrainConfig, checkpoint: str, path: str) -> int | None:
    """Return how many rows of the log at `path` are in the training set of a checkpoint's run,
    under any path.

    Segments of the log are compared by checksum with those of the run's log. The rows of other
    segments, up to `MAX_ROWS`, are compared one by one as model inputs with label: a row counts if
    it and its neighbours equal consecutive training rows. The number of neighbours is the least
    with which no held-out row of the run counts, so rows that repeat at random do not. Reads the
    run's log, so memory is some 50 bytes for each of these rows. Returns None if that is
    impossible: the log is missing, has changed or is another one of more than `_MAX_LOG_BYTES`; or
    no number of neighbours separates the rows. Also for other models than click models, and for
    lists of events, whose held-out items no training row has.
    """
    if not isinstance(config.workload, ClickSettings) or config.train_data.path is None:
        return None
    if config.workload.schema.sequence is not None:
        return None
    preprocessor = load_preprocessor(checkpoint)
    try:
        if _is_too_large(config.train_data, path):
            return None
        run = _RunRows.open(config, checkpoint, preprocessor)
        if run is None:
            return None
        scored = open_run_log(
            config.train_data.replace(path=path, files=()),
            preprocessor,
            cache=cache_folder(checkpoint),
        )
        matching, unknown = run.split_matching(scored)
        if not unknown:
            return matching
        repeated = run.count_repeated(unknown, preprocessor)
    except InputError:  # The run's log is gone or has other columns, so nothing is known of it.
        return None
    return None if repeated is None else matching + repeated


def _is_too_large(run: DataConfig, path: str) -> bool:
    """Return whether a run's log is too large to be read for the comparison with the log at
    `path`.
    """
    files = LogSource.at(str(run.path), run.files).list_files()
    return (
        sum(file.size_bytes for file in files) > _MAX_LOG_BYTES
        and files != LogSource.at(path).list_files()
    )


@dataclass(frozen=True)
class _RunRows:
    """Rows of a run's log: the training set, and the others, which its model has not seen."""

    index: LogIndex
    train: tuple[int, int]
    unseen: Sequence[SegmentRange]

    @classmethod
    def open(
        cls,
        config: TrainConfig,
        checkpoint: str,
        preprocessor: Preprocessor,
    ) -> _RunRows | None:
        """Open the log of a checkpoint's run. Returns None if its files changed since the run
        finished.
        """
        workload = config.workload
        assert isinstance(workload, ClickSettings)
        path = config.train_data.path
        assert path is not None
        if _has_changed(config, checkpoint):
            return None
        cache = cache_folder(checkpoint)
        index = open_run_log(config.train_data, preprocessor, cache=cache)
        if config.eval_data.path is None:
            train = workload.split_rows(path, index)["train"]
            unseen = [*index.parts(0, train[0]), *index.parts(train[1], index.rows)]
        else:
            train = (0, index.rows)
            evaluated = open_run_log(config.eval_data, preprocessor, cache=cache)
            unseen = list(evaluated.parts(0, evaluated.rows))
        return cls(index, train, unseen)

    def split_matching(self, scored: LogIndex) -> tuple[int, list[SegmentRange]]:
        """Return the training rows in scored segments that the run's log has as well, and the other
        scored segments.
        """
        trained: dict[Any, int] = {}
        for segment in self.index.segments:
            first = max(segment.first_row, self.train[0])
            stop = min(segment.first_row + segment.rows, self.train[1])
            trained[_identity(segment)] = max(stop - first, 0)
        matching = 0
        unknown = []
        for part in scored.parts(0, scored.rows):
            rows = trained.get(_identity(part.segment))
            if rows is None:
                unknown.append(part)
            else:
                matching += rows
        return matching, unknown

    def count_repeated(
        self,
        unknown: Sequence[SegmentRange],
        preprocessor: Preprocessor,
    ) -> int | None:
        """Return how many of these rows are training rows; see `count_training_rows`."""
        num_train = self.train[1] - self.train[0]
        if num_train > MAX_ROWS or sum(part.rows for part in unknown) > MAX_ROWS:
            return None
        train = hashed(self.index.parts(*self.train), preprocessor)
        unseen = hashed(_first_rows(self.unseen, _MAX_UNSEEN_ROWS), preprocessor)
        return count_repeated(hashed(unknown, preprocessor), train=train, unseen=unseen)


def _has_changed(config: TrainConfig, checkpoint: str) -> bool:
    """Return whether the files of a finished run's log are other ones now."""
    run = storage.parent_folder(storage.parent_folder(checkpoint.rstrip("/")))
    summary = storage.join(run, SUMMARY)
    stored = storage.read_json(summary).get("data") if storage.exists(summary) else None
    return bool(stored) and stored != data_versions(config)


def _identity(segment: Segment) -> Any:
    """Return the key of a segment, equal for equal rows: their checksum, or, for preprocessed and
    random rows, their place.
    """
    if segment.checksum is None:
        return segment.path, segment.start, segment.stop
    return segment.checksum, segment.rows


def _first_rows(parts: Iterable[SegmentRange], max_rows: int) -> list[SegmentRange]:
    first_parts: list[SegmentRange] = []
    left = max_rows
    for part in parts:
        if left <= 0:
            break
        first_parts.append(
            SegmentRange(part.segment, part.start, min(part.stop, part.start + left))
        )
        left -= part.rows
    return first_parts


def hashed(parts: Iterable[SegmentRange], preprocessor: Preprocessor) -> np.ndarray:
    """Return the hash of each row's model inputs and labels, uint64 [rows], in order."""
    hashes = [np.empty(0, np.uint64)]
    hashes += [row_hashes(rows) for rows in encode_parts(parts, preprocessor)]
    return np.concatenate(hashes)


def row_hashes(rows: EncodedRows) -> np.ndarray:
    """Return the hash of each row's dense features, ids and labels, uint64 [rows]. Equal rows have
    equal hashes.
    """
    total = np.zeros(len(rows), np.uint64)
    columns = [
        rows.dense[:, number].astype(np.float32).view(np.uint32)
        for number in range(rows.dense.shape[1])
    ]
    columns += [
        rows.labels[name].astype(np.float32).view(np.uint32) for name in sorted(rows.labels)
    ]
    for number, column in enumerate(columns):
        total += _salted(column, number)
    for number, ids in enumerate(rows.ids, start=len(columns)):
        if isinstance(ids, JaggedIds):
            sums = np.concatenate(
                [np.zeros(1, np.uint64), np.cumsum(_salted(ids.values, number), dtype=np.uint64)]
            )
            offsets = ids.offsets
            column_hashes = sums[offsets[1:]] - sums[offsets[:-1]]
        else:
            column_hashes = _salted(ids.reshape(len(rows), -1), number).sum(axis=1, dtype=np.uint64)
        # Alike, because one format has bags of equal sizes as arrays, another as lists
        total += mix64(column_hashes)
    return total


def _salted(values: np.ndarray, number: int) -> np.ndarray:
    """Hash values of a column, so that columns do not cancel out."""
    salt = np.uint64((number + 1) * GOLDEN % 2**64)
    return mix64(values.astype(np.uint64) ^ salt)


def count_repeated(scored: np.ndarray, *, train: np.ndarray, unseen: np.ndarray) -> int | None:
    """Return how many scored rows are training rows, given the hashes of each set's rows in order,
    uint64 [rows]. Pure.

    Rows count as members of the shortest runs (of 1, 8 or 64 consecutive rows) that are in the
    training rows, but never in the held-out rows as well. None if even the longest are in both, or
    if only single rows suggest that the scored rows were drawn from the training rows at random.
    """
    is_equal = np.isin(scored, train)
    if not is_equal.any():
        return 0
    accidental = float(np.isin(unseen, train).mean()) if len(unseen) else 0.0
    for length in _RUNS:
        matching = run_hashes(train, length)
        if np.isin(run_hashes(unseen, length), matching).any():
            continue
        starts = np.isin(run_hashes(scored, length), matching)
        if length == 1 or starts.any():
            return int(np.count_nonzero(_covered(starts, length, len(scored))))
        return (
            None
            if is_equal.mean() > accidental + _excess(accidental, len(unseen), len(scored))
            else 0
        )
    return None


def _excess(fraction: float, *sizes: int) -> float:
    """Return the difference from a fraction of repeated rows that samples of these sizes do not
    have by accident.
    """
    return _EXCESS + 3.0 * math.sqrt(
        fraction * (1.0 - fraction) * sum(1.0 / size for size in sizes if size)
    )


def run_hashes(hashes: np.ndarray, length: int) -> np.ndarray:
    """Return a hash for each `length` (a power of two) consecutive rows, uint64 [rows - length +
    1].
    """
    size = 1
    while size < length:
        hashes = mix64(hashes[:-size]) + hashes[size:]
        size *= 2
    return hashes


def _covered(starts: np.ndarray, length: int, rows: int) -> np.ndarray:
    """Return for each row whether it is in a run that starts at a marked row."""
    edges = np.zeros(rows + 1, np.int64)
    positions = np.flatnonzero(starts)
    np.add.at(edges, positions, 1)
    np.add.at(edges, positions + length, -1)
    return np.cumsum(edges[:-1]) > 0
