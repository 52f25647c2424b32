"""Checks of settings that several models have. Loads no torch."""

from __future__ import annotations

from rayrec.config import InputError
from rayrec.models.base import ClickModelConfig


def check_sizes(config: ClickModelConfig, *fields: str, empty: bool = True) -> None:
    """Check that the fields are sizes of layers, each at least 1; `empty`: there may be none. Raises InputError."""
    for field in fields:
        sizes = getattr(config, field)
        if any(size < 1 for size in sizes) or not (sizes or empty):
            number = "" if empty else "one or more "
            raise InputError(f"{type(config).__name__}.{field}: {sizes} needs {number}sizes of at least 1")


def check_counts(config: ClickModelConfig, *fields: str, least: int = 1) -> None:
    """Check that each field is at least `least`. Raises InputError."""
    for field in fields:
        if getattr(config, field) < least:
            raise InputError(f"{type(config).__name__}.{field}: {getattr(config, field)} must be at least {least}")


def check_dropouts(config: ClickModelConfig, *fields: str) -> None:
    """Check that each field is a share of activations below 1. Raises InputError."""
    for field in fields:
        if not 0 <= getattr(config, field) < 1:
            raise InputError(
                f"{type(config).__name__}.{field}: {getattr(config, field)} must be at least 0 and below 1"
            )
