"""From the path that a caller gives to the folder of a model."""

from __future__ import annotations

from rayrec import storage
from rayrec.checkpoint import open_checkpoint
from rayrec.serve.exported import is_export


def source_of(path: str) -> str:
    """The folder of a checkpoint or an export, absolute or a URL, the same for all replicas; of a run, its checkpoint to use.
    Raises InputError if there is none."""
    if is_export(path):
        return storage.absolute(path)
    return open_checkpoint(path).path
