"""Where the rows of embedding tables lie: TorchRec's plan, its memory and its traffic."""

from rayrec.sharding.planner import ShardingConfig

__all__ = ["ShardingConfig"]
