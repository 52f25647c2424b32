"""One GPU, one worker in this process, NCCL: whatever needs CUDA to be seen. `make test-gpu`; skipped where there is no GPU.

`RAYREC_GPU_TESTS_ON=cpu` runs the same on the CPU, to try the tests themselves."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import runs
from builders.digits import write_digits
from builders.faults import until
from builders.runs import QUIET
from ranks import click
from ranks.checkpoint import run_ranks
from torch import distributed

import rayrec
from rayrec.checkpoint import Checkpoint, full_tensors
from rayrec.collectives import group_arguments, use_device
from rayrec.data.logs.text_parser import parse
from rayrec.data.synthetic import generate
from rayrec.datasets.criteo import SCHEMA
from rayrec.inference.model import open_served
from rayrec.recipes import criteo_demo, gpt2_tiny, mnist_resnet18
from rayrec.workloads.base import TrainConfig

DEVICE = os.environ.get("RAYREC_GPU_TESTS_ON", "cuda")
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")

ROWS, STEPS = 20_000, 20


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
    return runs.train(made).summary


def losses(folder: Path, name: str) -> list[float]:
    return runs.losses(folder / name)


@pytest.mark.parametrize("name", ["dlrm", "finalnet", "dcnv2"])
def test_losses_match_cpu(log: str, tmp_path: Path, name: str) -> None:
    """Sums are added in another order, and these differences grow with the steps."""
    for gpu in (False, True):
        made = config(log, tmp_path, f"{name}-{gpu}", gpu=gpu)
        model = made.workload.model if name == "dlrm" else made.workload.model.of_class(name)  # type: ignore[attr-defined]
        train(made.replace(workload={"model": model}))
    cpu, gpu_losses = losses(tmp_path, f"{name}-False"), losses(tmp_path, f"{name}-True")
    assert len(cpu) == len(gpu_losses) == STEPS
    assert gpu_losses == pytest.approx(cpu, abs=5e-3)
    assert gpu_losses[0] == pytest.approx(cpu[0], abs=1e-5)


@pytest.mark.parametrize("name", [*click.CASES, *click.BY_ADAM])
def test_all_table_kinds_match_cpu(tmp_path: Path, name: str) -> None:
    """Shared tables, lists with weights, sequences under DIN, several labels, and Adam's own rule."""
    tables = (click.CASES | click.BY_ADAM)[name]
    settings = click.ADAM if name in click.BY_ADAM else {}
    for device in ("cpu", f"{DEVICE}:0" if DEVICE == "cuda" else "cpu"):
        place = torch.device(device)
        use_device(place)
        arguments = group_arguments(place, timeout_s=60.0)
        distributed.init_process_group(store=distributed.HashStore(), rank=0, world_size=1, **arguments)
        try:
            folder = tmp_path / ("there" if device == "cpu" and not (tmp_path / "there").exists() else "here")
            click.train(str(folder), tables, 0, device=device, **settings)
        finally:
            distributed.destroy_process_group()
    same_weights(tmp_path / "here" / "end", tmp_path / "there" / "end")


def test_two_workers_on_one_gpu_match_cpu(tmp_path: Path) -> None:
    run_ranks(click.alone, 1, str(tmp_path))
    if DEVICE == "cuda":
        run_ranks(click.on_one_gpu, 2, str(tmp_path))
        for name in click.CASES:
            same_weights(tmp_path / f"{name}_gpu" / "end", tmp_path / f"{name}_1" / "end")


def same_weights(found: Path, expected: Path) -> None:
    here, there = (dict(full_tensors(Checkpoint(str(place)))) for place in (found, expected))
    assert here.keys() == there.keys()
    for key, tensor in there.items():
        torch.testing.assert_close(here[key], tensor, msg=key, rtol=1e-4, atol=1e-5)


def test_checkpoint_round_trips_through_gpu_bitwise(log: str, tmp_path: Path) -> None:
    """Nothing learns, so every save has the weights and states that the one before had."""
    still = {"sparse_optimizer": {"learning_rate": 0.0}, "dense_optimizer": {"kind": "sgd", "learning_rate": 0.0}}
    found = [
        train(config(log, tmp_path, "moved", gpu=gpu, workload=still).replace(steps=steps))
        for gpu, steps in ((False, 5), (True, 10), (False, 15))
    ]
    assert [summary["steps"] for summary in found] == [5, 10, 15]
    assert len({summary["weights_sha256"] for summary in found}) == 1


