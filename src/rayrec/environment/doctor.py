"""Diagnosis of an installation: version conflicts, missing parts, and the commands to fix them."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rayrec.environment import installation
from rayrec.environment.installation import (
    EXTRAS,
    FBGEMM,
    PROBED,
    UNNEEDED,
    Installed,
    Machine,
    Probe,
)

_RAY_MEMORY_FRACTION = 0.3
_RAY_SHM_BYTES = 10**10
"""Defaults of Ray's object store: its fraction of free memory, and the size of /dev/shm below which
it warns (ray._private.utils.resolve_object_store_memory).
"""
_GIB = 1 << 30


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
        rows = [
            ("python", f"{machine.python}, {machine.platform}"),
            ("CPU cores", str(machine.cpu_cores)),
            ("memory", f"{_gib(machine.free_memory_bytes)} free of {_gib(machine.memory_bytes)}"),
            ("/dev/shm", f"{shm}; Ray's object store takes {_gib(_object_store_bytes(machine))}"),
            ("CUDA", ", ".join(machine.cuda_devices) or "no device"),
            ("kernels", "compiled" if self.kernels is None else f"FAIL: {self.kernels}"),
        ]
        for name, probe in self.probes.items():
            rows.append(
                (
                    f"import {name}",
                    f"works, {probe.import_s:.1f} s" if probe.ok else f"FAILS: {probe.error}",
                )
            )
        rows += list(self.installed.items())
        rows += [
            (f"extra {name}", f"not installed: {command}") for name, command in self.extras.items()
        ]
        width = max(len(name) for name, _ in rows) + 2
        lines = [f"{name:{width}}{value}" for name, value in rows]
        for finding in self.findings:
            lines += [
                "",
                f"{finding.kind}: {finding.text}",
                *(f"    {command}" for command in finding.remedy),
            ]
        count = sum(finding.kind == "problem" for finding in self.findings)
        return [
            *lines,
            "",
            "all fits together" if self.ok else f"{count} problem{'s' * (count > 1)}",
        ]


def doctor(
    *,
    installed: Mapping[str, Installed] | None = None,
    probes: Mapping[str, Probe] | None = None,
    machine: Machine | None = None,
    pip: str | None = None,
) -> Report:
    """Diagnose this interpreter's installation and this machine. Takes about 15 s, because it
    imports torch in another process. Arguments replace the detected values; `pip` is the user's
    command for this environment's pip.
    """
    pip = pip or _pip()
    installed = installation.installed_distributions() if installed is None else installed
    probes = installation.probe_all(PROBED) if probes is None else probes
    machine = installation.this_machine() if machine is None else machine
    kernels = installation.kernels_fault()
    requirements = {_name(each) for each in _requirements(installed)} - {
        "torch",
        "torchrec",
        *FBGEMM,
    }
    named = ("rayrec", *sorted(requirements), "torch", "torchrec", *FBGEMM)
    return Report(
        machine=machine,
        installed={
            name: _version_text(name, installed[name]) for name in named if name in installed
        },
        extras={
            extra: f"{pip} install 'rayrec[{extra}]'" for extra in extras(installed, present=False)
        },
        probes=dict(probes),
        kernels=kernels,
        findings=tuple(diagnose(installed, probes, machine, kernels=kernels, pip=pip)),
    )


def diagnose(
    installed: Mapping[str, Installed],
    probes: Mapping[str, Probe],
    machine: Machine,
    *,
    kernels: str | None = None,
    pip: str = "pip",
) -> list[Finding]:
    """Return all findings, problems first. Pure."""
    findings = [
        *_rayrec_findings(installed, machine, kernels, pip),
        *_fbgemm_findings(installed, probes, machine, pip),
        *_requirement_findings(installed, pip),
        *_import_findings(installed, probes, machine, pip),
        *_machine_findings(machine),
    ]
    return sorted(findings, key=lambda finding: finding.kind == "note")


def closure(
    roots: Iterable[Requirement], installed: Mapping[str, Installed]
) -> Iterator[tuple[str, Requirement]]:
    """Yield every requirement reachable from `roots`, with the distribution that requires it (""
    for the roots). Pure. Does not follow missing distributions, and skips UNNEEDED ones. Evaluates
    markers for this interpreter.
    """
    waiting = [("", requirement) for requirement in roots]
    seen = set()
    while waiting:
        asker, requirement = waiting.pop()
        if (asker, str(requirement)) in seen:
            continue
        seen.add((asker, str(requirement)))
        yield asker, requirement
        name = _name(requirement)
        for text in installed[name].requires if name in installed else ():
            inner = Requirement(text)
            if any(_applies(inner, extra) for extra in ("", *requirement.extras)) and _name(
                inner
            ) not in UNNEEDED.get(name, ()):
                waiting.append((name, inner))


def extras(installed: Mapping[str, Installed], *, present: bool) -> list[str]:
    """Return rayrec's EXTRAS that are installed, or those that are not. Pure. An extra counts as
    installed if its first distribution is, which rayrec uses for nothing else.
    """
    named = {extra: _requirements(installed, extra) for extra in EXTRAS}
    return [
        extra for extra, adds in named.items() if adds and (_name(adds[0]) in installed) == present
    ]


def _rayrec_findings(
    installed: Mapping[str, Installed], machine: Machine, kernels: str | None, pip: str
) -> Iterator[Finding]:
    install = f"{pip} install --no-deps -e .   # in a checkout"
    if "rayrec" not in installed:
        yield Finding(
            "problem", "rayrec itself is not installed, only found on the path", (install,)
        )
    if shlex.quote(machine.interpreter) != machine.interpreter:
        # ray._private.runtime_env.context passes the path to a shell unquoted.
        why = (
            "a shell reads its path otherwise (a space?), and so does Ray, whose workers then "
            "never start"
        )
        yield Finding(
            "problem", f"{machine.interpreter}: {why}; make the environment in another folder"
        )
    if kernels is not None:
        yield Finding("problem", f"the compiled kernels do not load: {kernels}", (install,))


def _fbgemm_findings(
    installed: Mapping[str, Installed], probes: Mapping[str, Probe], machine: Machine, pip: str
) -> Iterator[Finding]:
    """Check TorchRec, and fbgemm, whose two builds provide the same module."""
    torchrec, cuda, cpu = _tested_versions(installed)
    has_cuda = bool(machine.cuda_devices)
    holders = [name for name in FBGEMM if name in installed and installed[name].holds_fbgemm]
    is_cuda_build = holders == ["fbgemm-gpu"] and not installed["fbgemm-gpu"].version.endswith(
        "+cpu"
    )
    reinstall = (
        f"{pip} uninstall -y {' '.join(FBGEMM)}",
        f"{pip} install --no-deps {cuda if has_cuda else cpu}",
    )
    missing = [] if "torchrec" in installed else [torchrec]
    if not holders:
        missing.append(cuda if has_cuda else cpu)
    fails = _imports(probes, "torch") and not _imports(probes, "fbgemm_gpu")
    if len(holders) > 1:
        both = (
            "fbgemm-gpu and fbgemm-gpu-cpu are both installed and have overwritten each other's "
            "module fbgemm_gpu"
        )
        yield Finding("problem", both, reinstall)
    elif is_cuda_build and not has_cuda:
        yield Finding(
            "problem",
            "fbgemm-gpu is the CUDA build, which does not import without a CUDA device",
            reinstall,
        )
    elif is_cuda_build and installed.get("torch", Installed("")).version.endswith("+cpu"):
        mixed = (
            f"fbgemm-gpu is the CUDA build, torch {installed['torch'].version} a CPU build: they "
            "do not import together"
        )
        yield Finding(
            "problem",
            mixed,
            (f"{pip} uninstall -y torch", f"{pip} install {_torch_pin(installed)}"),
        )
    elif holders and fails:
        yield Finding(
            "problem", f"fbgemm_gpu does not import: {probes['fbgemm_gpu'].error}", reinstall
        )
    elif holders and has_cuda and not is_cuda_build:
        cpu_only = (
            f"{holders[0]} is the CPU build: training works, but tables cannot be on this "
            "machine's CUDA devices"
        )
        yield Finding("note", cpu_only, reinstall)
    if missing:
        names = " and ".join(text.split("==")[0] for text in missing)
        in_name_only = [name for name in FBGEMM if name in installed and not holders]
        first = (f"{pip} uninstall -y {' '.join(in_name_only)}",) if in_name_only else ()
        yield Finding(
            "problem",
            f"not installed: {names}",
            (*first, f"{pip} install --no-deps {' '.join(missing)}"),
        )
    for name, pin in (("torchrec", torchrec), ("fbgemm-gpu", cuda), ("fbgemm-gpu-cpu", cpu)):
        if (
            name in installed
            and len(holders) < 2
            and not _fits(installed[name].version, pin.removeprefix(name))
        ):
            text = f"{name} is {installed[name].version}, rayrec is tested with {pin}"
            yield Finding("problem", text, (f"{pip} install --no-deps {pin}",))


def _requirement_findings(installed: Mapping[str, Installed], pip: str) -> Iterator[Finding]:
    """Check all other direct and transitive requirements of rayrec and TorchRec for presence and
    version.
    """
    roots = _requirements(installed)
    for extra in extras(installed, present=True):
        roots += _requirements(installed, extra)
    unmet: dict[str, set[tuple[str, str]]] = {}
    for asker, requirement in closure(roots, installed):
        name = _name(requirement)
        specifier = str(requirement.specifier)
        if (
            name != "torchrec"
            and name not in FBGEMM
            and not (name in installed and _fits(installed[name].version, specifier))
        ):
            unmet.setdefault(name, set()).add((asker or "rayrec", specifier))
    for name, askers in sorted(unmet.items()):
        have = (
            f"{name} is {installed[name].version}"
            if name in installed
            else f"not installed: {name}"
        )
        needs = ", ".join(f"{asker} needs {name}{specifier}" for asker, specifier in sorted(askers))
        requirement_text = name + ",".join(
            sorted({specifier for _, specifier in askers if specifier})
        )
        yield Finding(
            "problem", f"{have}; {needs}", (f"{pip} install {shlex.quote(requirement_text)}",)
        )


def _import_findings(
    installed: Mapping[str, Installed], probes: Mapping[str, Probe], machine: Machine, pip: str
) -> Iterator[Finding]:
    """Report installed modules that fail to import although their dependencies import."""
    torch = probes.get("torch")
    pin = _torch_pin(installed)
    if torch is not None and not torch.ok and "torch" in installed:
        why = f"torch does not import: {torch.error}"
        if re.search(r"libcu|libnv|libnccl|CUDA", torch.error) and not machine.cuda_devices:
            why += (
                ". This is its CUDA build without the CUDA libraries; name PyTorch's CPU wheel "
                "index to pip"
            )
            why += " (PIP_EXTRA_INDEX_URL, or PIP_FIND_LINKS for a folder), then"
            yield Finding(
                "problem", why, (f"{pip} uninstall -y torch", f"{pip} install --no-deps {pin}")
            )
        else:
            yield Finding("problem", why, (f"{pip} uninstall -y torch", f"{pip} install {pin}"))
    elif torch is not None and torch.ok and machine.cuda_devices and not torch.cuda_devices:
        build = f"is built for CUDA {torch.cuda_build}" if torch.cuda_build else "is a CPU build"
        yield Finding(
            "note",
            f"torch {build} and sees none of this machine's CUDA devices "
            f"({len(machine.cuda_devices)})",
        )
    for name, needs in (("torchrec", ("torch", "fbgemm_gpu")), ("ray", ())):
        if (
            name in installed
            and all(_imports(probes, each) for each in needs)
            and not _imports(probes, name)
        ):
            command = f"{pip} install --force-reinstall --no-deps {name}=={installed[name].version}"
            yield Finding("problem", f"{name} does not import: {probes[name].error}", (command,))


def _machine_findings(machine: Machine) -> Iterator[Finding]:
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


def _tested_versions(installed: Mapping[str, Installed]) -> tuple[str, str, str]:
    """Return `torchrec`, `fbgemm-gpu` and `fbgemm-gpu-cpu` with rayrec's version pins."""
    pins = {_name(each): str(each.specifier) for each in _requirements(installed)}
    fbgemm = pins.get("fbgemm-gpu", "")
    return f"torchrec{pins.get('torchrec', '')}", f"fbgemm-gpu{fbgemm}", f"fbgemm-gpu-cpu{fbgemm}"


