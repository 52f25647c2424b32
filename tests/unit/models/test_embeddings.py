"""Initial table values: equal for any sharding, and within their bound."""

from typing import Any

import numpy as np
import pytest
import torch
from builders.click_models import whole_model
from builders.faults import rejects
from builders.own_click_model import WithoutLabelConfig
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec import models, recipes
from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.metrics.means import RowMetrics
from rayrec.models.base import ClickModelConfig, ModelInputs, TableInit, stored_model
from rayrec.models.embeddings import TableValues, build_embeddings
from rayrec.models.ensemble import build_network
from rayrec.models.heads import NumberHead, label_heads
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.models.scoring_tables import table_name
from rayrec.schema import Label
from rayrec.workloads.recsys.scorer import PlainModel

TABLE: dict[str, Any] = {"seed": 3, "table": "cat_1", "num_embeddings": 150_000, "embedding_dim": 8}


@pytest.mark.parametrize("start", [None, TableInit(kind="normal", std=0.5)])
def test_shard_values_match_full_table(start: TableInit | None) -> None:
    whole = torch.empty(150_000, 8)
    TableValues(**TABLE, start=start).fill(whole)
    for row, column, rows, columns in ((0, 0, 10, 8), (65_530, 4, 20, 4), (140_000, 0, 10_000, 8), (1, 2, 149_999, 2)):
        part = torch.empty(rows, columns)
        TableValues(**TABLE, start=start).fill(part, row_offset=row, column_offset=column)
        assert torch.equal(part, whole[row : row + rows, column : column + columns])
    by_threads = torch.empty(150_000, 8)
    TableValues(**TABLE, start=start).fill(by_threads, threads=3)
    assert torch.equal(by_threads, whole)


def test_initial_values_match_distribution_and_differ_between_blocks() -> None:
    whole = torch.empty(150_000, 8)
    TableValues(**TABLE).fill(whole)
    bound = 150_000**-0.5
    assert whole.abs().max() <= bound
    assert whole.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)
    assert not torch.equal(whole[:100], whole[65_536:65_636])
    TableValues(**TABLE, start=TableInit(kind="normal")).fill(whole)
    assert whole.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert whole.std().item() == pytest.approx(1e-4, rel=0.01)
    assert whole.abs().max() > 4e-4
    assert not torch.equal(whole[:100], whole[65_536:65_636])
    rejects(r"std: must be above 0 .*, got 0\.0", TableInit, kind="normal", std=0.0)


def test_default_initial_values_keep_bits() -> None:
    """Runs and golden curves of earlier versions start with these values."""
    part = torch.empty(2, 3)
    TableValues(3, "cat_1", 100, 3).fill(part)
    expected = [-1114835955, -1127736896, 1027692397, -1116264761, -1120535357, 1014909978]
    assert part.view(torch.int32).flatten().tolist() == expected


def test_initial_values_depend_on_seed_and_table_name_only() -> None:
    one = build_embeddings([100, 50], embedding_dim=4, seed=1, device="cpu")
    torch.manual_seed(99)
    two = build_embeddings([100, 50, 7], embedding_dim=4, seed=1, device="cpu")
    other = build_embeddings([100, 50], embedding_dim=4, seed=2, device="cpu")
    assert torch.equal(one.embedding_bags["cat_1"].weight, two.embedding_bags["cat_1"].weight)
    assert not torch.equal(one.embedding_bags["cat_1"].weight, other.embedding_bags["cat_1"].weight)


def test_tables_start_on_meta_device_and_must_have_rows() -> None:
    assert build_embeddings([10_000_000], embedding_dim=16, seed=0).embedding_bags["cat_0"].weight.is_meta
    rejects("cat_1: must have at least one row, got 0", build_embeddings, [5, 0], embedding_dim=4, seed=0)


ODD_NAMES = ["type", "keys", "items", "update", "user.id", "user%2Eid", "%table:a", "", "training", "_modules"]
ODD_NAMES += ["\u00fcser/id \u5e97", "a b"]


