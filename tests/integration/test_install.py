"""What people install: the source archive builds with a plain compiler, and its wheel brings all
that the command needs.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders.runs import one_worker
from filelock import FileLock
from hosts.dockerfile import Stage, build
from hosts.processes import run_command

ROOT = Path(__file__).parents[2]
wheels = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "wheels.py")))


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    return run_command(
        *command,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout_s=3000,
    ).stdout


def test_wheel_check_names_missing_and_forbidden_files() -> None:
    desired = {"rayrec/py.typed", "rayrec/cli.py"}
    good = ["rayrec/py.typed", "rayrec/cli.py", wheels.KERNELS, "rayrec-0.1.0.dist-info/METADATA"]
    assert wheels.wheel_faults(good, desired) == []
    faults = ["the wheel lacks rayrec/py.typed", "the wheel must not hold tests/conftest.py"]
    assert wheels.wheel_faults([*good[1:], "tests/conftest.py"], desired) == faults
    files = wheels.package_files(ROOT)
    data = "py.typed ingest/raydp.lock observe/report/templates/page.html serve/try.html"
    assert {f"rayrec/{name}" for name in data.split()} <= files
    assert not any(name.endswith((".c", ".h", ".so")) for name in files)


@pytest.mark.extended
def test_source_archive_builds_working_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    made = tmp_path / "made"
    wheels.copy_sources(source)
    made.mkdir()
    backend = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    _run(sys.executable, "-c", backend, made, cwd=source)
    (archive,) = made.glob("rayrec-*.tar.gz")
    with tarfile.open(archive) as packed:
        assert wheels.sdist_faults(packed.getnames(), ROOT) == []
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    _run(
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        made,
        archive,
        cwd=tmp_path,
    )
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
    assert [
        Path(line).is_relative_to(packages)
        for line in _run(python, "-c", where, cwd=tmp_path).split()
    ] == [True, True]
    assert _run(rayrec, "generate", "log", "--rows", "100", "--seed", "0", cwd=tmp_path)
    _run(rayrec, "validate", "log/train.txt", cwd=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_clean_environment_trains_from_wheels(tool: str, tmp_path: Path) -> None:
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
        links = _run(
            sys.executable, "-m", "pip", "config", "get", "global.find-links", cwd=tmp_path
        ).strip()
        uv = tmp_path / "uv/bin/uv"
        _run(
            uv,
            "pip",
            "install",
            "--quiet",
            "--python",
            python,
            *files,
            cwd=tmp_path,
            UV_FIND_LINKS=links,
        )
    rayrec = venv / "bin" / "rayrec"
    assert json.loads(_run(rayrec, "doctor", "--json", cwd=tmp_path))["ok"]
    _run(rayrec, "generate", "log", "--rows", "20000", "--seed", "0", cwd=tmp_path)
    train = (
        "train",
        "criteo_demo",
        "--train-data.path",
        "log/train.txt",
        "--storage-path",
        "runs",
        "--name",
        "one",
    )
    _run(rayrec, *train, "--steps", "20", "--scaling.num-workers", "1", cwd=tmp_path)
    assert (tmp_path / "runs" / "one" / "summary.json").exists()


# -- The oldest allowed Ray: its private names, and a run that learns like one without Ray
def _oldest() -> str:
    """The lower bound of Ray in pyproject.toml, where a bound without a patch release has patch
    release 0.
    """
    desired = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (found,) = [bound for text in desired if (bound := re.match(r"ray\[.*\]>=([\d.]+),<", text))]
    return found[1] + ".0" * (2 - found[1].count("."))


@pytest.fixture(scope="module")
def run(shared_folder: Path) -> Callable[..., str]:
    folder = Path(os.environ.get("RAYREC_TEST_CACHE") or shared_folder) / f"ray-{_oldest()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--retries",
        "10",
        "--timeout",
        "60",
        "--no-deps",
    ]
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            subprocess.run(
                [*install, "--upgrade", "--target", str(folder), f"ray=={_oldest()}"], check=True
            )
            (folder / "complete").touch()
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return lambda *command: run_command(sys.executable, *command, env=environment, cwd=ROOT).stdout


@pytest.mark.extended
def test_private_names_of_ray(run: Callable[..., str]) -> None:
    assert run("-c", "import ray; print(ray.__version__)").strip() == _oldest()
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/compat")


@pytest.mark.extended
def test_ray_run_and_scoring(run: Callable[..., str], click_log: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(one_worker(click_log, tmp_path, steps=10, cluster={"num_cpus": 2}).to_yaml())

    def found(address: str, *command: object) -> dict[str, Any]:
        return json.loads(run("-m", "rayrec", *command, "--cluster.address", address))

    on_ray, here = (
        found(address, "train", "--config", config, "--name", address)
        for address in ("local", "none")
    )
    assert on_ray["weights_sha256"] == here["weights_sha256"]
    scoring = ("evaluate", tmp_path / "local", click_log / "train.txt")
    assert found("local", *scoring)["auroc"] == pytest.approx(found("none", *scoring)["auroc"])


# -- deploy/Dockerfile carried out on a Debian that debootstrap makes
def _said(*command: object) -> list[str]:
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False
    ).stdout.split()


def _megabytes(root: Path) -> float:
    return int(_said("du", "--summarize", "--one-file-system", "--block-size=1", root)[0]) / 1e6


def _debian(scratch: Path) -> Path:
    """A Debian with what it cannot do without; RAYREC_TEST_CACHE keeps it for the next run too."""
    folder = Path(os.environ.get("RAYREC_TEST_CACHE") or scratch) / "debian"
    if not (folder / "complete").exists():
        mirror = _said("apt-get", "indextargets", "--format", "$(REPO_URI)", "Codename: bookworm")[
            0
        ]
        command = ["debootstrap", "--variant=minbase", "bookworm", str(folder / "base"), mirror]
        subprocess.run(command, check=True, capture_output=True)
        (folder / "complete").touch()
    return folder / "base"


def _network(base: Path) -> tuple[dict[Path, str], dict[str, str]]:
    """Return what a network would bring to machines made from `base`: files to bind, and pip's
    environment.

    Docker brings names. A company's network brings pip's certificates and folder of wheels.
    """
    binds = {Path("/etc/resolv.conf"): "/etc/resolv.conf", Path("/etc/hosts"): "/etc/hosts"}
    for file in binds.values():
        (base / file[1:]).touch()
    environment = {}
    (wheels,) = _said(sys.executable, "-m", "pip", "config", "get", "global.find-links") or ("",)
    if wheels:
        (base / "wheels").mkdir(exist_ok=True)
        binds[Path(wheels)] = "/wheels"
        environment["PIP_FIND_LINKS"] = "/wheels"
    if certificates := os.environ.get("PIP_CERT"):
        (base / "certificates.pem").touch()
        binds[Path(certificates)] = "/certificates.pem"
        environment["PIP_CERT"] = "/certificates.pem"
    return binds, environment


NEEDS_DEBIAN = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("debootstrap"),
    reason="needs root, debootstrap and a Debian mirror",
)


@pytest.mark.exhaustive
@NEEDS_DEBIAN
def test_plain_clone_runs_demo_and_passes_tests(tmp_path: Path) -> None:
    """The two commands of the README on a machine with Python, make and a compiler alone, for a
    user who is not root.
    """
    base = _debian(tmp_path)
    user = "somebody"
    binds, environment = _network(base)
    root = tmp_path / "machine"
    subprocess.run(
        [
            "cp",
            "-a",
            "--reflink=auto",
            str(base),
            str(root),
        ],
        check=True,
    )
    machine = Stage(root, environment)
    packages = [
        "python3",
        "python3-venv",
        "python3-dev",
        "gcc",
        "libc6-dev",
        "make",
    ]
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-qq", "--yes", "--no-install-recommends", *packages],
        ["useradd", "--create-home", "--uid", "10002", user],
    ):
        done = machine.run(*command, binds=binds, timeout_s=600)
        assert done.returncode == 0, done.stdout + done.stderr
    (root / "etc/hostname").unlink(missing_ok=True)
    clone = root / "home" / user / "rayrec"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    shutil.rmtree(clone / ".git")  # there is no git either
    subprocess.run(["chown", "--recursive", "10002:10002", str(clone)], check=True)
    machine.user = "10002"
    machine.folder = f"/home/{user}/rayrec"
    for target in ("demo", "test"):
        done = machine.run("make", target, binds=binds, timeout_s=1700)
        assert done.returncode == 0, done.stdout + done.stderr
    (summary,) = (clone / "demo/runs").glob("*/summary.json")
    assert json.loads(summary.read_text())["metrics"]["auroc"] > 0.7


@pytest.mark.exhaustive
@NEEDS_DEBIAN
def test_image_builds_and_runs_demo(tmp_path: Path) -> None:
    base = _debian(tmp_path)
    work = tmp_path / "stages"
    work.mkdir()
    binds, environment = _network(base)
    # The folder of wheels is an argument of the build. It is no part of the image.
    arguments = {
        "BUILD": "cpu",
        **{name: environment.pop(name) for name in ["PIP_FIND_LINKS"] if name in environment},
    }
    began_s = time.monotonic()
    image = build(
        ROOT / "deploy" / "Dockerfile",
        ROOT,
        work,
        base=Stage(base, environment),
        arguments=arguments,
        binds=binds,
    )
    built_s = time.monotonic()
    for command in (("rayrec", "doctor"), image.command):
        done = image.run(*command, binds=binds, timeout_s=1800)
        assert done.returncode == 0, done.stdout + done.stderr
    demo_s = time.monotonic() - built_s
    assert (image.root / "home/rayrec/runs/demo/summary.json").exists()
    assert image.run("id", "--user", binds=binds, timeout_s=60).stdout.strip() == "10001"
    assert image.run("touch", "/opt/rayrec/file", binds=binds, timeout_s=60).returncode != 0
    size = _megabytes(image.root)
    own = _megabytes(base)
    print(
        f"built in {built_s - began_s:.0f} s, {size - own:.0f} MB beyond Debian's {own:.0f}; demo "
        f"in {demo_s:.0f} s"
    )
