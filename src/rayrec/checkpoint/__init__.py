"""Checkpoints free of plan and world size: tensors by name in safetensors files, a JSON manifest written last.

A checkpoint folder holds a `data_*.safetensors` of each rank (its shards, written in parallel), what belongs with the
weights (`config.yaml`, the workload's own files), and `manifest.json`, which says where every part of every tensor
lies, with checksums, and holds the run's plain state. A folder without a manifest is not a checkpoint. Nothing in it is
ever unpickled. torch.distributed.checkpoint plans which rank writes and reads what; its own storage pickles and is not used.
For programs that use it, `CheckpointReader` and `CheckpointWriter` are such storage in this format.

Names are imported when first used: a command that only looks for a checkpoint loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayrec.checkpoint.dcp import CheckpointReader, CheckpointWriter
    from rayrec.checkpoint.discovery import (
        SUMMARY,
        Checkpoint,
        committed,
        folder_of,
        latest,
        newest_good,
        open_checkpoint,
        step_of,
    )
    from rayrec.checkpoint.format import MANIFEST, VERSION, DamagedError
    from rayrec.checkpoint.lease import Lease, acquire_lease, check_shared, write_token
    from rayrec.checkpoint.plan import untied
    from rayrec.checkpoint.reader import full_tensors, restore, verify, weights_sha256
    from rayrec.checkpoint.saver import Retention, Saver, to_remove
    from rayrec.checkpoint.writer import save

__all__ = [
    "MANIFEST",
    "SUMMARY",
    "VERSION",
    "Checkpoint",
    "CheckpointReader",
    "CheckpointWriter",
    "DamagedError",
    "Lease",
    "Retention",
    "Saver",
    "acquire_lease",
    "check_shared",
    "committed",
    "folder_of",
    "full_tensors",
    "latest",
    "newest_good",
    "open_checkpoint",
    "restore",
    "save",
    "step_of",
    "to_remove",
    "untied",
    "verify",
    "weights_sha256",
    "write_token",
]

_HOMES = {
    "MANIFEST": "format",
    "SUMMARY": "discovery",
    "VERSION": "format",
    "Checkpoint": "discovery",
    "CheckpointReader": "dcp",
    "CheckpointWriter": "dcp",
    "Lease": "lease",
    "DamagedError": "format",
    "Retention": "saver",
    "Saver": "saver",
    "check_shared": "lease",
    "acquire_lease": "lease",
    "committed": "discovery",
    "folder_of": "discovery",
    "full_tensors": "reader",
    "latest": "discovery",
    "newest_good": "discovery",
    "open_checkpoint": "discovery",
    "restore": "reader",
    "save": "writer",
    "step_of": "discovery",
    "to_remove": "saver",
    "untied": "plan",
    "verify": "reader",
    "weights_sha256": "reader",
    "write_token": "lease",
}
"""Module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayrec.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rayrec.checkpoint.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
