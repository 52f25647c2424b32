"""Private names of Ray, torch and TorchRec that rayrec uses: `ray_compat` and `torch_compat`. No other module uses any."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PrivateName:
    """A private name of a library."""

    module: str
    attribute: str | None
    """Name within the module; None for the module itself."""
    reason: str
    """Why rayrec needs it, in one line."""


def resolve(names: Mapping[str, PrivateName], name: str, asking: str) -> Any:
    """The object that `names` lists as `name`; imports its module. Raises AttributeError, which names the module `asking`, if
    the table lacks the name, and ImportError if the installed version of the library lacks it."""
    if name not in names:
        raise AttributeError(f"module {asking!r} has no attribute {name!r}")
    private = names[name]
    module = importlib.import_module(private.module)
    if private.attribute is None:
        return module
    try:
        return getattr(module, private.attribute)
    except AttributeError:
        raise ImportError(f"cannot import name {private.attribute!r} from {private.module!r}") from None
