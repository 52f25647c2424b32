"""Checks of a resumed run: settings that may change, and unchanged data of a finished run."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rayrec import storage
from rayrec.checkpoint import SUMMARY, Checkpoint, latest
from rayrec.cluster.restart_policy import FINISHED
from rayrec.config import CLASS, Config, InputError, default_of, nest, same_class, settings_hash
from rayrec.observe.tracking.config import TrackersConfig
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.data_versions import data_versions
from rayrec.workloads.run_config import ClusterConfig, ObserveConfig, ProfileConfig
from rayrec.workloads.scoring import stored_settings

_OUTSIDE: Final = ("name", "storage_path", "cluster")
"""Location of the run; not compared."""
_FREE: Final = (
    "eval_batch_size",
    "eval_rows",
    "evaluate_every",
    "evaluations_per_epoch",
    "log_every",
    "max_bad_fraction",
    "checkpoint",
    "loop",
    "early_stopping",
    "failure",
    "observe",
    "profile",
    "trackers",
    # A log may be moved. Its rows and their order are compared when the run resumes.
    "train_data.path",
    "train_data.in_memory",
    "train_data.cache_bytes",
    "train_data.prefetch_blocks",
    "eval_data.path",
    "eval_data.in_memory",
    "eval_data.cache_bytes",
    "eval_data.prefetch_blocks",
    "eval_data.block_bytes",
    "eval_data.segments_per_block",
    # Checkpoints do not depend on the number of workers and their devices.
    "scaling.num_workers",
    "scaling.use_gpu",
    "scaling.cpus_per_worker",
    "scaling.resize_interval_s",
    "scaling.resources_per_worker",
    "scaling.threads_per_worker",
    "scaling.bind_cores",
    "scaling.placement_strategy",
    "scaling.network_interface",
)
"""Settings and groups that change no weight of the remaining steps, except in the last digits."""
LENGTHS: Final = ("steps", "epochs")
_BATCH: Final = ("batch_size", "global_batch_size")
_ABSENT: Final = "not set"


@dataclass(frozen=True)
class Change:
    """Setting that differs. Values are plain JSON, or "not set" if a configuration lacks it."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {_text(self.old)} -> {_text(self.new)}"


@dataclass(frozen=True)
class Changes:
    """Differences between the settings of a run's start and of its resume."""

    rejected: tuple[Change, ...]
    accepted: tuple[Change, ...]


def compare_settings(stored: Mapping[str, Any], config: TrainConfig) -> Changes:
    """Compare the settings of a run's config.yaml with a new command. Pure. Accepts more steps or
    epochs, another number of workers, a batch size with the same global batch, and settings without
    effect on training: `_FREE` and the workload's `FREE_ON_RESUME`. Rejects all others. A field
    missing in settings stored by an earlier version counts as `Config.EARLIER`, or its default.
    """
    free = (*_FREE, *(f"workload.{name}" for name in config.workload.FREE_ON_RESUME))
    changes = [
        change for change in _changes(stored, config, "") if not _within(change.field, _OUTSIDE)
    ]
    rejected = [
        change
        for change in changes
        if not _within(change.field, free)
        and not (change.field in LENGTHS and _longer(change.old, change.new))
        and not (
            change.field in _BATCH and _global_batch(stored) == _global_batch(config.to_dict())
        )
    ]
    return Changes(tuple(rejected), tuple(change for change in changes if change not in rejected))


def with_old(config: TrainConfig, changes: tuple[Change, ...]) -> TrainConfig:
    """Return the configuration with the old values of the changes that have one. Pure."""
    return config.updated(
        nest({each.field: each.old for each in changes if _ABSENT not in (each.old, each.new)})
    )


def _changes(stored: Mapping[str, Any], config: Config, prefix: str) -> Iterator[Change]:
    plain = config.to_dict()
    if CLASS in stored and CLASS in plain and not same_class(stored[CLASS], plain[CLASS]):
        yield Change(f"{prefix}{CLASS}", stored[CLASS], plain[CLASS])
    for field in dataclasses.fields(config):
        old = stored.get(field.name, _ABSENT)
        value = getattr(config, field.name)
        # Settings of an earlier version do not have a later field
        if old != _ABSENT or value != config.EARLIER.get(field.name, default_of(field)):
            yield from _value_changes(f"{prefix}{field.name}", old, value, plain.get(field.name))
    named = {field.name for field in dataclasses.fields(config)}
    for name in stored.keys() - plain.keys() - named:
        yield Change(f"{prefix}{name}", stored[name], _ABSENT)


