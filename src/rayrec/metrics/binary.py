"""Exact metrics of a binary classifier over any number of rows and processes. Batch means and
samples can mislead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import numpy.typing as npt

from rayrec.collectives import Collectives, num_workers
from rayrec.config import InputError
from rayrec.metrics.registry import BINARY_METRICS, Rows, Totals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BLOCK_ROWS: Final = 1 << 20  # float64 temporaries stay below 8 MiB each
_SAMPLES_PER_RANK: Final = 1024  # Balances the ranks to about 0.1 % of the rows

CALIBRATION_BINS: Final = 15
"""Number of bins of the expected calibration error, as in Guo et al. 2017, "On Calibration of
Modern Neural Networks".
"""

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.uint8]
Keys = npt.NDArray[np.uint32]


def auroc(logits: Any, labels: Any) -> float:
    """Return the exact area under the ROC curve, Mann-Whitney U / (positives * negatives), with
    ties as one half. `logits` and `labels` are arrays or tensors of any shape with equal sizes.
    Logits are converted to float32, and labels must be 0 or 1. Infinite logits are ordered. NaN
    raises InputError. Returns NaN for only one class.
    """
    checked_logits, checked_labels = checked(logits, labels)
    negatives, positives = _sorted_keys(checked_logits, checked_labels)
    return _area(
        _twice_u(negatives, positives), num_positives=len(positives), num_negatives=len(negatives)
    )


def sigmoid(logits: npt.NDArray[Any]) -> Floats:
    """Return the probability 1 / (1 + exp(-logit)), without overflow, as float32."""
    small = np.exp(-np.abs(logits.astype(np.float64)))  # In (0, 1]
    return (np.where(logits >= 0, 1.0, small) / (1.0 + small)).astype(np.float32)


def binary_metrics(logits: Any, labels: Any) -> dict[str, float]:
    """Return BINARY_METRICS of these rows, then `rows` and `label_rate`. Without rows, all except
    `rows` are NaN. Arguments as in `auroc`.
    """
    checked_logits, checked_labels = checked(logits, labels)
    return _metrics(
        [_sums(checked_logits, checked_labels)],
        _twice_u(*_sorted_keys(checked_logits, checked_labels)),
    )


def flat_array(values: Any) -> npt.NDArray[Any]:
    """Convert an array or tensor to a flat NumPy array without importing torch. Copies from a
    device (a device sync).
    """
    if hasattr(values, "detach"):
        values = values.detach()
        # NumPy has no bfloat16
        values = (values.float() if values.is_floating_point() else values).cpu().numpy()
    return np.asarray(values).reshape(-1)


def converted(logits: Any, labels: Any) -> tuple[Floats, Labels]:
    """Convert as `checked`, but allow NaN."""
    flat_logits = flat_array(logits)
    flat_labels = flat_array(labels)
    if len(flat_logits) != len(flat_labels):
        raise InputError(
            f"labels: must have one per logit, {len(flat_logits)}, got {len(flat_labels)}"
        )
    wrong = np.flatnonzero((flat_labels != 0) & (flat_labels != 1))
    if len(wrong):
        raise InputError(f"labels: must be 0 or 1, got {flat_labels[wrong[0]]} in row {wrong[0]}")
    return flat_logits.astype(np.float32, copy=False), flat_labels.astype(np.uint8, copy=False)


def checked(logits: Any, labels: Any) -> tuple[Floats, Labels]:
    """Return flat float32 logits and uint8 labels. Raises InputError for unequal lengths, labels
    other than 0 and 1, and NaN.
    """
    flat_logits, flat_labels = converted(logits, labels)
    reject_nan(int(np.count_nonzero(np.isnan(flat_logits))), len(flat_logits))
    return flat_logits, flat_labels


def reject_nan(missing: int, rows: int) -> None:
    """Raise InputError if any logits are NaN: `missing` out of `rows`."""
    if missing:
        raise InputError(
            f"{missing} of {rows} logits are NaN: the model diverged or its inputs contain NaN. "
            "Lower --learning-rate"
        )


def row_losses(
    logits: Floats, labels: Labels
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the log loss, in nats, and the probability of each row, in float64. Supports infinite
    logits.
    """
    logit = logits.astype(np.float64)
    towards_wrong = np.where(labels == 1, -logit, logit)
    small = np.exp(-np.abs(logit))  # In (0, 1]: never overflows
    return np.maximum(towards_wrong, 0.0) + np.log1p(small), np.where(logit >= 0, 1.0, small) / (
        1.0 + small
    )


def is_correct(logits: Any, labels: Any) -> Any:
    """Return whether the threshold 0.5 of the probability predicts each row's label, for arrays or
    tensors, [rows].
    """
    return (logits > 0) == (labels > 0.5)


