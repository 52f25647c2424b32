"""Ranking models in `ranking`, of trees in `boosted`, and retrieval models in `retrieval`, one file
each, and their common code.
"""

import importlib
import pkgutil
from functools import cache
from typing import Any, Final

FAMILIES: Final = ("ranking", "retrieval", "boosted")
"""Model folders."""


def names(*families: str) -> list[str]:
    """Return the names of all models of the families, which are their file names. Default: all
    families.
    """
    return sorted(name for name, family in _families().items() if family in (families or FAMILIES))


def config_class(name: object) -> type[Any] | None:
    """Return a model's class from its name (`finalnet`) or stored path, None if unknown. Only
    imports the families' files.
    """
    families = _families()
    if name in families:
        module = importlib.import_module(f"{__name__}.{families[str(name)]}.{name}")
        classes = [value for value in vars(module).values() if _is_config(value, module.__name__)]
        return classes[0] if len(classes) == 1 else None
    module_name, _, qualname = str(name).rpartition(".")
    folder, _, file = module_name.rpartition(".")
    if folder != f"{__name__}.{families.get(file)}":
        return None
    cls = getattr(importlib.import_module(module_name), qualname, None)
    return cls if _is_config(cls, module_name) else None


@cache
def _families() -> dict[str, str]:
    families: dict[str, str] = {}
    for family in FAMILIES:
        folder = importlib.import_module(f"{__name__}.{family}")
        families |= {file.name: family for file in pkgutil.iter_modules(folder.__path__)}
    return families


def _is_config(value: object, module: str) -> bool:
    from rayrec.config import Config

    return isinstance(value, type) and issubclass(value, Config) and value.__module__ == module
