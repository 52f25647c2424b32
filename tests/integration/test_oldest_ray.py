"""The oldest Ray that rayrec allows: its private names exist there, and a run on it learns what one without Ray does."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders.runs import one_worker
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
def run(shared_folder: Path) -> Callable[..., str]:
    folder = Path(os.environ.get("RAYREC_TEST_CACHE") or shared_folder) / f"ray-{_oldest()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "10", "--timeout", "60", "--no-deps"]
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            subprocess.run([*install, "--upgrade", "--target", str(folder), f"ray=={_oldest()}"], check=True)
            (folder / "complete").touch()
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return lambda *command: run_command(sys.executable, *command, env=environment, cwd=ROOT).stdout


def test_private_names_of_ray(run: Callable[..., str]) -> None:
    assert run("-c", "import ray; print(ray.__version__)").strip() == _oldest()
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/compat")


def test_ray_run_and_scoring(run: Callable[..., str], click_log: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(one_worker(click_log, tmp_path, steps=10, cluster={"num_cpus": 2}).to_yaml())

    def found(address: str, *command: object) -> dict[str, Any]:
        return json.loads(run("-m", "rayrec", *command, "--cluster.address", address))

    on_ray, here = (found(address, "train", "--config", config, "--name", address) for address in ("local", "none"))
    assert on_ray["weights_sha256"] == here["weights_sha256"]
    scoring = ("evaluate", tmp_path / "local", click_log / "train.txt")
    assert found("local", *scoring)["auroc"] == pytest.approx(found("none", *scoring)["auroc"])
