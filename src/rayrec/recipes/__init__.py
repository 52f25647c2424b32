"""Recipes: functions that return the complete configuration of a run. One file a family."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from rayrec.config import InputError
from rayrec.recipes.clicks import clicks
from rayrec.recipes.criteo import (
    criteo_demo,
    criteo_full,
    criteo_kaggle,
    criteo_kaggle_distilled,
    criteo_small,
    mlperf_dcnv2,
    mlperf_dlrm,
)
from rayrec.recipes.gpt2 import gpt2, gpt2_tiny
from rayrec.recipes.mnist import mnist_resnet18, mnist_resnet18_augmented
from rayrec.workloads.base import TrainConfig

__all__ = [
    "ALL",
    "Recipe",
    "clicks",
    "criteo_demo",
    "criteo_full",
    "criteo_kaggle",
    "criteo_kaggle_distilled",
    "criteo_small",
    "find",
    "gpt2",
    "gpt2_tiny",
    "load_config",
    "mlperf_dcnv2",
    "mlperf_dlrm",
    "mnist_resnet18",
    "mnist_resnet18_augmented",
]

Recipe = Callable[[], TrainConfig]

ALL: dict[str, Recipe] = {
    recipe.__name__: recipe
    for recipe in (
        criteo_demo,
        criteo_kaggle,
        criteo_kaggle_distilled,
        criteo_small,
        criteo_full,
        mlperf_dlrm,
        mlperf_dcnv2,
        clicks,
        mnist_resnet18,
        mnist_resnet18_augmented,
        gpt2_tiny,
        gpt2,
    )
}
"""Every recipe by its name."""

PUBLISHED = {
    "criteo_kaggle": "criteo_kaggle",
    "criteo_kaggle_distilled": "criteo_kaggle",
    "criteo_small": "criteo_small",
    "criteo_full": "criteo_full",
    "mlperf_dlrm": "criteo_full",
    "mlperf_dcnv2": "criteo_full",
}
"""The published data set (see `rayrec fetch`) that a recipe's train_data.files are of."""


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
    file, colon, function = name.rpartition(":")
    if colon and file.endswith(".py"):
        return _own(file, function)
    if name not in ALL:
        near = difflib.get_close_matches(name, ALL, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(ALL)}, and FILE.py:FUNCTION"
        raise InputError(f"no recipe '{name}'; {hint}")
    return ALL[name]


def _own(file: str, function: str) -> Recipe:
    path = os.path.abspath(file)
    if not os.path.isfile(path):
        raise InputError(f"{file}: no such file; a recipe of your own is named FILE.py:FUNCTION")
    name = os.path.splitext(os.path.basename(path))[0]
    module = sys.modules.get(name)
    if module is None:
        module = _imported(name, path)
    elif getattr(module, "__file__", None) != path:
        raise InputError(f"{file}: there is another module '{name}' already; rename the file")
    recipe = getattr(module, function, None)
    if not callable(recipe):
        raise InputError(f"{file}: has no function '{function}'")
    if not isinstance(recipe(), TrainConfig):
        raise InputError(f"{file}: {function}() returns no rayrec.TrainConfig")
    return recipe


def _imported(name: str, path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
