"""Diagnosis of an installation: unfit versions, missing parts, and the commands to fix them."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rayrec.environment import installation
from rayrec.environment.installation import EXTRAS, PROBED, Machine, Probe

_RAY_MEMORY_FRACTION = 0.3
_RAY_SHM_BYTES = 10**10
"""Defaults of Ray's object store: its fraction of free memory, and the size of /dev/shm below which
it warns (ray._private.utils.resolve_object_store_memory).
"""
_GIB = 1 << 30
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")
"""Distributions of the CUDA and CPU build of the module fbgemm_gpu. The first name is also that of
packaging/fbgemm-gpu-cpu, which only requires the second.
"""


@dataclass(frozen=True)
class Finding:
    """Problem of an installation and its fix."""

    kind: Literal["problem", "note"]
    """Severity. A problem prevents rayrec from working, a note does not."""
    text: str
    remedy: tuple[str, ...] = ()
    """Commands, in order."""


@dataclass(frozen=True)
class Report:
    """Results of the diagnosis."""

    machine: Machine
    installed: dict[str, str]
    """Versions of rayrec's direct dependencies, by distribution."""
    extras: dict[str, str]
    """Installation command for each extra that is not installed."""
    probes: dict[str, Probe]
    """Import results by module."""
    kernels: str | None
    """Error of loading the compiled kernels, or None."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether rayrec works: no finding is a problem."""
        return not any(finding.kind == "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def lines(self) -> list[str]:
        """Format a table, followed by the findings."""
        machine = self.machine
        shm = "none" if machine.shm_bytes is None else f"{_gib(machine.shm_bytes)} free"
        rows = {
            "python": f"{machine.python}, {machine.platform}",
            "CPU cores": str(machine.cpu_cores),
            "memory": f"{_gib(machine.free_memory_bytes)} free of {_gib(machine.memory_bytes)}",
            "/dev/shm": f"{shm}; Ray's object store takes {_gib(_object_store_bytes(machine))}",
            "CUDA": ", ".join(machine.cuda_devices) or "no device",
            "kernels": "compiled" if self.kernels is None else f"FAIL: {self.kernels}",
        }
        for name, probe in self.probes.items():
            works = f"works, {probe.import_s:.1f} s"
            rows[f"import {name}"] = works if probe.ok else f"FAILS: {probe.error}"
        rows |= self.installed
        for name, command in self.extras.items():
            rows[f"extra {name}"] = f"not installed: {command}"
        width = max(map(len, rows)) + 2
        lines = [f"{name:{width}}{value}" for name, value in rows.items()]
        for finding in self.findings:
            lines += ["", f"{finding.kind}: {finding.text}"]
            lines += [f"    {command}" for command in finding.remedy]
        count = sum(finding.kind == "problem" for finding in self.findings)
        problems = f"{count} problem{'s' * (count > 1)}"
        return [*lines, "", "all fits together" if self.ok else problems]


# Findings come from three comparisons, cheapest first:
#
#   version_findings   installed versions with the requirements of rayrec
#   import_findings    modules that fail to import, in another process: a crash there is a finding
#   machine_findings   compiled kernels, /dev/shm and memory
def doctor(
    *,
    requirements: Sequence[str] | None = None,
    versions: Mapping[str, str] | None = None,
    probes: Mapping[str, Probe] | None = None,
    machine: Machine | None = None,
    pip: str | None = None,
) -> Report:
    """Diagnose this interpreter's installation and this machine. Takes about 15 s, because it
    imports torch in another process. Arguments replace the detected values; `pip` is the user's
    command for this environment's pip.
    """
    pip = pip or _pip()
    requirements = installation.requirements() if requirements is None else requirements
    versions = installation.installed_versions() if versions is None else versions
    probes = installation.probe_all(PROBED) if probes is None else probes
    machine = installation.this_machine() if machine is None else machine
    kernels = installation.kernels_fault()
    direct = {each.name for each in _required(requirements)} - {"torch", "torchrec", *_FBGEMM}
    named = ("rayrec", *sorted(direct), "torch", "torchrec", *_FBGEMM)
    findings = [
        *version_findings(requirements, versions, pip=pip),
        *import_findings(requirements, versions, probes, machine, pip=pip),
        *machine_findings(machine, versions, kernels=kernels, pip=pip),
    ]
    return Report(
        machine=machine,
        installed={name: versions[name] for name in named if name in versions},
        extras={
            extra: f"{pip} install 'rayrec[{extra}]'"
            for extra in EXTRAS
            if _required(requirements, extra) and not _has_extra(extra, requirements, versions)
        },
        probes=dict(probes),
        kernels=kernels,
        findings=tuple(sorted(findings, key=lambda finding: finding.kind == "note")),
    )


def version_findings(
    requirements: Sequence[str], versions: Mapping[str, str], *, pip: str
) -> Iterator[Finding]:
    """Check the requirements of rayrec and of its installed extras for presence and version."""
    if not requirements:
        install = f"{pip} install --no-deps -e .   # in a checkout"
        yield Finding(
            "problem", "rayrec itself is not installed, only found on the path", (install,)
        )
    required = _required(requirements)
    for extra in EXTRAS:
        if _has_extra(extra, requirements, versions):
            required += _required(requirements, extra)
    for each in required:
        version = versions.get(each.name)
        if version is None and each.name in _FBGEMM:
            version = versions.get("fbgemm-gpu-cpu")
        if version is not None and each.specifier.contains(version, prereleases=True):
            continue
        text = f"{each.name}{each.specifier}"
        # The metadata of TorchRec asks for fbgemm's CUDA build, which needs a CUDA device.
        options = "--no-deps " if each.name in ("torchrec", *_FBGEMM) else ""
        yield Finding(
            "problem",
            f"{each.name} is {version or 'not installed'}, rayrec needs {text}",
            (f"{pip} install {options}{shlex.quote(text)}",),
        )


def import_findings(
    requirements: Sequence[str],
    versions: Mapping[str, str],
    probes: Mapping[str, Probe],
    machine: Machine,
    *,
    pip: str,
) -> Iterator[Finding]:
    """Report modules that fail to import. torch, fbgemm_gpu and torchrec each need the ones
    before, so only the first failure of them is reported.
    """
    pins = {each.name: f"{each.name}{each.specifier}" for each in _required(requirements)}
    pin = pins.get("fbgemm-gpu", "fbgemm-gpu")
    fbgemm = pin if machine.cuda_devices else pin.replace("fbgemm-gpu", "fbgemm-gpu-cpu", 1)
    reinstall = f"{pip} install --force-reinstall --no-deps"
    remedies = {
        "torch": (f"{pip} uninstall -y torch", f"{pip} install {pins.get('torch', 'torch')}"),
        # The two builds overwrite each other's files.
        "fbgemm_gpu": (
            f"{pip} uninstall -y {' '.join(_FBGEMM)}",
            f"{pip} install --no-deps {fbgemm}",
        ),
        "torchrec": (f"{reinstall} torchrec=={versions.get('torchrec')}",),
        "ray": (f"{reinstall} ray=={versions.get('ray')}",),
    }
    failing = [name for name in ("torch", "fbgemm_gpu", "torchrec") if not probes[name].ok][:1]
    if not probes["ray"].ok:
        failing.append("ray")
    for name in failing:
        if name != "fbgemm_gpu" and name not in versions:
            continue
        why = f"{name} does not import: {probes[name].error}"
        if name == "torch" and not machine.cuda_devices:
            why += (
                ". A CUDA build needs CUDA libraries; name PyTorch's CPU wheel index to pip "
                "(PIP_EXTRA_INDEX_URL, or PIP_FIND_LINKS for a folder), then"
            )
        yield Finding("problem", why, remedies[name])
    torch = probes["torch"]
    if torch.ok and machine.cuda_devices and not torch.cuda_devices:
        build = f"is built for CUDA {torch.cuda_build}" if torch.cuda_build else "is a CPU build"
        devices = f"this machine's CUDA devices ({len(machine.cuda_devices)})"
        yield Finding("note", f"torch {build} and sees none of {devices}")


def machine_findings(
    machine: Machine, versions: Mapping[str, str], *, kernels: str | None, pip: str
) -> Iterator[Finding]:
    """Check the kernels, the interpreter's path, shared memory, and Java for Spark."""
    if kernels is not None:
        install = f"{pip} install --no-deps -e .   # in a checkout"
        yield Finding("problem", f"the compiled kernels do not load: {kernels}", (install,))
    if shlex.quote(machine.interpreter) != machine.interpreter:
        # ray._private.runtime_env.context passes the path to a shell unquoted.
        why = (
            "a shell reads its path otherwise (a space?), and so does Ray, whose workers then "
            "never start"
        )
        yield Finding(
            "problem", f"{machine.interpreter}: {why}; make the environment in another folder"
        )
    if "pyspark" in versions and not machine.has_java:
        yield Finding("note", "Spark needs Java 17, got no java on PATH and no JAVA_HOME")
    need_bytes = min(_object_store_bytes(machine), _RAY_SHM_BYTES)
    if machine.shm_bytes is not None and machine.shm_bytes < need_bytes:
        size = f"{need_bytes / _GIB:.1f}g"
        yield Finding(
            "note",
            f"/dev/shm has {_gib(machine.shm_bytes)} free, Ray's object store wants "
            f"{_gib(need_bytes)} there: the rest goes through the disk, slowly. In a container, "
            "and on a machine as root",
            (f"docker run --shm-size={size} …", f"mount -o remount,size={size} /dev/shm"),
        )


def _required(requirements: Sequence[str], extra: str = "") -> list[Requirement]:
    """Return rayrec's requirements without extras, or the additional ones of an extra, with
    normalized names.
    """
    parsed = [Requirement(text) for text in requirements]
    for each in parsed:
        each.name = canonicalize_name(each.name)
    if not extra:
        return [each for each in parsed if each.marker is None]
    return [each for each in parsed if each.marker and each.marker.evaluate({"extra": extra})]


def _has_extra(extra: str, requirements: Sequence[str], versions: Mapping[str, str]) -> bool:
    """Return whether the first distribution of an extra is installed. rayrec uses it for nothing
    else.
    """
    return any(each.name in versions for each in _required(requirements, extra)[:1])


def _object_store_bytes(machine: Machine) -> int:
    return int(machine.free_memory_bytes * _RAY_MEMORY_FRACTION)


def _gib(count: float) -> str:
    return f"{count / _GIB:.1f} GiB"


def _pip() -> str:
    """Return the user's command for this interpreter's pip."""
    on_path = shutil.which("pip")
    if on_path is not None and Path(on_path).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"
