"""Findings of the doctor, their fixes, and imports that crash."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rayrec.environment.doctor import Finding, closure, diagnose, doctor
from rayrec.environment.installation import (
    Installed,
    Machine,
    Probe,
    installed_distributions,
    probe_all,
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
RAYREC = Installed(
    "0.1.0",
    requires=(
        *(
            "torch==2.13.0",
            "ray[data]==2.60.0",
            "packaging>=24",
            "torchrec==1.8.0",
            "fbgemm-gpu==1.8.0",
        ),
        *(
            'fbgemm-gpu==1.8.0+cpu; extra == "cpu"',
            'fbgemm-gpu!=1.8.0+cpu,==1.8.0; extra == "cuda"',
        ),
        *(
            'onnx>=1.17; extra == "onnx"',
            'onnxruntime>=1.20; extra == "onnx"',
            'pytest>=8; extra == "test"',
        ),
    ),
)
CPU = {
    "rayrec": RAYREC,
    "torch": Installed("2.13.0+cpu", requires=("sympy>=1.13",)),
    "sympy": Installed("1.14.0"),
    "ray": Installed(
        "2.60.0", requires=("click>=7", 'pyarrow>=9; extra == "data"', 'fastapi; extra == "serve"')
    ),
    "click": Installed("8.1"),
    "pyarrow": Installed("21.0"),
    "packaging": Installed("25.0"),
    "torchrec": Installed("1.8.0", requires=("fbgemm-gpu", "tqdm")),
    "tqdm": Installed("4.0"),
    "fbgemm-gpu-cpu": Installed("1.8.0", requires=("numpy",), holds_fbgemm=True),
    "fbgemm-gpu": Installed("1.8.0+cpu", requires=("fbgemm-gpu-cpu==1.8.0",)),
    "numpy": Installed("2.1.0"),
}
CUDA = {
    **{name: installed for name, installed in CPU.items() if name != "fbgemm-gpu-cpu"},
    "torch": Installed("2.13.0", requires=("sympy>=1.13",)),
    "fbgemm-gpu": Installed("1.8.0", requires=("numpy",), holds_fbgemm=True),
}
WORKS = {
    name: Probe(ok=True, version="1", import_s=0.5)
    for name in ("torch", "fbgemm_gpu", "torchrec", "ray")
}
WORKS_ON_CUDA = {**WORKS, "torch": replace(WORKS["torch"], cuda_build="13.0", cuda_devices=1)}
ANEW = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu"
BARE = "pip install --no-deps"


def _without(installed: dict[str, Installed], *names: str) -> dict[str, Installed]:
    return {name: each for name, each in installed.items() if name not in names}


def _only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_missing_and_partial_extras_are_told_unlike_valid() -> None:
    assert (diagnose(CPU, WORKS, MACHINE), diagnose(CUDA, WORKS_ON_CUDA, GPU_MACHINE)) == ([], [])
    of_pytorch = {
        **_without(CPU, "fbgemm-gpu-cpu"),
        "fbgemm-gpu": Installed("1.8.0+cpu", holds_fbgemm=True),
    }
    assert diagnose(of_pytorch, WORKS, MACHINE) == []
    extra = 'mosaicml-streaming==0.13.0; extra == "language"'
    streaming = Installed(
        "0.13.0", requires=("numpy<2.1", "torchvision>=0.10", "oci<3", "xxhash<4", "boto3<2")
    )
    with_it = {
        **CPU,
        "mosaicml-streaming": streaming,
        "xxhash": Installed("3.8"),
        "boto3": Installed("1.44"),
    }
    with_it["rayrec"] = replace(RAYREC, requires=(*RAYREC.requires, extra))
    assert diagnose(with_it, WORKS, MACHINE) == []
    found = _only(diagnose(_without(with_it, "xxhash"), WORKS, MACHINE))
    assert found.text == "not installed: xxhash; mosaicml-streaming needs xxhash<4"
    assert diagnose(_without(with_it, "xxhash", "mosaicml-streaming"), WORKS, MACHINE) == []
    report = doctor(installed=CPU, probes=WORKS, machine=MACHINE, pip="pip")
    assert report.ok
    assert report.extras == {"onnx": "pip install 'rayrec[onnx]'"}
    assert ["extra", "onnx", "not installed: pip install 'rayrec[onnx]'"] in [
        line.split(maxsplit=2) for line in report.lines()
    ]
    in_part = {**CPU, "onnx": Installed("1.19")}
    assert doctor(installed=in_part, probes=WORKS, machine=MACHINE).extras == {}
    text = "not installed: onnxruntime; rayrec needs onnxruntime>=1.20"
    assert diagnose(in_part, WORKS, MACHINE) == [
        Finding("problem", text, ("pip install 'onnxruntime>=1.20'",))
    ]
    assert diagnose({**in_part, "onnxruntime": Installed("1.30")}, WORKS, MACHINE) == []
    probes = {
        **WORKS,
        **dict.fromkeys(
            ("fbgemm_gpu", "torchrec"), Probe(ok=False, error="OSError: undefined symbol")
        ),
    }
    finding, *_ = diagnose({**CUDA, "torch": CPU["torch"]}, probes, GPU_MACHINE)
    text = "fbgemm-gpu is the CUDA build, torch 2.13.0+cpu a CPU build: they do not import together"
    assert finding == Finding(
        "problem", text, ("pip uninstall -y torch", "pip install torch==2.13.0")
    )


def test_missing_torchrec_or_fbgemm_is_problem() -> None:
    for gone, machine, commands in (
        (
            ("torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu"),
            MACHINE,
            (f"{BARE} torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0",),
        ),
        (("torchrec",), MACHINE, (f"{BARE} torchrec==1.8.0",)),
        (("fbgemm-gpu-cpu", "fbgemm-gpu"), MACHINE, (f"{BARE} fbgemm-gpu-cpu==1.8.0",)),
        (
            ("torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu"),
            GPU_MACHINE,
            (f"{BARE} torchrec==1.8.0 fbgemm-gpu==1.8.0",),
        ),
        # The distribution that only has the name would satisfy pip, so it goes first.
        (
            ("fbgemm-gpu-cpu",),
            GPU_MACHINE,
            ("pip uninstall -y fbgemm-gpu", f"{BARE} fbgemm-gpu==1.8.0"),
        ),
    ):
        absent = Probe(ok=False, error="ModuleNotFoundError: No module named 'fbgemm_gpu'")
        probes = {**(WORKS_ON_CUDA if machine.cuda_devices else WORKS), "torchrec": absent}
        probes |= {"fbgemm_gpu": absent} if "fbgemm-gpu-cpu" in gone else {}
        finding = _only(diagnose(_without(CPU, *gone), probes, machine))
        assert (finding.kind, finding.text[:15], finding.remedy) == (
            "problem",
            "not installed: ",
            commands,
        )


BOTH = (
    "fbgemm-gpu and fbgemm-gpu-cpu are both installed and have overwritten each other's module "
    "fbgemm_gpu"
)
NO_DEVICE = "fbgemm-gpu is the CUDA build, which does not import without a CUDA device"


@pytest.mark.parametrize(
    ("changes", "failing", "machine", "text", "commands"),
    [
        (
            {**CUDA, "fbgemm-gpu-cpu": CPU["fbgemm-gpu-cpu"]},
            (),
            MACHINE,
            BOTH,
            (ANEW, f"{BARE} fbgemm-gpu-cpu==1.8.0"),
        ),
        (
            {**CUDA, "fbgemm-gpu-cpu": CPU["fbgemm-gpu-cpu"]},
            (),
            GPU_MACHINE,
            BOTH,
            (ANEW, f"{BARE} fbgemm-gpu==1.8.0"),
        ),
        (
            CUDA,
            ("fbgemm_gpu", "torchrec"),
            MACHINE,
            NO_DEVICE,
            (ANEW, f"{BARE} fbgemm-gpu-cpu==1.8.0"),
        ),
        (
            {},
            ("fbgemm_gpu", "torchrec"),
            MACHINE,
            "fbgemm_gpu does not import: SIGILL",
            (ANEW, f"{BARE} fbgemm-gpu-cpu==1.8.0"),
        ),
        (
            {},
            ("torchrec",),
            MACHINE,
            "torchrec does not import: SIGILL",
            ("pip install --force-reinstall --no-deps torchrec==1.8.0",),
        ),
        (
            {},
            ("ray",),
            MACHINE,
            "ray does not import: SIGILL",
            ("pip install --force-reinstall --no-deps ray==2.60.0",),
        ),
        (
            {"torch": "2.14.0"},
            (),
            MACHINE,
            "torch is 2.14.0; rayrec needs torch==2.13.0",
            ("pip install torch==2.13.0",),
        ),
        (
            {"packaging": "23.1"},
            (),
            MACHINE,
            "packaging is 23.1; rayrec needs packaging>=24",
            ("pip install 'packaging>=24'",),
        ),
        (
            {"pyarrow": "8.0"},
            (),
            MACHINE,
            "pyarrow is 8.0; ray needs pyarrow>=9",
            ("pip install 'pyarrow>=9'",),
        ),
        (
            {"torchrec": "1.9.0"},
            (),
            MACHINE,
            "torchrec is 1.9.0, rayrec is tested with torchrec==1.8.0",
            (f"{BARE} torchrec==1.8.0",),
        ),
        (
            {"fbgemm-gpu-cpu": "1.7.0"},
            (),
            MACHINE,
            "fbgemm-gpu-cpu is 1.7.0, rayrec is tested with fbgemm-gpu-cpu==1.8.0",
            (f"{BARE} fbgemm-gpu-cpu==1.8.0",),
        ),
    ],
)
def test_problem_names_fix(
    changes: dict[str, Installed | str],
    failing: tuple[str, ...],
    machine: Machine,
    text: str,
    commands: tuple[str, ...],
) -> None:
    changed = {
        name: replace(CPU[name], version=each) if isinstance(each, str) else each
        for name, each in changes.items()
    }
    probes = {**WORKS_ON_CUDA, **dict.fromkeys(failing, Probe(ok=False, error="SIGILL"))}
    installed = changed if "rayrec" in changed else {**CPU, **changed}
    assert _only(diagnose(installed, probes, machine)) == Finding("problem", text, commands)


def test_cpu_builds_and_cuda_torch_without_libraries_are_noted() -> None:
    fbgemm, torch = diagnose(CPU, WORKS, GPU_MACHINE)
    assert (fbgemm.kind, torch.kind) == ("note", "note")
    assert "CPU build" in fbgemm.text
    assert fbgemm.remedy == (ANEW, "pip install --no-deps fbgemm-gpu==1.8.0")
    assert torch.text.startswith("torch is a CPU build and sees none")
    built_for = replace(WORKS["torch"], cuda_build="13.0")
    assert (
        "built for CUDA 13.0" in diagnose(CUDA, {**WORKS, "torch": built_for}, GPU_MACHINE)[0].text
    )
    error = (
        "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory"
    )
    probes = {**{name: Probe(ok=False, error=error) for name in WORKS}, "ray": WORKS["ray"]}
    finding = _only(diagnose(CPU, probes, MACHINE))  # one cause, one finding
    assert finding.kind == "problem"
    assert [
        word
        for word in (error, "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
        if word not in finding.text
    ] == []
    assert finding.remedy == ("pip uninstall -y torch", "pip install --no-deps torch==2.13.0")
    on_gpu = _only(diagnose(CUDA, probes, GPU_MACHINE))
    assert on_gpu.remedy == ("pip uninstall -y torch", "pip install torch==2.13.0")
    assert "CPU" not in on_gpu.text


def test_transitive_requirements_rayrec_and_machine_are_checked() -> None:
    assert [
        finding.text
        for finding in diagnose(_without(CPU, "click", "tqdm", "pyarrow"), WORKS, MACHINE)
    ] == [
        "not installed: click; ray needs click>=7",
        # by ray[data]; fastapi, of another extra, is not asked for
        "not installed: pyarrow; ray needs pyarrow>=9",
        "not installed: tqdm; torchrec needs tqdm",
    ]
    installed = {
        "a": Installed("1", requires=("b",)),
        "b": Installed("1", requires=("a", "c[x]")),
        "c": Installed("1"),
    }
    asked = [
        (asker, str(requirement)) for asker, requirement in closure([Requirement("a")], installed)
    ]
    assert sorted(asked) == [("", "a"), ("a", "b"), ("b", "a"), ("b", "c[x]")]
    finding = _only(diagnose(CPU, WORKS, MACHINE, kernels="no such file"))
    assert (finding.kind, finding.text) == (
        "problem",
        "the compiled kernels do not load: no such file",
    )
    assert "only found on the path" in diagnose(_without(CPU, "rayrec"), WORKS, MACHINE)[0].text
    spaced, note = diagnose(
        CPU, WORKS, replace(MACHINE, shm_bytes=0, interpreter="/my work/.venv/bin/python")
    )
    assert (spaced.kind, note.kind) == ("problem", "note")
    assert spaced.text.startswith("/my work/.venv/bin/python: ")
    shm = _only(diagnose(CPU, WORKS, replace(MACHINE, shm_bytes=64 << 20)))
    assert (shm.kind, shm.remedy[0]) == ("note", "docker run --shm-size=6.0g …")
    large = replace(MACHINE, free_memory_bytes=500 * GIB, memory_bytes=512 * GIB)
    assert diagnose(CPU, WORKS, large) == []  # 16 GiB of /dev/shm are enough for Ray
    assert diagnose(CPU, WORKS, replace(MACHINE, shm_bytes=None)) == []


def test_report_is_readable() -> None:
    good = doctor(installed=CPU, probes=WORKS, machine=MACHINE, pip="pip")
    lines = [" ".join(line.split()) for line in good.lines()]
    assert (good.ok, lines[-1]) == (True, "all fits together")
    assert {"fbgemm-gpu 1.8.0+cpu (in name only)", "import torch works, 0.5 s"} < {*lines}
    bad = doctor(
        installed=_without(CPU, "torchrec"), probes=WORKS, machine=MACHINE, pip="/x/python -m pip"
    )
    assert not bad.ok
    command = "    /x/python -m pip install --no-deps torchrec==1.8.0"
    assert bad.lines()[-4:] == ["problem: not installed: torchrec", command, "", "1 problem"]
    plain = json.loads(json.dumps(bad.to_dict()))
    assert (plain["ok"], plain["findings"][0]["kind"], plain["machine"]["cpu_cores"]) == (
        False,
        "problem",
        8,
    )
    noted = doctor(installed=CPU, probes=WORKS, machine=replace(MACHINE, shm_bytes=0))
    assert noted.ok
    assert any(line.startswith("note: ") for line in noted.lines())


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
    installed = installed_distributions()
    assert any(requirement.startswith("torch==") for requirement in installed["rayrec"].requires)
    assert [name for name, each in installed.items() if each.holds_fbgemm] in (
        ["fbgemm-gpu-cpu"],
        ["fbgemm-gpu"],
    )
