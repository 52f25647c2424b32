"""Recipes: functions that return a complete run configuration. Files in this folder are discovered
automatically.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Sequence

from rayrec.config import InputError
from rayrec.humanize import one_line
from rayrec.imports import function_in_file, is_in_file
from rayrec.workloads.base import TrainConfig

Recipe = Callable[..., TrainConfig]
"""Function whose arguments have defaults. The first is the training data path."""

ALL: dict[str, Recipe] = {}
"""All recipes by name."""
PUBLISHED: dict[str, str] = {}
"""Published data set (see `rayrec fetch`) of each recipe with train_data.files."""


def _read_folder() -> None:
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        ALL.update({recipe.__name__: recipe for recipe in module.RECIPES})
        PUBLISHED.update(getattr(module, "PUBLISHED", {}))
    globals().update(ALL)  # also replaces modules with the name of a recipe


_read_folder()


def __getattr__(name: str) -> Recipe:
    """Raise AttributeError. For type checkers, `rayrec.recipes.NAME` is a recipe."""
    raise AttributeError(f"module 'rayrec.recipes' has no recipe '{name}'")


def load_config(
    text: str, *, recipe: Recipe | Sequence[Recipe] | None = None, source: str = "config"
) -> TrainConfig:
    """Load a configuration from YAML text as written by `TrainConfig.to_yaml`, or a part of it. The
    recipe it names supplies all classes and defaults. The text supplies plain values only. `recipe`
    is a recipe defined outside rayrec, or several to choose from. `source` is named in errors.
    Raises InputError for invalid YAML, an unknown or different recipe, and invalid fields.
    """
    import yaml

    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date
        raise InputError(
            f"{source}: not YAML ({one_line(error)}). `rayrec config RECIPE` prints a valid file."
        ) from None
    if not isinstance(values, dict) or "recipe" not in values:
        raise InputError(
            f"{source}: must name a recipe. Add a line `recipe: NAME` with one of {', '.join(ALL)}."
        )
    for field in values:
        if not isinstance(field, str):
            raise InputError(f"{source}: field names must be strings, got {field!r}")
    default = _defaults(values["recipe"], recipe, source)
    try:
        return default.updated(values)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _defaults(name: object, recipe: Recipe | Sequence[Recipe] | None, source: str) -> TrainConfig:
    """Return the configuration of the recipe with a name: one of those given, else a built-in one.
    Raises InputError.
    """
    defaults = [custom() for custom in ([recipe] if callable(recipe) else recipe or ())]
    for config in defaults:
        if config.recipe == name:
            return config
    # A single recipe must be the one; of several, the text may name a built-in one instead.
    if defaults and (callable(recipe) or str(name) not in ALL):
        names = ", ".join(repr(config.recipe) for config in defaults)
        raise InputError(f"{source}: belongs to recipe {name!r}, got recipe {names}")
    return _built_in(name, where=f"{source}: ")()


def find(name: str) -> Recipe:
    """Return the recipe of a name, or of FILE.py:FUNCTION, a user function without arguments.
    Raises InputError if not found.
    """
    return function_in_file(name, returns=TrainConfig) if is_in_file(name) else _built_in(name)


def _built_in(name: object, *, where: str = "") -> Recipe:
    if isinstance(name, str) and name in ALL:
        return ALL[name]
    close_matches = difflib.get_close_matches(str(name), ALL, n=1)
    hint = f"did you mean '{close_matches[0]}'? " if close_matches else ""
    raise InputError(
        f"{where}no recipe {name!r}; {hint}Use one of {', '.join(ALL)}, or FILE.py:FUNCTION."
    )
