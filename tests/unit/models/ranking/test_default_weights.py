"""Default settings of every click model: new settings must not change weight names or training."""

import json
import os
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from rayrec import models
from rayrec.batch import Batch
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
from rayrec.models.base import ModelInputs
from rayrec.models.ensemble import build_network
from rayrec.models.heads import network_loss
from rayrec.schema import Label

ROWS = 32
GOLDEN = Path(__file__).parents[3] / "golden" / "click_models.json"


def measured(name: str) -> dict[str, Any]:
    """Return checksums of initial weights with two numbers and three features, and the losses of three steps."""
    config = models.config_class(name)()  # type: ignore[misc]
    labels = (Label(name="like"),) if config.SEVERAL_LABELS else ()
    lists = (("history", None),) if name == "din" else ()
    inputs = ModelInputs(2, ("item", "history", "tag"), "click", labels, ("item", "item", "tag"), lists=lists)
    torch.manual_seed(0)
    network = build_network(config, inputs).train()
    weights = {name: tensor for name, tensor in network.state_dict().items() if tensor.numel()}
    names = "\n".join(f"{name} {list(tensor.shape)}" for name, tensor in weights.items())
    chance = torch.Generator().manual_seed(1)
    dense = torch.randn(ROWS, 2, generator=chance)
    values = torch.randn(ROWS, 3, config.table_width, generator=chance) * 0.1
    history = JaggedEmbeddings(values[:, 1], torch.ones(ROWS, dtype=torch.int64))
    wanted = {label: torch.randint(0, 2, (ROWS,), generator=chance).float() for label in inputs.label_names}
    start = {
        "names": crc32(names.encode()),
        "sum": sum(tensor.double().sum().item() for tensor in weights.values()),
        "squares": sum(tensor.double().square().sum().item() for tensor in weights.values()),
    }
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.01), []
    torch.manual_seed(2)
    for _ in range(3):
        optimizer.zero_grad()
        if lists:
            pooled = values[:, [0, 2]].flatten(1)
            outputs = network(dense, KeyedEmbeddings.in_order(inputs.features, config.table_width, pooled, {"history": history}))
        else:
            outputs = network(dense, KeyedEmbeddings.in_order(inputs.features, config.table_width, values.flatten(1)))
        own, batch = network_loss(network), Batch({"dense": dense}, 1.0, None, wanted)
        loss = own(outputs, batch).mean() if own else sum(cross_entropy(outputs[name], wanted[name]) for name in wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {**start, "losses": losses}


@pytest.mark.parametrize("name", models.names("ranking"))
def test_default_settings_keep_weights(name: str) -> None:
    """Regenerate with RAYREC_WRITE_GOLDEN=1 after intended changes."""
    found = measured(name)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("RAYREC_WRITE_GOLDEN"):
        golden[name] = found
        GOLDEN.write_text(json.dumps(golden, indent=2) + "\n")
    expected = golden[name]
    assert found["names"] == expected["names"]
    assert [found["sum"], found["squares"]] == pytest.approx([expected["sum"], expected["squares"]], rel=1e-6, abs=1e-4)
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-4)
