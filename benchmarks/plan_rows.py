"""Benchmark of the memory forecast by `rayrec plan` for a CPU worker, compared with its peak in
training, in three sizes.
"""

from functools import partial

from hosts.planned_memory import DIM, SIZES, measured
from rows import attempt, emit


def main(*, quick: bool) -> None:
    for rows in SIZES[: 1 if quick else None]:
        result = attempt(f"{rows:,} rows", partial(measured, rows))
        emit(
            "plan",
            peer="peak resident memory of the process",
            workload=(
                f"click model, {rows:,} rows of {DIM} in 26 tables, row-wise Adagrad, 1 worker, "
                "with a save"
            ),
            unit="forecast_bytes",
            value=result["forecast"],
            ratio=result["forecast"] / result["peak"],
            repeats=1,
            peak_bytes=result["peak"],
        )
