"""Worker setup shared by all workloads: start of a step, and GPU out-of-memory errors."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import torch

from rayrec.config import InputError
from rayrec.humanize import size_text
from rayrec.optim.config import LearningRateSchedule, learning_rates, set_learning_rates
from rayrec.workloads.base import WorkerContext
from rayrec.workloads.run_config import ScalingConfig


def step_start(
    context: WorkerContext, optimizer: Any, schedule: LearningRateSchedule
) -> Callable[[int, int], None]:
    """Return `WorkerSetup.begin_step`, which sets learning rates and random seeds of a step.
    Learning rates follow the schedule, from the optimizer's current rates and the number of
    workers. With the seeds, a step repeated after a crash has the same dropout and augmentation.
    """
    config = context.config
    factor = learning_rate_factor(config.scaling, world_size=context.world_size)
    base_rates = [rate * factor for rate in learning_rates(optimizer)]
    schedule_for = lru_cache(maxsize=1)(schedule.for_steps)

    def begin_step(step: int, total: int) -> None:
        seed_generators(step_seed(config.seed, step, context.rank), context.device)
        set_learning_rates(
            optimizer, base_rates=base_rates, schedule=schedule_for(total), step=step
        )

    return begin_step


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the random seed of a step."""
    return (
        int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8], "little") >> 1
    )


def seed_generators(number: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`. Same as torch.manual_seed(number), but
    without its stack trace for each unused kind of device, which takes 0.4 ms.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


_LARGEST: Final = 3
"""Number of tables to name."""


@contextlib.contextmanager
def memory_errors(
    described: Mapping[str, Any], *, rank: int, device: torch.device
) -> Iterator[None]:
    """Convert out-of-memory errors of torch on the device into InputError. `described` is
    `WorkerSetup.described`. Uses `batch_size`, `parallel` and `tables` (each a `TablePlacement` as
    a dict) if present.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(out_of_memory_text(error, described, rank=rank, device=device)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch or a library below it ran out of GPU memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and re.search("CUDA.*out of memory", str(error)) is not None
    )


def out_of_memory_text(
    error: BaseException, described: Mapping[str, Any], *, rank: int, device: torch.device
) -> str:
    """Return a one-line message: worker, requested memory, largest tables, and applicable remedies.
    Pure.
    """
    request = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    tables = _tables_on_rank(described.get("tables", ()), rank)
    remedies = []
    if described.get("batch_size"):
        remedies.append(f"lower --batch-size (now {described['batch_size']:,})")
    if tables:
        remedies.append("shard the tables over more workers (--scaling.num-workers)")
        if not any(cached for *_, cached in tables):
            remedies.append("store tables in host memory (--workload.sharding.uvm-caching)")
        else:
            remedies.append("reduce their cache (--workload.sharding.uvm-cache-fraction)")
        remedies.append("shrink them (embedding_dim, min_count, max_num_embeddings)")
    elif described.get("parallel") == "ddp":
        remedies.append("shard the model over the workers (--workload.parallel fsdp)")
    total_bytes = sum(size for _, size, _ in tables)
    largest = ", ".join(f"{name} {size_text(size)}" for name, size, _ in tables[:_LARGEST])
    filled = f"; its tables take {size_text(total_bytes)}, the largest {largest}" if tables else ""
    return (
        f"worker {rank}: {device} is out of "
        f"memory{f' for {request[1]} more' if request else ''}{filled}. Try to "
        f"{', or '.join(remedies) or 'use a GPU with more memory'}."
    )


def _tables_on_rank(tables: Sequence[Mapping[str, Any]], rank: int) -> list[tuple[str, int, bool]]:
    """Return (text, bytes on the device of `rank`, whether the device only caches the table),
    largest first.
    """
    tables_on_rank = []
    for table in tables:
        table_bytes = table["bytes_of_rank"].get(rank, 0) * table["device_share"]
        if table_bytes:
            shape = f"{table['num_embeddings']:,} x {table['embedding_dim']}"
            tables_on_rank.append(
                (f"{table['table']} ({shape})", int(table_bytes), table["device_share"] < 1)
            )
    return sorted(tables_on_rank, key=lambda table: -table[1])


def learning_rate_factor(scaling: ScalingConfig, *, world_size: int) -> float:
    """Return the factor for learning rates with `world_size` workers. Pure."""
    ratio = world_size / scaling.max_workers
    return {"constant": 1.0, "linear": ratio, "sqrt": ratio**0.5}[scaling.learning_rate_policy]
