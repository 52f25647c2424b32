"""Recommender workload: models on click logs, with sharded embedding tables."""

from rayrec.workloads.recsys.workload import ClickWorkload

__all__ = ["ClickWorkload"]
