"""Tests of GPU out-of-memory errors."""

from typing import Any

import pytest
import torch

from rayrec.config import InputError
from rayrec.workloads.worker_setup import memory_errors

CUDA = torch.device("cuda", 3)
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has a total capacity of 79.11 GiB.")


def placed(name: str, rows: int, *, ranks: dict[int, int], share: float = 1.0) -> dict[str, Any]:
    return {"table": name, "num_embeddings": rows, "embedding_dim": 128, "bytes_of_rank": ranks, "device_share": share}


def told(described: dict[str, Any], error: Exception = FULL) -> str:
    with pytest.raises(InputError) as found, memory_errors(described, rank=1, device=CUDA):
        raise error
    assert found.value.__cause__ is error
    return str(found.value)


def test_out_of_memory_error_names_tables_and_remedies() -> None:
    tables = [
        placed("small", 1_000, ranks={1: 512_000}),
        placed("elsewhere", 90_000_000, ranks={0: 46_080_000_000}),
        placed("items", 40_000_000, ranks={1: 20_480_000_000}),
        placed("users", 10_000_000, ranks={0: 1, 1: 5_120_000_000}),
        placed("third", 2_000, ranks={1: 1_024_000}),
    ]
    assert told({"tables": tables, "batch_size": 65_536}) == (
        "worker 1: cuda:3 is out of memory for 20.00 GiB more; its tables take 25.6 GB, the largest items (40,000,000 x 128) "
        "20.5 GB, users (10,000,000 x 128) 5.12 GB, third (2,000 x 128) 1.02 MB. Try to lower --batch-size (now 65,536), or "
        "shard the tables over more workers (--scaling.num-workers), or store tables in host memory "
        "(--workload.sharding.uvm-caching), or shrink them (embedding_dim, min_count, max_num_embeddings)."
    )


def test_cached_table_counts_cache_only() -> None:
    text = told({"tables": [placed("items", 40_000_000, ranks={1: 20_480_000_000}, share=0.1)]})
    assert "its tables take 2.05 GB" in text
    assert "--workload.sharding.uvm-cache-fraction" in text
    assert "--workload.sharding.uvm-caching)" not in text


def test_memory_error_without_tables_and_other_errors() -> None:
    assert "--workload.parallel fsdp" in told({"parallel": "ddp", "batch_size": 8})
    assert told({}).endswith("cuda:3 is out of memory for 20.00 GiB more. Try to use a GPU with more memory.")
    assert "is out of memory. " in told({}, RuntimeError("CUDA error: out of memory"))  # of a library under torch
    with pytest.raises(RuntimeError, match=r"^shapes$"), memory_errors({}, rank=0, device=CUDA):
        raise RuntimeError("shapes")