def _torch_pin(installed: Mapping[str, Installed]) -> str:
    return next((str(each) for each in _requirements(installed) if _name(each) == "torch"), "torch")


def _requirements(installed: Mapping[str, Installed], extra: str = "") -> list[Requirement]:
    """Return rayrec's requirements without extras, or the additional ones of an extra."""
    texts = installed["rayrec"].requires if "rayrec" in installed else ()
    return [
        each
        for each in map(Requirement, texts)
        if _applies(each, extra) and not (extra and each.marker is None)
    ]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _name(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)


def _fits(version: str, specifier: str) -> bool:
    return SpecifierSet(specifier).contains(version, prereleases=True)


def _imports(probes: Mapping[str, Probe], module: str) -> bool:
    return module not in probes or probes[module].ok


def _object_store_bytes(machine: Machine) -> int:
    return int(machine.free_memory_bytes * _RAY_MEMORY_FRACTION)


def _gib(count: float) -> str:
    return f"{count / _GIB:.1f} GiB"


def _version_text(name: str, installed: Installed) -> str:
    return installed.version + (
        " (in name only)" if name == "fbgemm-gpu" and not installed.holds_fbgemm else ""
    )


def _pip() -> str:
    """Return the user's command for this interpreter's pip."""
    on_path = shutil.which("pip")
    is_same_environment = (
        on_path is not None and Path(on_path).parent == Path(sys.executable).parent
    )
    return "pip" if is_same_environment else f"{shlex.quote(sys.executable)} -m pip"
