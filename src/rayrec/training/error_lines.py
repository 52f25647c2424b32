"""An error as one line, for events and the terminal. Loads neither Ray nor torch."""

from __future__ import annotations

from rayrec.config import InputError


def line_of(error: BaseException) -> str:
    """An InputError's own text, which says all; else the error's class and the last line of its text."""
    if isinstance(error, InputError):
        return " ".join(str(error).split())
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