def _value_changes(name: str, old: Any, value: Any, new: Any) -> Iterator[Change]:
    """Yield the changes from a stored value, if any, to `value`, which is `new` in plain JSON."""
    if isinstance(value, Config) and (isinstance(old, Mapping) or old == _ABSENT):
        yield from _changes({} if old == _ABSENT else old, value, f"{name}.")
    elif _are_items(old, value):
        for number, (stored_item, item) in enumerate(zip(old, value, strict=True)):
            yield from _changes(stored_item, item, f"{name}[{number}].")
    elif _canonical(old) != _canonical(new):
        yield Change(name, old, new)


def _are_items(old: Any, value: Any) -> bool:
    """Return whether both are lists of equally many configurations, to be compared one by one."""
    if not isinstance(old, list) or not isinstance(value, tuple) or len(old) != len(value):
        return False
    return all(isinstance(item, Mapping) for item in old) and all(
        isinstance(item, Config) for item in value
    )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _within(field: str, names: tuple[str, ...]) -> bool:
    return any(field == name or field.startswith(f"{name}.") for name in names)


def _longer(old: Any, new: Any) -> bool:
    """Return whether a limit was raised. None means no limit of `steps`."""
    return isinstance(old, int) and (new is None or (isinstance(new, int) and new > old))


