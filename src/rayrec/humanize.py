"""Formatting of numbers, sizes, times and durations for terminals, reports, errors and JSON."""

import math
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any

TIME_UNITS = (("s", 1.0, 300.0), ("min", 60.0, 3 * 3600.0), ("h", 3600.0, float("inf")))
"""(unit, seconds per unit, exclusive upper bound in seconds of durations shown in this unit)."""


def one_line(error: object) -> str:
    """Return up to 300 letters of an error's text in one line without a final period, or its type
    without text.
    """
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def number_text(value: float) -> str:
    """Format a number briefly: 1.5M, 20k, 0.0125."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{0.0 if abs(value) < 1e-12 else value:.6g}"


def estimate_text(value: float) -> str:
    """Format a positive estimate as a whole number with at most three significant digits."""
    return number_text(round(value, -max(0, math.floor(math.log10(max(value, 1.0))) - 2)))


def value_text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def date_text(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration_text(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def durations_text(seconds: Sequence[float]) -> list[str]:
    """Format several durations in the unit of the longest."""
    unit, size = next(
        (unit, size) for unit, size, limit in TIME_UNITS if max(seconds, default=0.0) < limit
    )
    return [f"{value / size:.{1 if unit == 's' else 2}f} {unit}" for value in seconds]


def clock_text(seconds: float) -> str:
    """Format seconds as H:MM:SS."""
    seconds_int = int(seconds)
    return f"{seconds_int // 3600}:{seconds_int // 60 % 60:02}:{seconds_int % 60:02}"


def size_text(size_bytes: float) -> str:
    """Format bytes with three digits in decimal units: 12 B, 3.4 kB, 44 MB, 16.3 GB, 1.1 TB."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        # smaller values round to less than 1000 of the smaller unit
        if size_bytes >= 0.9995 * size:
            value = size_bytes / size
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return f"{size_bytes:.0f} B"


def aligned(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Format the rows of a table. Aligns the columns `left` left, and all others right."""
    signs = ["<" if column in left else ">" for column in range(len(rows[0]))]
    cells = [
        f"{{:{sign}{max(len(row[column]) for row in rows)}}}" for column, sign in enumerate(signs)
    ]
    return ["  ".join(cells).format(*row).rstrip() for row in rows]


def json_values(value: Any) -> Any:
    """Return the value with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {name: json_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
