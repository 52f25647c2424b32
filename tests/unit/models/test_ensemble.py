"""Ensembles in one model: predictions, and independent training of each member."""

import pytest
import torch
from builders.click_models import whole_model
from builders.faults import rejects
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec.batch import Batch
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ensemble import build_network
from rayrec.models.ranking.din import DINConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.schema import Label

ROWS, DIM = 12, 4
LABELS = (Label(name="like"), Label(name="seconds", kind="number"))
DLRM = DLRMConfig(interaction="dot", embedding_dim=DIM, bottom_mlp=(8, DIM), top_mlp=(8, 1), embedding_penalty=0.1)
FINAL = FinalNetConfig(embedding_dim=DIM, first_tower=(8,), second_tower=(6,), first_dropout=0.0)
INPUTS = ModelInputs(2, ("a", "b"), "click")


def batch(inputs: ModelInputs) -> Batch:
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 5, (2 * ROWS,), generator=chance)
    labels = {name: torch.randint(0, 2, (ROWS,), generator=chance).float() for name in inputs.label_names}
    if inputs.more_labels:
        labels["like"][::3] = torch.nan
        labels["seconds"][::4] = torch.nan
    features = KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=torch.ones(2 * ROWS, dtype=torch.int32), stride=ROWS)
    dense, weights = torch.rand(ROWS, 2, generator=chance), torch.rand(ROWS, generator=chance)
    return Batch({"dense": dense}, 1 / ROWS, features, labels, weights=weights)


@pytest.mark.parametrize(
    ("config", "inputs"), [(DLRM, INPUTS), (DLRM, ModelInputs(2, ("a", "b"), "click", LABELS)), (FINAL, INPUTS)]
)
def test_ensemble_members_learn_independently(config: ClickModelConfig, inputs: ModelInputs) -> None:
    """Compare gradients with a separate model that has the member's weights and embeddings."""
    rows = batch(inputs)
    whole = whole_model(config.replace(members=3), [5, 5], inputs=inputs)
    loss, output = whole(rows)
    loss.backward()
    logits, losses = [], []
    for number, network in enumerate(whole.head.network.members):
        alone = whole_model(config, [5, 5], inputs=inputs)
        columns = slice(number * DIM, (number + 1) * DIM)
        with torch.no_grad():
            alone.head.network.load_state_dict(network.state_dict())
            for mine, its in zip(alone.embeddings.parameters(), whole.embeddings.parameters(), strict=True):
                mine.copy_(its[:, columns])
        network_loss, own_output = alone(rows)
        network_loss.backward()
        logits.append(own_output.outputs["click"])
        losses.append(network_loss.detach())
        for mine, its in zip(alone.head.network.parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(its.grad, mine.grad)
        for mine, its in zip(alone.embeddings.parameters(), whole.embeddings.parameters(), strict=True):
            torch.testing.assert_close(its.grad[:, columns], mine.grad)
    torch.testing.assert_close(output.outputs["click"], torch.stack(logits).mean(0))
    torch.testing.assert_close(loss.detach(), torch.stack(losses).mean())
    assert list(output.outputs) == list(inputs.label_names)
    assert not torch.equal(logits[0], logits[1])


def test_single_member_builds_plain_network_and_zero_are_rejected() -> None:
    one, plain = whole_model(DLRM.replace(members=1), [5, 5]), whole_model(DLRM, [5, 5])
    assert one.state_dict().keys() == plain.state_dict().keys()
    assert DLRM.replace(members=3).table_width == 3 * DIM
    rejects(r"DLRMConfig.members: must be at least 1, got 0", DLRM.replace, members=0)


def test_members_use_separate_parts_of_sequences() -> None:
    inputs = ModelInputs(0, ("item", "history"), "click", vocabularies=("item", "item"), lists=(("history", None),))
    network = build_network(DINConfig(embedding_dim=DIM, attention=(), mlp=(), members=2), inputs).eval()
    item, values = torch.rand(ROWS, 2 * DIM), torch.rand(3 * ROWS, 2 * DIM)
    lengths = torch.full((ROWS,), 3)
    lists = {"history": JaggedEmbeddings(values, lengths)}
    made = network(torch.zeros(ROWS, 0), KeyedEmbeddings.in_order(inputs.features, 2 * DIM, item, lists))
    parts = []
    for number, member in enumerate(network.members):
        part = slice(number * DIM, (number + 1) * DIM)
        lists = {"history": JaggedEmbeddings(values[:, part], lengths)}
        given = KeyedEmbeddings.in_order(inputs.features, DIM, item[:, part], lists)
        parts.append(member(torch.zeros(ROWS, 0), given)["click"])
    torch.testing.assert_close(made["click"], (parts[0] + parts[1]) / 2)
