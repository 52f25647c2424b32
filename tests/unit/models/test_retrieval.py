"""Retrieval models on two workers, on one, and in plain PyTorch have equal weights within float error."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import retrieval
from ranks.checkpoint import run_ranks
from torch.nn import functional

from rayrec.checkpoint import Checkpoint, full_tensors
from rayrec.metrics.ranking import rank_measures


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for size in (1, 2):
        run_ranks(retrieval.train, size, str(folder))
    return folder


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(full_tensors(Checkpoint(str(folder)), "model."))


@pytest.mark.parametrize("name", ["two_tower", "sasrec"])
def test_retrieval_with_two_workers_matches_one(name: str, trained: Path) -> None:
    alone, together = (_weights(trained / f"{name}_{size}" / "end") for size in (1, 2))
    start = _weights(trained / f"{name}_1" / "start")
    assert alone.keys() == together.keys()
    for key, values in alone.items():
        torch.testing.assert_close(together[key], values, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(values, start[key]) for key, values in alone.items())


def test_two_towers_match_plain_pytorch(trained: Path) -> None:
    weights = {key: value.clone().requires_grad_() for key, value in _weights(trained / "two_tower_2" / "start").items()}
    tables = {key: weights[key] for key in weights if key.endswith(("bags.user.weight", "embeddings.item.weight"))}
    users, items = (next(weights[key] for key in tables if f".{name}." in key) for name in ("user", "item"))
    counts = torch.zeros(1 << 16)
    network = [key for key in weights if "tower." in key]

    def vector(side: str, rows: torch.Tensor) -> torch.Tensor:
        weight, bias = (
            next(weights[key] for key in network if key.endswith(f"{side}_tower.1.{part}")) for part in ("weight", "bias")
        )
        return functional.normalize(rows @ weight.T + bias, dim=1)

    for step in range(len(retrieval.ROWS)):
        user, item = (torch.from_numpy(ids) for ids in retrieval.pairs(step))
        counts = counts * 0.99 + torch.bincount(item, minlength=1 << 16)
        logits = vector("user", users[user]) @ vector("item", items[item]).T / retrieval.TWO_TOWER.temperature
        logits = logits - (counts[item] / counts.sum()).log()
        same = (item[:, None] == item) & ~torch.eye(len(item), dtype=torch.bool)
        loss = functional.cross_entropy(logits.masked_fill(same, -torch.inf), torch.arange(len(item)))
        trainable = {**tables, **{key: weights[key] for key in network}}
        gradients = torch.autograd.grad(loss, list(trainable.values()))
        with torch.no_grad():
            for (key, values), gradient in zip(trainable.items(), gradients, strict=True):
                values -= retrieval.RATES["sparse" if key in tables else "dense"] * gradient
    found = _weights(trained / "two_tower_2" / "end")
    for key in (*tables, *network):
        torch.testing.assert_close(found[key], weights[key].detach(), rtol=1e-4, atol=1e-6)


def test_rank_measures_skip_rows_and_rank_nan_last() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [torch.nan, 2.0, 1.0], [1.0, 1.0, 1.0]])
    found = rank_measures(logits, torch.tensor([1, 0, 0, 2]), k=2, known=torch.tensor([True, True, True, False]))
    np.testing.assert_allclose(found["ndcg_at_2"], [1 / np.log2(3), 0, 0, np.nan], rtol=1e-6)
    np.testing.assert_array_equal(found["recall_at_2"], [1, 0, 0, np.nan])
