"""What people install: the source archive builds with a plain compiler, and its wheel brings all that the command needs."""

import json
import os
import runpy
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hosts.processes import run_command

ROOT = Path(__file__).parents[2]
wheels = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "wheels.py")))


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    return run_command(*command, cwd=cwd, env={**os.environ, **environment}, timeout_s=3000).stdout


def test_wheel_check_names_missing_and_forbidden_files() -> None:
    wanted = {"rayrec/py.typed", "rayrec/cli.py"}
    good = ["rayrec/py.typed", "rayrec/cli.py", wheels.KERNELS, "rayrec-0.1.0.dist-info/METADATA"]
    assert wheels.wheel_faults(good, wanted) == []
    faults = ["the wheel lacks rayrec/py.typed", "the wheel must not hold tests/conftest.py"]
    assert wheels.wheel_faults([*good[1:], "tests/conftest.py"], wanted) == faults
    files, data = wheels.package_files(ROOT), "py.typed ingest/raydp.lock observe/report/templates/page.html serve/try.html"
    assert {f"rayrec/{name}" for name in data.split()} <= files
    assert not any(name.endswith((".c", ".h", ".so")) for name in files)


@pytest.mark.extended
def test_source_archive_builds_working_wheel(tmp_path: Path) -> None:
    source, made = tmp_path / "source", tmp_path / "made"
    wheels.copy_sources(source)
    made.mkdir()
    backend = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    _run(sys.executable, "-c", backend, made, cwd=source)
    (archive,) = made.glob("rayrec-*.tar.gz")
    with tarfile.open(archive) as packed:
        assert wheels.sdist_faults(packed.getnames(), ROOT) == []
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", made, archive, cwd=tmp_path)
    (wheel,) = made.glob("rayrec-*-cp311-abi3-linux_*.whl")
    with zipfile.ZipFile(wheel) as packed_wheel:
        assert wheels.wheel_faults(packed_wheel.namelist(), wheels.package_files(ROOT)) == []
    # An environment of its own that finds everything else where these tests do.
    venv = tmp_path / "venv"
    _run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    packages = venv / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    _run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    rayrec = venv / "bin" / "rayrec"
    assert _run(rayrec, "--version", cwd=tmp_path).strip()
    report = json.loads(_run(rayrec, "doctor", "--json", cwd=tmp_path))
    assert report["ok"], report["findings"]
    where = "import rayrec, rayrec.native as n; print(rayrec.__file__); print(n.library()._name)"
    assert [Path(line).is_relative_to(packages) for line in _run(python, "-c", where, cwd=tmp_path).split()] == [True, True]
    assert _run(rayrec, "generate", "log", "--rows", "100", "--seed", "0", cwd=tmp_path)
    _run(rayrec, "validate", "log/train.txt", cwd=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_clean_environment_trains_from_wheels(tool: str, tmp_path: Path) -> None:
    """`make wheel`, then what docs/install.md says, from the package index."""
    _run("make", "wheel", cwd=ROOT)
    files = sorted(map(str, (ROOT / "dist").glob("*.whl")))
    venv = tmp_path / "venv"
    _run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    if tool == "pip":
        _run(python, "-m", "pip", "install", "--quiet", *files, cwd=tmp_path)
    else:
        _run(sys.executable, "-m", "venv", tmp_path / "uv", cwd=tmp_path)
        _run(tmp_path / "uv/bin/python", "-m", "pip", "install", "--quiet", "uv", cwd=tmp_path)
        links = _run(sys.executable, "-m", "pip", "config", "get", "global.find-links", cwd=tmp_path).strip()
        uv = tmp_path / "uv/bin/uv"
        _run(uv, "pip", "install", "--quiet", "--python", python, *files, cwd=tmp_path, UV_FIND_LINKS=links)
    rayrec = venv / "bin" / "rayrec"
    assert json.loads(_run(rayrec, "doctor", "--json", cwd=tmp_path))["ok"]
    _run(rayrec, "generate", "log", "--rows", "20000", "--seed", "0", cwd=tmp_path)
    train = ("train", "criteo_demo", "--train-data.path", "log/train.txt", "--storage-path", "runs", "--name", "one")
    _run(rayrec, *train, "--steps", "20", "--scaling.num-workers", "1", cwd=tmp_path)
    assert (tmp_path / "runs" / "one" / "summary.json").exists()
