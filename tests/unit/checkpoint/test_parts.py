"""Retention, save plans, leases and host memory copies."""

import logging
import os
import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from builders.faults import rejects

from rayrec.checkpoint import Retention, acquire_lease, to_remove
from rayrec.checkpoint.plan import Box, HostCopy, Part, Plan, check_covered
from rayrec.config import InputError

NAN = float("nan")
STEPS = [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("scores", "retention", "in_use", "removed"),
    [
        ([None] * 5, Retention(), [], [10, 20, 30]),
        ([None] * 5, Retention(num_to_keep=1), [], [10, 20, 30, 40]),
        ([None] * 5, Retention(num_to_keep=9), [], []),
        ([None] * 5, Retention(num_to_keep=1), [20], [10, 30, 40]),
        ([0.9, 0.1, 0.2, 0.3, 0.4], Retention(), [], [20, 30]),
        ([0.1, 0.9, 0.9, 0.3, 0.4], Retention(), [], [10, 20]),  # of equal ones the later
        ([0.1, None, 0.0, NAN, None], Retention(num_to_keep=1), [], [20, 30, 40]),
        ([0.5, 0.4, 0.3, 0.2, 0.1], Retention(num_to_keep=1, keep_best=2), [], [30, 40]),
        ([0.5, 0.4, 0.3, 0.2, 0.1], Retention(num_to_keep=1, keep_best=0), [], [10, 20, 30, 40]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], Retention(num_to_keep=1, keep_best=1), [], [10, 20, 30, 40]),
        ([None] * 5, Retention(num_to_keep=1, keep_every=20), [], [10, 30]),
        ([None] * 5, Retention(num_to_keep=1, keep_every=100), [], [10, 20, 30, 40]),
    ],
)
def test_retention_removes_expected_steps(scores: list[Any], retention: Retention, in_use: list[int], removed: list[int]) -> None:
    saved = list(zip(STEPS, scores, strict=True))
    assert to_remove(saved, retention, in_use=in_use) == removed
    assert to_remove(saved[::-1], retention, in_use=in_use) == removed
    assert to_remove([], retention, in_use=in_use) == []


# What the ranks of a run must hold together, so that a checkpoint is complete ----------------------------------------
@pytest.mark.parametrize(
    ("boxes", "covered"),
    [
        ([((0, 0), (4, 3))], 12),
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], 12),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2))], 12),
        ([], 0),
        ([((0, 0), (2, 3))], 6),
        ([((0, 0), (4, 3)), ((0, 0), (4, 3))], 24),
    ],
)
def test_parts_cover_each_tensor_exactly_once(boxes: list[Box], covered: int) -> None:
    refused = pytest.raises(InputError, match=f"table: the workers have {covered} of its 12 elements")
    with nullcontext() if covered == 12 else refused:
        check_covered({"scalar": (), "empty": (0, 4), "table": (4, 3)}, {"scalar": [((), ())], "table": boxes})
    rejects("scalar: the workers have 0 of its 1 elements", check_covered, {"scalar": ()}, {})


# Who owns a run ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_latest_lease_is_valid(tmp_path: Path, scheme: str) -> None:
    run = f"{scheme}{tmp_path}"
    first = acquire_lease(run)
    assert first.valid()
    assert first.name.startswith("000001-")
    second = acquire_lease(run)
    assert (first.valid(), second.valid()) == (False, True)
    assert pickle.loads(pickle.dumps(second)).valid()
    second.check()
    rejects("another process acquired the lease of this run", first.check)


def test_one_of_two_simultaneous_leases_is_valid(tmp_path: Path) -> None:
    mine = acquire_lease(str(tmp_path))
    (tmp_path / "claims" / ("000001-" + "f" * 32)).touch()
    assert not mine.valid()


def test_other_files_are_not_leases(tmp_path: Path) -> None:
    mine = acquire_lease(str(tmp_path))
    for name in ("zzz", "000009-" + "f" * 32 + ".abc.partial", "9-x"):
        (tmp_path / "claims" / name).touch()
    assert mine.valid()
    assert acquire_lease(str(tmp_path)).name.startswith("000002-")


def test_old_leases_are_removed_and_numbering_continues(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / ("999999-" + "f" * 32)).touch()
    names = [acquire_lease(str(tmp_path)).name for _ in range(12)]
    assert [name.split("-")[0] for name in names] == [str(1_000_000 + number) for number in range(12)]
    assert sorted(os.listdir(tmp_path / "claims")) == names[-5:]


# Host memory of a checkpoint's copy next to a GPU: pinned, or not if the system refuses ------------------------------
@pytest.mark.parametrize(("code", "unpinned"), [(0, 1), (2, 0)])
def test_unpinnable_memory_is_logged_and_used(
    code: int, unpinned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register, unregister = Mock(return_value=code), Mock(return_value=700)  # an error of the device, which is reported elsewhere
    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    with caplog.at_level(logging.WARNING):
        part: Any = Part(None, "model.weight", torch.float32, (4,), (0,), (4,), 0, 16)  # type: ignore[arg-type]
        source: Any = SimpleNamespace(device=torch.device("cuda", 3))
        copy = HostCopy(Plan((part,), {"model.weight": (4,)}), lambda _: source)
    assert [call.args[1] for call in register.call_args_list] == [16]
    assert ("of host memory for checkpoints (CUDA error 2). Saves stall training for longer" in caplog.text) == bool(code)
    assert len(copy.body()) == 16
    copy.free()
    copy.free()
    assert unregister.call_count == unpinned
