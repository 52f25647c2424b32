"""Compatibility checks between a run and the checkpoint it starts from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rayrec import storage
from rayrec.config import Config, InputError

if TYPE_CHECKING:
    from rayrec.checkpoint import Checkpoint


def stored_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Load the config.yaml of a checkpoint. Raises InputError if it is not a run configuration."""
    import yaml

    path = storage.join(checkpoint.path, "config.yaml")
    try:
        values = yaml.safe_load(storage.read_bytes(path).decode())
    except (yaml.YAMLError, UnicodeDecodeError):
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("workload"), dict):
        raise InputError(f"{path}: is not the configuration of a run; take the checkpoint's folder whole")
    return values


def require_same_optimizer(
    checkpoint: Checkpoint, stored: Mapping[str, Any], group: str, optimizer: Config, *, fields: Iterable[str]
) -> None:
    """Check that the optimizer settings in `fields`, which determine its state, match the checkpoint. Raises InputError. `group`
    is the field of the workload."""
    own = optimizer.to_dict()
    default = type(optimizer)().to_dict()
    there = {**default, **(stored["workload"].get(group) or {})}
    for field in fields:
        if bool(there[field]) != bool(own[field]) or (isinstance(own[field], str) and there[field] != own[field]):
            raise InputError(
                f"init_from {checkpoint.path}: was trained with workload.{group}.{field} {there[field]}, this run has "
                f"{own[field]}, and keeps another state; give the same"
            )


def require_same_weights(
    checkpoint: Checkpoint, stored: Mapping[str, Any], wanted: Mapping[str, list[int]], *, prefix: str = "model."
) -> None:
    """Check that the weights of a checkpoint have the names (without `prefix`) and shapes `wanted`. Reads no weights. Raises
    InputError. `stored` has the tensors of its manifest."""
    there = {name.removeprefix(prefix): entry["shape"] for name, entry in stored.items() if name.startswith(prefix)}
    for name in sorted(there.keys() | wanted.keys()):
        if there.get(name) != wanted.get(name):
            raise InputError(
                f"init_from {checkpoint.path}: {name} has {_shape(there.get(name))}, and {_shape(wanted.get(name))} in this "
                "run's model; give the model and the settings of its config.yaml"
            )


def _shape(shape: list[int] | None) -> str:
    return "no values" if shape is None else f"shape {shape}"
