"""Tests of click model workers on unequal machines, and of single workers."""

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from builders.faults import rejects
from ranks import click
from ranks.checkpoint import run_ranks, same
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from rayrec.checkpoint import Checkpoint, full_tensors, weights_sha256
from rayrec.data.encoding.rules import SparseColumn
from rayrec.workloads.recsys import worker
from rayrec.workloads.recsys.warm_start import TableRemap, remap_table
from rayrec.workloads.recsys.worker import TimedSparseDist, Unwrapped


def test_single_worker_step_has_no_device_sync(single_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, meta = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)), torch.device("meta")
    alone = {"env": ShardingEnv.from_local(1, 0), "plan": ShardingPlan({}), "data_parallel_wrapper": Unwrapped()}
    sharded = DistributedModelParallel(model, device=meta, init_parameters=False, **alone)
    assert {tensor.device.type for tensor in sharded.state_dict().values()} == {"meta"}
    # Each of these methods blocks the host on a GPU. torch's optimizers call them on host memory only.
    waits: list[str] = []

    def counted(name: str) -> Any:
        plain = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            frame: FrameType | None = sys._getframe(1)
            if "/torchrec/" in frame.f_code.co_filename or "/rayrec/" in frame.f_code.co_filename:
                waits.append(f"{name} by {frame.f_code.co_qualname}")
            return plain(self, *arguments, **named)

        return method

    found = {}
    for pipeline in (None, TimedSparseDist):
        config = click.config(click.MANY, 1)
        setup = config.workload.set_up(click.context(config, 0, 1), click.prepared(click.MANY))
        made: Any = setup.pipeline
        if pipeline is not None:
            made = pipeline(setup.model, setup.optimizer, torch.device("cpu"), setup.clock)
        batches = iter([click.batch(click.MANY, step, 0, 1) for step in range(6)])
        made.progress(batches)  # builds what later steps use
        with monkeypatch.context() as patched:
            for name in ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "__bool__", "__int__", "__float__"):
                patched.setattr(torch.Tensor, name, counted(name))
            for step in range(1, 4):
                setup.begin_step(step, 6)
                made.progress(batches)
        found[pipeline], waits = waits, []
    assert found[None] == []
    assert len(found[TimedSparseDist]) >= 3  # which is why one worker does not have it


