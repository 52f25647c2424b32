"""Where a result comes from: installed versions, the commit of the code, the machine, and the command."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata

from rayrec.observe.event_lines import command_line

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


_GIT_S = 5.0


def origin() -> dict[str, str | None]:
    """`commit` of the working directory's repository, with `+` for uncommitted changes, None outside of one; `machine`: name,
    CPUs and processor; `command`: the command line, without secrets."""
    return {"commit": _commit(os.getcwd()), "machine": _machine(), "command": command_line(sys.argv)}


def _commit(folder: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    try:
        head, changes = (
            subprocess.run([git, "-C", folder, *arguments], capture_output=True, text=True, timeout=_GIT_S, check=True)
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):  # no repository, or one that git does not trust
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def _machine() -> str:
    return f"{platform.node()}, {os.cpu_count()} CPUs ({platform.machine()}), {platform.system()} {platform.release()}"
