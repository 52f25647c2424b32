"""User settings of a configuration: short names, and texts for data paths, schema files and model
names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any, TypeVar

from rayrec.config import CLASS, TEXT, Config, InputError, nest, packaged_json, suggest

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig

Settings = TypeVar("Settings", bound=Config)

_SHORT_NAMES = packaged_json(__package__, "short_names.json")
ALIASES: dict[str, list[str]] = _SHORT_NAMES["paths"]
"""Short names of a recipe's settings. The first existing path is used."""
COMPANIONS: dict[str, dict[str, Any]] = _SHORT_NAMES["companions"]
"""Further settings of a short name, with their value. None: the value of the short name."""
_TEXT_METAVARS = {"Schema": "FILE", "ClickModelConfig": "NAME", "DataConfig": "PATH"}


def text_metavar(cls: type[Config]) -> str:
    """Return the metavar if a text may replace a configuration of this class, otherwise an empty
    string.
    """
    return next(
        (_TEXT_METAVARS[base.__name__] for base in cls.__mro__ if base.__name__ in _TEXT_METAVARS),
        "",
    )


def resolve_alias(config: Config, name: str) -> str | None:
    """Return the setting with a short name, or None if the configuration lacks it, or one of
    several.
    """
    # Recipes differ in their fields: `--lr` is the dense optimizer's where tables have their own.
    path = next((path for path in ALIASES.get(name, ()) if _has(config, path)), None)
    return path if all(_has(config, companion) for companion in COMPANIONS.get(name, ())) else None


def _has(config: Config, path: str) -> bool:
    return value_at(config, path, default=MISSING) is not MISSING


def value_at(config: Any, path: str, *, default: Any = None) -> Any:
    """Return the setting at a dotted path, or `default` if the configuration lacks it."""
    for name in path.split("."):
        if not hasattr(config, name):
            return default
        config = getattr(config, name)
    return config


def nest_settings(config: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings with short or dotted names (`scaling.num_workers`) to nested settings."""
    return nest(
        dict(each for name, value in changes.items() for each in _expand_alias(config, name, value))
    )


def _expand_alias(config: Config, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if name not in ALIASES or hasattr(config, name):
        yield name, value
        return
    path = resolve_alias(config, name)
    if path is None:
        raise InputError(
            f"{name}: recipe {getattr(config, 'recipe', '')} has no {ALIASES[name][0]}. Omit it."
        )
    yield path, value
    for companion, fixed in COMPANIONS.get(name, {}).items():
        yield companion, value if fixed is None else fixed


def updated(config: Settings, changes: Mapping[str, Any]) -> Settings:
    """Update a configuration like `Config.updated`, but also accept a text for data (path), a
    schema (file) and a click model (name, or several: `dlrm+finalnet`). Items of a configuration
    list are addressed by number.
    """
    return config.updated({name: _value(config, name, value) for name, value in changes.items()})


# What a value may be, by the kind of the current setting:
#
#   configuration, a text              read by its kind: schema file, model name or data path
#   configuration, a mapping + TEXT    the text, then settings of what it names
#   configuration, a mapping           settings, each by these rules
#   list of configurations, a mapping  settings by number; the others stay
#   anything else                      the value itself, which `Config.updated` checks
def _value(config: Config, name: str, value: Any) -> Any:
    current = getattr(config, name, None)
    if isinstance(current, Config) and (
        isinstance(value, str) or (isinstance(value, Mapping) and TEXT in value)
    ):
        text, inner = (value, {}) if isinstance(value, str) else (value[TEXT], {**value})
        inner.pop(TEXT, None)
        return updated(_read(current, name, text), inner)
    if isinstance(value, Mapping) and isinstance(current, Config):
        return {key: _value(current, key, inner) for key, inner in value.items()}
    if isinstance(value, Mapping) and isinstance(current, tuple):
        return tuple(
            updated(item, value.get(str(number), {})) for number, item in enumerate(current)
        )
    return value


def _read(current: Config, name: str, text: str) -> Config:
    kind = text_metavar(type(current))
    if kind == "FILE":
        from rayrec.workloads.recsys.settings import read_schema

        return read_schema(text)
    if kind == "NAME":
        return _model(current, text)
    if kind == "PATH":
        return current.updated({"path": text})
    raise InputError(
        f"{name}: must be settings of {type(current).__name__}, got {text!r}. Set its fields."
    )


def _model(current: Any, names: str) -> Config:
    """Replace the click model by others from their names, with several as an ensemble. Keeps the
    common settings.
    """
    from rayrec import models
    from rayrec.models.ranking.ensemble import EnsembleConfig

    kinds: list[Any] = []
    for name in names.split("+"):
        kind = models.config_class(name) if name in models.names() else None
        if kind is None:
            available = f"use one of {', '.join(models.names())}, or a recipe with a custom model."
            hint = suggest(name, models.names(), otherwise=available)
            raise InputError(f"model: unknown model {name}, {hint}")
        kinds.append(kind)
    model: Config = (
        EnsembleConfig.from_kinds(kinds, current) if kinds[1:] else current.updated({CLASS: names})
    )
    return model


# How a text is understood, by the first rule that fits:
#
#   FILE.py:FUNCTION              a recipe of the user's file
#   ends in .yaml, .yml or .json  a configuration file
#   has a slash, or is a folder   a run, which resumes; anything else there is probably data
#   names a file                  data, which the error explains
#   otherwise                     the name of a recipe
def named_configuration(text: str) -> TrainConfig:
    """Return the configuration of a recipe's name, FILE.py:FUNCTION, FILE.yaml, or the folder of a
    run, which then resumes.

    Raises InputError if there is no such recipe, file or run.
    """
    from rayrec import recipes, storage
    from rayrec.checkpoint import runs_beside
    from rayrec.imports import is_in_file

    if is_in_file(text):
        return recipes.find(text)()
    if text.endswith((".yaml", ".yml", ".json")):
        return recipes.load_config(storage.read_text(text), source=text)
    folder = text.rstrip("/")
    if "/" in text or os.path.isdir(text):
        path = storage.join(folder, "config.yaml")
        if not storage.exists(path):
            raise InputError(
                f"{folder}: not a recipe, and no run (no config.yaml). {_for_data(folder)}. "
                f"{runs_beside(folder)}"
            )
        parent, _, name = storage.absolute(folder).rpartition("/")
        return recipes.load_config(storage.read_text(path), source=path).replace(
            storage_path=parent, name=name
        )
    if os.path.isfile(text):
        raise InputError(f"{text}: not a recipe. {_for_data(text)}")
    return recipes.find(text)()


def _for_data(path: str) -> str:
    from rayrec.data.formats.content import is_criteo_text

    if is_criteo_text(path):
        return f"For data: rayrec train criteo_demo --data {path}"
    return (
        f"For data: rayrec schema {path} --out schema.yaml, then rayrec train clicks --schema "
        f"schema.yaml --data {path}"
    )
