"""Runs in processes of torchrun, which are forked like other ranks, and may be killed."""

import functools
import os
import signal
from pathlib import Path
from typing import Any

from builders.faults import until
from builders.runs import QUIET
from hosts.ports import free_ports
from ranks.checkpoint import run_ranks

from rayrec import storage
from rayrec.checkpoint import committed
from rayrec.recipes import load_config
from rayrec.training import trainer
from rayrec.training.step_log import StepAccounting
from rayrec.workloads.base import TrainConfig


def train_in_processes(workers: int, config: TrainConfig) -> dict[str, Any]:
    """Train by a process per worker, and return the summary."""
    run = _folder(config)
    run_ranks(_ranks(config, workers), workers, run, grouped=False)
    return storage.read_json(storage.join(run, "summary.json"))


def train_until_killed(workers: int, config: TrainConfig, *, step: int) -> None:
    """Train by a process per worker until the last one is killed, after a step and the first
    checkpoint. The others end, as torchrun ends them.
    """
    function = _ranks(config, workers, kill_at=step)
    run_ranks(
        function,
        workers,
        _folder(config),
        killed=workers - 1,
        grouped=False,
    )


def _folder(config: TrainConfig) -> str:
    run = storage.join(config.storage_path, str(config.name))
    Path(run).mkdir(parents=True, exist_ok=True)
    return run


def _ranks(config: TrainConfig, workers: int, *, kill_at: int | None = None) -> Any:
    config = config.replace(scaling={"num_workers": workers, "threads_per_worker": 1})
    world = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)),
    }
    return functools.partial(_train, config.to_yaml(), world, kill_at)


def _train(text: str, world: dict[str, str], kill_at: int | None, run: str, rank: int) -> None:
    os.environ |= {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    if kill_at is not None:
        is_killed = rank == int(world["WORLD_SIZE"]) - 1
        end = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        _call_after(
            kill_at,
            run,
            end if is_killed else functools.partial(os._exit, 0),
        )
    trainer.train(load_config(text), console=QUIET)


def _call_after(step: int, run: str, function: Any) -> None:
    """Call a function after a step of this process, once the run has a checkpoint."""
    count = StepAccounting.count

    def count_and_call(account: Any, *arguments: Any, **named: Any) -> Any:
        result = count(account, *arguments, **named)
        if account._progress.step >= step:
            until(lambda: committed(run))
            function()
        return result

    StepAccounting.count = count_and_call  # type: ignore[method-assign]