def test_run_continues_without_lost_rows(log: str, tmp_path: Path) -> None:
    constant = {"schedule": {"decay_fraction": 0.0}}  # else a longer run has other learning rates from the start
    train(config(log, tmp_path, "continued", gpu=True, workload=constant).replace(steps=STEPS // 2))
    summary = train(config(log, tmp_path, "continued", gpu=True, workload=constant))
    train(config(log, tmp_path, "whole", gpu=True, workload=constant))
    assert (summary["rows_lost"], summary["rows_repeated"]) == (0, 0)
    assert losses(tmp_path, "continued") == pytest.approx(losses(tmp_path, "whole"), abs=2e-3)


def test_killed_run_resumes_without_lost_rows(log: str, tmp_path: Path) -> None:
    """The whole process group and its CUDA context go, as when a machine does."""
    flags: dict[str, Any] = {"train-data.path": log, "storage-path": tmp_path, "name": "killed"}
    flags |= {"steps": 200, "checkpoint.every": 20, "early-stopping.patience": 0}
    command = [sys.executable, "-m", "rayrec", "train", "criteo_demo", "--scaling.num-workers", "1"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    command += ["--scaling.use-gpu"] * (DEVICE == "cuda")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    saved = lambda: list((tmp_path / "killed").glob("checkpoints/*/manifest.json"))  # noqa: E731
    until(lambda: saved() or process.poll() is not None, timeout_s=180)
    assert process.poll() is None, "it ended before its first checkpoint"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    subprocess.run(command, check=True, capture_output=True)
    summary = json.loads((tmp_path / "killed" / "summary.json").read_text())
    assert (summary["steps"], summary["rows_lost"], summary["rows_repeated"]) == (200, 0, 0)


def test_served_model_matches_cpu(log: str, tmp_path: Path) -> None:
    """Without HTTP, which is the same on any device."""
    train(config(log, tmp_path, "served", gpu=True))
    text = Path(log).read_bytes()[:60_000]
    text = text[: text.rindex(b"\n") + 1]
    raw, _ = parse(SCHEMA, text)
    found = []
    for device in ("cpu", DEVICE):
        served = open_served(str(tmp_path / "served"), device=device)  # type: ignore[arg-type]
        found.append(served.scorer.score(served.preprocessor.encode(raw, np.arange(raw.rows))))
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_scores_match_cpu(log: str, tmp_path: Path) -> None:
    train(config(log, tmp_path, "scored", gpu=True))
    run = str(tmp_path / "scored")
    on_cpu, on_gpu = (
        rayrec.evaluate(run, log, device=device, cluster_address="none", console=QUIET) for device in ("cpu", DEVICE)
    )
    assert on_gpu["rows"] == on_cpu["rows"] == ROWS
    for name in ("auroc", "logloss"):
        assert on_gpu[name] == pytest.approx(on_cpu[name], abs=1e-4)


def test_profile_has_gpu_kernels(log: str, tmp_path: Path) -> None:
    train(config(log, tmp_path, "profiled", gpu=True, profile={"steps": "5:8"}))
    traces = sorted((tmp_path / "profiled" / "profile").rglob("trace*"))
    assert traces
    kinds = {event.get("cat") for event in _trace(traces[0])["traceEvents"]}
    assert ("kernel" in kinds) == (DEVICE == "cuda")


def test_device_memory_is_reported(log: str, tmp_path: Path) -> None:
    train(config(log, tmp_path, "memory", gpu=True))
    text = (tmp_path / "memory" / "events.jsonl").read_text()
    assert ("device_memory_bytes" in text) == (DEVICE == "cuda")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_resnet18_trains(tmp_path: Path, parallel: str) -> None:
    write_digits(tmp_path / "digits", train=256, test=64)
    made = mnist_resnet18(str(tmp_path / "digits")).replace(
        storage_path=str(tmp_path),
        name="vision",
        steps=4,
        batch_size=32,
        workload={"parallel": parallel},
        scaling={"num_workers": 1, "use_gpu": DEVICE == "cuda"},
        trackers={"prometheus": False, "tensorboard": False},
    )
    assert train(made)["steps"] == 4


def test_gpt2_trains(tmp_path: Path) -> None:
    for package in ("transformers", "streaming"):
        pytest.importorskip(package)
    (tmp_path / "text.txt").write_text("the cat sees a dog.\n" * 2_000)
    tokens, block = str(tmp_path / "tokens"), 32
    rayrec.preprocess(
        str(tmp_path / "text.txt"), out=tokens, format="mds", tokenizer="characters", block_size=block, console=QUIET
    )
    network = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": block}
    made = gpt2_tiny(tokens).replace(
        storage_path=str(tmp_path),
        name="language",
        steps=STEPS,
        log_every=1,
        scaling={"num_workers": 1, "use_gpu": DEVICE == "cuda"},
        workload={"model": network, "max_new_tokens": 8},
        trackers={"prometheus": False, "tensorboard": False},
    )
    train(made)
    found = losses(tmp_path, "language")
    assert found[-1] < found[0]


def _trace(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
