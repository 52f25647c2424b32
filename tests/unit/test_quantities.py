"""Numbers are shown as people read them."""

from __future__ import annotations

import pytest

from rayrec.quantities import clock_text, duration_text, durations_text, number_text, size_text, value_text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1e-17, "0"), (0.0125, "0.0125"), (9500, "9500"), (20000, "20k"), (1.5e6, "1.5M"), (-3e9, "-3G")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


def test_quantities_are_readable() -> None:
    assert [duration_text(seconds) for seconds in (0.0312, 75, 130, 7300)] == ["0.0312 s", "75 s", "2 min", "2 h 2 min"]
    assert [clock_text(seconds) for seconds in (0.9, 61, 7325)] == ["0:00:00", "0:01:01", "2:02:05"]
    assert [size_text(size) for size in (12, 3400, 999_499, 999_500, 44_000_000, 5e10, 2e15)] == [
        "12 B",
        "3.4 kB",
        "999 kB",
        "1 MB",
        "44 MB",
        "50 GB",
        "2000 TB",
    ]
    assert [value_text(value) for value in (None, 0.123456789, 12345, "x")] == ["-", "0.123457", "12,345", "x"]


def test_durations_side_by_side_have_one_unit() -> None:
    assert durations_text([86.4, 120.0]) == ["86.4 s", "120.0 s"]
    assert durations_text([86.4, 600.0]) == ["1.44 min", "10.00 min"]
    assert durations_text([]) == []
