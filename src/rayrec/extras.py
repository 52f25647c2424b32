"""Optional packages: what to say where one is not installed."""

from __future__ import annotations

import importlib.util
from typing import Final

from rayrec.config import InputError

LANGUAGE: Final = ("streaming", "tokenizers", "transformers", "accelerate")
"""Modules of the extra `language`."""


def require_language(*modules: str) -> None:
    """Raises InputError, with what mends it, where modules of the extra `language` (default: any) are not installed."""
    for module in modules or LANGUAGE:
        if importlib.util.find_spec(module) is None:
            raise InputError(f"{module} is not installed; pip install 'rayrec[language]'")
