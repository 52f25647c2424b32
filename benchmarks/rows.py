"""The one format of a benchmark's result: a JSON object a row."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from rayrec.launch.provenance import versions

Found = TypeVar("Found")


def hardware() -> str:
    """Processor and cores of this machine, in words."""
    model = platform.machine()
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {os.cpu_count()} cores"


def emit(
    name: str,
    *,
    peer: str | None,
    workload: str,
    unit: str = "rows_per_s",
    value: float,
    ratio: float | None,
    repeats: int,
    **more: Any,
) -> None:
    """Prints one row on standard output. `ratio`: ours / the peer's, measured in the same run."""
    row = {
        "name": name,
        "peer": peer,
        "workload": workload,
        unit: round(value) if value >= 100 else float(f"{value:.4g}"),
        "ratio": None if ratio is None else round(ratio, 4),
        "repeats": repeats,
        "hardware": hardware(),
        "versions": versions(),
        "config_hash": "",
        **more,
    }
    print(json.dumps(row), flush=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def timed(function: Callable[[], Found]) -> tuple[Found, float]:
    """What the function returns, and its seconds."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def interleaved(repeats: int, **candidates: Callable[[], float]) -> dict[str, float]:
    """Runs the candidates in turn, `repeats` rounds, and returns each one's median rate: what drifts on the machine then
    hits all alike."""
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(repeats):
        for name, candidate in candidates.items():
            rate = candidate()
            rates[name].append(rate)
            say(f"  round {number + 1}: {name} {rate:,.0f}/s")
    return {name: statistics.median(values) for name, values in rates.items()}
