"""Paths of trained models: checkpoints, runs and exports. Imports no torch, which a command that
only names a model does not need.
"""

from __future__ import annotations

from typing import Final

from rayrec import storage
from rayrec.checkpoint.discovery import open_checkpoint
from rayrec.checkpoint.format import MANIFEST
from rayrec.config import InputError

EXPORT_FORMAT: Final = "rayrec-export"
"""Field `format` in the manifest of an export."""


def is_export(path: str) -> bool:
    """Return whether a folder has the manifest of an export. Checks nothing else."""
    manifest_path = storage.join(path, MANIFEST)
    if not storage.exists(manifest_path):
        return False
    try:
        manifest = storage.read_json(manifest_path)
    except InputError:
        return False
    return isinstance(manifest, dict) and manifest.get("format") == EXPORT_FORMAT


def resolve_source(path: str) -> str:
    """Resolve a checkpoint, run or export to its folder, absolute or a URL. Raises InputError if a
    run has no checkpoint.
    """
    return storage.absolute(path) if is_export(path) else open_checkpoint(path).path
