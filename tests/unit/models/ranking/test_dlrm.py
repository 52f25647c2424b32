"""The whole network against torchrec's, its loss over uneven batches, and what its settings refuse and cost."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from builders.whole_click_model import whole_model
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.models.cost import network_multiply_adds
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.sharded_model import ClickModel

SIZES = [50, 3, 700, 20]
SMALL = DLRMConfig(
    interaction="dot",
    embedding_dim=8,
    bottom_mlp=(32, 8),
    top_mlp=(32, 16, 1),
    cross_layers=2,
    cross_low_rank=6,
    projection_first=(24, 16),
    projection_second=(24, 24),
)


def batch(rows: int, *, seed: int = 0, loss_weight: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(0, size, (rows,), generator=generator) for size in SIZES])
    return Batch(
        tensors={"dense": torch.randn(rows, 13, generator=generator)},
        sparse_features=KeyedJaggedTensor(
            keys=[f"cat_{index}" for index in range(len(SIZES))],
            values=ids,
            lengths=torch.ones(len(SIZES) * rows, dtype=torch.int32),
            stride=rows,
        ),
        labels={"label": torch.randint(0, 2, (rows,), generator=generator).float()},
        loss_weight=loss_weight,
    )


def build(config: DLRMConfig = SMALL, **settings: object) -> ClickModel:
    return whole_model(config, SIZES, **settings)


def test_kaggle_multiply_adds() -> None:
    kaggle = DLRMConfig(interaction="dot", embedding_dim=16, bottom_mlp=(512, 256, 64, 16), top_mlp=(512, 256, 1))
    model = whole_model(kaggle, [2] * 26)
    assert network_multiply_adds(model.head.network, model.head.inputs, kaggle) == 486_032


@pytest.mark.parametrize("interaction", ["dot", "cross", "projection"])
def test_multiply_adds_counts_the_built_layers(interaction: str) -> None:
    config = SMALL.replace(interaction=interaction)
    model = build(config)
    weights = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embedding_bags" not in n)
    products = {"dot": 5 * 5 * 8, "cross": 0, "projection": 2 * 3 * 8}[interaction]
    cost = network_multiply_adds(model.head.network, model.head.inputs, config)
    assert cost == weights + products
    assert model.training


def test_uneven_workers_average_to_the_global_mean() -> None:
    model, whole = build(), batch(48)
    logits = model.score(whole.tensors["dense"], whole.sparse_features)
    expected = functional.binary_cross_entropy_with_logits(logits, whole.labels["label"])
    parts = []
    for start, stop in ((0, 31), (31, 48)):
        ids = whole.sparse_features.values().view(len(SIZES), 48)[:, start:stop].reshape(-1)
        part = batch(stop - start, loss_weight=2 / 48)
        part.tensors = {"dense": whole.tensors["dense"][start:stop]}
        part.labels = {"label": whole.labels["label"][start:stop]}
        part.sparse_features = KeyedJaggedTensor(
            keys=part.sparse_features.keys(), values=ids, lengths=part.sparse_features.lengths(), stride=stop - start
        )
        parts.append(model(part)[0])
    torch.testing.assert_close((parts[0] + parts[1]) / 2, expected)


def test_seed_alone_decides_the_start() -> None:
    torch.manual_seed(5)
    one = build(seed=1).state_dict()
    state = torch.get_rng_state()
    two = build(seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["top_mlp.layers.0.weight"], build(seed=2).state_dict()["top_mlp.layers.0.weight"])


def test_bottom_mlp_follows_embedding_dim_unless_set() -> None:
    assert SMALL.replace(embedding_dim=16).bottom_mlp == (32, 16)
    assert SMALL.replace(embedding_dim=16, bottom_mlp=(64, 16)).bottom_mlp == (64, 16)
    stored = {"class": SMALL.to_dict()["class"], "embedding_dim": 16}
    assert SMALL.updated(stored).bottom_mlp == (32, 16)
    other = SMALL.updated({"class": "deepfm", "embedding_dim": 16})
    assert (type(other).__name__, other.embedding_dim) == ("DeepFMConfig", 16)
    with pytest.raises(InputError, match="must end with embedding_dim 16"):
        SMALL.replace(embedding_dim=16, bottom_mlp=(32, 8))


def test_settings_load_no_torch() -> None:
    code = "import sys, rayrec.models.ranking.dlrm, rayrec.sharding as s; s.ShardingConfig(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
