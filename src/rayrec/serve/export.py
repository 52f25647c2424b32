"""A trained model as a folder that other tools read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayrec import storage
from rayrec.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig


def export(checkpoint: str, out: str, *, config: TrainConfig) -> dict[str, Any]:
    """Writes the model of a checkpoint (or of a run: the one to use) into folder `out`, which appears complete or not at all;
    what it holds is the workload's affair. Returns what the workload tells of it, out and checkpoint.

    Raises InputError for an unusable checkpoint, a model that cannot be exported, and where `out` exists.
    """
    opened = open_checkpoint(checkpoint)
    opened.manifest()
    with storage.writing_folder(out) as folder:
        told = config.workload.export(config, checkpoint=opened.path, out=folder)
    return {**told, "out": storage.absolute(out), "checkpoint": opened.path}
