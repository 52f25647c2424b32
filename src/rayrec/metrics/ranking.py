"""Metrics of row order within groups, such as the items shown to one user: GAUC, NDCG, recall, hit
rate, MRR. One pass through rows sorted by group and score (native/ranking.c) computes them, with
over 5 million rows/s on two CPUs.
"""

from __future__ import annotations

import ctypes
import math
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import numpy.typing as npt

from rayrec import host_resources
from rayrec.collectives import Collectives
from rayrec.config import InputError
from rayrec.metrics.binary import checked, converted, reject_nan
from rayrec.native import c_fields, call

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NO_GROUP: Final = 0
"""Key of rows without a group."""
DEFAULT_KS: Final = (10,)
"""Ranks k of the metrics at k."""
_LARGEST_K: Final = 1_000_000
_PART_ROWS: Final = 1 << 15
"""Number of rows that are sorted at once, to fit into a CPU's cache."""
_MAX_BITS: Final = 10
_MAX_THREADS: Final = 4
_ROUND_ROWS: Final = 1 << 24
"""Number of rows per sorting round, with 32 bytes each."""
MEMORY_ROWS: Final = 1 << 25
"""Number of rows that a RankingAccumulator keeps in memory, 13 bytes each. More rows go to a
temporary file.
"""
_BUCKETS: Final = 256
"""Number of group partitions of the temporary file, which are read sequentially."""
_ROW: Final = np.dtype([("group", np.int64), ("logit", np.float32), ("label", np.uint8)])

Groups = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.uint8]
Rows = tuple[Groups, Floats, Labels]


def gauc(groups: Any, logits: Any, labels: Any) -> dict[str, float]:
    """Return the row-weighted mean of the groups' exact AUROCs, with ties as one half, and its
    group and row counts. `groups` are int64 keys [rows]. Excludes rows with NO_GROUP and groups
    with one class. gauc is NaN without groups. `logits` and `labels` as in
    `rayrec.metrics.binary.auroc`. Raises InputError as `auroc`, and for different lengths. Source:
    Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction", section 6.2.
    """
    metrics = ranking_metrics(groups, logits, labels)
    return {name: metrics[name] for name in ("gauc", "gauc_groups", "gauc_rows")}


def ranking_metrics(
    groups: Any,
    logits: Any,
    labels: Any,
    *,
    ks: Sequence[int] = DEFAULT_KS,
) -> dict[str, float]:
    """Return `gauc` and, for each k of `ks`, `ndcg_at_K`, `recall_at_K` and `hit_rate_at_K`, then
    `mrr` and `ranked_groups`. These are unweighted means over the `ranked_groups` groups with at
    least one positive. Rows of a group are ranked by falling logit. NDCG: gain 1 for a positive,
    discount 1 / log2(rank + 1), ideal of min(k, positives) (Järvelin & Kekäläinen 2002). Recall:
    positives within the first k divided by all positives. Hit rate: whether the first k have a
    positive. MRR: 1 / rank of the first positive. Ties count as the expected value over all orders
    of the tied rows, so the input order does not matter (McSherry & Najork 2008, as scikit-learn's
    ndcg_score). Arguments and errors as in `gauc`. Memory: 32 bytes per row for up to 16 million
    rows at a time, or one larger group.
    """
    check_ks(ks)
    checked_logits, checked_labels = checked(logits, labels)
    keys = _keys(groups, len(checked_logits))
    sums = _Sums(tuple(ks))
    for rows in _rounds((keys, checked_logits, checked_labels)):
        sums.add(rows)
    return sums.metrics()


def check_ks(ks: Sequence[int]) -> None:
    """Check that ranks are unique and in range. Raises InputError."""
    wrong = [k for k in ks if not 1 <= k <= _LARGEST_K]
    if wrong:
        raise InputError(f"k: must be from 1 to {_LARGEST_K:,}, got {wrong[0]}")
    if len(set(ks)) < len(ks):
        raise InputError(f"k: must be distinct, got {', '.join(map(str, ks))}")


def _keys(groups: Any, rows: int) -> Groups:
    keys = (
        np.asarray(groups.cpu() if hasattr(groups, "cpu") else groups)
        .reshape(-1)
        .astype(np.int64, copy=False)
    )
    if len(keys) != rows:
        raise InputError(f"groups: must have one per row, {rows}, got {len(keys)}")
    return keys


def _buckets(groups: Groups, buckets: int) -> npt.NDArray[np.intp]:
    """Return a number below `buckets` for each row, equal for all rows of a group."""
    mixed = groups.view(np.uint64) * np.uint64(0xD1342543DE82EF95)
    return ((mixed >> np.uint64(40)) % np.uint64(buckets)).astype(np.intp)


