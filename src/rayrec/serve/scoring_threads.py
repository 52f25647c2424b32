"""Scores blocks of rows by threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from rayrec.data.threads import in_order
from rayrec.serve.pool import Pool

if TYPE_CHECKING:
    from rayrec.workloads.scoring import Device, Scoring


def scored_tables(scoring: Scoring, *, pool: Pool, device: Device, first_block: int = 0) -> Iterator[pa.Table]:
    """A table of scores a block of rows, in order, from block `first_block` on; the same as processes on Ray make."""
    import torch

    threads = torch.get_num_threads()
    shared = scoring.load(device) if scoring.thread_safe else None
    own = threading.local()

    def scored(number: int) -> pa.Table:
        if not hasattr(own, "score"):
            torch.set_num_threads(max(1, int(pool.cpus_per_actor)))  # of operators that this thread calls
            own.score = shared or scoring.load(device)
        return own.score(number)

    try:
        yield from in_order(
            scored,
            range(first_block, scoring.num_blocks),
            name="score",
            num_threads=pool.num_actors,
            ahead=2,
        )
    finally:
        torch.set_num_threads(threads)
