"""Synthetic click log in Criteo's format with a known ground truth, to measure quality and speed
anywhere.
"""

import contextlib
import ctypes
import datetime
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.synthetic_law import (
    BLOCK_ROWS,
    DIALECTS,
    NUM_DENSE,
    NUM_SPARSE,
    VERSION,
    GroundTruth,
)
from rayrec.host_resources import usable_cpus
from rayrec.native import call
from rayrec.storage.range_reader import in_order


def day_starts(rows: int, days: int) -> list[int]:
    """Return the first row of each day, and the row count: near-equal days."""
    return [-(-day * rows // days) for day in range(days + 1)]


def block_spans(block: int, *, starts: list[int], stop: int | None = None) -> list[tuple[int, int]]:
    """Return the days in a block of BLOCK_ROWS rows, as (day, row count within the block), up to
    row `stop` of the log.
    """
    first = block * BLOCK_ROWS
    last = min((block + 1) * BLOCK_ROWS, starts[-1] if stop is None else stop)
    spans = []
    for day, (start, end) in enumerate(itertools.pairwise(starts)):
        count = min(end, last) - max(start, first)
        if count > 0:
            spans.append((day, count))
    return spans


def exact_auroc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Compute the probability that a click scores above a non-click, with half credit for ties.
    None if either class is absent. Sorts float32 scores; the rest is integer arithmetic.
    """
    clicked = labels.astype(bool)
    clicks, skips = (
        np.sort(scores[mask].astype(np.float32, copy=False)) for mask in (clicked, ~clicked)
    )
    if not len(clicks) or not len(skips):
        return None
    twice = int(np.searchsorted(skips, clicks).sum()) + int(
        np.searchsorted(skips, clicks, side="right").sum()
    )
    return twice / (2 * len(clicks) * len(skips))


def _logloss(logits: np.ndarray, targets: np.ndarray | None) -> float:
    """Compute the mean cross-entropy in nats, against labels, or against the true probabilities if
    targets is None.
    """
    total = 0.0
    for start in range(0, len(logits), 1 << 20):  # Bounds the float64 copies
        part = logits[start : start + (1 << 20)].astype(np.float64)
        target = 1 / (1 + np.exp(-part)) if targets is None else targets[start : start + (1 << 20)]
        total += float(np.sum(np.logaddexp(0, part) - target * part))
    return total / len(logits)


def _quality(logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Compute the metrics of the true probabilities on these rows; None if undefined."""
    if not len(labels):
        return {
            "rows": 0,
            "label_rate": None,
            "auroc": None,
            "logloss": None,
            "normalized_entropy": None,
        }
    rate = int(labels.sum(dtype=np.int64)) / len(labels)
    logloss = _logloss(logits, labels)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)) if 0 < rate < 1 else None
    auroc = exact_auroc(logits, labels)
    normalized = float(logloss / entropy) if entropy else None
    return {
        "rows": len(labels),
        "label_rate": rate,
        "auroc": auroc,
        "logloss": logloss,
        "normalized_entropy": normalized,
    }


def split_starts(dialect: str, starts: list[int]) -> tuple[int, int]:
    """Return the first validation and test rows: halves of Kaggle's last seventh, or of the last
    day.
    """
    rows = starts[-1]
    validation = rows - rows // 7 if dialect == "kaggle" else starts[-2]
    return validation, rows - (rows - validation) // 2


def _truth(
    plan: GroundTruth, logits: np.ndarray, labels: np.ndarray, starts: list[int]
) -> dict[str, Any]:
    overall = _quality(logits, labels)
    days_detail = []
    for day, (start, end) in enumerate(itertools.pairwise(starts)):
        quality = _quality(logits[start:end], labels[start:end])
        del quality["normalized_entropy"]
        days_detail.append({"day": day, **quality})
    validation, test = split_starts(plan.dialect, starts)
    parts = {
        "train": (0, validation),
        "validation": (validation, test),
        "test": (test, len(labels)),
    }
    return {
        "version": VERSION,
        "rows": overall.pop("rows"),
        "dialect": plan.dialect,
        "days": len(starts) - 1,
        "seed": plan.seed,
        "drift": plan.drift,
        **overall,
        "expected_logloss": _logloss(logits, None),
        "days_detail": days_detail,
        "split": {name: _quality(logits[a:b], labels[a:b]) for name, (a, b) in parts.items()},
    }