def test_closed_evaluation_stops_batch_thread(single_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = MagicMock()
    loader.__iter__.side_effect = lambda: iter([click.batch(click.EQUAL, step, 0, 1) for step in range(3)])
    monkeypatch.setattr(worker, "_loader", lambda *_, **__: loader)
    config, prepared = click.config(click.EQUAL, 1), click.prepared(click.EQUAL)
    prepared.sets["validation"] = prepared.sets["train"]
    setup = config.workload.set_up(click.context(config, 0, 1), prepared)
    batches: Any = setup.eval_batches["validation"]()
    next(batches)
    loader.close.assert_not_called()
    batches.close()
    assert loader.close.call_count == 1
    assert len(list(setup.eval_batches["validation"]())) == 3
    assert loader.close.call_count == 2


@pytest.mark.slow
def test_unequal_workers_per_machine_train_one_model(tmp_path: Path) -> None:
    run_ranks(click.alone, 1, str(tmp_path))
    run_ranks(click.on_unequal_nodes, 3, str(tmp_path))
    tables_of = {name: len(tables) for name, tables in click.CASES.items()}
    for name, num_tables in {**tables_of, "shared": 2, "sequences": 2, "adam": 2, "adam_sequences": 2}.items():
        one, three = tmp_path / f"{name}_1", tmp_path / f"{name}_3"
        assert weights_sha256(Checkpoint(str(three / "start"))) == weights_sha256(Checkpoint(str(one / "start")))
        expected, found = (dict(full_tensors(Checkpoint(str(run / "end")))) for run in (one, three))
        of_tables = [key for key in found if ".embedding_bags." in key or ".sequences.embeddings." in key]
        assert len(of_tables) == num_tables * (4 if name.startswith("adam") else 1)  # with Adam's three states
        torch.testing.assert_close(found, expected)
        losses = [json.loads((run / "losses.json").read_text()) for run in (one, three)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    exact, rounded = (dict(full_tensors(Checkpoint(str(tmp_path / f"{name}_3" / "end")))) for name in ("equal", "rounded"))
    assert not same(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.01, atol=0.002)
    # Sums of three depend on their order, which is the same in the first step of an attempt as in any other.
    whole, parts = (weights_sha256(Checkpoint(str(tmp_path / name / "6"))) for name in ("whole", "parts"))
    assert whole == parts


# Row mappings between old and new tables ------------------------------------------------------------------------------
def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def joined(old: SparseColumn, new: SparseColumn, old_tokens: np.ndarray, new_tokens: np.ndarray) -> TableRemap:
    return remap_table(old, new, old_tokens, new_tokens, where="column a")


OLD = SparseColumn(num_embeddings=5, num_tokens=3)
HASHED = SparseColumn(num_embeddings=100, num_tokens=None)
SHARED, EXTENDED = (SparseColumn(num_embeddings=4, num_tokens=number) for number in (5, 6))
"""Columns whose categories share rows."""
LAST = SparseColumn(num_embeddings=4, num_tokens=3, first_id=0, unknown_id=3, missing_id=3)
GAP = SparseColumn(num_embeddings=6, num_tokens=5, first_id=0, unknown_id=3, missing_id=3, gap=3)


def test_rows_follow_categories() -> None:
    for old, new, old_tokens, new_tokens, rows in (
        (OLD, SparseColumn(num_embeddings=7, num_tokens=5), [9, 4, 7], [9, 4, 7, 1, 2], [0, 1, 2, 3, 4, -1, -1]),
        # The row of unknown categories keeps its number. Counted again, it is the last one.
        (LAST, GAP, [9, 4, 7], [9, 4, 7, 1, 2], [0, 1, 2, 3, -1, -1]),
        (GAP, LAST, [9, 4, 7, 1, 2], [2, 7, 5], [5, 2, -1, 3]),
        (  # A new row of missing values starts from that of the old table.
            SparseColumn(num_embeddings=4, num_tokens=2, missing_id=0),
            SparseColumn(num_embeddings=5, num_tokens=2, missing_id=3, gap=3),
            [9, 4],
            [4, 8],
            [0, 1, 3, 0, -1],
        ),
        (HASHED, HASHED, [], [], list(range(100))),
        (SHARED, EXTENDED, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [0, 1, 2, 3]),
    ):
        assert joined(old, new, tokens(*old_tokens), tokens(*new_tokens)).row_map.of(0, len(rows)).tolist() == rows


def test_extended_vocabulary_needs_no_table_unlike_others() -> None:
    found = joined(OLD, SparseColumn(num_embeddings=7, num_tokens=5), tokens(9, 4, 7), tokens(9, 4, 7, 1, 2))
    assert found.row_map.sources is None
    assert found.counts() == {"kept": 3, "fresh": 2, "dropped": 0}
    found = joined(GAP, LAST, tokens(9, 4, 7, 1, 2), tokens(2, 7, 5))
    assert found.counts() == {"kept": 2, "fresh": 1, "dropped": 3}
    wider = SparseColumn(num_embeddings=200, num_tokens=None)
    hashed_to = "column a: must be hashed to 100 rows by the checkpoint's rule, got 200 rows"
    rejects(hashed_to, joined, HASHED, wider, tokens(), tokens())
    rejects("column a: hashing does not match", joined, HASHED, OLD, tokens(), tokens(9, 4, 7))
    rejects("column a: several categories share a row", joined, SHARED, EXTENDED, tokens(1, 2, 3, 4, 5), tokens(5, 1, 2, 3, 4, 6))