def _global_batch(settings: Mapping[str, Any]) -> int | None:
    """Return the rows per step with the maximum number of workers, or None if unknown."""
    if settings.get("global_batch_size") is not None:
        return settings["global_batch_size"]
    workers = settings.get("scaling", {}).get("num_workers", 1)
    max_workers = workers[-1] if isinstance(workers, list) else workers
    size = settings.get("batch_size")
    return size * max_workers if isinstance(size, int) and isinstance(max_workers, int) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def data_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Describe how two results of `data_versions` differ; None if they are equal. Pure."""
    for name in sorted({*old, *new}):
        before = old.get(name)
        after = new.get(name)
        if before != after:
            same = (
                before is not None
                and after is not None
                and _version_text(before) == _version_text(after)
            )
            return f"{name} {'still ' if same else ''}has {_version_text(after)}" + (
                ", but with other names or times" if same else f", and had {_version_text(before)}"
            )
    return None


def _version_text(version: Mapping[str, Any] | None) -> str:
    if version is None:
        return "no files"
    count = f"{version['files']:,} file{'s' if version['files'] > 1 else ''}"
    return (
        f"{count} of {version['bytes']:,} bytes (newest: {version['newest']}, "
        f"{version['modified']})"
    )


def run_hash(config: TrainConfig, stored: Mapping[str, Any] | None = None) -> str:
    """Return the hash of the settings that determine a run's result, without its name and
    locations. With `stored` settings, only of fields that they have: an earlier version hashed no
    others.
    """
    plain = config.replace(
        name=None,
        storage_path="",
        cluster=ClusterConfig(),
        observe=ObserveConfig(),
    )
    settings = plain.replace(trackers=TrackersConfig(), profile=ProfileConfig()).to_dict()
    return settings_hash(settings if stored is None else _restricted(settings, stored))


def _restricted(value: Any, stored: Any) -> Any:
    if isinstance(value, Mapping) and isinstance(stored, Mapping):
        return {
            name: _restricted(each, stored[name]) for name, each in value.items() if name in stored
        }
    if isinstance(value, list) and isinstance(stored, list) and len(value) == len(stored):
        return [_restricted(*pair) for pair in zip(value, stored, strict=True)]
    return value


def changes_since(folder: str, config: TrainConfig) -> Changes:
    """Return the changes from the settings of an earlier start of the run, if any."""
    stored = _earlier_settings(folder)
    return Changes((), ()) if stored is None else compare_settings(stored, config)


def with_stored_versions(folder: str, config: TrainConfig) -> TrainConfig:
    """Return the configuration with the versions of tables that an earlier start of the run read,
    since a table may have later ones now.
    """
    if not storage.exists(folder):
        return config
    stored = _earlier_settings(folder) or {}
    for name in ("train_data", "eval_data"):
        path = getattr(config, name).path
        before = (stored.get(name) or {}).get("path")
        if path is None or before is None:
            continue
        table, version = storage.split_version(before)
        is_same = storage.absolute(table) == storage.absolute(path.rstrip("/"))
        if version is not None and is_same and storage.table_kind(path) is not None:
            config = config.updated(nest({f"{name}.path": before}))
    return config


def _earlier_settings(folder: str) -> dict[str, Any] | None:
    """Return the settings of an earlier start of the run, if any."""
    stored = _stored_settings(folder)
    if stored is None:  # e.g. damaged; every checkpoint has a copy
        checkpoint = latest(folder)
        stored = _stored_settings(checkpoint.path) if checkpoint else None
    return stored


def _stored_settings(folder: str) -> dict[str, Any] | None:
    """Return the settings of the config.yaml in a folder; None if it is missing or damaged."""
    with contextlib.suppress(InputError):
        return stored_settings(Checkpoint(folder))
    return None


def finished_summary(
    folder: str,
    config: TrainConfig,
    changes: Changes,
    note: Callable[[str], None],
) -> dict[str, Any] | None:
    """Return the summary of a finished run, or None if the run must be trained or trained for
    longer. Raises InputError, before any change, if the run has a checkpoint of a training with
    other settings.
    """
    path = storage.join(folder, SUMMARY)
    if not storage.exists(path):
        if changes.rejected and latest(folder) is not None:
            raise _other_settings(folder, changes.rejected)
        if changes.rejected:
            note(
                f"Starting {folder} again with other settings, because no step was saved "
                f"({_listed(changes.rejected)})"
            )
        if changes.accepted:
            note(f"Resuming {folder} with changed settings ({_listed(changes.accepted)})")
        return None
    summary = storage.read_json(path)
    lengths = tuple(change for change in changes.rejected if change.field in LENGTHS)
    rejected = tuple(change for change in changes.rejected if change.field not in LENGTHS)
    if rejected:
        raise _other_settings(folder, rejected)
    free = tuple(change for change in changes.accepted if change.field not in LENGTHS)
    before = with_old(config, free)
    stored = _stored_settings(folder)
    if summary["config_hash"] == run_hash(before, stored):
        _check_same_data(folder, config, summary)
        changed = (
            f"; ignored, because nothing remains to be trained: {_listed(free)}" if free else ""
        )
        note(
            f"{folder} is {FINISHED}; its result follows (choose another --name to train "
            f"again){changed}"
        )
        return summary
    if not is_longer(before, summary, stored):
        changed_lengths = f" ({_listed(lengths)})" if lengths else ""
        raise InputError(
            f"{folder}: finished with another configuration (see its config.yaml). Only steps and "
            f"epochs can be raised{changed_lengths}. Choose another --name"
        )
    note(f"Resuming {folder}, which was finished at step {summary['steps']:,}")
    return None


def listed_data(config: TrainConfig) -> dict[str, Any]:
    """Return the versions of the data; empty for a workload whose paths rayrec cannot list."""
    try:
        return data_versions(config)
    except InputError:  # the workload's `prepare` decides whether the path is valid
        return {}


def _check_same_data(folder: str, config: TrainConfig, summary: Mapping[str, Any]) -> None:
    """Check that the data of a finished run is unchanged, by its listing only. Raises
    InputError.
    """
    stored = summary.get("data")  # None: written by an earlier version, which compared nothing
    if stored == {}:
        return
    try:
        now = data_versions(config)
    except InputError as error:
        difference: str | None = str(error)
    else:
        difference = None if stored is None else data_difference(stored, now)
    if difference is not None:
        raise InputError(
            f"{folder}: {FINISHED}, with other data: {difference}. Choose another --name, such as "
            "one with a date"
        )


def _other_settings(folder: str, rejected: Sequence[Change]) -> InputError:
    return InputError(
        f"{folder}: trained with other settings ({_listed(rejected)}). Use its config.yaml, or "
        "another --name"
    )


def _listed(changes: Sequence[Change]) -> str:
    return ", ".join(map(str, changes))


def is_longer(
    config: TrainConfig,
    summary: Mapping[str, Any],
    stored: Mapping[str, Any] | None = None,
) -> bool:
    """Return whether a configuration equals a finished run's, with `stored` settings, except for
    more steps or epochs. Pure. A run that stopped early would not continue, and counts as a
    different one.
    """
    steps = summary["steps"]
    epochs = round(summary["epochs"] or 0)
    if run_hash(config.replace(steps=steps), stored) == summary["config_hash"]:
        return config.steps is not None and config.steps > steps
    if (
        not epochs
        or run_hash(config.replace(steps=None, epochs=epochs), stored) != summary["config_hash"]
    ):
        return False
    return config.epochs > epochs if config.steps is None else config.steps > steps
