"""Runs on a Ray cluster: a running one, or a local one of the run's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa
import ray

from rayrec import machine
from rayrec.cluster import connection
from rayrec.cluster.node_storage import require_reachable
from rayrec.data.engine import Shared, StreamEngine, ThreadEngine
from rayrec.ingest.ray_engine import RayEngine, RayShared
from rayrec.observe.console import Console
from rayrec.training.launchers.assignment import Launch
from rayrec.training.launchers.attempts import run_attempts, share_out, start_ahead, wait_for_room
from rayrec.training.launchers.failures import cause_of
from rayrec.workloads.base import TrainConfig

_FEW_TASKS: Final = 8
"""Blocks of a log that one thread indexes in about a second."""
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class _DriverEngine(ThreadEngine):
    """Data tasks of the driver of a local Ray: as threads they start at once, and see the same CPUs and files."""

    def share(self, value: _Value) -> Shared[_Value]:
        return RayShared(ray.put(value))


@dataclass(frozen=True)
class _NearEngine(RayEngine):
    """Data tasks of the driver on a running cluster of its own node alone: a few as a thread, because a task's process takes
    seconds to start; more by Ray, which knows what other jobs do there."""

    max_outage_s: float = 0.0

    def run(
        self, name: str, function: Callable[[Any], pa.Table], items: Sequence[Any], *, block_bytes: int = 16 << 20
    ) -> Iterator[pa.Table]:
        if len(items) > _FEW_TASKS:
            return super().run(name, function, items, block_bytes=block_bytes)
        return ThreadEngine(1, max_outage_s=self.max_outage_s).run(name, function, items, block_bytes=block_bytes)


class RayLauncher:
    """See `Launcher`."""

    on_ray: Final = True

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def connect(self, folder: str, console: Console) -> None:
        config = self._config
        connection.connect(
            config.cluster.address,
            num_cpus=config.cluster.num_cpus,
            object_store_bytes=config.cluster.object_store_bytes,
            log_to_driver=console.verbose,
            ahead=() if config.scaling.use_gpu else config.workload.WORKER_MODULES,
        )
        require_reachable((folder, config.train_data.path, config.eval_data.path, config.init_from))
        connection.ship_code(config)

    def share_out(self, *, goes_on: bool, note: Callable[[str], None]) -> connection.Layout:
        # A resumed run may do so on a cluster whose nodes are still joining; a new one is refused at once.
        shares = wait_for_room(self._config, note) if goes_on else share_out(self._config)
        if shares.num_nodes > 1:
            note(shares.text())
        start_ahead(self._config, shares)
        return shares

    def engine(self, shares: connection.Layout, *, max_outage_s: float) -> StreamEngine:
        if connection.is_own():
            return _DriverEngine(machine.usable_cpus(granted=self._config.cluster.num_cpus), max_outage_s=max_outage_s)
        placement = shares.driver.replace(max_outage_s=max_outage_s)
        return _NearEngine(placement, max_outage_s=max_outage_s) if shares.num_nodes == 1 else RayEngine(placement)

    def run(self, launch: Launch) -> dict[str, Any] | None:
        return run_attempts(self._config, launch)

    def cause_of(self, error: BaseException) -> str:
        return cause_of(error)
