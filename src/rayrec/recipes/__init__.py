"""Recipes: functions that return the complete configuration of a run. One file a family."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from rayrec.config import InputError
from rayrec.recipes.clicks import clicks
from rayrec.recipes.criteo import criteo_demo, criteo_full, criteo_kaggle, criteo_small, mlperf_dcnv2, mlperf_dlrm
from rayrec.workloads.base import TrainConfig

__all__ = [
    "ALL",
    "clicks",
    "criteo_demo",
    "criteo_full",
    "criteo_kaggle",
    "criteo_small",
    "load_config",
    "mlperf_dcnv2",
    "mlperf_dlrm",
]

ALL: dict[str, Callable[[], TrainConfig]] = {
    recipe.__name__: recipe
    for recipe in (criteo_demo, criteo_kaggle, criteo_small, criteo_full, mlperf_dlrm, mlperf_dcnv2, clicks)
}
"""Every recipe by its name."""

PUBLISHED = {
    "criteo_kaggle": "criteo_kaggle",
    "criteo_small": "criteo_small",
    "criteo_full": "criteo_full",
    "mlperf_dlrm": "criteo_full",
    "mlperf_dcnv2": "criteo_full",
}
"""The published data set (see `rayrec fetch`) that a recipe's train_data.files are of."""


def load_config(text: str) -> TrainConfig:
    """The configuration that YAML text holds, as `TrainConfig.to_yaml` wrote it or a part of it.

    The recipe it names supplies every class and whatever the text leaves out; the text supplies plain values only.
    Raises InputError for text that is no such YAML, an unknown recipe, and unknown or unfit fields.
    """
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise InputError(f"config: not YAML ({why}); `rayrec config RECIPE` prints one") from None
    if not isinstance(values, dict) or "recipe" not in values:
        raise InputError(f"config: names no recipe; add a line `recipe: NAME` with one of {', '.join(ALL)}")
    name = values["recipe"]
    if not isinstance(name, str) or name not in ALL:
        near = difflib.get_close_matches(str(name), ALL, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise InputError(f"config: no recipe {name!r}; {hint}there are {', '.join(ALL)}")
    for field in values:
        if not isinstance(field, str):
            raise InputError(f"config: {field!r} is no field's name")
    return ALL[name]().updated(values)
