"""Process groups of workers and their GPUs."""

from pathlib import Path

import pytest
import torch
from builders.faults import rejects
from ranks.checkpoint import run_ranks
from ranks.metric import gathered_rows_of_ranks
from torch import distributed

from rayrec.cluster.layout import TorchrunEnv
from rayrec.collectives import gathered_rows, group_arguments, group_device
from rayrec.training.launchers.process_worker import select_device


def test_nccl_group_and_process_use_gpu_of_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = group_arguments(torch.device("cuda", 5), timeout_s=60.0)
    assert (found["backend"], found["device_id"], found["timeout"].total_seconds()) == (
        "nccl",
        torch.device("cuda", 5),
        60,
    )
    found = group_arguments(torch.device("cpu"), timeout_s=60.0)
    assert (found["backend"], found["device_id"]) == ("gloo", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    last = TorchrunEnv(
        rank=31,
        world_size=32,
        local_rank=7,
        local_world_size=8,
        restarts=0,
    )
    assert select_device(last, use_gpu=True) == torch.device("cuda", 7)
    assert select_device(last, use_gpu=False) == torch.device("cpu")
    # Slurm has bound one GPU to each process
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rejects(
        r"LOCAL_RANK=7 on .*: this process sees 1 GPUs\. .*--gpu-bind=none",
        select_device,
        last,
        use_gpu=True,
    )


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:nccl", "cuda:3"),
        ("cpu:gloo,cuda:nccl", "cpu"),
    ],
)
def test_group_device_prefers_supported_cpu(
    monkeypatch: pytest.MonkeyPatch, backends: str, expected: str
) -> None:
    monkeypatch.setattr(distributed, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert group_device() == torch.device(expected)


@pytest.mark.parametrize("size", [2, 3])
def test_gathered_rows_sum_gradients_in_rank_order(size: int, tmp_path: Path) -> None:
    run_ranks(gathered_rows_of_ranks, size, str(tmp_path))


def test_gathered_rows_of_one_worker_are_unchanged() -> None:
    values = torch.ones(2, 3, requires_grad=True)
    rows, own = gathered_rows(values)
    rows[own].sum().backward()
    assert torch.equal(rows, values)
    assert torch.equal(values.grad, torch.ones(2, 3))  # type: ignore[arg-type]