_SUMMED: Final = tuple(metric for metric in BINARY_METRICS if metric.row_values)


def _sums(logits: Floats, labels: Labels) -> list[float]:
    """Return row count and positives, then float64 sums: the row values of each metric, and
    probability - label in each bin.
    """
    sums: list[list[float]] = [[] for _ in _SUMMED]
    gaps = []
    bins = CALIBRATION_BINS
    for start in range(0, len(logits), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        loss, probability = row_losses(logits[block], labels[block])
        rows = Rows(logits[block], labels[block], loss, probability)
        for metric, block_sums in zip(_SUMMED, sums, strict=True):
            assert metric.row_values
            block_sums.append(float(np.sum(metric.row_values(rows))))
        # A probability of 1 is in the last one
        bin_numbers = np.minimum((probability * bins).astype(np.int64), bins - 1)
        gaps.append(np.bincount(bin_numbers, probability - labels[block], minlength=bins).tolist())
    totals = map(math.fsum, (*sums, *zip([0.0] * bins, *gaps, strict=True)))
    return [len(labels), int(np.count_nonzero(labels)), *totals]


# Keys instead of logits, since equal keys are ties and integers can be exchanged without a loss.
def _sorted_keys(logits: Floats, labels: Labels) -> tuple[Keys, Keys]:
    """Return sorted unsigned keys, ordered as logits, of negatives and positives, 4 bytes per
    row.
    """
    bits = (logits + np.float32(0.0)).view(np.uint32)  # Adding 0 makes -0.0 and 0.0 one key
    # Two's complement to offset binary: flip every bit of a negative number, the sign bit of a
    # positive one.
    flip = (bits.view(np.int32) >> 31).view(np.uint32)
    flip |= np.uint32(0x80000000)
    bits ^= flip
    del flip
    is_positive = labels.astype(bool)
    positives = bits[is_positive]
    negatives = bits[~is_positive]
    positives.sort()
    negatives.sort()
    return negatives, positives


def _twice_u(negatives: Keys, positives: Keys) -> int:
    """Return twice the exact Mann-Whitney U of the positives: 2 for each lower negative, 1 for each
    tie.
    """
    if len(positives) > len(negatives):  # Search with the smaller class
        return 2 * len(positives) * len(negatives) - _twice_u(positives, negatives)
    total = 0
    for start in range(0, len(positives), _BLOCK_ROWS):
        block = positives[start : start + _BLOCK_ROWS]
        below = np.searchsorted(negatives, block, side="left")
        below += np.searchsorted(negatives, block, side="right")
        total += int(below.sum())
    return total


def _area(twice_u: int, *, num_positives: int, num_negatives: int) -> float:
    # Dividing Python integers rounds once, however large they are.
    return (
        twice_u / (2 * num_positives * num_negatives)
        if num_positives and num_negatives
        else math.nan
    )


def _metrics(rank_sums: Sequence[Sequence[float]], twice_u: int) -> dict[str, float]:
    """Return the metrics from the `_sums` of each rank."""
    counts, positives, *sums_by_rank = zip(*rank_sums, strict=True)
    sums = [math.fsum(values) for values in sums_by_rank]
    rows = int(sum(counts))
    num_positives = int(sum(positives))
    rate = num_positives / rows if rows else math.nan
    entropy = (
        -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)) if 0 < rate < 1 else math.nan
    )
    totals = Totals(
        rows=rows or math.nan,
        positives=num_positives or math.nan,
        auroc=_area(twice_u, num_positives=num_positives, num_negatives=rows - num_positives),
        entropy=entropy,
        sums={metric.name: value for metric, value in zip(_SUMMED, sums, strict=False)},
        bin_gaps=math.fsum(map(abs, sums[len(_SUMMED) :])),
    )
    metrics = {metric.name: float(metric.compute(totals)) for metric in BINARY_METRICS}
    return {**metrics, "rows": rows, "label_rate": rate}


