"""Distribution of a synthetic log: its columns, and the ground truth of its clicks. Every number in
a row comes from one 32-bit draw. The upper 16 bits choose one of 65,536 equally likely slots of the
column's inverse distribution. The lower 16 bits choose one of the neighbouring values in a slot far
out in the tail. Slots also contain the value's contribution to the true logit, so a row costs a few
table lookups per column. The constants are rounded statistics of the genuine logs.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from rayrec.config import packaged_json
from rayrec.hashing import GOLDEN, mix64

VERSION = 1  # Raised whenever the same arguments produce other bytes
BLOCK_ROWS = 65_536
_CHUNK_ROWS = 8_192  # A chunk's columns stay in the L2 cache
_SLOTS = 65_536
NUM_DENSE = 13
NUM_SPARSE = 26
_TARGET_AUROC = 0.80
_CALIBRATION_CHUNKS = 24  # 196,608 rows: label rate within 0.001

# Cumulative probabilities of the quantiles of a dense column.
_QUANTILES = (0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1)


@dataclass(frozen=True)
class LogSpec:
    """Constants of one of the two genuine logs."""

    label_rate: float
    dense: list[list[int]]
    """Values at _QUANTILES of each dense column, without missing and negative values."""
    negative: dict[int, list[tuple[int, float]]]
    """Dense column -> (negative value, fraction of the values), most negative first."""
    sparse: list[tuple[int, list[float], float, float]]
    """Cardinality (at most 100,000), fractions of the top tokens, then exponent a and offset q of
    (rank + q)^-a.
    """
    missing: list[tuple[float, list[int]]]
    """Rate, and the columns (dense 0-12, sparse 13-38) that are empty together."""
    linked: list[list[int]]
    """Sparse columns that name the same thing, so that their common tokens occur together."""
    interacting: list[tuple[int, int]]
    """Pairs of sparse columns with few, popular tokens. The dot product of their latent vectors
    adds to the logit.
    """
    shares: list[float]
    """Fractions of the logit's variance for dense columns, tokens and interactions. With rarer
    clicks, tokens must contribute less for a model to learn them from a million rows.
    """
    shrinkage_rows: float
    """Occurrences in a million rows at which a token has half its column's strength."""

    @classmethod
    def all(cls) -> dict[str, LogSpec]:
        """Read the constants of both logs from synthetic_law.json, which has lists for tuples and
        text for columns.
        """
        laws = packaged_json(__package__, "synthetic_law.json")
        negative = {
            name: {int(column): value for column, value in law["negative"].items()}
            for name, law in laws.items()
        }
        return {name: cls(**{**law, "negative": negative[name]}) for name, law in laws.items()}


DIALECTS: Final = LogSpec.all()


def _hash64(values: np.ndarray, salt: int, purpose: int) -> np.ndarray:
    """Hash uint64 values with SplitMix64, with a separate stream per purpose."""
    return mix64(values.astype(np.uint64) + np.uint64((salt + purpose * GOLDEN) % (1 << 64)))


def _permute32(values: np.ndarray) -> np.ndarray:
    """Apply MurmurHash3's 32-bit finalizer, a bijection, so that two tokens of a column never share
    a name.
    """
    mixed = (values ^ values >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return mixed ^ mixed >> np.uint32(16)


@lru_cache(maxsize=1)
def _normal_quantiles() -> np.ndarray:
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 4096) for i in range(4096)], dtype=np.float32)


def _normals(keys: np.ndarray, salt: int, purpose: int) -> np.ndarray:
    return _normal_quantiles()[(_hash64(keys, salt, purpose) >> np.uint64(52)).astype(np.intp)]


def _slots(edges: np.ndarray) -> np.ndarray:
    """Pack slots (lowest value | width << 32) from the value at the lower edge of each slot and at
    the end.
    """
    width = np.maximum(np.diff(edges), 1)
    assert edges.min() >= 0
    assert width.max() <= 1 << 16
    return edges[:-1].astype(np.uint64) | (width.astype(np.uint64) << np.uint64(32))


@dataclass(frozen=True)
class _DenseColumn:
    slots: np.ndarray
    """Packed slots, uint64 [65,536]; values are stored + 2, because -2 is the least."""
    effects: np.ndarray
    """Logit contribution by slot, the last one for a missing value, which counts as 0, float32
    [65,537].
    """


