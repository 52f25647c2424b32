"""Findings of the doctor, their fixes, and imports that crash."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rayrec.environment.doctor import (
    Finding,
    doctor,
    import_findings,
    machine_findings,
    version_findings,
)
from rayrec.environment.installation import (
    Machine,
    Probe,
    installed_versions,
    probe_all,
    requirements,
    this_machine,
)

GIB = 1 << 30
MACHINE = Machine(
    "3.11.9",
    "/x/.venv/bin/python",
    "Linux x86_64",
    8,
    32 * GIB,
    20 * GIB,
    16 * GIB,
    cuda_devices=(),
)
GPU_MACHINE = replace(MACHINE, cuda_devices=("NVIDIA H200",))
REQUIREMENTS = [
    "torch==2.13.0",
    "ray[data]==2.60.0",
    "typing_extensions>=4",
    "torchrec==1.8.0",
    "fbgemm-gpu==1.8.0",
    'fbgemm-gpu==1.8.0+cpu; extra == "cpu"',
    'onnx>=1.17; extra == "onnx"',
    'onnxruntime>=1.20; extra == "onnx"',
    'pytest>=8; extra == "test"',
]
VERSIONS = {
    "rayrec": "0.1.0",
    "torch": "2.13.0+cpu",
    "ray": "2.60.0",
    "typing-extensions": "4.12",
    "torchrec": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
    "fbgemm-gpu": "1.8.0+cpu",
}
WORKS = {
    name: Probe(ok=True, version="1", import_s=0.5)
    for name in ("torch", "fbgemm_gpu", "torchrec", "ray")
}
BARE = "pip install --no-deps"
UNINSTALL = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu"


def _only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def _versions(**changes: str | None) -> list[Finding]:
    changed = {**VERSIONS, **{name.replace("_", "-"): each for name, each in changes.items()}}
    present = {name: version for name, version in changed.items() if version is not None}
    return list(version_findings(REQUIREMENTS, present, pip="pip"))


def _imports(machine: Machine, **probes: Probe) -> list[Finding]:
    return list(import_findings(REQUIREMENTS, VERSIONS, {**WORKS, **probes}, machine, pip="pip"))


def test_valid_installations_have_no_findings() -> None:
    assert _versions() == []
    assert _versions(fbgemm_gpu=None) == []
    assert _versions(fbgemm_gpu_cpu=None) == []
    assert _imports(MACHINE) == []
    assert list(machine_findings(MACHINE, VERSIONS, kernels=None, pip="pip")) == []


@pytest.mark.parametrize(
    ("changes", "text", "command"),
    [
        ({"torch": "2.14.0"}, "torch is 2.14.0, rayrec needs torch==2.13.0", "torch==2.13.0"),
        (
            {"typing_extensions": "3.9"},
            "typing-extensions is 3.9, rayrec needs typing-extensions>=4",
            "'typing-extensions>=4'",
        ),
        (
            {"torchrec": None},
            "torchrec is not installed, rayrec needs torchrec==1.8.0",
            "--no-deps torchrec==1.8.0",
        ),
        (
            {"fbgemm_gpu": None, "fbgemm_gpu_cpu": "1.7.0"},
            "fbgemm-gpu is 1.7.0, rayrec needs fbgemm-gpu==1.8.0",
            "--no-deps fbgemm-gpu==1.8.0",
        ),
        (
            {"onnx": "1.19"},
            "onnxruntime is not installed, rayrec needs onnxruntime>=1.20",
            "'onnxruntime>=1.20'",
        ),
    ],
    ids=["torch", "range", "missing", "fbgemm", "partial-extra"],
)
def test_problem_names_fix(changes: dict[str, str | None], text: str, command: str) -> None:
    assert _only(_versions(**changes)) == Finding("problem", text, (f"pip install {command}",))


def test_rayrec_on_path_only_is_problem() -> None:
    finding = _only(list(version_findings([], {}, pip="pip")))
    assert (finding.kind, finding.remedy) == (
        "problem",
        (f"{BARE} -e .   # in a checkout",),
    )
    assert "only found on the path" in finding.text


@pytest.mark.parametrize(
    ("failing", "machine", "commands"),
    [
        (("torch",), GPU_MACHINE, ("pip uninstall -y torch", "pip install torch==2.13.0")),
        (
            ("fbgemm_gpu", "torchrec"),
            MACHINE,
            (UNINSTALL, f"{BARE} fbgemm-gpu-cpu==1.8.0"),
        ),
        (
            ("fbgemm_gpu", "torchrec"),
            GPU_MACHINE,
            (UNINSTALL, f"{BARE} fbgemm-gpu==1.8.0"),
        ),
        (
            ("torchrec",),
            MACHINE,
            ("pip install --force-reinstall --no-deps torchrec==1.8.0",),
        ),
        (("ray",), MACHINE, ("pip install --force-reinstall --no-deps ray==2.60.0",)),
    ],
    ids=["torch", "fbgemm-cpu", "fbgemm-cuda", "torchrec", "ray"],
)
def test_failed_import_is_reported_once(
    failing: tuple[str, ...], machine: Machine, commands: tuple[str, ...]
) -> None:
    probes = {name: Probe(ok=False, error="SIGILL") for name in failing}
    torch = replace(WORKS["torch"], cuda_devices=1)
    finding = _only(_imports(machine, **{"torch": torch, **probes}))
    assert finding == Finding("problem", f"{failing[0]} does not import: SIGILL", commands)


def test_failed_torch_on_cpu_names_wheel_index() -> None:
    error = "ImportError: libcudart.so.13: cannot open shared object file"
    finding = _only(_imports(MACHINE, torch=Probe(ok=False, error=error)))
    assert error in finding.text
    assert "PIP_EXTRA_INDEX_URL" in finding.text
    assert "PIP_FIND_LINKS" in finding.text


@pytest.mark.parametrize(
    ("cuda_build", "text"), [(None, "is a CPU build"), ("13.0", "is built for CUDA 13.0")]
)
def test_torch_without_devices_is_noted(cuda_build: str | None, text: str) -> None:
    torch = replace(WORKS["torch"], cuda_build=cuda_build)
    finding = _only(_imports(GPU_MACHINE, torch=torch))
    assert finding.kind == "note"
    assert finding.text.startswith(f"torch {text} and sees none")


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"interpreter": "/my work/.venv/bin/python"}, "problem", "/my work/.venv/bin/python: "),
        ({"shm_bytes": 64 << 20}, "note", "/dev/shm has 0.1 GiB free"),
        ({"has_java": False}, "note", "Spark needs Java 17"),
    ],
    ids=["space", "shm", "java"],
)
def test_machine_findings_name_problem(changes: dict[str, object], kind: str, text: str) -> None:
    versions = {**VERSIONS, "pyspark": "4.3.0"}
    machine = replace(MACHINE, **changes)
    finding = _only(list(machine_findings(machine, versions, kernels=None, pip="pip")))
    assert finding.kind == kind
    assert finding.text.startswith(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"free_memory_bytes": 500 * GIB, "memory_bytes": 512 * GIB},
        {"shm_bytes": None},
        {"has_java": False},
    ],
    ids=["large-machine", "no-shm", "no-spark"],
)
def test_sufficient_machine_has_no_findings(changes: dict[str, object]) -> None:
    machine = replace(MACHINE, **changes)
    assert list(machine_findings(machine, VERSIONS, kernels=None, pip="pip")) == []


def test_missing_kernels_are_problem() -> None:
    finding = _only(list(machine_findings(MACHINE, VERSIONS, kernels="no such file", pip="pip")))
    assert finding.kind == "problem"
    assert finding.text == "the compiled kernels do not load: no such file"


def test_report_is_readable() -> None:
    good = doctor(
        requirements=REQUIREMENTS, versions=VERSIONS, probes=WORKS, machine=MACHINE, pip="pip"
    )
    lines = [" ".join(line.split()) for line in good.lines()]
    assert (good.ok, lines[-1]) == (True, "all fits together")
    assert {
        "fbgemm-gpu 1.8.0+cpu",
        "import torch works, 0.5 s",
        "extra onnx not installed: pip install 'rayrec[onnx]'",
    } < {*lines}


def test_problems_end_report() -> None:
    versions = {name: version for name, version in VERSIONS.items() if name != "torchrec"}
    bad = doctor(
        requirements=REQUIREMENTS,
        versions=versions,
        probes=WORKS,
        machine=MACHINE,
        pip="/x/python -m pip",
    )
    assert not bad.ok
    assert bad.lines()[-4:] == [
        "problem: torchrec is not installed, rayrec needs torchrec==1.8.0",
        "    /x/python -m pip install --no-deps torchrec==1.8.0",
        "",
        "1 problem",
    ]
    plain = json.loads(json.dumps(bad.to_dict()))
    assert (plain["ok"], plain["findings"][0]["kind"]) == (False, "problem")
    assert plain["machine"]["cpu_cores"] == 8


MODULES = {
    "fine": "__version__ = '1.2'\nprint('noise')",
    "chatty": "import sys; print('{\"module\": ', file=sys.stderr)",
    "raises": (
        "import sys\nsys.stderr.write('before\\n')\nraise ImportError('libcudart.so.13: cannot "
        "open')"
    ),
    "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "leaves": "import os; os._exit(7)",
    "hangs": "import time; time.sleep(600)",
}


@pytest.mark.extended
def test_failed_import_fails_only_its_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probes = probe_all(["fine", "raises", "chatty", "crashes", "leaves", "no_such_module"])
    assert [name for name, probe in probes.items() if probe.ok] == ["fine", "chatty"]
    assert probes["fine"].version == "1.2"
    assert [probe.error for probe in probes.values() if not probe.ok] == [
        "ImportError: libcudart.so.13: cannot open",
        *("the process died of SIGSEGV", "the process ended with status 7"),
        "ModuleNotFoundError: No module named 'no_such_module'",
    ]
    probes = probe_all(["fine", "hangs"], timeout_s=2.0)
    assert probes["fine"].ok
    assert probes["hangs"] == Probe(ok=False, error="did not finish within 2 s")


def test_resources_and_packages_of_this_machine_are_found() -> None:
    machine = this_machine()
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert machine.cpu_cores >= 1
    assert 0 < machine.free_memory_bytes <= machine.memory_bytes
    assert any(text.startswith("torch==") for text in requirements())
    assert {"torch", "torchrec", "typing-extensions"} <= installed_versions().keys()
