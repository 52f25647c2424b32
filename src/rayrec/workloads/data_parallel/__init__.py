"""Data-parallel training (DDP, FSDP) of any PyTorch model on numbered rows."""

from rayrec.workloads.data_parallel.workload import DataParallelWorkload

__all__ = ["DataParallelWorkload"]
