"""What the data side of a run does, told beside its steps: speed, load and backlog of each stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

from torch import distributed

from rayrec.data.stage_times import STAGES, StageAccount

_LEAST_S: Final = 1.0
"""Between two events: a block lasts for many steps, and most intervals between two logs see none."""
_MOST_S: Final = 10.0
"""After which there is one though no block was taken in use."""


@final
class DataReport:
    """Adds up over the workers what their loaders' StageAccounts count; one on each worker, which all call alike."""

    def __init__(self, loader: Any) -> None:
        """A loader without `stages` is told nothing of."""
        self._account: StageAccount | None = getattr(loader, "stages", None)
        self._since_s = time.monotonic() if self._account is None else self._account.begin_s
        self._sums = dict.fromkeys(StageAccount.FIELDS, 0.0)

    def take(self) -> list[float]:
        """This worker's numbers since the last call, whose means over the workers `tell` is given; as many on each."""
        return [] if self._account is None else self._account.take()

    def tell(self, means: Sequence[float], *, step: int, log: Callable[[str, dict[str, Any]], None]) -> None:
        """Logs an event of kind data now and then."""
        if self._account is None:
            return
        workers = distributed.get_world_size() if distributed.is_initialized() else 1
        for name, mean in zip(StageAccount.FIELDS, means, strict=True):
            self._sums[name] = mean * workers + (0.0 if name == "cpus" else self._sums[name])
        seconds = time.monotonic() - self._since_s
        if seconds < _LEAST_S or (seconds < _MOST_S and not self._sums["blocks"]):
            return
        log("data", {"step": step, **data_fields(self._sums, seconds=seconds)})
        self._since_s += seconds
        self._sums = dict.fromkeys(StageAccount.FIELDS, 0.0)


def data_fields(sums: Mapping[str, float], *, seconds: float) -> dict[str, Any]:
    """The fields of a data event, from the sums of all workers' StageAccounts over so long. Pure.

    Of each stage: `rows_per_s` of all the CPUs, were they at this stage alone; `busy`, the share of the CPUs' time it took;
    `cpu_share` and `queue_share`, the shares of that in which it computed, and could have but had no CPU; for the rest it waited
    for storage. The backlog is the mean over the time.
    """
    cpus, rows = sums["cpus"], sums["rows"]
    stages = []
    for name in STAGES:
        wall_s, cpu_s = sums[f"{name}_wall_s"], sums[f"{name}_cpu_s"]
        if wall_s:
            stages.append(
                {
                    "stage": name,
                    "rows_per_s": rows * cpus / wall_s,
                    "busy": wall_s / (seconds * cpus),
                    "cpu_share": cpu_s / wall_s,
                    "queue_share": sums[f"{name}_queue_s"] / wall_s,
                }
            )
    busy_s = sum(sums[f"{name}_wall_s"] for name in STAGES)
    return {
        "seconds": seconds,
        "rows": round(rows),
        "rows_per_s": rows / seconds,
        "cpus": cpus,
        "busy": busy_s / (seconds * cpus),
        "capacity_rows_per_s": rows * cpus / busy_s if busy_s else None,
        "backlog_rows": sums["waited_row_s"] / seconds,
        "backlog_blocks": sums["waited_block_s"] / seconds,
        "stages": stages,
    }
