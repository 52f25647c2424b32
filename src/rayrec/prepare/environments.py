"""Python environments of their own, for programs whose pins do not fit beside ours; made once, on first use."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import resources

from rayrec.config import InputError

_COMPLETE = "complete"
"""File that is written last."""


def environment(name: str, *, folder: str, note: Callable[[str], None]) -> str:
    """The interpreter of environment `name`, whose distributions NAME.lock beside this file lists; it is made in a folder
    below `folder`, named by them, where it is not there yet.

    Two processes that want it at once make it once. Raises InputError where pip cannot install it.
    """
    lock = resources.files("rayrec.prepare").joinpath(f"{name}.lock").read_text()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    key = hashlib.sha256(f"{sys.executable}\0{version}\0{lock}".encode()).hexdigest()[:12]
    place = os.path.join(folder, f"{name}-{key}")
    python = os.path.join(place, "bin", "python")
    if os.path.exists(os.path.join(place, _COMPLETE)):
        return python
    os.makedirs(folder, exist_ok=True)
    with open(place + ".lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if os.path.exists(os.path.join(place, _COMPLETE)):
            return python
        note(f"making the Python environment of {name} in {place} (once)")
        shutil.rmtree(place, ignore_errors=True)
        requirements = os.path.join(folder, f"{name}-{key}.txt")
        with open(requirements, "w") as file:
            file.write(lock)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
        for command in ([sys.executable, "-m", "venv", place], [*pip, "-r", requirements]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = [
                    line for line in done.stderr.splitlines() if line.startswith("ERROR")
                ] or done.stderr.splitlines()
                why = lines[0].strip() if lines else f"exit status {done.returncode}"
                raise InputError(
                    f"{place}: {' '.join(command[1:4])} failed ({why}); see what pip can reach, and call again"
                )
        with open(os.path.join(place, _COMPLETE), "w"):
            pass
    return python