def test_table_name_supports_any_and_keeps_ordinary_names() -> None:
    odd = build_embeddings([5] * len(ODD_NAMES), embedding_dim=4, seed=1, device="cpu", table_of={n: n for n in ODD_NAMES})
    assert len(odd.state_dict()) == len(ODD_NAMES)
    keys = [f"embedding_bags.{table_name(name)}.weight" for name in ODD_NAMES]
    assert list(odd.state_dict()) == keys
    batch = KeyedJaggedTensor(ODD_NAMES, torch.arange(len(ODD_NAMES)) % 5, lengths=torch.ones(len(ODD_NAMES), dtype=torch.int32))
    pooled = odd(batch)
    assert list(pooled.keys()) == ODD_NAMES
    for number, (name, key) in enumerate(zip(ODD_NAMES, keys, strict=True)):
        assert torch.equal(pooled[name][0], odd.state_dict()[key][number % 5])
    for name in ("cat_0", "user_id", "Typ", "user%2Eid", "\u00fcser/id \u5e97", "a b"):
        assert table_name(name) == name
    assert table_name("user.id") == "%table:user%2Eid"


# Networks without labels in the training loop, and conversion of outputs to columns and fields ------------------------
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


# Loading of stored configurations, which may only select networks of rayrec -------------------------------------------
class OwnConfig(ClickModelConfig):
    pass


def test_stored_model_restores_settings() -> None:
    for model in (DLRMConfig(cross_layers=2), FinalNetConfig(first_tower=(8,))):
        assert stored_model(model.to_dict(), where="f") == model
    own = OwnConfig(embedding_dim=3)
    found = stored_model(own.to_dict(), where="f", own=OwnConfig)
    assert (type(found), found) == (OwnConfig, own)


@pytest.mark.parametrize(
    "name",
    [
        f"{__name__}.OwnConfig",
        "FinalNetConfig",
        "os.system",
        "this.Zen",  # Importing it prints
        "rayrec.models.ranking.finalnet.FinalNet",
        "rayrec.models.ranking.dlrm.ClickModelConfig",  # Imported there, but builds nothing
        "rayrec.models.ranking.dlrm.InputError",
        "rayrec.models.ranking..finalnet.FinalNetConfig",
        7,
        ["a"],
    ],
)
def test_stored_model_rejects_other_classes(name: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^f: network must be one of rayrec's, got .*\. Pass its training recipe"):
        stored_model({"class": name, "embedding_dim": 4}, where="f")
    assert capsys.readouterr().out == ""


def test_stored_class_replaces_recipe_class() -> None:
    """By model name or stored class path. Keeps the settings that all click models share."""
    recipe = recipes.criteo_demo()
    model = recipe.replace(workload={"model": {"class": "finalnet", "first_tower": [8]}}).workload.model
    assert model == FinalNetConfig(embedding_dim=16, embedding_penalty=3e-4, first_tower=(8,))
    changed = recipe.replace(workload={"model": FinalNetConfig(members=2)})
    assert recipes.load_config(changed.to_yaml()) == changed
    back = changed.replace(workload={"model": {"class": "dlrm"}}).workload.model
    assert back == DLRMConfig(embedding_dim=16, bottom_mlp=(512, 256, 16), members=2)
    for unknown in ("deepest", "os.system", "rayrec.models.base.ClickModelConfig"):
        with pytest.raises(InputError, match=rf"model\.class: .*; rayrec's models are {', '.join(models.names())}"):
            recipe.replace(workload={"model": {"class": unknown}})


def test_every_file_in_families_is_model() -> None:
    for name in models.names():
        cls = models.config_class(name)
        assert cls is not None, name
        assert models.config_class(f"{cls.__module__}.{cls.__qualname__}") is cls
        assert issubclass(cls, ClickModelConfig)
        cls()  # Every field has a default
