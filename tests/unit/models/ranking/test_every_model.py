"""What holds for every click model of rayrec: it trains, and scores what it was trained to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.whole_click_model import whole_model

from rayrec.batch import Batch
from rayrec.data.encoded import Bags, EncodedRows
from rayrec.ingest.batches import sparse_features
from rayrec.models import ranking
from rayrec.models.base import ClickModelConfig, ModelInputs, unpooled_features
from rayrec.models.cost import network_cost
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.scoring_tables import RowFormat
from rayrec.schema import Label
from rayrec.workloads.recsys.scorer import PlainModel, make_scorer

ROWS, SIZES = 24, (12, 12, 3)


def inputs_of(config: ClickModelConfig) -> ModelInputs:
    labels = (Label(name="like"),) if config.SEVERAL_LABELS else ()
    features = ("item", "history", "tags")
    lists = (("history", 5), ("tags", None))
    return ModelInputs(2, features, "click", labels, ("item", "item", "tags"), lists=lists)


def rows_of(inputs: ModelInputs, unpooled: tuple[str, ...]) -> tuple[Batch, EncodedRows]:
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 6, (ROWS,), generator=chance).int()
    history = torch.randint(0, 12, (int(lengths.sum()),), generator=chance).int()
    item, tags = (torch.randint(0, size, (ROWS,), generator=chance).int().numpy() for size in (12, 3))
    ids: list[Any] = [item, Bags(history.numpy(), lengths.numpy()), Bags(tags, torch.ones(ROWS).int().numpy())]
    pooled = [number for number, name in enumerate(inputs.features) if name not in unpooled]
    listed = [number for number, name in enumerate(inputs.features) if name in unpooled]

    def features(numbers: list[int]) -> Any:
        keys = [inputs.features[number] for number in numbers]
        return sparse_features(keys, [ids[number] for number in numbers], ROWS) if numbers else None

    dense = torch.rand(ROWS, 2, generator=chance)
    labels = {name: torch.randint(0, 2, (ROWS,), generator=chance).float() for name in inputs.label_names}
    batch = Batch({"dense": dense}, 1 / ROWS, features(pooled), labels, sequence_features=features(listed))
    return batch, EncodedRows(dense.numpy(), ids, None)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {"members": members}) for name in ranking.names() for members in (1, 2)),
        ("autoint", {"use_wide": True}),
        ("dcnv2", {"structure": "stacked_parallel", "low_rank": 3, "experts": 2}),
        ("dlrm", {"batch_norm": True, "bottom_dropout": 0.1, "top_dropout": 0.1}),
        ("finalnet", {"activation": "none", "tower_losses": False}),
        ("mmoe", {"batch_norm": True}),
        ("ple", {"batch_norm": True, "levels": 2}),
        ("wukong", {"mlp_batch_norm": True}),
    ],
)
def test_it_learns_and_scores_as_it_trains(name: str, settings: dict[str, Any]) -> None:
    cls = ranking.config_class(name)
    assert cls is not None
    like = DLRMConfig(embedding_dim=8, bottom_mlp=(8,), embedding_penalty=1e-6)
    config: ClickModelConfig = cls.in_place_of(like).replace(**settings)
    inputs = inputs_of(config)
    unpooled = unpooled_features(config, inputs)
    torch.manual_seed(0)
    model = whole_model(config, SIZES, inputs=inputs)
    batch, encoded = rows_of(inputs, unpooled)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        without = [which for which, parameter in model.named_parameters() if parameter.grad is None]
        assert not without
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert list(output.logits) == list(inputs.label_names)
    model.eval()
    with torch.no_grad():
        trained = model.score(batch.tensors["dense"], batch.sparse_features, batch.sequence_features)
    plain = PlainModel(
        model.head.network, inputs, width=config.table_width, sequences=config.sequences(inputs), unpooled=unpooled
    ).requires_grad_(requires_grad=False)
    weights = model.state_dict()
    tables = [weights[table] for table in plain.table_weights().values()]
    scorer = make_scorer(plain, tables, row_format=RowFormat("fp32", config.table_width), device="cpu")
    torch.testing.assert_close(torch.from_numpy(scorer.score(encoded)), trained, atol=1e-5, rtol=1e-4)
    cost = network_cost(model.head.network, inputs, config)
    assert cost.multiply_adds is not None
    assert cost.multiply_adds > 0
