"""What the benchmark of one GPU computes from what it measured, and how it refuses a machine without one."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec.config import InputError


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("gpu_benchmark")


def test_without_a_gpu_it_says_so(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYREC_GPU_TESTS_ON", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch sees no GPU here"):
        gpu.main(quick=True)


def test_parts_are_chosen_by_name(gpu: Any) -> None:
    assert gpu.chosen_parts(["gpu", "--quick"]) == gpu.PARTS
    assert gpu.chosen_parts(["gpu", "--parts", "trace,train"]) == ("train", "trace")
    for wrong in (["--parts", "speed"], ["--parts"], ["--parts", ""]):
        with pytest.raises(InputError, match="--parts: there are train, dcnv2"):
            gpu.chosen_parts(wrong)


def test_the_roofline_is_the_lower_of_two_bounds(gpu: Any) -> None:
    moved = gpu.bytes_of_row(ids=2, features=2, width=4, state_values=1, saved_bytes=10.0)
    assert moved == {"tables": 4 * 2 * (3 * 4 + 2), "embeddings": 4 * 2 * 4 * 4, "activations": 40}
    peak = {"bf16": 6_000.0, "memory": 2_800.0}
    found = gpu.roofline(5.0, 100.0, moved, peak, precision="bf16")
    assert (found["flop_per_row"], found["flop_share"]) == (600, 0.5)
    assert found["bytes_share"] == pytest.approx(5 * 280 / 2_800, abs=1e-3)
    assert found["bound_rows_per_s"] == 10  # by both


def test_syncs_are_read_from_a_trace(gpu: Any) -> None:
    events = [
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize"},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize"},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel"},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)"},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)"},
        {"cat": "kernel", "name": "sgemm"},
        {"name": "a mark"},
    ]
    assert gpu.syncs_of(events) == {"cudaStreamSynchronize": 2, "Memcpy DtoH (Device -> Pageable)": 1}
    assert gpu.kernels_of(events) == 1


def dry_run(
    gpu: Any, parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    monkeypatch.setenv("RAYREC_GPU_TESTS_ON", "cpu")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["run.py", "gpu", "--parts", parts, "--out", str(tmp_path / "out")])
    gpu.main(quick=True)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.exhaustive
def test_everything_can_be_tried_on_the_cpu(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = dry_run(gpu, ",".join(gpu.PARTS), tmp_path, monkeypatch, capsys)
    assert len(rows) == 3 + 1 + 5
    assert {row["device"] for row in rows} == {"cpu"}
    (trace,) = (row for row in rows if "syncs_per_step" in row)
    assert (trace["syncs_per_step"], trace["kernels"]) == (0, 0)
    assert (tmp_path / "out" / "trace.json.gz").exists()


def test_a_row_of_speed_has_its_roofline_and_its_peer(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "TRAINED", ("fp32",))
    (speed,) = dry_run(gpu, "train", tmp_path, monkeypatch, capsys)
    assert speed["ratio"] == pytest.approx(speed["rows_per_s"] / speed["peer_rows_per_s"], rel=0.05)
    assert 0 <= speed["blocked_fraction"] <= 1
    assert speed["flop_per_row"] > 6 * 2_000_000  # of MLPerf's network
    assert speed["bytes_per_row"]["tables"] == 4 * 26 * 3 * 128
