"""Tests that need CUDA: one GPU, one worker in this process, NCCL. `RAYREC_GPU_TESTS_ON=cpu` tries
them on the CPU.
"""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.digits import write_digits
from builders.runs import LEAN, QUIET, check_no_rows_lost, losses, short_run, train
from hosts.processes import Run
from ranks import click
from ranks.checkpoint import run_ranks
from torch import distributed

import rayrec
from rayrec.checkpoint import Checkpoint, committed, full_tensors
from rayrec.collectives import group_arguments, use_device
from rayrec.data.logs.text_parser import parse
from rayrec.data.synthetic import generate
from rayrec.datasets.criteo import SCHEMA
from rayrec.inference.model import open_served
from rayrec.recipes import criteo_demo, gpt2_tiny, mnist_resnet18
from rayrec.workloads.base import TrainConfig

DEVICE = os.environ.get("RAYREC_GPU_TESTS_ON", "cuda")
# Evaluated when a test begins: ranks are forked after the import, and a process that has asked for
# CUDA has none after a fork.
pytestmark = pytest.mark.skipif(
    "DEVICE == 'cuda' and not torch.cuda.is_available()", reason="needs a GPU"
)

ROWS = 20_000
STEPS = 20


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("log")
    generate(str(folder), rows=ROWS, seed=0)
    return str(folder / "train.txt")


def config(
    recipe: TrainConfig, folder: Path, name: str = "run", *, gpu: bool = True, **changes: Any
) -> TrainConfig:
    return short_run(
        recipe,
        folder,
        **{
            "name": name,
            "steps": STEPS,
            "log_every": 1,
            "evaluate_every": 1000,
            "scaling": {"num_workers": 1, "use_gpu": gpu and DEVICE == "cuda"},
            "trackers": LEAN["trackers"],
            **changes,
        },
    )


