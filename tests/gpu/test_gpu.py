"""One GPU, one worker in this process, NCCL: whatever needs CUDA to be seen. `make test-gpu`; skipped where there is no GPU.

`RAYREC_GPU_TESTS_ON=cpu` runs the same on the CPU, to try the tests themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from digits import write_digits

import rayrec
from rayrec.data.synthetic import generate
from rayrec.observe.console import Console
from rayrec.observe.events import read_events
from rayrec.recipes import criteo_demo, mnist_resnet18
from rayrec.workloads.base import TrainConfig

DEVICE = os.environ.get("RAYREC_GPU_TESTS_ON", "cuda")
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")

ROWS, STEPS = 20_000, 20
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("log")
    generate(str(folder), rows=ROWS, seed=0)
    return str(folder / "train.txt")


def config(log: str, folder: Path, name: str, *, gpu: bool, **changes: Any) -> TrainConfig:
    return criteo_demo(log).replace(
        storage_path=str(folder),
        name=name,
        log_every=1,
        steps=STEPS,
        scaling={"num_workers": 1, "use_gpu": gpu and DEVICE == "cuda"},
        trackers={"prometheus": False, "tensorboard": False},
        **changes,
    )


def train(made: TrainConfig) -> dict[str, Any]:
    return rayrec.train(made, console=QUIET).summary


def losses(folder: Path, name: str) -> list[float]:
    return [event["loss"] for event in read_events(str(folder / name / "events.jsonl"), kinds={"step"})]


@pytest.mark.parametrize("name", ["dlrm", "finalnet", "dcnv2"])
def test_the_losses_are_those_of_the_cpu(log: str, tmp_path: Path, name: str) -> None:
    """Sums are added in another order, and these differences grow with the steps."""
    for gpu in (False, True):
        made = config(log, tmp_path, f"{name}-{gpu}", gpu=gpu)
        model = made.workload.model if name == "dlrm" else made.workload.model.of_class(name)  # type: ignore[attr-defined]
        train(made.replace(workload={"model": model}))
    cpu, gpu_losses = losses(tmp_path, f"{name}-False"), losses(tmp_path, f"{name}-True")
    assert len(cpu) == len(gpu_losses) == STEPS
    assert gpu_losses == pytest.approx(cpu, abs=5e-3)
    assert gpu_losses[0] == pytest.approx(cpu[0], abs=1e-5)


def test_a_checkpoint_goes_to_the_gpu_and_back_bit_for_bit(log: str, tmp_path: Path) -> None:
    """Nothing learns, so every save has the weights and states that the one before had."""
    still = {"sparse_optimizer": {"learning_rate": 0.0}, "dense_optimizer": {"kind": "sgd", "learning_rate": 0.0}}
    found = [
        train(config(log, tmp_path, "moved", gpu=gpu, workload=still).replace(steps=steps))
        for gpu, steps in ((False, 5), (True, 10), (False, 15))
    ]
    assert [summary["steps"] for summary in found] == [5, 10, 15]
    assert len({summary["weights_sha256"] for summary in found}) == 1


def test_a_run_is_continued_without_a_row_lost(log: str, tmp_path: Path) -> None:
    constant = {"schedule": {"decay_fraction": 0.0}}  # else a longer run has other learning rates from the start
    train(config(log, tmp_path, "continued", gpu=True, workload=constant).replace(steps=STEPS // 2))
    summary = train(config(log, tmp_path, "continued", gpu=True, workload=constant))
    train(config(log, tmp_path, "whole", gpu=True, workload=constant))
    assert (summary["rows_lost"], summary["rows_repeated"]) == (0, 0)
    assert losses(tmp_path, "continued") == pytest.approx(losses(tmp_path, "whole"), abs=2e-3)


def test_scores_are_those_of_the_cpu(log: str, tmp_path: Path) -> None:
    train(config(log, tmp_path, "scored", gpu=True))
    run = str(tmp_path / "scored")
    on_cpu, on_gpu = (
        rayrec.evaluate(run, log, device=device, cluster_address="none", console=QUIET) for device in ("cpu", DEVICE)
    )
    assert on_gpu["rows"] == on_cpu["rows"] == ROWS
    for name in ("auroc", "logloss"):
        assert on_gpu[name] == pytest.approx(on_cpu[name], abs=1e-4)


def test_a_profile_has_the_kernels_of_the_gpu(log: str, tmp_path: Path) -> None:
    train(config(log, tmp_path, "profiled", gpu=True, profile={"steps": "5:8"}))
    traces = sorted((tmp_path / "profiled" / "profile").rglob("trace*"))
    assert traces
    kinds = {event.get("cat") for event in _trace(traces[0])["traceEvents"]}
    assert ("kernel" in kinds) == (DEVICE == "cuda")


def test_the_memory_of_the_device_is_reported(log: str, tmp_path: Path) -> None:
    train(config(log, tmp_path, "memory", gpu=True))
    text = (tmp_path / "memory" / "events.jsonl").read_text()
    assert ("device_memory_bytes" in text) == (DEVICE == "cuda")


def test_resnet18_trains(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits", train=256, test=64)
    made = mnist_resnet18(str(tmp_path / "digits")).replace(
        storage_path=str(tmp_path),
        name="vision",
        steps=4,
        batch_size=32,
        scaling={"num_workers": 1, "use_gpu": DEVICE == "cuda"},
        trackers={"prometheus": False, "tensorboard": False},
    )
    assert train(made)["steps"] == 4


def _trace(path: Path) -> Any:
    if path.suffix == ".gz":
        import gzip

        with gzip.open(path, "rt") as file:
            return json.load(file)
    return json.loads(path.read_text())