def distributed_binary_metrics(
    logits: Any, labels: Any, *, process_group: ProcessGroup | None = None
) -> dict[str, float]:
    """Return `binary_metrics` over the rows of all ranks, equal on every rank. Collective. Every
    rank of the group (default: all) passes its rows, possibly none. AUROC is exact and
    bit-identical to one process, and float64 sums agree to about 1e-15 relative. Invalid rows on
    one rank raise InputError on every rank, so that no rank waits. A rank also needs about 12 bytes
    per row of its share (more with very many ties). Without torch.distributed, this is the local
    `binary_metrics`. Method: sample sort (Frazer & McKellar 1970) of the keys, one key range per
    rank, then rank sums per range.
    """
    if num_workers(process_group) == 1:
        return binary_metrics(logits, labels)

    group = Collectives(process_group)
    # Raised only after the first collective: the other ranks wait in it.
    error: InputError | None = None
    checked_logits = np.empty(0, np.float32)
    checked_labels = np.empty(0, np.uint8)
    try:
        checked_logits, checked_labels = checked(logits, labels)
    except InputError as caught:
        error = caught
    gathered = group.gather_floats(
        [float(error is not None), *_sums(checked_logits, checked_labels)]
    )
    failed = [str(rank) for rank, (flag, *_) in enumerate(gathered) if flag]
    if failed:
        raise error or InputError(
            f"cannot compute metrics: invalid rows on rank {', '.join(failed)}. See its message."
        )

    rank_sums = [sums for _, *sums in gathered]
    rank_rows = [int(rows) for rows, *_ in rank_sums]
    twice_u = 0
    if 0 < sum(positives for _, positives, *_ in rank_sums) < sum(rank_rows):
        keys = _sorted_keys(checked_logits, checked_labels)
        del checked_logits, checked_labels
        twice_u = _distributed_twice_u(keys, group=group, rank_rows=rank_rows)
    return _metrics(rank_sums, twice_u)


# Exact AUROC over ranks, without one that holds all rows. Collectives in order:
#
#   1. gather    samples of each rank's keys -> the same splitters on all ranks
#   2. exchange  number of keys for each rank
#   3. exchange  keys, negatives and then positives: rank r gets the r-th range of keys
#   4. gather    U of each range, and its class counts
#
# A positive of a range is above all negatives of lower ranges, which the sum adds.
def _distributed_twice_u(
    keys: tuple[Keys, Keys], *, group: Collectives, rank_rows: Sequence[int]
) -> int:
    """Return twice U over all ranks from each rank's sorted keys (negatives, positives)."""
    # One sample per equal number of rows on all ranks, so that ranks weigh as much as their rows.
    stride = max(1, sum(rank_rows) // (group.num_ranks * _SAMPLES_PER_RANK))
    samples = np.full(max(rank_rows) // stride + 2, -1, dtype=np.int64)
    local_samples = np.concatenate([part[stride // 2 :: stride] for part in keys])
    samples[: len(local_samples)] = local_samples
    gathered = np.sort(np.concatenate(group.gather(samples)))
    gathered = gathered[gathered >= 0]
    splitters = gathered[
        [rank * len(gathered) // group.num_ranks for rank in range(1, group.num_ranks)]
    ]

    # side="right" assigns a splitter and all its ties to the lower rank: no key is on two ranks.
    cuts = [
        np.concatenate(
            [[0], np.searchsorted(part, splitters.astype(np.uint32), side="right"), [len(part)]]
        )
        for part in keys
    ]
    send_counts = np.stack([np.diff(cut) for cut in cuts], axis=1)  # [ranks, 2]
    receive_counts = group.exchange(
        send_counts.reshape(-1), [2] * group.num_ranks, [2] * group.num_ranks
    )
    receive_counts = receive_counts.reshape(-1, 2)
    negatives, positives = (
        np.sort(
            group.exchange(part.view(np.int32), send.tolist(), receive.tolist()).view(np.uint32)
        )
        for part, send, receive in zip(keys, send_counts.T, receive_counts.T, strict=True)
    )

    high, low = divmod(_twice_u(negatives, positives), 1 << 32)  # Two int64 halves never overflow
    parts = group.gather(np.array([len(negatives), len(positives), high, low], dtype=np.int64))
    total = negatives_below = 0
    for num_negatives, num_positives, rank_high, rank_low in (part.tolist() for part in parts):
        total += (rank_high << 32) + rank_low + 2 * num_positives * negatives_below
        negatives_below += num_negatives
    return total


@final
class BinaryMetricsAccumulator:
    """Accumulator of an evaluation's logits and labels, 5 bytes per row on the CPU, for exact
    metrics.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Floats, Labels]] = []
        self.rows = 0
        """Number of rows so far on this rank."""

    def update(self, logits: Any, labels: Any) -> None:
        """Append a batch: arrays or tensors of any shape, labels 0 or 1. Copies from a device (a
        device sync).
        """
        new_logits, new_labels = converted(logits, labels)
        self._parts.append((new_logits.copy(), new_labels.copy()))
        self.rows += len(new_logits)

    def compute(self, *, process_group: ProcessGroup | None = None) -> dict[str, float]:
        """Return `distributed_binary_metrics` of all rows. Collective, but local without
        torch.distributed.
        """
        logits, labels = map(
            np.concatenate,
            zip((np.empty(0, np.float32), np.empty(0, np.uint8)), *self._parts, strict=True),
        )
        return distributed_binary_metrics(logits, labels, process_group=process_group)
