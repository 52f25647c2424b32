"""A click model on workers of unequal machines: one plan, every table trained and saved, the weights of a single worker."""

from __future__ import annotations

import json
from pathlib import Path

import click_ranks
import pytest
import torch
from checkpoint_ranks import run_ranks

from rayrec.checkpoint import Checkpoint, full_tensors, weights_sha256

pytestmark = pytest.mark.slow


def test_machines_with_unequal_numbers_of_workers_train_one_model(tmp_path: Path) -> None:
    run_ranks(click_ranks.alone, 1, str(tmp_path))
    run_ranks(click_ranks.on_unequal_nodes, 3, str(tmp_path))
    for name, tables in (("many", click_ranks.MANY), ("equal", click_ranks.EQUAL)):
        one, three = tmp_path / f"{name}_1", tmp_path / f"{name}_3"
        assert weights_sha256(Checkpoint(str(three / "start"))) == weights_sha256(Checkpoint(str(one / "start")))
        expected, found = (dict(full_tensors(Checkpoint(str(run / "end")))) for run in (one, three))
        assert found.keys() == expected.keys()
        assert sum("embedding_bags" in key for key in found) == len(tables)
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, msg=key)
        losses = [json.loads((run / "losses.json").read_text()) for run in (one, three)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
