"""Placement of embedding tables: TorchRec's plan, its memory and its communication."""

from rayrec.sharding.planner import ShardingConfig

__all__ = ["ShardingConfig"]
