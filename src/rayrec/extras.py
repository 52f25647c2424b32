"""Optional packages: what to say where one is not installed."""

from __future__ import annotations

import importlib.util
from typing import Final

from rayrec.config import InputError

LANGUAGE: Final = ("streaming", "tokenizers", "transformers", "accelerate")
"""Modules of the extra `language`."""


def require_language(*modules: str) -> None:
    """Raises InputError, with what fixes it, where modules of the extra `language` (default: any) are not installed."""
    for module in modules or LANGUAGE:
        if importlib.util.find_spec(module) is None:
            raise InputError(f"{module} is not installed; pip install 'rayrec[language]'")


def require(module: str, *, extra: str) -> None:
    """Raises InputError, with what fixes it, where a module of an extra is not installed."""
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{module} is not installed; pip install 'rayrec[{extra}]'")


def require_onnx() -> None:
    """Raises InputError, with what fixes it, where a module of the extra `onnx` is not installed."""
    for module in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(module) is None:
            raise InputError(f"{module} is not installed; pip install 'rayrec[onnx]'")
