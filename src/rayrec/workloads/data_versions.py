"""Versions of a run's data, from listings of its files."""

import hashlib
from collections.abc import Sequence
from typing import Any

from rayrec import storage
from rayrec.data.logs.index import partition_names
from rayrec.humanize import date_text
from rayrec.workloads.base import TrainConfig


def data_versions(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Return the versions of `train_data` and `eval_data` as plain JSON values, from a listing of
    their files. Reads no file. Files are identified by name, partitions, size and time, not by
    folder. Raises InputError for a path without files.
    """
    inputs = {"train_data": config.train_data, "eval_data": config.eval_data}
    list_data = config.workload.list_data
    return {
        name: _version(list_data(data.path, data.files))
        for name, data in inputs.items()
        if data.path is not None
    }


def _version(files: Sequence[storage.File]) -> dict[str, Any]:
    identity = [
        (
            *partition_names(storage.parent_folder(file.path)),
            storage.name_of(file.path),
            file.size_bytes,
            file.modified_ns,
        )
        for file in files
    ]
    newest = max(files, key=lambda file: file.modified_ns)
    return {
        "files": len(files),
        "bytes": sum(file.size_bytes for file in files),
        "newest": storage.name_of(newest.path),
        "modified": date_text(newest.modified_ns / 1e9),
        "hash": hashlib.sha256(repr(identity).encode()).hexdigest()[:16],
    }
