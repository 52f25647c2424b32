"""Every verb has its command, and loads what it needs alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rayrec import cli
from rayrec.commands import MODULES, command
from rayrec.verbs import VERBS


def test_every_verb_has_one_command() -> None:
    verbs = [verb for verbs in MODULES.values() for verb in verbs]
    assert sorted(verbs) == sorted(verb for verb in VERBS if verb != "doctor")  # which must run where imports fail
    for verb in verbs:
        assert callable(command(verb))


@pytest.mark.parametrize(("verb", "unneeded"), [("top", "rayrec.prepare"), ("validate", "rayrec.serve.online.app")])
def test_a_verb_loads_its_own_module_alone(verb: str, unneeded: str) -> None:
    code = f"import sys; from rayrec.commands import command; command({verb!r}); print({unneeded!r} in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (FileNotFoundError(2, "No such file or directory", "log.txt"), 2, "log.txt: No such file or directory"),
        (OSError("s3://b/run: the store was out\nfor 600 s"), 1, "s3://b/run: the store was out for 600 s"),
        (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
        (PermissionError(), 1, "PermissionError"),
    ],
    ids=repr,
)
def test_trouble_with_storage_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, status: int, line: str
) -> None:
    def fails(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr("rayrec.commands.command", lambda verb: fails)
    assert cli.run(["train", "criteo_demo"]) == status
    assert capsys.readouterr().err == f"rayrec train: {line}\n"


def test_what_native_code_and_child_processes_print_stays_out_of_the_results() -> None:
    script = (
        "import os, subprocess, sys\n"
        "from rayrec import cli\n"
        "def run(arguments):\n"
        "    os.write(1, b'a warning of Ray\\n')\n"
        "    subprocess.run(['echo', 'a child'], check=True)\n"
        "    print('{\"auroc\": 0.5}')\n"
        "    return 3\n"
        "cli.run = run\n"
        "cli.main(['evaluate'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, '{"auroc": 0.5}\n')
    assert done.stderr == "a warning of Ray\na child\n"


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_what_libraries_print_stays_out_of_the_results(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def score(*_: object, **__: object) -> dict[str, float]:
        print("a warning of Ray")
        return {"auroc": 0.5}

    monkeypatch.setattr("rayrec.api.evaluate", score)
    monkeypatch.setattr("rayrec.api.predict_to", score)
    assert cli.run([verb, "run", "log", *(["--out", "scores"] if verb == "predict" else [])]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"auroc": 0.5}
    assert "a warning of Ray" in err
