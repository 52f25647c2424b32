"""Benchmarks: their rows, rounds in turn, and what those of starts, preemption and GPUs make of
events.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.faults import raising, rejects
from builders.scripts import ROOT, script

import rayrec
from rayrec.cli.parser import parse
from rayrec.commands import COMMANDS
from rayrec.config import InputError
from rayrec.data.synthetic import generate
from rayrec.observe.console import Console
from rayrec.optim.config import DenseOptimizerConfig

gpu, measuring, preempt, run, scale, start, subprocesses = (
    script("benchmarks", name)
    for name in (
        "gpu_benchmark",
        "rows",
        "preempt_rows",
        "run",
        "scale_benchmark",
        "start_benchmark",
        "subprocesses",
    )
)
DryRun = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(measuring, "_FAILED", [])


# -- What the benchmark of one GPU computes from what it measured, and how it refuses a machine
# without one
def test_missing_gpu_is_reported_and_roofline_is_lower_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAYREC_GPU_TESTS_ON", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rejects("torch sees no GPU here", gpu.main, quick=True)
    assert gpu.selected_parts(["gpu", "--quick"]) == gpu.PARTS
    assert gpu.selected_parts(["gpu", "--parts", "trace,train"]) == ("train", "trace")
    for wrong in (
        ["--parts", "speed"],
        ["--parts"],
        ["--parts", ""],
    ):
        rejects("--parts: there are train, dcnv2", gpu.selected_parts, wrong)
    moved = gpu.bytes_of_row(
        ids=2,
        features=2,
        width=4,
        state_values=1,
        saved_bytes=10.0,
    )
    assert moved == {"tables": 4 * 2 * (3 * 4 + 2), "embeddings": 4 * 2 * 4 * 4, "activations": 40}
    found = gpu.roofline(5.0, 100.0, moved, {"bf16": 6_000.0, "memory": 2_800.0}, precision="bf16")
    assert (found["flop_per_row"], found["flop_share"]) == (600, 0.5)
    assert found["bytes_share"] == pytest.approx(5 * 280 / 2_800, abs=1e-3)
    assert found["bound_rows_per_s"] == 10  # by both
    names = {
        "cuda_runtime": ("cudaStreamSynchronize", "cudaStreamSynchronize", "cudaLaunchKernel"),
        "gpu_memcpy": ("Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pinned -> Device)"),
        "kernel": ("sgemm",),
    }
    events = [
        {"name": "a mark"},
        *({"cat": kind, "name": name} for kind in names for name in names[kind]),
    ]
    assert gpu.syncs_of(events) == {
        "cudaStreamSynchronize": 2,
        "Memcpy DtoH (Device -> Pageable)": 1,
    }
    assert gpu.kernels_of(events) == 1


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> DryRun:
    def rows(parts: str) -> list[dict[str, Any]]:
        monkeypatch.setenv("RAYREC_GPU_TESTS_ON", "cpu")
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.setattr(
            "sys.argv", ["run.py", "gpu", "--parts", parts, "--out", str(tmp_path / "out")]
        )
        gpu.main(quick=True)
        return printed(capsys)

    return rows


@pytest.mark.extended
def test_gpu_benchmark_runs_on_cpu(dry_run: DryRun, tmp_path: Path) -> None:
    rows = dry_run(",".join(gpu.PARTS))
    assert len(rows) == 2 * 3 + 1 + 5
    assert {row["device"] for row in rows} == {"cpu"}
    (trace,) = (row for row in rows if "syncs_per_step" in row)
    assert (trace["syncs_per_step"], trace["kernels"]) == (0, 0)
    assert (tmp_path / "out" / "trace.json.gz").exists()


def test_speed_rows_have_roofline_and_peer(
    dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "TRAINED", ("fp32",))
    speeds = dry_run("train")
    assert [speed["peer"].split()[0] for speed in speeds] == ["preprocessed", "TorchRec's"]
    for speed in speeds:
        ratio = speed["rows_per_s"] / speed["peer_rows_per_s"]
        assert speed["ratio"] == pytest.approx(ratio, rel=0.05)
    assert 0 <= speed["blocked_fraction"] <= 1
    assert speed["flop_per_row"] > 6 * 2_000_000  # of MLPerf's network
    assert speed["bytes_per_row"]["tables"] == 4 * 26 * 3 * 128


# -- What the benchmark of preemptions reads from the steps that were begun
STAMPS = "7 0 100.0\n7 1 101.0\n7 2 102.0\n9 1 110.0\n9 2 111.0\n3 3 130.0\n3 4 13"


def test_preemptions_are_seeded_and_cost_as_restarts() -> None:
    assert preempt.parse_attempts(STAMPS) == [
        preempt.AttemptSteps(0, 3, 100.0, 102.0),
        preempt.AttemptSteps(1, 3, 110.0, 111.0),
        preempt.AttemptSteps(3, 4, 130.0, 130.0),  # the last line is not whole
    ]
    assert preempt.parse_attempts("") == []
    attempts = preempt.parse_attempts(STAMPS)
    killed_in_step_2 = (101.5, 103.0)
    ended_before = (110.5, 125.0)
    assert preempt.losses(attempts, [killed_in_step_2, ended_before]) == [
        preempt.Loss(steps_redone=2, idle_s=8.0, after_kill_s=7.0),
        preempt.Loss(steps_redone=0, idle_s=19.0, after_kill_s=5.0),
    ]
    two_restarts = preempt.Loss(steps_redone=2, idle_s=27.0, after_kill_s=10.0)
    assert preempt.losses(attempts, [(101.5, 120.0)]) == [two_restarts]
    assert preempt.losses(attempts[:1], [(101.5, 120.0)]) == [
        preempt.Loss(steps_redone=0, idle_s=0.0, after_kill_s=0.0)
    ]
    chosen = preempt.moments(600, 4, seed=0)
    assert chosen == preempt.moments(600, 4, seed=0) != preempt.moments(600, 4, seed=1)
    assert all(150 * part <= step < 150 * part + 60 for part, step in enumerate(chosen))


# The benchmark of starts reads a run's events into stages without gaps, and emits a row for each
# command and end ------
def events() -> list[dict[str, Any]]:
    """Of a command that began at 100 s."""

    def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
        return {"kind": kind, "time": time, **fields}

    step = partial(
        event,
        "step",
        steps=20,
        rows_per_s=50.0,
        blocked_fraction=0.0,
    )
    return [
        event("run", 104.0),
        event("prepared", 105.0, seconds=1.0),
        event("start_up", 105.0, process="driver", stages={"imports": 4.0, "index": 1.0}),
        event("attempt", 105.5, number=1),
        event("start", 109.0, step=0, rows=0),
        event(
            "start_up",
            109.0,
            process="worker",
            stages={"attempt": 0.25, "set_up": 3.0, "process_group": 1.0},
        ),
        event(
            "start_up", 110.0, process="worker", stages={"first_batch": 0.25, "first_step": 0.75}
        ),
        step(112.0, step=10, rows=100),
        step(114.0, step=20, rows=200),
        event("evaluate", 115.5, step=20, set="validation"),
        event("checkpoint", 116.0, step=20, stall_s=0.25),
        event("finish", 118.0, step=20),
        event("samples", 118.0, samples=[]),
        event("summary", 118.5),
    ]


def test_stages_sum_to_command_time_also_after_late_save() -> None:
    stages = start.waterfall(events(), began_s=100.0, ended_s=121.0)
    assert list(stages)[:6] == [
        "imports",
        "index",
        "attempt",
        "process_group",
        "set_up",
        "first_batch",
    ]
    assert sum(stages.values()) == pytest.approx(21.0)
    expected = {
        "attempt": 0.25,
        "evaluation": 1.5,
        "saves": 0.25,
        "test": 2.0,
        "summary": 0.5,
        "shutdown": 2.5,
    }
    assert expected.items() <= stages.items()
    assert start.first_step_s(stages) == pytest.approx(10.25)
    late = [
        {**event, "time": 118.25} if event["kind"] == "checkpoint" else event for event in events()
    ]
    stages = start.waterfall(late, began_s=100.0, ended_s=121.0)
    assert (stages["test"], sum(stages.values())) == (0.0, pytest.approx(21.0))


def found_by(seconds: float, *, trainings: tuple[str, ...]) -> dict[str, Any]:
    training = {
        "imports": seconds,
        "shutdown": 1.0,
        "first_step_s": seconds,
        "exit_s": seconds + 1.0,
        "auroc": 0.7,
    }
    return {
        "bare Ray": {"first_step_s": 8.0},
        **dict.fromkeys((*trainings, *start.PLAIN.values()), training),
        start.SERVE: {"answer_s": seconds},
        "import torch": {"exit_s": 2.0},
        **{name: {"exit_s": seconds} for name in start.SCORINGS},
    }


def test_plain_script_has_settings_of_recipe() -> None:
    plain = script("benchmarks/peers", "plain_dlrm")
    arguments = parse(
        COMMANDS["train"], ["criteo_demo", "--scaling.num-workers", "1", *start.PLAIN_NETWORK]
    ).arguments
    (config,) = arguments
    model = config.workload.model
    tables = config.workload.sparse_optimizer
    network = config.workload.dense_optimizer
    assert (model.interaction, model.first_order, model.embedding_penalty, config.epochs) == (
        "dot",
        False,
        0.0,
        1,
    )
    assert (
        model.embedding_dim,
        [*model.bottom_mlp],
        [*model.top_mlp],
    ) == (
        plain.DIMENSION,
        plain.BOTTOM,
        plain.TOP,
    )
    assert (tables.kind, tables.learning_rate, tables.eps) == (
        "rowwise_adagrad",
        plain.TABLE_LEARNING_RATE,
        plain.TABLE_EPS,
    )
    assert network == DenseOptimizerConfig(kind="adam", learning_rate=plain.DENSE_LEARNING_RATE)
    two = config.replace(scaling={"num_workers": 2})
    for rows in (17_143, 94_286):  # of --quick and of the full benchmark
        batch = min(plain.GLOBAL_BATCH, rows // plain.MIN_STEPS)
        assert config.effective_batch_size(rows=rows, world_size=1) == batch
        assert two.effective_batch_size(rows=rows, world_size=2) == batch // 2
        steps = -(-rows // batch)
        schedule = config.workload.schedule.for_steps(steps)
        expected = [schedule.factor(step) for step in range(steps)]
        assert [plain.rate_factor(step, steps) for step in range(steps)] == pytest.approx(expected)


report_of = partial(start.Report, rows=1000, repeats=3)


def test_row_prints_once_both_sides_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    found = found_by(4.0, trainings=tuple(start.TRAININGS))
    found[start.PLAIN[2]] = measuring.Failed("RuntimeError: ended with signal 6")
    report = report_of(with_lightgbm=False)
    new = []
    for number in range(1, len(found) + 1):
        report.print(dict([*found.items()][:number]))
        new.append(printed(capsys))
    rows = [*itertools.chain(*new)]
    assert [*map(len, new[:5])] == [0, 2, 2, 2, 2]  # against bare Ray, and without a peer
    assert len(rows) == 4 * len(start.TRAININGS) + len(start.SCORINGS) + 1
    failed = [row for row in rows if "error" in row]
    assert {row["peer"] for row in failed} == {start.PLAIN[2]}
    assert len(failed) == 2 * sum("2 workers" in name for name in start.TRAININGS)
    assert all(
        (row["ratio"], row["peer_s"], row["error"])
        == (None, None, "RuntimeError: ended with signal 6")
        for row in failed
    )
    assert all(row["s"] for row in failed)
    report_of(with_lightgbm=False).print(found_by(3.0, trainings=start.QUICK))
    assert len(printed(capsys)) == 4 * len(start.QUICK) + len(start.SCORINGS) + 1


# A benchmark whose peer fails prints a row with the error, measures all else, and its command ends
# with status 1 ------
ABORTS = """import os, sys
print("connecting to s3://user:word@store with SECRET_KEY=hidden-word", file=sys.stderr)
print("terminate called, api_key=hidden-word", file=sys.stderr)
print("------", file=sys.stderr, flush=True)
os.kill(os.getpid(), 6)
"""


def emit_rates(rates: dict[str, Any]) -> None:
    for peer in ("whole", "aborts", "missing"):
        measuring.emit(
            "some",
            peer=peer,
            workload="rows",
            value=rates["ours"],
            repeats=2,
            ratio=rates["ours"] / rates[peer],
            peer_rows_per_s=round(rates[peer]),
        )


def test_peer_killed_by_signal_becomes_error_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text(ABORTS)
    calls: list[str] = []

    def called(name: str, function: Callable[[], float]) -> float:
        calls.append(name)
        return function()

    ways = {
        "aborts": partial(subprocesses.run_child, peer),
        "missing": lambda: 1 / 0,
        "ours": lambda: 10.0,
        "whole": lambda: 5.0,
    }
    rates = measuring.interleaved(
        2, **{name: partial(called, name, function) for name, function in ways.items()}
    )
    assert calls == [
        "aborts",
        "missing",
        "ours",
        "whole",
        "ours",
        "whole",
    ]
    emit_rates(rates)
    captured = capsys.readouterr()
    assert "hidden-word" not in captured.err
    assert "user:word" not in captured.err
    whole, aborts, missing = map(json.loads, captured.out.splitlines())
    assert (whole["rows_per_s"], whole["ratio"], whole["peer_rows_per_s"]) == (10.0, 2.0, 5)
    assert "error" not in whole
    assert (
        aborts["error"]
        == "RuntimeError: peer.py ended with signal 6 (Aborted): terminate called, api_key=***"
    )
    assert (aborts["rows_per_s"], aborts["ratio"], aborts["peer_rows_per_s"]) == (10.0, None, None)
    assert missing["error"] == "ZeroDivisionError: division by zero"
    assert measuring.failed() == ["some"]


def test_failed_own_rate_leaves_peer_figures(capsys: pytest.CaptureFixture[str]) -> None:
    failed = measuring.Failed("RuntimeError: it is over")
    emit_rates(
        {
            "ours": failed,
            "whole": 5.0,
            "aborts": failed,
            "missing": 1 / (1 / failed + 1 / 2.0),
        }
    )
    whole, aborts, missing = printed(capsys)
    assert (whole["rows_per_s"], whole["ratio"], whole["peer_rows_per_s"]) == (None, None, 5)
    assert {row["error"] for row in (whole, aborts, missing)} == {"RuntimeError: it is over"}
    assert list(failed) == list(failed.items()) == []
    assert max((0, 1), key=lambda number: (failed, 1.0)[number]) == 1
    assert f"{failed['a']['b']:.2f}" == "failed"
    assert measuring.medians_of({"a": [{"x": 1.0}, {"x": 3.0}, {}], "b": failed}) == {
        "a": {"x": 1.0},
        "b": failed,
    }


def test_results_are_known_before_later_candidates_run() -> None:
    seen: list[list[str]] = []
    reported: list[dict[str, Any]] = []

    def measure(name: str) -> str:
        seen.append([*(reported[-1] if reported else ())])
        return name

    candidates = {name: partial(measure, name) for name in "abc"}
    measuring.in_turn(
        2,
        lambda number: candidates,
        shown=str,
        on_result=lambda found: reported.append(dict(found)),
    )
    assert seen == [[], [], [], [], ["a"], ["a", "b"]]
    assert reported[-1] == {name: [name, name] for name in "abc"}


def test_failed_part_of_all_benchmarks_is_skipped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    mains: dict[str, Any] = {
        "first": lambda quick: done.append("first"),
        "second": raising(RuntimeError("password=hidden-word\nits last line")),
        "third": raising(InputError("rayrec benchmark third: --data names no log")),
        "fourth": lambda quick: done.append("fourth"),
    }
    for name, main in mains.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(main=main))
    monkeypatch.setattr(run, "BENCHMARKS", {name: (name,) for name in mains})
    assert (run.main(["all", "--quick"]), done) == (1, ["first", "fourth"])
    captured = capsys.readouterr()
    assert "hidden-word" not in captured.out + captured.err
    errors = {row["name"]: row["error"] for row in map(json.loads, captured.out.splitlines())}
    assert errors == {
        "second": "RuntimeError: its last line",
        "third": "rayrec benchmark third: --data names no log",
    }
    for name, status in (("second", 1), ("first", 0)):
        monkeypatch.setattr(measuring, "_FAILED", [])
        assert run.main([name]) == status
    rejects("names no log", run.main, ["third"])


def test_models_and_their_plain_peers_train() -> None:
    """In a process of its own, which makes and ends a process group."""
    done = subprocess.run(
        [sys.executable, "-c", _MODELS],
        cwd=ROOT / "benchmarks",
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["workload"].split(",")[0] for row in rows] == ["linear", "dcnv3"], done.stderr
    assert all(row["ratio"] > 0 for row in rows)


_MODELS = """
import models_benchmark

