"""Exact moments: sums of floating-point numbers and their squares without rounding, equal in any
order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from rayrec.native import call

_ROWS_AT_ONCE: Final = 1 << 20
"""Numbers that the bins of the kernel have room for."""
_UNIT_BITS: Final = 1074
"""Sums are in units of 2^-1074, the smallest positive float64."""
_NUM_BINS: Final = 2048


@dataclass
class Moments:
    """Moments of the present values of a column, after its transform. Two big integers have every
    bit of the sums, so they do not depend on how rows are divided into tasks. That matters for
    numbers far from 0 with a small spread, such as times: the difference of two rounded sums would
    have no correct digit.
    """

    present: int = 0
    """Number of values, including those that are not finite."""
    not_finite: int = 0
    """Number of infinities and NaN, the logarithms of numbers that have none. They are in no
    sum.
    """
    total: int = 0
    """Sum of the values, in units of 2^-1074."""
    squares: int = 0
    """Sum of the squared values, in units of 2^-2148."""
    lowest: float = math.inf
    highest: float = -math.inf

    def add_values(self, values: np.ndarray) -> None:
        """Add float64 values [rows]. About 4 ns each."""
        values = np.ascontiguousarray(values, np.float64)
        for start in range(0, len(values), _ROWS_AT_ONCE):
            self._add(values[start : start + _ROWS_AT_ONCE])

    def _add(self, values: np.ndarray) -> None:
        bins = np.zeros((_NUM_BINS, 4), np.uint64)
        limits = np.array([self.lowest, self.highest])
        self.present += len(values)
        self.not_finite += call("rayrec_exact_sums", values, len(values), bins, limits)
        self.lowest, self.highest = limits.tolist()
        exponents = np.flatnonzero(bins.any(axis=1)).tolist()
        sums = bins.view(np.int64)[exponents, 1].tolist()  # The upper half of a signed number
        for exponent, high, (low, _, square_low, square_high) in zip(
            exponents, sums, bins[exponents].tolist(), strict=True
        ):
            # A bin's unit is 2^(exponent - 1075), and 2^1 of ours for exponent 2.
            shift = exponent - 1
            self.total += ((high << 64) + low) << shift
            self.squares += ((square_high << 64) + square_low) << (2 * shift)

    def merge(self, other: Moments) -> None:
        """Add the values of other rows."""
        self.present += other.present
        self.not_finite += other.not_finite
        self.total += other.total
        self.squares += other.squares
        self.lowest = min(self.lowest, other.lowest)
        self.highest = max(self.highest, other.highest)

    def mean(self) -> tuple[float, float]:
        """Return the mean of the finite values, and its rounding error. (0, 0) without values."""
        finite = self.present - self.not_finite
        if not finite:
            return 0.0, 0.0
        exact = Fraction(self.total, finite << _UNIT_BITS)
        mean = float(exact)
        return mean, float(exact - Fraction(mean))

    def deviation(self) -> float:
        """Return the standard deviation of the finite values. 0 if they are equal, or without
        values.
        """
        finite = self.present - self.not_finite
        if not finite:
            return 0.0
        # finite^2 times the variance, in units of 2^-2148. Its root has at least 53 correct bits,
        # except near the smallest float64.
        scaled = finite * self.squares - self.total * self.total
        return float(Fraction(math.isqrt(scaled), finite << _UNIT_BITS))

    def to_json(self) -> list[Any]:
        """Return the fields as JSON values."""
        return [
            self.present,
            self.not_finite,
            hex(self.total),
            hex(self.squares),
            self.lowest,
            self.highest,
        ]

    @classmethod
    def from_json(cls, stored: list[Any]) -> Moments:
        """Inverse of `to_json`."""
        present, not_finite, total, squares, lowest, highest = stored
        return cls(present, not_finite, int(total, 16), int(squares, 16), lowest, highest)
