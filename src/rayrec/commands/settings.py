"""User settings of a configuration: short names, and texts for data paths, schema files and model names."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from rayrec.config import CLASS, Config, InputError

Settings = TypeVar("Settings", bound=Config)

ALIASES = {
    "data": ("train_data.path",),
    "schema": ("workload.schema",),
    "model": ("workload.model",),
    "lr": ("workload.dense_optimizer.learning_rate", "workload.optimizer.learning_rate"),
    "table_lr": ("workload.sparse_optimizer.learning_rate",),
    "workers": ("scaling.num_workers",),
    "gpus": ("scaling.num_workers", "scaling.use_gpu"),
}
"""Short names of a recipe's settings. The first existing path is used; gpus sets both of its settings."""
WHOLE = ""
"""Key of a text value for a nested configuration that also has other settings."""
_WHOLE_METAVARS = {"Schema": "FILE", "ClickModelConfig": "NAME", "DataConfig": "PATH"}


def whole_metavar(cls: type[Config]) -> str:
    """Return the metavar if a text may replace a configuration of this class, otherwise an empty string."""
    return next((_WHOLE_METAVARS[base.__name__] for base in cls.__mro__ if base.__name__ in _WHOLE_METAVARS), "")


def aliased(config: Config, name: str) -> str | None:
    """Return the setting with a short name, or None if the configuration lacks it."""
    return next((path for path in ALIASES.get(name, ()) if _has(config, path)), None)


def _has(config: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(config, name):
            return False
        config = getattr(config, name)
    return True


def settings_of(config: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings with short or dotted names (`scaling.num_workers`) to nested settings."""
    return nest(dict(each for name, value in changes.items() for each in _written_out(config, name, value)))


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings with dotted names to nested settings."""
    nested: dict[str, Any] = {}
    for path, value in settings.items():
        *names, last = path.split(".")
        place = nested
        for name in names:
            inner = place.setdefault(name, {})
            if not isinstance(inner, dict):
                inner = place[name] = {WHOLE: inner}
            place = inner
        if isinstance(place.get(last), dict) and not isinstance(value, Mapping):
            place[last][WHOLE] = value
        else:
            place[last] = value
    return nested


def _written_out(config: Config, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if name not in ALIASES or hasattr(config, name):
        yield name, value
        return
    path = aliased(config, name)
    if path is None:
        raise InputError(f"{name}: recipe {getattr(config, 'recipe', '')} has no {ALIASES[name][0]}. Omit it.")
    yield path, value
    if name == "gpus":
        yield "scaling.use_gpu", True


def updated(config: Settings, changes: Mapping[str, Any]) -> Settings:
    """Update a configuration like `Config.updated`, but also accept a text for data (path), a schema (file) and a click model
    (name, or several: `dlrm+finalnet`). Items of a configuration list are addressed by number."""
    return config.updated({name: _value(config, name, value) for name, value in changes.items()})


def _value(config: Config, name: str, value: Any) -> Any:
    current = getattr(config, name, None)
    if isinstance(current, Config) and (isinstance(value, str) or (isinstance(value, Mapping) and WHOLE in value)):
        whole, inner = (value, {}) if isinstance(value, str) else (value[WHOLE], {**value})
        inner.pop(WHOLE, None)
        return updated(_read(current, name, whole), inner)
    if isinstance(value, Mapping) and isinstance(current, Config):
        return {key: _value(current, key, inner) for key, inner in value.items()}
    if isinstance(value, Mapping) and isinstance(current, tuple):
        return tuple(updated(item, value.get(str(number), {})) for number, item in enumerate(current))
    return value


def _read(current: Config, name: str, text: str) -> Config:
    kind = whole_metavar(type(current))
    if kind == "FILE":
        from rayrec import storage
        from rayrec.schema import load_schema

        return load_schema(storage.read_text(text), text)
    if kind == "NAME":
        return _model(current, text)
    if kind == "PATH":
        return current.updated({"path": text})
    raise InputError(f"{name}: must be settings of {type(current).__name__}, got {text!r}. Set its fields.")


def _model(current: Any, names: str) -> Config:
    """Replace the click model by others from their names, with several as an ensemble. Keeps the common settings."""
    from rayrec import models
    from rayrec.models.ranking.ensemble import EnsembleConfig

    kinds: list[Any] = []
    for name in names.split("+"):
        kind = models.config_class(name) if name in models.names() else None
        if kind is None:
            near = difflib.get_close_matches(name, models.names(), n=1)
            known = f". Use one of {', '.join(models.names())}, or a recipe with a custom model."
            raise InputError(f"model: unknown model {name}" + (f", did you mean {near[0]}?" if near else known))
        kinds.append(kind)
    made: Config = EnsembleConfig.of_kinds(kinds, current) if kinds[1:] else current.updated({CLASS: names})
    return made