def clicks(log: str, folder: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    return train(config(criteo_demo(log), folder, name, **changes)).summary


@pytest.mark.parametrize("name", ["dlrm", "finalnet", "dcnv2"])
def test_losses_match_cpu(log: str, tmp_path: Path, name: str) -> None:
    model: Any = criteo_demo().workload.model  # type: ignore[attr-defined]
    workload = {"model": model if name == "dlrm" else model.with_class(name)}
    for gpu in (False, True):
        clicks(log, tmp_path, str(gpu), gpu=gpu, workload=workload)
    cpu = losses(tmp_path / "False")
    gpu_losses = losses(tmp_path / "True")
    assert len(cpu) == len(gpu_losses) == STEPS
    assert gpu_losses == pytest.approx(cpu, abs=5e-3)
    assert gpu_losses[0] == pytest.approx(cpu[0], abs=1e-5)


@pytest.mark.parametrize("name", [*click.CASES, *click.BY_ADAM])
def test_all_table_kinds_match_cpu(tmp_path: Path, name: str) -> None:
    """Shared tables, lists with weights, sequences under DIN, several labels, and Adam's own
    rule.
    """
    tables = (click.CASES | click.BY_ADAM)[name]
    settings = click.ADAM if name in click.BY_ADAM else {}
    for folder, device in (("there", "cpu"), ("here", "cuda:0" if DEVICE == "cuda" else "cpu")):
        place = torch.device(device)
        use_device(place)
        arguments = group_arguments(place, timeout_s=60.0)
        distributed.init_process_group(
            store=distributed.HashStore(), rank=0, world_size=1, **arguments
        )
        try:
            click.train(str(tmp_path / folder), tables, 0, device=device, **settings)
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
        torch.testing.assert_close(
            here[key],
            tensor,
            msg=key,
            rtol=1e-4,
            atol=1e-5,
        )


def test_checkpoint_round_trips_through_gpu_bitwise(log: str, tmp_path: Path) -> None:
    still = {
        "sparse_optimizer": {"learning_rate": 0.0},
        "dense_optimizer": {"kind": "sgd", "learning_rate": 0.0},
    }
    moves = {5: False, 10: True, 15: False}
    found = [
        clicks(
            log,
            tmp_path,
            steps=steps,
            gpu=gpu,
            workload=still,
        )
        for steps, gpu in moves.items()
    ]
    assert [summary["steps"] for summary in found] == [5, 10, 15]
    assert len({summary["weights_sha256"] for summary in found}) == 1


def test_run_continues_without_lost_rows(log: str, tmp_path: Path) -> None:
    # else a longer run has other learning rates from the start
    constant = {"schedule": {"decay_fraction": 0.0}}
    clicks(log, tmp_path, "continued", workload=constant, steps=STEPS // 2)
    check_no_rows_lost(clicks(log, tmp_path, "continued", workload=constant))
    clicks(log, tmp_path, "whole", workload=constant)
    assert losses(tmp_path / "continued") == pytest.approx(losses(tmp_path / "whole"), abs=2e-3)


def test_killed_run_resumes_without_lost_rows(log: str, tmp_path: Path) -> None:
    recipe = config(
        criteo_demo(log),
        tmp_path,
        steps=200,
        checkpoint={"every": 20},
        early_stopping={"patience": 0},
    )
    with Run(recipe, tmp_path / "commands", cache=tmp_path / "cache").start() as run:
        run.session.until(lambda: committed(run.path))
        run.session.end()
        assert not run.events("finish")
        summary = run.start().summary()
    check_no_rows_lost(summary)
    assert summary["steps"] == 200


def test_scores_match_cpu(log: str, tmp_path: Path) -> None:
    clicks(log, tmp_path)
    run = str(tmp_path / "run")
    found = []
    raw, _ = parse(SCHEMA, b"".join(Path(log).read_bytes().splitlines(keepends=True)[:300]))
    for device in ("cpu", DEVICE):
        served = open_served(run, device=device)  # type: ignore[arg-type]
        scores = served.scorer.score(served.preprocessor.encode(raw, np.arange(raw.rows)))
        found.append(
            (
                scores,
                rayrec.evaluate(
                    run,
                    log,
                    device=device,
                    cluster_address="none",
                    console=QUIET,
                ),
            )
        )
    (cpu_scores, on_cpu), (gpu_scores, on_gpu) = found
    assert gpu_scores == pytest.approx(cpu_scores, abs=1e-4)
    assert on_gpu["rows"] == on_cpu["rows"] == ROWS
    for name in ("auroc", "logloss"):
        assert on_gpu[name] == pytest.approx(on_cpu[name], abs=1e-4)


def test_profile_and_events_show_gpu(log: str, tmp_path: Path) -> None:
    clicks(log, tmp_path, profile={"steps": "5:8"})
    traces = sorted((tmp_path / "run" / "profile").rglob("trace.json.gz"))
    kinds = {
        event.get("cat")
        for event in json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    }
    text = (tmp_path / "run" / "events.jsonl").read_text()
    assert ("kernel" in kinds) == ("device_memory_bytes" in text) == (DEVICE == "cuda")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_resnet18_trains(tmp_path: Path, parallel: str) -> None:
    digits = write_digits(tmp_path / "digits", train=256, test=64)
    made = config(
        mnist_resnet18(str(digits)),
        tmp_path,
        steps=4,
        batch_size=32,
        workload={"parallel": parallel},
    )
    assert train(made).summary["steps"] == 4


def test_gpt2_trains(tmp_path: Path) -> None:
    for package in ("transformers", "streaming"):
        pytest.importorskip(package)
    (tmp_path / "text.txt").write_text("the cat sees a dog.\n" * 2_000)
    tokens = str(tmp_path / "tokens")
    rayrec.preprocess(
        str(tmp_path / "text.txt"),
        out=tokens,
        format="mds",
        tokenizer="characters",
        block_size=32,
        console=QUIET,
    )
    found = losses(
        train(
            config(
                gpt2_tiny(tokens),
                tmp_path,
                workload={
                    "model": {
                        "n_layer": 2,
                        "n_head": 2,
                        "n_embd": 32,
                        "n_positions": 32,
                    },
                    "max_new_tokens": 8,
                },
            )
        ).folder
    )
    assert found[-1] < found[0]