@dataclass(frozen=True)
class _SparseColumn:
    slots: np.ndarray
    """Packed slots of ranks, 0 the most popular, uint64 [65,536]."""
    wide: bool
    """Whether to draw within slots, because some contain several ranks."""
    popularity: np.ndarray
    """Probability of each rank in `slots`, float64 [cardinality]."""
    strength: np.ndarray
    """Standard deviation of each token's weight, near 0 for a rare one, float32 [cardinality]."""
    salt: int


@dataclass(frozen=True)
class _DayTables:
    bias: float
    tokens: tuple[np.ndarray, ...]
    """Tokens of each column, the last one for a missing value, uint32 [cardinality + 1]."""
    weights: tuple[np.ndarray, ...]
    """Token weights of each column, float32 [cardinality + 1]."""
    latents: dict[tuple[int, int], tuple[np.ndarray, ...]]
    """(Pair, sparse column) -> latent components, float32 [cardinality + 1] each."""


@dataclass(frozen=True)
class Rows:
    """Rows by column, n in all. Bit d of `missing` is dense column d, bit 13 + s sparse column s.
    Types: labels uint8 [n], logits float32 [n], dense int32 [13, n], tokens uint32 [26, n], missing
    uint64 [n].
    """

    labels: np.ndarray
    logits: np.ndarray
    dense: np.ndarray
    tokens: np.ndarray
    missing: np.ndarray


def _dense_column(
    dialect: LogSpec, column: int, strength: float, rng: np.random.Generator
) -> _DenseColumn:
    points = np.arange(_SLOTS + 1) / _SLOTS
    below = 0.0
    values = np.zeros(_SLOTS + 1, dtype=np.int64)
    for value, fraction in dialect.negative.get(column, ()):
        values[(points >= below) & (points < below + fraction)] = value
        below += fraction
    rest = points >= below
    logarithms = np.interp(
        (points[rest] - below) / (1 - below), _QUANTILES, np.log1p(dialect.dense[column])
    )
    values[rest] = np.floor(np.expm1(logarithms) + 0.5)
    slots = _slots(values + 2)
    middle = values[:-1] + (np.maximum(np.diff(values), 1) - 1) / 2
    # Negative and missing values act like 0
    position = np.log1p(np.maximum(np.append(middle, 0.0), 0))
    centred = (position - position[:-1].mean()) / (position[:-1].std() + 1e-9)
    slope, bump = rng.choice([-1.0, 1.0], 2) * rng.uniform([0.7, 0.2], [1.3, 0.6])
    effects = strength * (slope * np.tanh(centred / 1.5) + bump * np.exp(-0.5 * centred**2))
    return _DenseColumn(slots, (effects - effects[:-1].mean()).astype(np.float32))


def _sparse_column(
    law: tuple[int, list[float], float, float], strength: float, shrinkage_rows: float, salt: int
) -> _SparseColumn:
    cardinality, top, exponent, offset = law
    tail = (np.arange(len(top), cardinality) + 1.0 + offset) ** -exponent
    fractions = np.sort(np.concatenate([top, tail * ((1 - sum(top)) / tail.sum())]))[::-1]
    edges = np.searchsorted(np.cumsum(fractions), np.arange(_SLOTS + 1) / _SLOTS, side="right")
    edges = np.minimum(edges, cardinality - 1)
    edges[-1] = cardinality
    slots = _slots(edges)
    width = np.maximum(np.diff(edges), 1)
    change = np.zeros(cardinality + 1)
    np.add.at(change, edges[:-1], 1 / (_SLOTS * width))
    np.add.at(change, edges[:-1] + width, -1 / (_SLOTS * width))
    popularity = np.maximum(np.cumsum(change)[:-1], 0)
    seen = 1e6 * popularity
    weight_strength = np.where(seen < 50, 0, strength * seen / (seen + shrinkage_rows)).astype(
        np.float32
    )
    return _SparseColumn(slots, bool(width.max() > 1), popularity, weight_strength, salt)


