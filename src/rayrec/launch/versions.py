"""Versions of everything that decides a result."""

from __future__ import annotations

import platform
from importlib import metadata

DISTRIBUTIONS = ("rayrec", "torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "ray", "numpy", "pyarrow")


def versions() -> dict[str, str]:
    """Installed versions by distribution, and Python's; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
