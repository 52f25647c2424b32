"""What deploy/Dockerfile promises, read from its text; tests/integration/test_container.py carries it out."""

import json
import os
import subprocess
from pathlib import Path

from hosts.dockerfile import Instruction, ignored, instructions

ROOT = Path(__file__).parents[2]
RULES = (ROOT / ".dockerignore").read_text()
STEPS = instructions((ROOT / "deploy" / "Dockerfile").read_text())


def _rests(word: str) -> list[str]:
    return [step.rest for step in STEPS if step.word == word]


def _last_stage() -> list[Instruction]:
    return STEPS[max(number for number, step in enumerate(STEPS) if step.word == "FROM") :]


def test_instructions_are_read_and_image_runs_demo_unprivileged() -> None:
    text = "# a\nFROM x AS y\nRUN a \\\n # in between\n && b\n\ncopy c d\n"
    assert instructions(text) == [Instruction("FROM", "x AS y"), Instruction("RUN", "a && b"), Instruction("COPY", "c d")]
    kept = ["src/rayrec/cli.py", "requirements.lock"]
    left = ["src/rayrec/native/_kernels.abi3.so", "src/rayrec/__pycache__", "src/rayrec/__pycache__/cli.pyc", ".git/config"]
    left += ["src/rayrec.egg-info/PKG-INFO", "tests/conftest.py", ".venv"]
    assert [path for path in (*kept, *left) if not ignored(path, RULES)] == kept
    stage = _last_stage()
    (user,) = (step.rest for step in stage if step.word == "USER")
    assert int(user) > 0  # a number, so that Kubernetes can tell that it is not root's
    after = [step.word for step in stage[[step.word for step in stage].index("USER") :]]
    assert "RUN" not in after
    (command,) = (json.loads(step.rest) for step in stage if step.word == "CMD")
    assert f"deploy/run-mode.sh /opt/rayrec/bin/{command[0]}" in _rests("COPY")
    assert not any("gcc" in step.rest for step in _last_stage())
    assert all("rm -rf /var/lib/apt/lists/*" in rest for rest in _rests("RUN") if "apt-get install" in rest)


def test_mode_selects_recipe_data_and_output(tmp_path: Path) -> None:
    """The script runs with a `rayrec` that prints its arguments."""
    (tmp_path / "rayrec").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "rayrec").chmod(0o755)
    script = ROOT / "deploy" / "run-mode.sh"
    assert os.access(script, os.X_OK)
    common = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def lines(*flags: str, **variables: str) -> list[str]:
        done = subprocess.run([script, *flags], env=common | variables, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert lines() == [
        "generate log --rows 100000 --seed 0",
        "train criteo_demo --train-data.path log/train.txt --storage-path runs --name demo",
    ]
    (kaggle,) = lines("--epochs", "2", RUN_MODE="kaggle")
    assert kaggle == "train criteo_kaggle --train-data.path /data --storage-path runs --name kaggle --epochs 2"
    folders = {"DATA_DIR": "/logs", "OUTPUT_DIR": "/out", "RUN_NAME": "first"}
    assert lines(RUN_MODE="criteo_full", **folders) == [
        "train criteo_full --train-data.path /logs --storage-path /out --name first"
    ]


def test_image_has_locked_versions_and_existing_files() -> None:
    installs = [rest for rest in _rests("RUN") if "pip install" in rest]
    assert installs
    assert all("--constraint requirements.lock" in rest for rest in installs)
    assert not any("latest" in rest for rest in [*_rests("FROM"), *_rests("ARG")])
    names = {rest.split(" AS ")[1] for rest in _rests("FROM") if " AS " in rest}
    copied = set()
    for rest in _rests("COPY"):
        *sources, _ = rest.split()
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in names
            continue
        copied |= set(sources)
        for source in sources:
            assert (ROOT / source).exists(), source
            assert not ignored(source, RULES), source
    assert copied == {line[1:] for line in RULES.splitlines() if line.startswith("!")}  # and nothing else is sent