# Files of several names cannot appear in one step. `truth.json` is renamed last and marks the log
# as complete; after an error, those that got their names before are removed.
@contextlib.contextmanager
def _new_files(folder: str, names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield temporary paths for new files. At the end, they get their names in this order, or are
    removed without a trace.
    """
    named: list[str] = []
    made: list[str] = []
    try:
        with storage.Scratch("generate", parent=folder) as temporary:
            paths = {
                name: os.path.join(temporary, str(number)) for number, name in enumerate(names)
            }
            yield paths
            for path in paths.values():
                storage.sync(path)
            for name, path in paths.items():
                target = os.path.join(folder, name)
                if not os.path.isdir(parent := os.path.dirname(target)):
                    os.makedirs(parent)
                    made.append(parent)
                if os.path.lexists(target):  # Appeared while this log was written
                    raise InputError(
                        f"{target}: exists already and is never overwritten; name another folder"
                    )
                os.rename(path, target)
                named.append(target)
        for parent in {folder, *map(os.path.dirname, named)}:
            storage.sync(parent)
    except BaseException:
        for path in named:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        for parent in made:
            with contextlib.suppress(OSError):  # Contains another log
                os.rmdir(parent)
        raise


@dataclass(frozen=True, kw_only=True)
class SyntheticLog:
    """Settings of a synthetic log, which determine its rows. Raises InputError for invalid
    values.
    """

    rows: int
    dialect: str = "kaggle"
    """Format. kaggle: one file train.txt, all days in order of time; terabyte: one file day_<d> per
    day.
    """
    days: int = 7
    seed: int = 0
    drift: int = 1
    """Days of change in the ground truth from one day to the next. 0: no change."""
    first_date: str | None = None
    """First day, such as 2026-01-31, for one folder per day: dt=2026-01-31/train.txt. None: no
    folders.
    """

    def __post_init__(self) -> None:
        if self.dialect not in DIALECTS:
            raise InputError(f"dialect: must be one of {', '.join(DIALECTS)}, got {self.dialect!r}")
        for name, minimum in (("rows", 1), ("days", 1), ("seed", 0), ("drift", 0)):
            _check_number(name, getattr(self, name), minimum)
        if self.days > self.rows:
            raise InputError(
                f"days: must be at most the number of rows, {self.rows}, got {self.days}"
            )

    def file_names(self) -> list[str]:
        """Return the file names, one per day or a single one. Raises InputError for invalid
        dates.
        """
        if self.first_date is None:
            return (
                ["train.txt"]
                if self.dialect == "kaggle"
                else [f"day_{day}" for day in range(self.days)]
            )
        try:
            first = datetime.date.fromisoformat(self.first_date)
            dates = [first + datetime.timedelta(day) for day in range(self.days)]
        except (ValueError, OverflowError):
            raise InputError(
                f"first_date: must be a date such as 2026-01-31 with {self.days} days to follow, "
                f"got {self.first_date!r}"
            ) from None
        return [f"dt={date.isoformat()}/train.txt" for date in dates]


def _check_number(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InputError(f"{name}: must be an integer of at least {minimum}, got {value!r}")


def _block_text(
    plan: GroundTruth,
    block: int,
    spans: list[tuple[int, int]],
    logits: np.ndarray,
    labels: np.ndarray,
) -> Any:
    """Return the text of a block as (day, bytes) pairs, and fill the block's range of `logits` and
    `labels`.
    """
    buffer = np.empty(
        sum(count for _, count in spans) * max_row_bytes(NUM_DENSE, NUM_SPARSE), dtype=np.uint8
    )
    texts = []
    at = 0
    row = block * BLOCK_ROWS
    for day, rows in plan.rows(block, spans=spans):
        end = row + len(rows.labels)
        logits[row:end] = rows.logits
        labels[row:end] = rows.labels
        size = format_rows(
            rows.labels, dense=rows.dense, tokens=rows.tokens, missing=rows.missing, out=buffer[at:]
        )
        texts.append((day, buffer[at : at + size].data))
        at += size
        row = end
    return texts


# A block of rows depends on the plan and its number only. Threads make blocks in any order, and the
# text is the same for any number of threads:
#
#   threads        _block_text    rows of a block, as text by day; labels and logits into arrays
#   this thread    in_order       blocks by number, written to the file of their day
#   at the end     _truth         metrics of the true logits, then `truth.json`
def generate(
    out: str,
    *,
    parallelism: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Write a synthetic click log and `truth.json`, the best quality any model could reach; return
    it. `settings` are the fields of SyntheticLog. The files appear complete or not at all,
    `truth.json` last. `parallelism`: threads (default: available CPUs). `progress(rows done, rows)`
    is called after every block. Raises InputError for invalid settings and existing files.
    """
    out = os.fspath(out)
    if "://" in out:
        raise InputError(f"{out}: must be a local folder; generate the log there, then copy it")
    log = SyntheticLog(**settings)
    _check_number(
        "parallelism", num_threads := parallelism if parallelism is not None else usable_cpus(), 1
    )
    if os.path.exists(out) and not os.path.isdir(out):
        raise InputError(f"{out}: must be a folder, got a file; name another folder")
    names = log.file_names()
    for name in [*names, "truth.json"]:
        if os.path.lexists(os.path.join(out, name)):
            raise InputError(
                f"{out}: already has {name}, which is never overwritten; name another folder"
            )
    rows = log.rows
    plan = GroundTruth(log.dialect, log.seed, log.drift)
    starts = day_starts(rows, log.days)
    logits = np.empty(rows, dtype=np.float32)
    labels = np.empty(rows, dtype=np.uint8)

    def make(block: int) -> Any:
        return _block_text(plan, block, block_spans(block, starts=starts), logits, labels)

    os.makedirs(out, exist_ok=True)
    with _new_files(out, [*names, "truth.json"]) as paths:
        numbers = range(-(-rows // BLOCK_ROWS))
        blocks = in_order(
            make, numbers, name="generate", num_threads=num_threads, prefetch=num_threads
        )
        with contextlib.closing(blocks), contextlib.ExitStack() as stack:
            current = -1
            file = None
            for block, texts in enumerate(blocks):
                for day, text in texts:
                    index = min(day, len(names) - 1)
                    if index != current:
                        stack.close()
                        current = index
                        file = stack.enter_context(open(paths[names[index]], "xb"))
                    assert file is not None
                    file.write(text)
                if progress is not None:
                    progress(min((block + 1) * BLOCK_ROWS, rows), rows)
        truth = _truth(plan, logits, labels, starts)
        with open(paths["truth.json"], "x", encoding="utf-8") as truth_file:
            truth_file.write(json.dumps(truth, indent=2, allow_nan=False) + "\n")
    return truth


_MAX_INTEGER_BYTES = 12
_TOKEN_BYTES = 9


def max_row_bytes(num_dense: int, num_sparse: int) -> int:
    """Return the maximum size of a formatted row, newline included."""
    return 2 + num_dense * _MAX_INTEGER_BYTES + num_sparse * _TOKEN_BYTES


def format_rows(
    labels: np.ndarray,
    *,
    dense: np.ndarray,
    tokens: np.ndarray,
    missing: np.ndarray,
    out: np.ndarray,
) -> int:
    """Write rows as `label, integers, 8-hex-digit tokens`, tab-separated, into `out`; return the
    number of bytes written. All arrays are C-contiguous: labels uint8 [rows], dense int32
    [num_dense, rows], tokens uint32 [num_sparse, rows], out uint8 [capacity]. `missing` is uint64
    [rows] with bit d for dense column d and bit num_dense + s for sparse column s. Raises
    ValueError for an array of another type or shape, and if the text exceeds `out`.
    """
    rows = len(labels)
    num_dense = len(dense)
    num_sparse = len(tokens)
    expected = (
        ("labels", labels, np.uint8, (rows,)),
        ("dense", dense, np.int32, (num_dense, rows)),
        ("tokens", tokens, np.uint32, (num_sparse, rows)),
        ("missing", missing, np.uint64, (rows,)),
        ("out", out, np.uint8, (out.size,)),
    )
    for name, array, kind, shape in expected:
        if array.dtype != kind or array.shape != shape or not array.flags.c_contiguous:
            raise ValueError(
                f"{name}: must be C-contiguous {np.dtype(kind)} {shape}, got {array.dtype} "
                f"{array.shape}"
            )
    if not out.flags.writeable:
        raise ValueError("out: is read-only")
    # The kernel's arguments of 32 bits. `call` passes Python integers as 64 bits.
    columns = (ctypes.c_int32(num_dense), ctypes.c_int32(num_sparse))
    size = call(
        "rayrec_format_rows", labels, dense, tokens, missing, rows, rows, *columns, out, out.size
    )
    if size < 0:
        row_bytes = max_row_bytes(num_dense, num_sparse)
        raise ValueError(
            f"out: must have room for {rows} rows of up to {row_bytes} bytes, got {out.size}, or "
            "a label exceeds 9"
        )
    return size