def _identities(column: _SparseColumn, day: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the token at each rank on a day, and its key. Every 8 days, a quarter of the pairs of
    ranks (r, r with its second highest bit flipped) are swapped. Each day, 1/32 of the rare tokens
    are replaced. Each rank has a separate phase.
    """
    cardinality = len(column.popularity)
    ranks = np.arange(cardinality, dtype=np.int64)
    flip = np.zeros(cardinality, dtype=np.int64)
    flip[4:] = np.int64(1) << (np.floor(np.log2(ranks[4:] + 0.5)).astype(np.int64) - 1)
    partner = ranks ^ flip
    partner = np.where(partner < cardinality, partner, ranks)
    chance = _hash64(np.minimum(ranks, partner), column.salt, 1)
    phase = ((chance >> np.uint64(8)) & np.uint64(7)).astype(np.int64)
    swapped = ((chance & np.uint64(3)) == 0) & (((day + phase) // 8) % 2 == 1)
    holder = np.where(swapped, partner, ranks)
    birth = (_hash64(holder, column.salt, 2) & np.uint64(31)).astype(np.int64)
    rare = column.popularity[holder] < 3e-4
    return holder, holder + cardinality * np.where(rare, (day + birth) // 32, 0)


class GroundTruth:
    """Distribution of a synthetic log, fixed by dialect, seed and drift, independent of the row
    count.
    """

    def __init__(self, dialect: str, seed: int, drift: int = 1) -> None:
        """Fit the distribution. `drift` is the days of change from one day of the log to the next;
        0: none.
        """
        self.dialect = dialect
        self.seed = seed
        self.drift = drift
        self._law = law = DIALECTS[dialect]
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(0,))))
        self._missing_rate = np.zeros(NUM_DENSE + NUM_SPARSE)
        self._missing_group = np.full(NUM_DENSE + NUM_SPARSE, -1)
        for group, (rate, columns) in enumerate(law.missing):
            self._missing_rate[list(columns)] = rate
            self._missing_group[list(columns)] = group
        present = 1 - self._missing_rate
        # A column that is often missing contributes little.
        strengths = np.exp(0.5 * rng.standard_normal(NUM_DENSE + NUM_SPARSE)) * present
        self._dense = [_dense_column(law, d, strengths[d], rng) for d in range(NUM_DENSE)]
        salts = rng.integers(1 << 32, 1 << 62, NUM_SPARSE)
        self._sparse = [
            _sparse_column(
                law.sparse[s], strengths[NUM_DENSE + s], law.shrinkage_rows, int(salts[s])
            )
            for s in range(NUM_SPARSE)
        ]
        # Linked columns share the first one's draw.
        leader = {s: group[0] for group in law.linked for s in group}
        leaders = sorted({leader.get(s, s) for s in range(NUM_SPARSE)})
        first = 1 + NUM_DENSE
        self._draw_of = [first + leaders.index(leader.get(s, s)) for s in range(NUM_SPARSE)]
        self._missing_draw = first + len(leaders)
        self._num_draws = self._missing_draw + len(law.missing)
        self._days: dict[int, _DayTables] = {}
        # Threads that make rows of one day share its tables, so one thread computes them for all.
        self._lock = threading.Lock()
        self._bias = 0.0
        self._sparse_scale = 1.0
        self._latent_scale = 1.0
        self._normalise(present)
        self._calibrate()

    def _normalise(self, present: np.ndarray) -> None:
        """Scale the three parts of the logit to their fractions of its variance (assuming
        independent columns).
        """
        tables = self._tables(0)
        dense = sum(
            present[d] * float(np.var(column.effects[:-1])) for d, column in enumerate(self._dense)
        )
        sparse = sum(
            present[NUM_DENSE + s] * float(np.sum(column.popularity * tables.weights[s][:-1] ** 2))
            for s, column in enumerate(self._sparse)
        )
        interaction = 0.0
        for pair, (left, right) in enumerate(self._law.interacting):
            for component in range(2):
                left_variance, right_variance = (
                    float(
                        np.sum(
                            self._sparse[s].popularity
                            * tables.latents[pair, s][component][:-1] ** 2
                        )
                    )
                    for s in (left, right)
                )
                interaction += left_variance * right_variance
        fractions = self._law.shares
        self._rescale(
            (fractions[0] / dense) ** 0.5,
            (fractions[1] / sparse) ** 0.5,
            (fractions[2] / interaction) ** 0.25,
        )

    def _rescale(self, dense: float, sparse: float, latent: float) -> None:
        self._dense = [
            _DenseColumn(column.slots, column.effects * np.float32(dense)) for column in self._dense
        ]
        self._sparse_scale *= sparse
        self._latent_scale *= latent
        self._days.clear()

    def _calibrate(self) -> None:
        """Set scale and bias so that day 0 has the dialect's label rate and the target AUROC, on a
        fixed sample.
        """
        rng = np.random.Generator(
            np.random.SFC64(np.random.SeedSequence(self.seed, spawn_key=(1,)))
        )
        chunks = [self._rows(self._draws(rng), 0).logits for _ in range(_CALIBRATION_CHUNKS)]
        # Means of eight neighbours represent all, so that the bisections below take milliseconds.
        shape = np.sort(np.concatenate(chunks).astype(np.float64)).reshape(-1, 8).mean(axis=1)

        def bias_for(scale: float) -> float:
            low = -30.0
            high = 30.0
            for _ in range(40):
                middle = (low + high) / 2
                rate = float(np.mean(1 / (1 + np.exp(-(scale * shape + middle)))))
                low, high = (middle, high) if rate < self._law.label_rate else (low, middle)
            return (low + high) / 2

        low = 0.1
        high = 6.0
        for _ in range(16):
            scale = (low + high) / 2
            click = 1 / (1 + np.exp(-(scale * shape + bias_for(scale))))
            skip_below = np.cumsum(1 - click) - (1 - click) / 2
            auroc = float(np.sum(click * skip_below) / (np.sum(click) * np.sum(1 - click)))
            low, high = (scale, high) if auroc < _TARGET_AUROC else (low, scale)
        # Rounded: the last bits of exp may differ between machines
        scale = round((low + high) / 2, 4)
        self._bias = round(bias_for(scale), 4)
        self._rescale(scale, scale, scale**0.5)

    def _tables(self, day: int) -> _DayTables:
        """Return the tables of a day, built once (about 50 ms) and cached while among the eight
        latest.
        """
        with self._lock:
            tables = self._days.get(day)
            if tables is None:
                tables = self._make_tables(day)
                while len(self._days) > 7:
                    del self._days[next(iter(self._days))]
                self._days[day] = tables
            return tables

    def _make_tables(self, day: int) -> _DayTables:
        wobble = 0.05 * float(_normals(np.array([day]), self.seed, 0)[0]) if day else 0.0
        tokens = []
        weights = []
        latents: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
        interacting = [
            (pair, s) for pair, columns in enumerate(self._law.interacting) for s in columns
        ]
        for s, column in enumerate(self._sparse):
            cardinality = len(column.popularity)
            holder, keys = _identities(column, day)
            names = _permute32(keys.astype(np.uint32) + np.uint32(column.salt & 0xFFFFFFFF))
            names = _permute32(names ^ np.uint32((column.salt >> 16) & 0xFFFFFFFF))
            tokens.append(np.append(names, np.uint32(0)))
            # A swap moves no token with strength beyond twice the last such rank.
            head = min(2 * int(np.count_nonzero(column.strength)), cardinality)
            strength = column.strength[holder[:head]] * np.float32(self._sparse_scale)
            weight = np.zeros(cardinality + 1, dtype=np.float32)
            weight[:head] = strength * _normals(keys[:head], column.salt, 3)
            # One token in 16 oscillates by a third of its strength over four weeks.
            chance = _hash64(keys[:head], column.salt, 4)
            angle = (chance >> np.uint64(32)).astype(np.float64) * (
                2 * np.pi / (1 << 32)
            ) + 2 * np.pi * day / 28
            weight[:head] += np.where(
                (chance & np.uint64(15)) == 0, 0.35 * strength * np.sin(angle), 0
            )
            weight[:-1] -= np.float32(np.sum(column.popularity * weight[:-1]))
            weights.append(weight)
            for pair in (pair for pair, member in interacting if member == s):
                components = []
                for component in range(2):
                    latent = np.zeros(cardinality + 1, dtype=np.float32)
                    seen = 1e6 * column.popularity[holder]
                    latent[:-1] = self._latent_scale * seen / (seen + 5 * self._law.shrinkage_rows)
                    latent[:-1] *= _normals(keys, column.salt, 5 + 2 * pair + component)
                    latent[:-1] -= np.float32(np.sum(column.popularity * latent[:-1]))
                    components.append(latent)
                latents[pair, s] = tuple(components)
        return _DayTables(self._bias + wobble, tuple(tokens), tuple(weights), latents)

    def _draws(self, rng: np.random.Generator) -> np.ndarray:
        """Return uint32 [draws, chunk rows], straight from the bit generator, whose stream NumPy
        never changes.
        """
        raw = rng.bit_generator.random_raw(self._num_draws * _CHUNK_ROWS // 2)
        return raw.view(np.uint32).reshape(self._num_draws, _CHUNK_ROWS)

    def _rows(self, draws: np.ndarray, day: int) -> Rows:
        tables = self._tables(day)
        rows = draws.shape[1]
        missing = np.zeros(rows, dtype=np.uint64)
        empty = []
        for group, (rate, columns) in enumerate(self._law.missing):
            mask = draws[self._missing_draw + group] < np.uint32(rate * (1 << 32))
            empty.append(mask)
            missing |= mask * np.uint64(sum(1 << column for column in columns))
        logits = np.full(rows, tables.bias, dtype=np.float32)
        dense = np.empty((NUM_DENSE, rows), dtype=np.int32)
        tokens = np.empty((NUM_SPARSE, rows), dtype=np.uint32)
        low_half = np.uint32(0xFFFF)
        high_half = np.uint32(16)
        low_word = np.uint64(0xFFFFFFFF)
        high_word = np.uint64(32)
        for d, column in enumerate(self._dense):
            draw = draws[1 + d]
            slot = (draw >> high_half).astype(np.intp)
            packed = np.take(column.slots, slot, mode="clip")
            value = (packed & low_word) + (
                ((packed >> high_word) * (draw & low_half)) >> np.uint64(16)
            )
            np.subtract(value.astype(np.int32), np.int32(2), out=dense[d])
            if self._missing_group[d] >= 0:
                np.putmask(slot, empty[self._missing_group[d]], _SLOTS)
            logits += np.take(column.effects, slot, mode="clip")
        ranks: dict[int, np.ndarray] = {}
        paired = {s for pair in self._law.interacting for s in pair}
        for s, sparse in enumerate(self._sparse):
            draw = draws[self._draw_of[s]]
            packed = np.take(sparse.slots, (draw >> high_half).astype(np.intp), mode="clip")
            rank = (packed & low_word).view(np.intp)
            if sparse.wide:
                rank += (((packed >> high_word) * (draw & low_half)) >> np.uint64(16)).view(np.intp)
            if self._missing_group[NUM_DENSE + s] >= 0:
                np.putmask(rank, empty[self._missing_group[NUM_DENSE + s]], len(sparse.popularity))
            np.take(tables.tokens[s], rank, mode="clip", out=tokens[s])
            logits += np.take(tables.weights[s], rank, mode="clip")
            if s in paired:
                ranks[s] = rank
        for pair, (left, right) in enumerate(self._law.interacting):
            for one, other in zip(
                tables.latents[pair, left], tables.latents[pair, right], strict=True
            ):
                logits += np.take(one, ranks[left], mode="clip") * np.take(
                    other, ranks[right], mode="clip"
                )
        # float32 keeps 24 bits of the draw; an error of 2^-24 in the label rate is negligible.
        labels = draws[0].astype(np.float32) * np.float32(2.0**-32) * (1 + np.exp(-logits)) < 1
        return Rows(labels.view(np.uint8), logits, dense, tokens, missing)

    def rows(
        self, block: int, *, spans: list[tuple[int, int]], skip: int = 0
    ) -> Iterator[tuple[int, Rows]]:
        """Yield (day, rows) of a block, in order, without its first `skip` rows. `spans` are its
        days as (day, row count).
        """
        rng = np.random.Generator(
            np.random.SFC64(np.random.SeedSequence(self.seed, spawn_key=(2, block)))
        )
        used = _CHUNK_ROWS
        for day, count in spans:
            left = count
            while left:
                if used == _CHUNK_ROWS:
                    draws = self._draws(rng)
                    used = 0
                take = min(left, _CHUNK_ROWS - used)
                low, skip = min(skip, take), max(skip - take, 0)
                if low < take:
                    yield day, self._rows(draws[:, used + low : used + take], day * self.drift)
                used += take
                left -= take
