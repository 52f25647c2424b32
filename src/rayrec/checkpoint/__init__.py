"""Checkpoints independent of sharding plan and world size: named tensors in safetensors files and a
JSON manifest. A checkpoint folder contains a `data_*.safetensors` file for each rank (its shards,
written in parallel), files that belong to the weights (`config.yaml`, the workload's own files) and
`manifest.json`. The manifest is written last and contains the location and checksums of every
tensor part, and the run's plain state. A folder without a manifest is not a checkpoint. Nothing in
it is ever unpickled. torch.distributed.checkpoint plans the reads and writes of each rank; its own
storage is not used, because it pickles. For programs that use it, `CheckpointReader` and
`CheckpointWriter` implement its storage in this format. Names are imported lazily, so that a
command that only searches for a checkpoint does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# ruff: noqa: F403
if TYPE_CHECKING:  # public names are those in `_NAMES`
    from rayrec.checkpoint.dcp import *
    from rayrec.checkpoint.discovery import *
    from rayrec.checkpoint.format import *
    from rayrec.checkpoint.huggingface import *
    from rayrec.checkpoint.lease import *
    from rayrec.checkpoint.plan import *
    from rayrec.checkpoint.reader import *
    from rayrec.checkpoint.saver import *
    from rayrec.checkpoint.writer import *

_NAMES = {
    "dcp": "CheckpointReader CheckpointWriter",
    "discovery": (
        "SUMMARY Checkpoint committed step_folder latest latest_valid_checkpoint open_checkpoint "
        "runs_beside parse_step"
    ),
    "format": "MANIFEST VERSION DamagedError",
    "huggingface": "SyncCheckpoints",
    "lease": "Lease acquire_lease check_shared write_token",
    "plan": "drop_tied_tensors",
    "reader": "full_tensors restore verify weights_sha256",
    "saver": "Retention Saver to_remove",
    "writer": "save",
}
"""Public names of each module."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayrec.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rayrec.checkpoint.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
