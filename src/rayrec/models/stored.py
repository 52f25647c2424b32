"""From what a file says of a click model to its settings. A file chooses among rayrec's own models, and no other code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec.config import CLASS, InputError
from rayrec.models import ranking
from rayrec.models.base import ClickModelConfig
from rayrec.models.ranking.dlrm import DLRMConfig


def stored_model(
    values: Mapping[str, Any], *, where: str, own: type[ClickModelConfig] | None = None
) -> ClickModelConfig:
    """The settings that `ClickModelConfig.to_dict` gave. `own`: the class of a model that is not rayrec's, where one was given;
    `where`: the file, for messages. Raises InputError for a class that is neither, and for settings that do not fit it."""
    if not isinstance(values, Mapping):
        raise InputError(f"{where}: its network must be a mapping of settings, got {str(values)[:40]!r}")
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
    cls: type[ClickModelConfig] | None = ranking.config_class(name) if "." in name else None
    if cls is None:
        raise InputError(
            f"{where}: its network is {name}, which is not one of rayrec's; give the recipe that it was trained by: "
            "--recipe FILE.py:FUNCTION"
        )
    return cls
