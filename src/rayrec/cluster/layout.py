"""Processes that torchrun, or srun with torchrun's variables, has started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from rayrec import machine
from rayrec.config import InputError


@dataclass(frozen=True)
class Launched:
    """Which of several processes this is, by the variables that torchrun sets."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restarts: int
    """How often torchrun has started all of them again."""
    is_torchrun: bool = field(default=True, kw_only=True)
    """False: a process that trains alone."""
    num_cpus: int | None = field(default=None, kw_only=True)
    """CPUs of this machine that were granted; None: all that the process may use."""

    @classmethod
    def alone(cls, num_cpus: int | None) -> Self:
        """Return a process that is the only one, and may use so many CPUs."""
        return cls(0, 1, 0, 1, 0, is_torchrun=False, num_cpus=num_cpus)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """None if this process was started in another way. Raises InputError for variables that contradict each other."""
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if any(name not in environment for name in needed):
            return None
        defaults = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
        names = ("RANK", "WORLD_SIZE", *defaults)
        try:
            found = cls(*(int(environment.get(name, defaults.get(name, ""))) for name in names))
        except ValueError:
            said = ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
            raise InputError(f"{said}: these variables of torchrun must be numbers") from None
        if not 0 <= found.rank < found.world_size or not 0 <= found.local_rank < found.local_world_size:
            raise InputError(
                f"RANK={found.rank} of WORLD_SIZE={found.world_size}, LOCAL_RANK={found.local_rank} of "
                f"LOCAL_WORLD_SIZE={found.local_world_size}: a rank must be below the number of processes; with srun, export "
                "RANK=$SLURM_PROCID, LOCAL_RANK=$SLURM_LOCALID and LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE"
            )
        return found

    @property
    def cpus(self) -> int:
        """Of this machine, for this process."""
        return max(1, self.usable_cpus // self.local_world_size)

    @property
    def usable_cpus(self) -> int:
        """Of this machine, for all of its processes."""
        return machine.usable_cpus(granted=self.num_cpus)