models_benchmark.MODELS = ("linear", "dcnv3")
models_benchmark.BATCH = 64
models_benchmark.main(quick=True)
"""


@pytest.mark.exhaustive
def test_torchrun_peer_ends_with_status_0(tmp_path: Path) -> None:
    """Every second run ended with signal 6 when its process group was destroyed before its
    pipelines.
    """
    generate(
        str(tmp_path),
        rows=5_000,
        seed=0,
        parallelism=1,
    )
    made = {"out": str(tmp_path / "npy"), "format": "npy", "split": "sevenths"}
    rayrec.preprocess(str(tmp_path / "train.txt"), **made, console=Console(quiet=True))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(ROOT / "benchmarks" / "peers" / "plain_dlrm.py"),
        made["out"],
    ]
    for _ in range(3):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout.splitlines()[-1]).keys() == {"first_step_s", "auroc"}


# -- The bits of tiny runs: what counts as a difference, and that those of the stored runs are still
# the same
bits = script("tools", "bits")
HASHES = {"weights_sha256": "aa", "predict_sha256": "bb"}
LINE: dict[str, Any] = {
    "name": "criteo",
    "losses": [0.5, 0.25],
    "metrics": {"auroc": "0.75"},
    **HASHES,
}


@pytest.mark.parametrize(
    ("changes", "on_this_machine", "elsewhere"),
    [
        pytest.param({}, 0, 0, id="0"),
        pytest.param({"losses": [0.5, 0.2500001]}, 1, 0, id="losses-0.5-0.2500001"),
        pytest.param({"losses": [0.5, 0.2501]}, 1, 1, id="losses-0.5-0.2501"),
        pytest.param({"losses": [0.5, float("nan")]}, 1, 1, id="losses-0.5-float-nan"),
        pytest.param({"losses": [0.5]}, 1, 1, id="losses-0.5"),
        pytest.param({"weights_sha256": "cc"}, 1, 0, id="weights_sha256-cc"),
        pytest.param(
            {"predict_sha256": "cc", "export_sha256": "dd"},
            2,
            0,
            id="predict_sha256-cc-export_sha256",
        ),
        pytest.param(
            {"metrics": {"auroc": "0.7500000000000001", "added": "1"}}, 1, 0, id="metrics-auroc"
        ),
        pytest.param({"metrics": {}}, 1, 0, id="metrics"),
    ],
)
def test_differences_need_equal_bits_on_one_machine_only(
    changes: dict[str, Any], on_this_machine: int, elsewhere: int
) -> None:
    now = {**LINE, **changes}
    assert len(bits.differences(now, LINE, bits=True)) == on_this_machine
    assert len(bits.differences(now, LINE, bits=False)) == elsewhere
    assert len(bits.differences(now, None, bits=False)) == 1


def test_chosen_runs_include_their_dependencies() -> None:
    assert bits.select_runs(["distilled"]) == ["criteo", "distilled"]
    assert bits.select_runs(["resumed_3"]) == ["torchrun_2", "resumed_3"]
    assert (bits.select_runs(["quick"]), bits.select_runs([])) == (
        list(bits.QUICK),
        list(bits.RUNS),
    )


@pytest.mark.extended
@pytest.mark.slow
def test_quick_runs_keep_their_bits() -> None:
    """A process of its own: the number of threads counts from its start. CONTRIBUTING.md says how
    to store an intended change.
    """
    command = [sys.executable, "tools/bits.py", "quick", "--against", "tests/golden/bits.json"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 9


# -- Scale
@pytest.mark.parametrize("case", ["events", "events of text", "events in CSV"])
def test_lists_of_events_are_measured_beside_ingest(case: str) -> None:
    rate, peak = scale.run(case, 3000)
    assert (rate.name, rate.limit, peak.name) == ("rows_per_s", 0.5, "peak_rss_bytes")
    assert rate.ratio == rate.value / rate.peer > 0
    assert peak.limit == 4 << 30


@pytest.mark.parametrize(
    ("result", "is_within"),
    [
        pytest.param(("start_s", 3.0, 2.0), False, id="slow"),
        pytest.param(("start_s", 2.0, 2.0), True, id="fast"),
        pytest.param(("rows_per_s", 4.0, 0.5, 10.0), False, id="low ratio"),
        pytest.param(("rows_per_s", 6.0, 0.5, 10.0), True, id="high ratio"),
    ],
)
def test_scale_compares_rates_with_peer(result: tuple[Any, ...], is_within: bool) -> None:
    assert scale.Result(*result).is_within == is_within
