"""rayrec: from raw logs to a served model on Ray. Names are imported when first used; `import rayrec` loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayrec import recipes
    from rayrec.api import (
        doctor,
        evaluate,
        fetch,
        generate,
        plan,
        predict,
        preprocess,
        supervise,
        train,
        validate,
        vocabulary,
    )
    from rayrec.config import InputError
    from rayrec.launch.supervision import SuperviseConfig
    from rayrec.prepare.config import PreparationConfig
    from rayrec.prepare.validate import Gates
    from rayrec.schema import Schema

__version__ = "0.1.0"
__all__ = [
    "Gates",
    "InputError",
    "PreparationConfig",
    "Schema",
    "SuperviseConfig",
    "doctor",
    "evaluate",
    "fetch",
    "generate",
    "plan",
    "predict",
    "preprocess",
    "recipes",
    "supervise",
    "train",
    "validate",
    "vocabulary",
]

_HOMES = {
    "Gates": "rayrec.prepare.validate",
    "InputError": "rayrec.config",
    "PreparationConfig": "rayrec.prepare.config",
    "Schema": "rayrec.schema",
    "SuperviseConfig": "rayrec.launch.supervision",
    "recipes": "rayrec.recipes",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rayrec' has no attribute {name!r}")
    if name == "recipes":
        return importlib.import_module("rayrec.recipes")
    return getattr(importlib.import_module(_HOMES.get(name, "rayrec.api")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
