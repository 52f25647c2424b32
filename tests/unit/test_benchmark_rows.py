"""A benchmark whose peer fails prints a row with the error, measures everything else, and its command ends with status 1."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rayrec
from rayrec.config import InputError
from rayrec.data.synthetic import generate
from rayrec.observe.console import Console

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ABORTS = """import os, sys
print("connecting to s3://user:word@store with SECRET_KEY=hidden-word", file=sys.stderr)
print("terminate called, api_key=hidden-word", file=sys.stderr)
print("------", file=sys.stderr, flush=True)
os.kill(os.getpid(), 6)
"""


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("rows")
    monkeypatch.setattr(module, "_FAILED", [])
    return module


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def emit_rates(rows: Any, rates: dict[str, Any]) -> None:
    for peer in ("whole", "aborts", "missing"):
        rows.emit(
            "some",
            peer=peer,
            workload="rows",
            value=rates["ours"],
            ratio=rates["ours"] / rates[peer],
            repeats=2,
            peer_rows_per_s=round(rates[peer]),
        )


def test_peer_killed_by_signal_becomes_error_row(rows: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_child = importlib.import_module("children").run_child
    script = tmp_path / "peer.py"
    script.write_text(ABORTS)
    calls: list[str] = []

    def called(name: str, function: Callable[[], float]) -> float:
        calls.append(name)
        return function()

    candidates = {
        "aborts": partial(run_child, script),
        "missing": lambda: 1 / 0,
        "ours": lambda: 10.0,
        "whole": lambda: 5.0,
    }
    rates = rows.interleaved(2, **{name: partial(called, name, function) for name, function in candidates.items()})
    assert calls == ["aborts", "missing", "ours", "whole", "ours", "whole"]
    emit_rates(rows, rates)
    captured = capsys.readouterr()
    assert "hidden-word" not in captured.err
    assert "user:word" not in captured.err
    whole, aborts, missing = map(json.loads, captured.out.splitlines())
    assert (whole["rows_per_s"], whole["ratio"], whole["peer_rows_per_s"]) == (10.0, 2.0, 5)
    assert "error" not in whole
    assert aborts["error"] == "RuntimeError: peer.py ended with signal 6 (Aborted): terminate called, api_key=***"
    assert (aborts["rows_per_s"], aborts["ratio"], aborts["peer_rows_per_s"]) == (10.0, None, None)
    assert missing["error"] == "ZeroDivisionError: division by zero"
    assert rows.failed() == ["some"]


def test_failed_own_rate_leaves_peer_figures(rows: Any, capsys: pytest.CaptureFixture[str]) -> None:
    failed = rows.Failed("RuntimeError: it is over")
    emit_rates(rows, {"ours": failed, "whole": 5.0, "aborts": failed, "missing": 1 / (1 / failed + 1 / 2.0)})
    whole, aborts, missing = printed(capsys)
    assert (whole["rows_per_s"], whole["ratio"], whole["peer_rows_per_s"]) == (None, None, 5)
    assert {row["error"] for row in (whole, aborts, missing)} == {"RuntimeError: it is over"}
    assert list(failed) == list(failed.items()) == []
    assert max((0, 1), key=lambda number: (failed, 1.0)[number]) == 1
    assert f"{failed['a']['b']:.2f}" == "failed"
    assert rows.medians_of({"a": [{"x": 1.0}, {"x": 3.0}, {}], "b": failed}) == {"a": {"x": 1.0}, "b": failed}


def test_results_are_known_before_later_candidates_run(rows: Any) -> None:
    seen: list[list[str]] = []
    told: list[dict[str, Any]] = []

    def measure(name: str) -> str:
        seen.append([*(told[-1] if told else ())])
        return name

    candidates = {name: partial(measure, name) for name in "abc"}
    rows.in_turn(2, lambda number: candidates, shown=str, known=lambda found: told.append(dict(found)))
    assert seen == [[], [], [], [], ["a"], ["a", "b"]]
    assert told[-1] == {name: [name, name] for name in "abc"}


def test_failed_part_of_all_benchmarks_is_skipped(
    rows: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = importlib.import_module("run")
    done: list[str] = []

    def benchmark(name: str, error: Exception | None = None) -> None:
        def main(*, quick: bool) -> None:
            if error:
                raise error
            done.append(name)

        monkeypatch.setitem(sys.modules, f"{name}_benchmark", SimpleNamespace(main=main))

    benchmark("first")
    benchmark("second", RuntimeError("password=hidden-word\nits last line"))
    benchmark("third", InputError("rayrec benchmark third: --data names no log"))
    benchmark("fourth")
    monkeypatch.setattr(run, "NAMES", ("first", "second", "third", "fourth"))
    assert run.main(["all", "--quick"]) == 1
    assert done == ["first", "fourth"]
    captured = capsys.readouterr()
    assert "hidden-word" not in captured.out + captured.err
    errors = {row["name"]: row["error"] for row in map(json.loads, captured.out.splitlines())}
    assert errors == {
        "second": "RuntimeError: its last line",
        "third": "rayrec benchmark third: --data names no log",
    }
    monkeypatch.setattr(rows, "_FAILED", [])
    assert run.main(["second"]) == 1
    monkeypatch.setattr(rows, "_FAILED", [])
    assert run.main(["first"]) == 0
    with pytest.raises(InputError, match="names no log"):
        run.main(["third"])


@pytest.mark.exhaustive
def test_torchrun_peer_ends_with_status_0(tmp_path: Path) -> None:
    """Every second run ended with signal 6 when its process group was destroyed before its pipelines."""
    generate(str(tmp_path), rows=5_000, seed=0, parallelism=1)
    rayrec.preprocess(
        str(tmp_path / "train.txt"),
        out=str(tmp_path / "npy"),
        format="npy",
        split="sevenths",
        console=Console(quiet=True),
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    peer = BENCHMARKS / "peers" / "plain_dlrm.py"
    for _ in range(3):
        command = [sys.executable, *torchrun, str(peer), str(tmp_path / "npy")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout.splitlines()[-1]).keys() == {"first_step_s", "auroc"}
