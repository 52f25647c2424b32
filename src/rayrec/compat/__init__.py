"""Private names of Ray, torch and TorchRec used by rayrec: `ray_compat` and `torch_compat`. No
other module uses any.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class PrivateName:
    """Private name of a library, and the reason for its use."""

    module: str
    attribute: str | None
    """Name within the module. None for the module itself."""
    reason: str
    """Reason why rayrec needs it, in one line."""


def read_names(library: str) -> dict[str, PrivateName]:
    """Return a library's entries of private_names.json by their last component, without leading
    underscores.
    """
    stored = json.loads(resources.files(__package__).joinpath("private_names.json").read_text())
    names = [PrivateName(*entry) for entry in stored[library]]
    return {(each.attribute or each.module.rpartition(".")[2]).lstrip("_"): each for each in names}


def resolve(names: Mapping[str, PrivateName], name: str, asking: str) -> Any:
    """Import and return the object listed as `name`. Raises AttributeError for the module `asking`
    if it is not listed, and ImportError if the installed library version lacks it.
    """
    if name not in names:
        raise AttributeError(f"module {asking!r} has no attribute {name!r}")
    private = names[name]
    module = importlib.import_module(private.module)
    if private.attribute is None:
        return module
    try:
        return getattr(module, private.attribute)
    except AttributeError:
        raise ImportError(
            f"cannot import name {private.attribute!r} from {private.module!r}"
        ) from None
