"""Compatibility checks between a run and the checkpoint it starts from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rayrec import storage
from rayrec.config import Config, InputError
from rayrec.workloads.scoring import mismatched_weight

if TYPE_CHECKING:
    from rayrec.checkpoint import Checkpoint


def stored_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Load the config.yaml of a checkpoint. Raises InputError if it is not a run configuration."""
    import yaml

    path = storage.join(checkpoint.path, "config.yaml")
    try:
        values = yaml.safe_load(storage.read_bytes(path).decode())
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: not UTF-8, or an invalid date
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("workload"), dict):
        raise InputError(f"{path}: must be the configuration of a run. Copy the full checkpoint folder.")
    return values


def require_same_optimizer(
    checkpoint: Checkpoint, stored: Mapping[str, Any], group: str, optimizer: Config, *, fields: Iterable[str]
) -> None:
    """Check that the optimizer settings in `fields`, which determine its state, match the checkpoint. Raises InputError. `group`
    is the field of the workload."""
    current = optimizer.to_dict()
    default = type(optimizer)().to_dict()
    previous = {**default, **(stored["workload"].get(group) or {})}
    for field in fields:
        if bool(previous[field]) != bool(current[field]) or (
            isinstance(current[field], str) and previous[field] != current[field]
        ):
            raise InputError(
                f"init_from {checkpoint.path}: optimizer state does not match: trained with workload.{group}.{field} "
                f"{previous[field]}, this run has {current[field]}. Use the same value."
            )


def require_same_weights(checkpoint: Checkpoint, expected: Mapping[str, list[int]]) -> None:
    """Check that the weights of a checkpoint have the names (without `PREFIX`) and shapes `expected`. Raises InputError."""
    if mismatch := mismatched_weight(checkpoint, expected):
        raise InputError(f"init_from {checkpoint.path}: {mismatch}. Use the model and settings of its config.yaml.")
