"""deploy/Dockerfile carried out for real, on a Debian that debootstrap makes (as root; needs debootstrap and a Debian mirror)."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts.dockerfile import Stage, build

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap"),
]


def _said(*command: object) -> list[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False).stdout.split()


def _megabytes(root: Path) -> float:
    return int(_said("du", "--summarize", "--one-file-system", "--block-size=1", root)[0]) / 1e6


def _debian(scratch: Path) -> Path:
    """A Debian with what it cannot do without; RAYREC_TEST_CACHE keeps it for the next run too."""
    folder = Path(os.environ.get("RAYREC_TEST_CACHE") or scratch) / "debian"
    if not (folder / "complete").exists():
        mirror = _said("apt-get", "indextargets", "--format", "$(REPO_URI)", "Codename: bookworm")[0]
        command = ["debootstrap", "--variant=minbase", "bookworm", str(folder / "base"), mirror]
        subprocess.run(command, check=True, capture_output=True)
        (folder / "complete").touch()
    return folder / "base"


def test_image_builds_and_runs_demo(tmp_path: Path) -> None:
    base, work = _debian(tmp_path), tmp_path / "stages"
    work.mkdir()
    # What Docker would bring: names. What a company's network would: pip's certificates and folder of wheels.
    binds = {Path("/etc/resolv.conf"): "/etc/resolv.conf", Path("/etc/hosts"): "/etc/hosts"}
    arguments = {"BUILD": "cpu"}
    (wheels,) = _said(sys.executable, "-m", "pip", "config", "get", "global.find-links") or ("",)
    if wheels:
        (base / "wheels").mkdir(exist_ok=True)
        binds[Path(wheels)] = "/wheels"
        arguments["PIP_FIND_LINKS"] = "/wheels"
    environment = {}
    if certificates := os.environ.get("PIP_CERT"):
        (base / "certificates.pem").touch()
        binds[Path(certificates)] = "/certificates.pem"
        environment["PIP_CERT"] = "/certificates.pem"
    for file in ("/etc/resolv.conf", "/etc/hosts"):
        (base / file[1:]).touch()
    began_s = time.monotonic()
    image = build(ROOT / "deploy" / "Dockerfile", ROOT, work, base=Stage(base, environment), arguments=arguments, binds=binds)
    built_s = time.monotonic()
    for command in (("rayrec", "doctor"), image.command):
        done = image.run(*command, binds=binds, timeout_s=1800)
        assert done.returncode == 0, done.stdout + done.stderr
    demo_s = time.monotonic() - built_s
    assert (image.root / "home/rayrec/runs/demo/summary.json").exists()
    assert image.run("id", "--user", binds=binds, timeout_s=60).stdout.strip() == "10001"
    assert image.run("touch", "/opt/rayrec/file", binds=binds, timeout_s=60).returncode != 0
    size, own = _megabytes(image.root), _megabytes(base)
    print(f"built in {built_s - began_s:.0f} s, {size - own:.0f} MB beyond Debian's {own:.0f}; demo in {demo_s:.0f} s")