def _rounds(rows: Rows, *, max_rows: int = _ROUND_ROWS) -> Iterator[Rows]:
    """Yield the rows in rounds of about `max_rows` with complete groups."""
    rounds = -(-len(rows[0]) // max_rows)
    if rounds <= 1:
        yield rows
        return
    round_of = _buckets(rows[0], rounds).astype(np.uint16)
    for number in range(rounds):
        selected = np.flatnonzero(round_of == number)
        yield rows[0][selected], rows[1][selected], rows[2][selected]


# Mirror of rayrec_ranking in native/kernels.h:
#
#   ks, discounts   arrays of the accumulator, read by all threads
#   room            scratch memory of one thread
#   sums, counts    results of one part: a sum and its rounding error each
#
# `_summed` keeps the arrays until the kernel returns.
class _CRanking(ctypes.Structure):
    _fields_ = c_fields("void* ks discounts room sums counts; int64 num_ks")


@final
class _Sums:
    """Sums over groups, each added once."""

    def __init__(self, ks: tuple[int, ...]) -> None:
        self._ks = np.array(ks, np.int64)
        ranks = np.arange(1, max(ks, default=0) + 1)
        self._discounts = np.concatenate([[0.0], np.cumsum(1 / np.log2(ranks + 1))])
        self._round_sums: list[list[float]] = []

    def add(self, rows: Rows) -> None:
        """Add rows of new groups."""
        groups, logits, labels = (np.ascontiguousarray(values) for values in rows)
        count = len(groups)
        bits = min((count // _PART_ROWS).bit_length(), _MAX_BITS)
        starts = np.empty((1 << bits) + 1, np.int64)
        ranked = np.empty((count, 2), np.uint64)
        call(
            "rayrec_rank_partition",
            groups,
            logits,
            labels,
            count,
            ctypes.c_int32(bits),
            starts,
            ranked,
        )
        num_threads = max(min(host_resources.usable_cpus(), _MAX_THREADS, len(starts) - 1), 1)
        turns = [range(first, len(starts) - 1, num_threads) for first in range(num_threads)]
        # Parts have no group in common, so threads share nothing that they write. Kernels release
        # the GIL.
        with ThreadPoolExecutor(num_threads, thread_name_prefix="ranking") as pool:
            for values in pool.map(lambda turn: self._summed(ranked, starts, turn), turns):
                self._round_sums += values

    def _summed(
        self,
        ranked: npt.NDArray[np.uint64],
        starts: npt.NDArray[np.int64],
        turn: range,
    ) -> list[list[float]]:
        """Return the sums of some parts. Their order, and thus the thread count, does not affect
        `math.fsum`.
        """
        sizes = np.diff(starts)
        buffer = np.empty((int(sizes[turn.start :: turn.step].max(initial=0)), 2), np.uint64)
        at_ks = np.empty(2 * len(self._ks))
        results = []
        for number in turn:
            sums = np.zeros(4 + 6 * len(self._ks))
            counts = np.zeros(3, np.int64)
            arrays = (self._ks, self._discounts, at_ks, sums, counts)
            # Addresses of arrays that this frame holds until the call has returned.
            ranking = _CRanking(*(array.ctypes.data for array in arrays), len(self._ks))
            call(
                "rayrec_rank_rows",
                ranked[starts[number] :],
                buffer,
                int(sizes[number]),
                ctypes.byref(ranking),
            )
            results.append(
                [*map(float, counts.tolist()), *sums.reshape(-1, 2).sum(axis=1).tolist()]
            )
        return results

    def values(self) -> list[float]:
        """Return the counts, then the sums. Results of several ranks are added."""
        size = 3 + 2 + 3 * len(self._ks)
        return [
            math.fsum(round_values)
            for round_values in zip([0.0] * size, *self._round_sums, strict=True)
        ]

    def metrics(self, values: Sequence[float] | None = None) -> dict[str, float]:
        """Return the metrics for added `values`. Default: the sums of this object."""
        rows, groups, ranked, weighted, reciprocals, *at_ks = (
            self.values() if values is None else values
        )
        gauc = weighted / rows if rows else math.nan
        results: dict[str, float] = {
            "gauc": gauc,
            "gauc_groups": int(groups),
            "gauc_rows": int(rows),
        }
        for index, k in enumerate(self._ks.tolist()):
            for name, total in zip(
                ("ndcg", "recall", "hit_rate"),
                at_ks[3 * index : 3 * index + 3],
                strict=True,
            ):
                results[f"{name}_at_{k}"] = total / ranked if ranked else math.nan
        return {
            **results,
            "mrr": reciprocals / ranked if ranked else math.nan,
            "ranked_groups": int(ranked),
        }


@final
class RankingAccumulator:
    """Accumulator of an evaluation's groups, logits and labels for `ranking_metrics` over all
    ranks. Rows take 13 bytes each in memory, up to `memory_rows`. Then all move to a temporary
    file, by a hash of groups, read in 256 parts.
    """

    def __init__(self, ks: Sequence[int] = DEFAULT_KS, *, memory_rows: int = MEMORY_ROWS) -> None:
        check_ks(ks)
        self._ks = tuple(ks)
        self._memory_rows = memory_rows
        self._parts: list[Rows] = []
        self._rows = 0
        self._missing = 0
        self._file: Any = None
        self._extents: list[list[tuple[int, int]]] = [[] for _ in range(_BUCKETS)]
        """Start in the file and row count of each part of a bucket."""
        self._total = 0

    def update(self, groups: Any, logits: Any, labels: Any) -> None:
        """Append a batch. Copies from a device (a device sync). Raises OSError if the disk of
        temporary files is full.
        """
        new_logits, new_labels = converted(logits, labels)
        self._parts.append(
            (_keys(groups, len(new_logits)).copy(), new_logits.copy(), new_labels.copy())
        )
        self._missing += int(np.count_nonzero(np.isnan(new_logits)))
        self._rows += len(new_logits)
        self._total += len(new_logits)
        if self._rows > self._memory_rows:
            self._spill()

    def _spill(self) -> None:
        if self._file is None:
            # Closed with this object.
            self._file = tempfile.TemporaryFile(prefix="rayrec-ranking-")  # noqa: SIM115
        offset = self._file.seek(0, 2)
        for groups, logits, labels in self._pop_batches():
            bucket_url = _buckets(groups, _BUCKETS)
            order = np.argsort(bucket_url, kind="stable")
            rows = np.empty(len(order), _ROW)
            rows["group"] = groups[order]
            rows["logit"] = logits[order]
            rows["label"] = labels[order]
            self._file.write(rows.view(np.uint8).data)
            for bucket, count in enumerate(np.bincount(bucket_url, minlength=_BUCKETS).tolist()):
                if count:
                    self._extents[bucket].append((offset, count))
                    offset += count * _ROW.itemsize
        self._file.flush()

    def _pop_batches(self) -> Iterator[Rows]:
        """Yield the rows in memory as joined batches, for few reads per bucket later. Frees memory
        on the way.
        """
        remaining, self._parts, self._rows = self._parts[::-1], [], 0
        while remaining:
            batches: list[Rows] = []
            rows = 0
            while remaining and (
                not batches or rows + len(remaining[-1][0]) <= self._memory_rows // 4
            ):
                batches.append(remaining.pop())
                rows += len(batches[-1][0])
            yield _concatenate(batches)

    def _bucket(self, bucket: int) -> Rows:
        """Return all rows of a bucket, including rows in memory."""
        parts = []
        for offset, count in self._extents[bucket]:
            self._file.seek(offset)
            parts.append(np.frombuffer(self._file.read(count * _ROW.itemsize), _ROW))
        spilled = np.concatenate([np.empty(0, _ROW), *parts])
        groups, logits, labels = _concatenate(self._parts)
        selected = np.flatnonzero(_buckets(groups, _BUCKETS) == bucket)
        in_memory = (groups[selected], logits[selected], labels[selected])
        return _concatenate([(spilled["group"], spilled["logit"], spilled["label"]), in_memory])

    def compute(self, *, process_group: ProcessGroup | None = None) -> dict[str, float]:
        """Return the metrics over all ranks. Collective if distributed. Each group's rows go to one
        rank, by a hash of its key, so the result equals one process except for the order of a sum.
        Raises InputError on every rank if any logit is NaN.
        """
        sums = _Sums(self._ks)
        ranks = Collectives(process_group)
        rank_counts = ranks.gather_floats(
            [float(self._missing), float(self._total), float(self._file is not None)]
        )
        missing, total, spilled = zip(*rank_counts, strict=True)
        reject_nan(int(sum(missing)), int(sum(total)))
        for rows in self._in_rounds(by_bucket=any(spilled)):
            for round_rows in _rounds(_exchanged(rows, ranks) if ranks.num_ranks > 1 else rows):
                sums.add(round_rows)
        return sums.metrics(
            [math.fsum(values) for values in zip(*ranks.gather_floats(sums.values()), strict=True)]
        )

    def _in_rounds(self, *, by_bucket: bool) -> Iterator[Rows]:
        """Yield the rows in equally many rounds on each rank, with complete groups."""
        if not by_bucket:
            yield _concatenate(self._parts)
            return
        if self._parts and self._file is not None:
            self._spill()  # So that each bucket is read from one place
        for bucket in range(_BUCKETS):
            yield self._bucket(bucket)


def _concatenate(parts: Sequence[Rows]) -> Rows:
    no_rows = (np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.uint8))
    groups, logits, labels = map(np.concatenate, zip(no_rows, *parts, strict=True))
    return groups, logits, labels


def _exchanged(rows: Rows, ranks: Collectives) -> Rows:
    """Exchange rows between ranks. Return the rows of this rank's groups."""
    rank_of = (
        rows[0].view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)
    ) % np.uint64(ranks.num_ranks)
    order = np.argsort(rank_of, kind="stable")
    send = np.bincount(rank_of.astype(np.int64), minlength=ranks.num_ranks)
    receive = ranks.exchange(send, [1] * ranks.num_ranks, [1] * ranks.num_ranks)
    exchanged = [ranks.exchange(values[order], send.tolist(), receive.tolist()) for values in rows]
    return exchanged[0], exchanged[1], exchanged[2]
