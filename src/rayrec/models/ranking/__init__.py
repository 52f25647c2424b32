"""Click models, one file each: a configuration (`rayrec.models.base.ClickModelConfig`) and the network it builds.

For scoring it is built on the meta device, so a network computes constants that are not saved when it needs them, not when it is
built. A network of the user's own need not.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def names() -> list[str]:
    """Of the models: of their files."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__))


def config_class(name: object) -> type[Any] | None:
    """The class of a model's configuration, by the model's name (`finalnet`) or its own with its module, as configurations are
    stored; None if rayrec has no such model. Nothing but a file of this folder is imported."""
    known = names()
    if name in known:
        module = importlib.import_module(f"{__name__}.{name}")
        classes = [value for value in vars(module).values() if _is_config(value, module.__name__)]
        return classes[0] if len(classes) == 1 else None
    module_name, _, qualname = str(name).rpartition(".")
    if module_name.rpartition(".")[0] != __name__ or module_name.rpartition(".")[2] not in known:
        return None
    cls = getattr(importlib.import_module(module_name), qualname, None)
    return cls if _is_config(cls, module_name) else None


def _is_config(value: object, module: str) -> bool:
    from rayrec.config import Config

    return isinstance(value, type) and issubclass(value, Config) and value.__module__ == module
