"""Finds out what is installed, whether it imports, what the machine has, and where a result comes from; judges nothing."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rayrec import machine
from rayrec.observe.event_lines import command_line

PROBED = ("torch", "fbgemm_gpu", "torchrec", "ray")
"""Modules that are imported to see whether they do; the first three each need those before them."""
FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")
"""The distributions that bring the module fbgemm_gpu."""
EXTRAS = ("spark", "language", "mlflow", "wandb", "onnx")
"""rayrec's extras that add something to it; the first distribution that each names tells whether it is meant to be there."""
UNNEEDED = {
    "mosaicml-streaming": frozenset(
        {
            # Of stores that are not read through it: rayrec.storage fetches the shards.
            "azure-identity", "azure-storage-blob", "azure-storage-file-datalake", "google-cloud-storage", "oci", "paramiko",
            "matplotlib",  # of its simulator
            "torchvision",  # of streaming.vision, which data/text/mds.py keeps out; beside a CPU build of torch pip's build dies
            "numpy",  # below 2.2, which nothing in it depends on
        }
    )
}  # fmt: skip
"""Requirements in a distribution's metadata that rayrec's imports of it do not need, by distribution: left out of the lock,
and ignored by the doctor."""
_PROBE_TIMEOUT_S = 120.0
"""For one process; a cold import of TorchRec takes 15 s."""

# Runs apart, because importing a build that does not fit may end the process.
_PROBE = """
import importlib, json, sys, time
for name in sys.argv[1:]:
    start = time.perf_counter()
    module = importlib.import_module(name)
    facts = {"version": str(getattr(module, "__version__", "")), "import_s": time.perf_counter() - start}
    if name == "torch":
        facts["cuda_build"] = module.version.cuda
        facts["cuda_devices"] = module.cuda.device_count()
    print("\\n" + json.dumps({"module": name, "facts": facts}), flush=True)
"""


@dataclass(frozen=True)
class Installed:
    """A distribution as its metadata tells it."""

    version: str
    requires: tuple[str, ...] = ()
    holds_fbgemm: bool = False
    """Whether it brings the module fbgemm_gpu; packaging/fbgemm-gpu-cpu, which only has the name, does not."""


@dataclass(frozen=True)
class Probe:
    """What came of importing a module in a process of its own."""

    ok: bool
    version: str = ""
    import_s: float = 0.0
    error: str = ""
    """The last line of what the process said, or how it ended."""
    cuda_build: str | None = None
    """torch only: the CUDA version it was built for."""
    cuda_devices: int = 0
    """torch only: CUDA devices it can use."""


@dataclass(frozen=True)
class Machine:
    """What Ray and training will have."""

    python: str
    interpreter: str
    """Its path."""
    platform: str
    cpu_cores: int
    """That this process may run on."""
    memory_bytes: int
    free_memory_bytes: int
    """Also within the container's limit."""
    shm_bytes: int | None
    """Free in /dev/shm; None where there is no such thing."""
    cuda_devices: tuple[str, ...]
    """As the driver names them; torch is not asked."""


def installed_distributions() -> dict[str, Installed]:
    """Every distribution of this interpreter, by normalized name; of two of one name, the one that imports."""
    from packaging.utils import canonicalize_name

    found: dict[str, Installed] = {}
    for distribution in metadata.distributions():
        told = distribution.metadata
        name, *_ = told.get_all("Name") or [None]
        if name is None or canonicalize_name(name) in found:  # a half-removed distribution has no name
            continue
        holds = canonicalize_name(name) in FBGEMM and any(path.parts[0] == "fbgemm_gpu" for path in distribution.files or ())
        found[canonicalize_name(name)] = Installed(
            version=distribution.version, requires=tuple(distribution.requires or ()), holds_fbgemm=holds
        )
    return found


def probe_all(modules: Sequence[str], *, python: str = sys.executable, timeout_s: float = _PROBE_TIMEOUT_S) -> dict[str, Probe]:
    """Imports modules in other processes: one process until a module fails in it, then another for those after it."""
    probes: dict[str, Probe] = {}
    while len(probes) < len(modules):
        waiting = list(modules[len(probes) :])
        command = [python, "-c", _PROBE, *waiting]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
            output, error = done.stdout, _ending(done.returncode, done.stderr.decode(errors="replace"))
        except subprocess.TimeoutExpired as expired:
            output, error = expired.stdout or b"", f"did not finish within {timeout_s:g} s"
        for line in output.decode(errors="replace").splitlines():
            if line.startswith('{"module": '):
                found = json.loads(line)
                probes[found["module"]] = Probe(ok=True, **found["facts"])
        failed = next((name for name in waiting if name not in probes), None)
        if failed is not None:
            probes[failed] = Probe(ok=False, error=error)
    return probes


def _ending(status: int, stderr: str) -> str:
    """How a process ended: the signal, or the last line of what it said."""
    if status < 0:
        return f"the process died of {signal.Signals(-status).name}"
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    return said[-1] if said else f"the process ended with status {status}"


def this_machine() -> Machine:
    """What this process sees of the machine."""
    memory = machine.memory()
    shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None
    return Machine(
        python=platform.python_version(),
        interpreter=sys.executable,
        platform=f"{platform.system()} {platform.machine()}",
        cpu_cores=machine.usable_cpus(),
        memory_bytes=memory.total,
        free_memory_bytes=memory.available,
        shm_bytes=shm,
        cuda_devices=_cuda_devices(),
    )


def _cuda_devices() -> tuple[str, ...]:
    """CUDA devices as NVIDIA's driver names them; without its tool, the device files."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired):
            return ()
        return tuple(line.strip() for line in done.stdout.splitlines() if line.strip()) if done.returncode == 0 else ()
    return tuple(str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*")))


def kernels_fault() -> str | None:
    """Why the compiled kernels do not load; None where they do."""
    from rayrec.native import library

    try:
        library()
    except (ImportError, OSError) as error:
        return str(error)
    return None


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
