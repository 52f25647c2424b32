"""Result rows of benchmarks as JSON objects, also for failures."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from rayrec.config import error_line
from rayrec.environment.installation import versions
from rayrec.observe.event_json import redact_secrets

Result = TypeVar("Result")


def hardware() -> str:
    """Describe this machine's processor and cores."""
    model = platform.machine()
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {os.cpu_count()} cores"


class Failed:
    """A measurement that failed. Every figure that is computed from it, and every field of it, is
    the same failure.
    """

    def __init__(self, error: str) -> None:
        self.error = error

    def _same(self, *_: object) -> Failed:
        return self

    __getitem__ = get = __round__ = __neg__ = _same
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _same
    )

    def __contains__(self, field: object) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def items(self) -> tuple[()]:
        return ()

    def __lt__(self, other: object) -> bool:
        """Return True, so that a failed peer is never the best one."""
        return True

    def __gt__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return f"Failed({self.error!r})"

    def __format__(self, form: str) -> str:
        return "failed"


_FAILED: list[str] = []
"""Rows with an error that were printed, by the names of their benchmarks."""


def failed() -> list[str]:
    """Return the names of the benchmarks that printed a row with an error."""
    return list(dict.fromkeys(_FAILED))


def emit(
    name: str,
    *,
    peer: str | None,
    workload: str,
    unit: str = "rows_per_s",
    value: Any,
    ratio: Any,
    repeats: int,
    **more: Any,
) -> None:
    """Print one row on standard output. `ratio`: ours / the peer's, measured in the same run. A row
    with a figure that failed has the cause as `error`, and null instead of the figure.
    """
    figures = {unit: value, "ratio": ratio, **more}
    errors = [figure.error for figure in figures.values() if isinstance(figure, Failed)]
    fields = {
        name: None if isinstance(figure, Failed) else figure for name, figure in figures.items()
    }
    value = fields.pop(unit)
    ratio = fields.pop("ratio")
    row = {
        "name": name,
        "peer": peer,
        "workload": workload,
        unit: value if value is None else round(value) if value >= 100 else float(f"{value:.4g}"),
        "ratio": None if ratio is None else round(ratio, 4),
        "repeats": repeats,
        "hardware": hardware(),
        "versions": versions(),
        "config_hash": "",
        **fields,
        **({"error": errors[0]} if errors else {}),
    }
    _FAILED.extend([name] if errors else [])
    print(json.dumps(row), flush=True)


def attempt(name: str, function: Callable[[], Result]) -> Result | Any:
    """Return the result of the function, or Failed with the cause in one line, without secrets, if
    it raises an error.
    """
    try:
        return function()
    except Exception as error:
        note(redact_secrets(f"  {name} failed: {error}"))
        return Failed(redact_secrets(error_line(error)))


@contextlib.contextmanager
def part(name: str, workload: str, *, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Run a part of a benchmark. If it fails, print a row with the error and continue, unless the
    error is `passing`.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        note(redact_secrets(traceback.format_exc()))
        cause = Failed(redact_secrets(error_line(error)))
        emit(name, peer=None, workload=workload, unit="value", value=cause, ratio=None, repeats=0)


def in_turn(
    repeats: int,
    candidates: Callable[[int], Mapping[str, Callable[[], Result]]],
    *,
    shown: Callable[[Result], str],
    on_result: Callable[[dict[str, Any]], None] = lambda by_name: None,
) -> dict[str, Any]:
    """Run the candidates of each round in turn, so that drift of the machine affects all alike.

    Returns the results of each candidate, or Failed for a candidate that failed, which is not run
    again. `on_result` gets the candidates whose last round has ended, after each of these.
    """
    by_name: dict[str, Any] = {}
    done: dict[str, Any] = {}
    for number in range(repeats):
        for name, candidate in candidates(number).items():
            results = by_name.setdefault(name, [])
            if not isinstance(results, Failed):
                result = attempt(f"round {number + 1}: {name}", candidate)
                if isinstance(result, Failed):
                    by_name[name] = result
                else:
                    results.append(result)
                    note(f"  round {number + 1}: {name} {shown(result)}")
            if number == repeats - 1:
                done[name] = by_name[name]
                on_result(done)
    return done


def median_of(results: Any, field: Callable[[Any], float] = lambda result: result) -> Any:
    """Return the median of a result's field over a candidate's results of `in_turn`, or its
    failure.
    """
    return results if isinstance(results, Failed) else statistics.median(map(field, results))


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def timed(function: Callable[[], Result]) -> tuple[Result, float]:
    """Return the function's result and its seconds."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def medians_of(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return the medians of each candidate's numbers by name, or its failure. A number that a round
    lacks is 0 in it.
    """

    def medians(results: Any) -> Any:
        if isinstance(results, Failed):
            return results
        return {key: median_of([result.get(key, 0.0) for result in results]) for key in results[0]}

    return {name: medians(results) for name, results in by_name.items()}


def interleaved(repeats: int, **candidates: Callable[[], float]) -> dict[str, Any]:
    """Run the candidates `in_turn` and return the median rate of each."""
    results = in_turn(repeats, lambda number: candidates, shown=lambda rate: f"{rate:,.0f}/s")
    return {name: median_of(rates) for name, rates in results.items()}
