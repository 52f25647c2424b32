"""From what a file says of a click model to its settings. A file chooses among rayrec's own models, and no other code."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

import rayrec.models.ranking
from rayrec.config import CLASS, InputError
from rayrec.models.base import ClickModelConfig
from rayrec.models.ranking.dlrm import DLRMConfig


def stored_model(
    values: Mapping[str, Any], *, where: str, own: type[ClickModelConfig] | None = None
) -> ClickModelConfig:
    """The settings that `ClickModelConfig.to_dict` gave. `own`: the class of a model that is not rayrec's, where one was given;
    `where`: the file, for messages. Raises InputError for a class that is neither, and for settings that do not fit it."""
    name = str(values.get(CLASS) or DLRMConfig.__qualname__)
    if own is not None and own.__qualname__.rpartition(".")[2] == name.rpartition(".")[2]:
        cls: type[ClickModelConfig] = own
    elif CLASS not in values:
        cls = DLRMConfig
    else:
        cls = _shipped(name, where)
    try:
        return cls().updated(values)
    except TypeError as error:
        raise InputError(
            f"{where}: {cls.__qualname__} cannot be made of its defaults ({error}); give every field one"
        ) from None


def _shipped(name: str, where: str) -> type[ClickModelConfig]:
    module, _, qualname = name.rpartition(".")
    package = rayrec.models.ranking
    modules = [f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]
    cls = getattr(importlib.import_module(module), qualname, None) if module in modules else None
    if not (isinstance(cls, type) and issubclass(cls, ClickModelConfig) and cls.__module__ == module):
        raise InputError(
            f"{where}: its network is {name}, which is not one of rayrec's; give the recipe that it was trained by: "
            "--recipe FILE.py:FUNCTION"
        )
    return cls
