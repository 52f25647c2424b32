"""Scripts of benchmarks/ and tools/, imported."""

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def script(folder: str, name: str) -> Any:
    """Import a script, which may import others of its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / folder))
        return importlib.import_module(name)
