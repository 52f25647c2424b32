"""Private names of Ray, torch and TorchRec used by rayrec: `ray_compat` and `torch_compat`. No other module uses any."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PrivateName:
    """Private name of a library, and the reason for its use."""

    module: str
    attribute: str | None
    """Name within the module. None for the module itself."""
    reason: str
    """Reason why rayrec needs it, in one line."""


def index(*names: PrivateName) -> dict[str, PrivateName]:
    """Return the names by their last component, without leading underscores."""
    return {(each.attribute or each.module.rpartition(".")[2]).lstrip("_"): each for each in names}


def resolve(names: Mapping[str, PrivateName], name: str, asking: str) -> Any:
    """Import and return the object listed as `name`. Raises AttributeError for the module `asking` if it is not listed, and
    ImportError if the installed library version lacks it."""
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
