"""How well rows are ordered within groups, such as the items that one user was shown."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import numpy.typing as npt

from rayrec.config import InputError
from rayrec.metrics.binary import Collectives, checked, converted, refuse_nan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NO_GROUP: Final = 0
"""Key of rows that are in no group."""

Groups = npt.NDArray[np.int64]


def gauc(groups: Any, logits: Any, labels: Any) -> dict[str, float]:
    """`gauc`: the mean of the groups' AUROCs, each weighted by its rows, exact, a tie counting one half (Zhou et al. 2018, "Deep
    Interest Network for Click-Through Rate Prediction", section 6.2); `gauc_groups` and `gauc_rows`: what it is over.

    `groups` (rows,) int64 keys; rows with NO_GROUP and groups of one class have no part in it, and gauc is nan where nothing has.
    `logits` and `labels` as in `rayrec.metrics.binary.auroc`. Raises InputError for lengths that differ and what `auroc` refuses.
    """
    checked_logits, checked_labels = checked(logits, labels)
    return _told(*_sums(_keys(groups, len(checked_logits)), checked_logits, checked_labels))


def _told(weighted: float, rows: int, groups: int) -> dict[str, float]:
    return {"gauc": weighted / rows if rows else math.nan, "gauc_groups": groups, "gauc_rows": rows}


def _keys(groups: Any, rows: int) -> Groups:
    keys = np.asarray(groups.cpu() if hasattr(groups, "cpu") else groups).reshape(-1).astype(np.int64, copy=False)
    if len(keys) != rows:
        raise InputError(f"{len(keys)} groups and {rows} logits; give one group for each row")
    return keys


def _sums(groups: Groups, logits: npt.NDArray[np.float32], labels: npt.NDArray[np.uint8]) -> tuple[float, int, int]:
    """Of the groups that have both classes: the sum of AUROC * rows, the rows, and their number. Time: that of sorting."""
    order = np.lexsort((logits, groups))
    keys, scores, positive = groups[order], logits[order], labels[order].astype(bool)
    begins = _begins(keys[1:] != keys[:-1])
    if not len(keys):
        return 0.0, 0, 0
    group_of = np.cumsum(begins) - 1
    starts = np.flatnonzero(begins)
    sizes = np.diff(np.append(starts, len(keys)))
    # Twice the mean rank from 1 of each row within its group, rows that tie sharing theirs; integers, so that sums are exact.
    ties = _begins((keys[1:] != keys[:-1]) | (scores[1:] != scores[:-1]))
    first = np.flatnonzero(ties)
    last = np.append(first[1:], len(keys)) - 1
    twice_rank = (first + last)[np.cumsum(ties) - 1] - 2 * starts[group_of] + 2
    positives = np.bincount(group_of[positive], minlength=len(starts))
    rank_sums = np.zeros(len(starts), np.int64)
    np.add.at(rank_sums, group_of[positive], twice_rank[positive])
    negatives = sizes - positives
    counts = (positives > 0) & (negatives > 0) & (keys[starts] != NO_GROUP)
    twice_u = rank_sums - positives * (positives + 1)
    areas = twice_u[counts] / (2.0 * positives[counts] * negatives[counts])
    return math.fsum(areas * sizes[counts]), int(sizes[counts].sum()), int(counts.sum())


def _begins(changes: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    return np.concatenate([[True], changes])


@final
class GaucAccumulator:
    """Keeps groups, logits and labels of an evaluation, 13 bytes a row on the CPU, and computes `gauc` of all ranks' rows."""

    def __init__(self) -> None:
        self._parts: list[tuple[Groups, npt.NDArray[np.float32], npt.NDArray[np.uint8]]] = []

    def update(self, groups: Any, logits: Any, labels: Any) -> None:
        """Appends a batch; copies from a device (a device sync)."""
        new_logits, new_labels = converted(logits, labels)
        self._parts.append((_keys(groups, len(new_logits)).copy(), new_logits.copy(), new_labels.copy()))

    def compute(self, *, process_group: ProcessGroup | None = None) -> dict[str, float]:
        """A collective of the group. Each group's rows go to one rank, by a hash of its key, so that the result is that of one
        process but for the order of a sum; local without torch.distributed. Raises InputError on every rank if a logit of any is
        NaN, so that none waits."""
        import torch.distributed as dist

        groups = np.concatenate([np.empty(0, np.int64), *(part[0] for part in self._parts)])
        logits = np.concatenate([np.empty(0, np.float32), *(part[1] for part in self._parts)])
        labels = np.concatenate([np.empty(0, np.uint8), *(part[2] for part in self._parts)])
        missing = int(np.count_nonzero(np.isnan(logits)))
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1:
            refuse_nan(missing, len(logits))
            return _told(*_sums(groups, logits, labels))
        ranks = Collectives(process_group)
        of_ranks = ranks.gather_floats([float(missing), float(len(logits))])
        refuse_nan(*(int(sum(values)) for values in zip(*of_ranks, strict=True)))
        rank_of = (groups.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)) % np.uint64(ranks.num_ranks)
        order = np.argsort(rank_of, kind="stable")
        send = np.bincount(rank_of.astype(np.int64), minlength=ranks.num_ranks)
        receive = ranks.exchange(send, [1] * ranks.num_ranks, [1] * ranks.num_ranks)
        parts = [ranks.exchange(values[order], send.tolist(), receive.tolist()) for values in (groups, logits, labels)]
        gathered = ranks.gather_floats([float(value) for value in _sums(*parts)])
        weighted, rows, counted = (math.fsum(values) for values in zip(*gathered, strict=True))
        return _told(weighted, int(rows), int(counted))
