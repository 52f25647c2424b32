"""Networks without labels in the training loop, and conversion of outputs to columns and fields."""

from typing import Any

import numpy as np
import pytest
import torch
from builders.click_models import whole_model
from builders.faults import rejects
from builders.own_click_model import WithoutLabelConfig
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec.batch import Batch
from rayrec.metrics.means import RowMetrics
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ensemble import build_network
from rayrec.models.heads import NumberHead, label_heads
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.schema import Label
from rayrec.workloads.recsys.scorer import PlainModel

INPUTS = ModelInputs(1, ("item",), lists=(("item", None),))
CONFIG = WithoutLabelConfig(embedding_dim=4)


def batch(*numbers: float) -> Batch:
    rows = len(numbers)
    ids = KeyedJaggedTensor(keys=["item"], values=torch.arange(rows), lengths=torch.ones(rows, dtype=torch.int32))
    return Batch({"dense": torch.tensor(numbers).unsqueeze(1)}, 1.0, weights=torch.full((rows,), 2.0), sequence_features=ids)


def test_unlabeled_model_learns_and_reports_measures() -> None:
    model, metrics = whole_model(CONFIG, [4], inputs=INPUTS), RowMetrics()
    loss, output = model(batch(0.0, 1.0, 2.0))
    assert (loss.item(), dict(output.measures)) == (6.0, {})
    model.eval()
    for rows in (batch(0.0, 1.0, 2.0), batch(5.0)):
        metrics.update(model(rows)[1])
    assert metrics.compute() == {"loss": 2.0, "large": 3.5}
    assert CONFIG.score(metrics.compute()) == -2.0


def test_predictions_become_columns_and_fields() -> None:
    heads = CONFIG.output_heads(INPUTS)
    model = PlainModel(build_network(CONFIG, INPUTS), INPUTS, heads, width=4, sequences=("item",))
    tensors = model.predict(torch.ones(3, 1), torch.zeros(3, 0), torch.rand(3, 4), torch.ones(3, dtype=torch.int64))
    values = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
    columns: dict[str, np.ndarray] = {}
    for head in heads:
        assert head.json_schema().keys() == head.answer(values, lambda feature: np.arange(0, 40, 10)).keys()
        columns |= head.columns(values, lambda feature: np.arange(0, 40, 10))
    assert {name: values.shape for name, values in columns.items()} == {"best": (3, 2), "scores": (3, 2), "user": (3, 4)}
    assert columns["best"].tolist() == [[30, 10]] * 3


def test_label_fields_match_json_schema() -> None:
    heads = label_heads("click", (Label(name="like"), Label(name="seconds", kind="number")))
    values: dict[str, Any] = {head.name: np.zeros(2, np.float32) for head in heads}
    fields = [list(head.answer(values, np.array)) for head in heads]
    assert fields == [["scores", "logits"], ["score_like"], ["score_seconds"]] == [list(h.json_schema()) for h in heads]
    columns = [name for head in heads for name in head.columns(values, np.array)]
    assert columns == ["score", "logit", "score_like", "logit_like", "score_seconds", "logit_seconds"]
    assert isinstance(heads[2], NumberHead)


def test_count_head_uses_poisson_loss_and_metrics() -> None:
    (head,) = label_heads("views", kind="count")
    logs, counts, weights = torch.tensor([0.0, 1.0, -1.0]), torch.tensor([2.0, 0.0, 1.0]), torch.tensor([1.0, 0.5, 2.0])
    expected = functional.poisson_nll_loss(logs, counts, reduction="none") * weights
    torch.testing.assert_close(head.losses({"views": logs}, {"views": counts}, weights), expected)
    metrics = head.accumulator()
    metrics.update(logs, counts)
    means, wanted = logs.exp().double().numpy(), counts.double().numpy()
    deviance = 2 * np.mean(np.where(wanted > 0, wanted * np.log(np.maximum(wanted, 1) / means), 0) - wanted + means)
    assert metrics.compute() == pytest.approx({"deviance": deviance, "calibration": means.sum() / 3, "rows": 3})
    assert ClickModelConfig.score(CONFIG, metrics.compute()) == pytest.approx(-deviance)
    fields = head.answer({"views": logs.numpy()}, np.array)
    assert fields.keys() == head.json_schema().keys()
    np.testing.assert_array_equal(fields["scores"], np.exp(logs.numpy()))


def test_ensembles_reject_heads_without_mean() -> None:
    rejects(r"^WithoutLabelConfig.members: must be 1 without logits to average, got 2", CONFIG.replace, members=2)
    message = r"^EnsembleConfig.models\[1\]: must predict a label, got WithoutLabelConfig"
    rejects(message, EnsembleConfig, models=(DLRMConfig(), CONFIG))
