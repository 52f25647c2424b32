"""Installed distributions, import checks, machine resources and the origin of results. Does not
diagnose.
"""

import functools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

from rayrec import host_resources
from rayrec.observe.event_json import command_line

PROBED = ("torch", "fbgemm_gpu", "torchrec", "ray")
"""Modules whose import is checked. Each of the first three needs the ones before it."""
EXTRAS = ("spark", "language", "mlflow", "wandb", "onnx")
"""Functional extras of rayrec. The first distribution of each indicates whether it is installed."""
_PROBE_TIMEOUT_S = 120.0
"""Timeout of one process in seconds. A cold import of TorchRec takes 15 s."""

# Runs in a separate process, because importing an incompatible build may crash.
_PROBE = resources.files(__package__).joinpath("probe.txt").read_text()


@dataclass(frozen=True)
class Probe:
    """Result of importing a module in a separate process."""

    ok: bool
    version: str = ""
    import_s: float = 0.0
    error: str = ""
    """Last line of the process's output, or its exit status."""
    cuda_build: str | None = None
    """CUDA version of the torch build, for torch only."""
    cuda_devices: int = 0
    """Number of usable CUDA devices, for torch only."""


@dataclass(frozen=True)
class Machine:
    """Machine resources for Ray and training."""

    python: str
    interpreter: str
    """Path of the Python executable."""
    platform: str
    cpu_cores: int
    """Number of cores that this process may run on."""
    memory_bytes: int
    free_memory_bytes: int
    """Free memory in bytes, within the container's limit."""
    shm_bytes: int | None
    """Free bytes in /dev/shm. None if it does not exist."""
    cuda_devices: tuple[str, ...]
    """Device names from the driver, without torch."""
    has_java: bool = True
    """Whether Spark finds Java."""


def installed_versions() -> dict[str, str]:
    """Return the versions of this interpreter's distributions by normalized name. Of duplicates,
    the importable one.
    """
    from packaging.utils import canonicalize_name

    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name, *_ = distribution.metadata.get_all("Name") or [None]
        # a partly removed distribution has no name
        if name is not None:
            versions.setdefault(canonicalize_name(name), distribution.version)
    return versions


def requirements() -> list[str]:
    """Return the requirements of the installed rayrec with their markers, or [] if it is only found
    on the path.
    """
    try:
        return metadata.requires("rayrec") or []
    except metadata.PackageNotFoundError:
        return []


def probe_all(
    modules: Sequence[str], *, python: str = sys.executable, timeout_s: float = _PROBE_TIMEOUT_S
) -> dict[str, Probe]:
    """Import modules in separate processes: one process until a module fails, then another one for
    the rest.
    """
    probes: dict[str, Probe] = {}
    while len(probes) < len(modules):
        waiting = list(modules[len(probes) :])
        command = [python, "-c", _PROBE, *waiting]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
            output = done.stdout
            error = _ending(done.returncode, done.stderr.decode(errors="replace"))
        except subprocess.TimeoutExpired as expired:
            output = expired.stdout or b""
            error = f"did not finish within {timeout_s:g} s"
        for line in output.decode(errors="replace").splitlines():
            if line.startswith('{"module": '):
                result = json.loads(line)
                probes[result["module"]] = Probe(ok=True, **result["facts"])
        failed = next((name for name in waiting if name not in probes), None)
        if failed is not None:
            probes[failed] = Probe(ok=False, error=error)
    return probes


def _ending(status: int, stderr: str) -> str:
    """Describe how a process ended: its signal, or the last line of its output."""
    if status < 0:
        return f"the process died of {signal.Signals(-status).name}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with status {status}"


def this_machine() -> Machine:
    """Return the machine as this process sees it."""
    memory = host_resources.memory()
    return Machine(
        python=platform.python_version(),
        interpreter=sys.executable,
        platform=f"{platform.system()} {platform.machine()}",
        cpu_cores=host_resources.usable_cpus(),
        memory_bytes=memory.total,
        free_memory_bytes=memory.available,
        shm_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        cuda_devices=_cuda_devices(),
        has_java=shutil.which("java") is not None or "JAVA_HOME" in os.environ,
    )


def _cuda_devices() -> tuple[str, ...]:
    """Return the CUDA devices of NVIDIA's driver, or the device files if nvidia-smi is not
    installed.
    """
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ()
        if done.returncode != 0:
            return ()
        return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
    return tuple(str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*")))


def kernels_fault() -> str | None:
    """Return the error of loading the compiled kernels, or None."""
    from rayrec.native import library

    try:
        library()
    except (ImportError, OSError) as error:
        return str(error)
    return None


DISTRIBUTIONS = (
    "rayrec",
    "torch",
    "torchrec",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu",
    "ray",
    "numpy",
    "pyarrow",
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed DISTRIBUTIONS."""
    installed = {name: version for name in DISTRIBUTIONS if (version := _version(name))}
    return {"python": platform.python_version(), **installed}


@functools.cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


_GIT_S = 5.0


def origin() -> dict[str, str | None]:
    """Return the origin of a result. `commit`: of the working directory's repository, with `+` for
    uncommitted changes, None without one. `machine`: name, CPUs and processor. `command`: command
    line without secrets.
    """
    host = (
        f"{platform.node()}, {os.cpu_count()} CPUs ({platform.machine()}), {platform.system()} "
        f"{platform.release()}"
    )
    return {"commit": _commit(os.getcwd()), "machine": host, "command": command_line(sys.argv)}


def _commit(folder: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    try:
        head, changes = (
            subprocess.run(
                [git, "-C", folder, *arguments],
                capture_output=True,
                text=True,
                timeout=_GIT_S,
                check=True,
            )
            for arguments in (
                ("rev-parse", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no"),
            )
        )
    except (OSError, subprocess.SubprocessError):  # no repository, or one that git does not trust
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
