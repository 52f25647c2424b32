"""Recipes: functions that return the complete configuration of a run. One file a family, found by being in this folder."""

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from rayrec.config import InputError
from rayrec.imports import function_in_file, is_in_file
from rayrec.workloads.base import TrainConfig

Recipe = Callable[..., TrainConfig]
"""Its arguments have defaults; the first is the path of the training data."""

ALL: dict[str, Recipe] = {}
"""Every recipe by its name."""
PUBLISHED: dict[str, str] = {}
"""The published data set (see `rayrec fetch`) that a recipe's train_data.files are of."""


def _read_folder() -> None:
    for found in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{found.name}")
        ALL.update({recipe.__name__: recipe for recipe in module.RECIPES})
        PUBLISHED.update(getattr(module, "PUBLISHED", {}))
    globals().update(ALL)  # also where a file has the name of its recipe: importing it put the module there


_read_folder()


def __getattr__(name: str) -> Recipe:
    """`rayrec.recipes.NAME` is the recipe of that name."""
    if name in ALL:
        return ALL[name]
    raise AttributeError(f"module 'rayrec.recipes' has no recipe '{name}'")


def load_config(text: str, *, recipe: Recipe | None = None, source: str = "config") -> TrainConfig:
    """The configuration that YAML text holds, as `TrainConfig.to_yaml` wrote it or a part of it.

    The recipe it names supplies every class and whatever the text leaves out; the text supplies plain values only. A recipe
    that is not rayrec's own is passed as `recipe`; messages name `source`. Raises InputError for text that is no such YAML, an
    unknown recipe or another than `recipe`, and unknown or unfit fields.
    """
    import yaml

    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        why = " ".join(str(error).split())
        raise InputError(f"{source}: not YAML ({why}); `rayrec config RECIPE` prints one") from None
    if not isinstance(values, dict) or "recipe" not in values:
        raise InputError(f"{source}: names no recipe; add a line `recipe: NAME` with one of {', '.join(ALL)}")
    for field in values:
        if not isinstance(field, str):
            raise InputError(f"{source}: {field!r} is no field's name")
    default = recipe() if recipe is not None else _named(values["recipe"], source)
    if default.recipe != values["recipe"]:
        raise InputError(f"{source}: is one of recipe {values['recipe']!r}, and the recipe given is {default.recipe!r}")
    try:
        return default.updated(values)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _named(name: Any, source: str) -> TrainConfig:
    """The configuration of one of rayrec's own recipes, which the text of `source` names."""
    if not isinstance(name, str) or name not in ALL:
        near = difflib.get_close_matches(str(name), ALL, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise InputError(
            f"{source}: no recipe {name!r}; {hint}there are {', '.join(ALL)}; one of your own goes by its file: FILE.py:FUNCTION"
        )
    return ALL[name]()


def find(name: str) -> Recipe:
    """The recipe of a name, or of FILE.py:FUNCTION, a function without arguments in a file of the user's, which is run.

    Raises InputError where there is none.
    """
    if is_in_file(name):
        return function_in_file(name, returns=TrainConfig)
    if name not in ALL:
        near = difflib.get_close_matches(name, ALL, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(ALL)}, and FILE.py:FUNCTION"
        raise InputError(f"no recipe '{name}'; {hint}")
    return ALL[name]
