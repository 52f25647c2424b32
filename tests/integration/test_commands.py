"""Data commands in subprocesses: output, streams and exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.extended, pytest.mark.exhaustive]  # README.md and docs/prepare.md run these commands


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def rayrec(cache: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "rayrec", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**environment, "RAYREC_CACHE": cache},
    )
    assert done.returncode == status, done.stderr[-2000:]
    return done


def test_commands_prepare_data_from_log(cache: str, click_log: Path, tmp_path: Path) -> None:
    log, vocabulary, ready = str(click_log / "train.txt"), str(tmp_path / "vocabulary"), str(tmp_path / "ready")
    made = json.loads(rayrec(cache, "vocabulary", log, "--out", vocabulary, "--preset", "torchrec", "--min-count", "2").stdout)
    assert (made["preset"], made["rows"]) == ("torchrec", 20_000)
    preprocess = ("preprocess", log, "--out", ready, "--format", "npy")
    done = json.loads(rayrec(cache, *preprocess, "--preprocessor", vocabulary, "--shuffle", "full").stdout)
    assert (done["rows"], done["preprocessor"]) == (20_000, made["hash"])
    again = rayrec(cache, *preprocess, status=2)
    assert again.stdout == ""
    assert "exists already" in again.stderr
    report = json.loads(rayrec(cache, "validate", log, "--preprocessor", vocabulary).stdout)
    assert report["rows"] == 20_000


def test_failed_gate_returns_status_2_and_names_gate(cache: str, click_log: Path) -> None:
    done = rayrec(cache, "validate", str(click_log / "train.txt"), "--gates.min-rows", "1000000", status=2)
    assert json.loads(done.stdout)["failures"]
    assert done.stderr.splitlines()[-1].startswith("rayrec validate: ")
    assert "min-rows" in done.stderr.splitlines()[-1] or "min_rows" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fetch", "criteo_kagle", "--out", "x"], "did you mean 'criteo_kaggle'"),
        (["fetch", "mnist", "--out", "x", "--base-url", "ftp://here"], "http"),
        (["vocabulary", "nothing.txt", "--out", "x"], "nothing.txt: no such file"),
        (["vocabulary", "nothing.txt", "--out", "x", "--preset", "torchrek"], "did you mean 'torchrec'"),
        (["vocabulary", "nothing.txt", "--out", "x", "--schema", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_user_errors_print_one_line(cache: str, arguments: list[str], told: str) -> None:
    done = rayrec(cache, *arguments, status=2)
    assert done.stdout == ""
    assert told in done.stderr.splitlines()[-1]
