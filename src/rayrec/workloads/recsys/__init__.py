"""Recommenders: click models on logs, with sharded embedding tables."""

from rayrec.workloads.recsys.workload import ClickWorkload

__all__ = ["ClickWorkload"]
