"""What deploy/Dockerfile promises, read from its text; tests/integration/test_container.py carries it out."""

import json
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
    assert command[:2] == ["sh", "-c"]
    assert "rayrec train criteo_demo" in command[2]
    assert not any("gcc" in step.rest for step in _last_stage())
    assert all("rm -rf /var/lib/apt/lists/*" in rest for rest in _rests("RUN") if "apt-get install" in rest)


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
