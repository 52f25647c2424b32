"""The oldest Ray that rayrec allows: its private names exist there, and a run on it learns what one without Ray does."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from filelock import FileLock
from hosts.processes import run_command

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.extended


def _oldest() -> str:
    """The lower bound of Ray in pyproject.toml, where a bound without a patch release has patch release 0."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (found,) = [bound for text in wanted if (bound := re.match(r"ray\[.*\]>=([\d.]+),<", text))]
    return found[1] + ".0" * (2 - found[1].count("."))


@pytest.fixture(scope="module")
def older(shared_folder: Path) -> dict[str, str]:
    """The environment of processes that find that Ray before the installed one."""
    folder = Path(os.environ.get("RAYREC_TEST_CACHE") or shared_folder) / f"ray-{_oldest()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "10", "--timeout", "60", "--no-deps"]
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            subprocess.run([*install, "--upgrade", "--target", str(folder), f"ray=={_oldest()}"], check=True)
            (folder / "complete").touch()
    return {**os.environ, "PYTHONPATH": str(folder)}


def _run(older: dict[str, str], *command: str) -> str:
    return run_command(sys.executable, *command, env=older, cwd=ROOT).stdout


def test_private_names_of_ray(older: dict[str, str]) -> None:
    assert _run(older, "-c", "import ray; print(ray.__version__)").strip() == _oldest()
    _run(older, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/compat")


def test_ray_run_and_scoring(older: dict[str, str], click_log: Path, tmp_path: Path) -> None:
    log = str(click_log / "train.txt")
    flags = ["--train-data.path", log, "--storage-path", str(tmp_path), "--steps", "10", "--evaluate-every", "10"]
    flags += ["--cluster.num-cpus", "2", "--scaling.num-workers", "1"]

    def trained(name: str, address: str) -> dict[str, str]:
        command = ("train", "criteo_demo", *flags, "--name", name, "--cluster.address", address)
        return json.loads(_run(older, "-m", "rayrec", *command))

    on_ray, here = trained("ray", "local"), trained("here", "none")
    assert on_ray["weights_sha256"] == here["weights_sha256"]
    scoring = ("evaluate", str(tmp_path / "ray"), log, "--cluster.address")
    metrics = [json.loads(_run(older, "-m", "rayrec", *scoring, address))["auroc"] for address in ("local", "none")]
    assert metrics[0] == pytest.approx(metrics[1])
