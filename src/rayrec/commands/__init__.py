"""Each command: its flags, the public function it calls, and what it prints (results to standard output, as JSON)."""

from __future__ import annotations

import importlib
from collections.abc import Callable

MODULES = {
    "preparing": ("generate", "fetch", "vocabulary", "preprocess", "adopt", "split", "validate"),
    "training": ("recipes", "config", "plan", "train", "tune", "supervise"),
    "scoring": ("evaluate", "compare", "ensemble", "predict", "export", "serve"),
    "observing": ("top", "report", "profile", "benchmark"),
}
"""Where the function of each verb is; a verb loads its own module alone."""


def command(verb: str) -> Callable[[list[str]], int | None]:
    """The function of a verb: takes the arguments, returns the exit status (None: 0)."""
    (module,) = (module for module, verbs in MODULES.items() if verb in verbs)
    return getattr(importlib.import_module(f"rayrec.commands.{module}"), verb)
