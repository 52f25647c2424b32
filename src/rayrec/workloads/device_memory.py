"""What a worker whose GPU is full says: what fills it, and what to change."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from rayrec.config import InputError
from rayrec.quantities import size_text

_LARGEST: Final = 3
"""Tables that are named."""


@contextlib.contextmanager
def memory_errors(described: Mapping[str, Any], *, rank: int, device: torch.device) -> Iterator[None]:
    """Raises InputError in place of torch's error if the device has no memory left.

    `described`: `WorkerSetup.described`, of which `batch_size`, `parallel` and `tables` (each a `TablePlacement` as a dict) are
    used if they are there.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(out_of_memory_text(error, described, rank=rank, device=device)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, or a library under it, found no memory on a GPU."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and re.search("CUDA.*out of memory", str(error)) is not None
    )


def out_of_memory_text(error: BaseException, described: Mapping[str, Any], *, rank: int, device: torch.device) -> str:
    """One line: the worker, what it asked for, the largest tables that it holds, and the remedies that fit. Pure."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    tables = _held(described.get("tables", ()), rank)
    remedies = []
    if described.get("batch_size"):
        remedies.append(f"lower --batch-size (now {described['batch_size']:,})")
    if tables:
        remedies.append("give more workers a share of the tables (--scaling.num-workers)")
        if not any(cached for *_, cached in tables):
            remedies.append("store tables in host memory (--workload.sharding.uvm-caching)")
        else:
            remedies.append("make their cache smaller (--workload.sharding.uvm-cache-fraction)")
        remedies.append("make them smaller (embedding_dim, min_count, max_num_embeddings)")
    elif described.get("parallel") == "ddp":
        remedies.append("split the model over the workers (--workload.parallel fsdp)")
    held = sum(size for _, size, _ in tables)
    largest = ", ".join(f"{name} {size_text(size)}" for name, size, _ in tables[:_LARGEST])
    filled = f"; its tables take {size_text(held)}, the largest {largest}" if tables else ""
    return (
        f"worker {rank}: {device} has no memory left{f' for {asked[1]} more' if asked else ''}{filled}; "
        f"{', or '.join(remedies) or 'use a GPU with more memory'}"
    )


def _held(tables: Sequence[Mapping[str, Any]], rank: int) -> list[tuple[str, int, bool]]:
    """(text, bytes on the device of `rank`, whether the device only has a cache of it), the largest first."""
    found = []
    for table in tables:
        held = table["bytes_of_rank"].get(rank, 0) * table["device_share"]
        if held:
            shape = f"{table['num_embeddings']:,} x {table['embedding_dim']}"
            found.append((f"{table['table']} ({shape})", int(held), table["device_share"] < 1))
    return sorted(found, key=lambda table: -table[1])
