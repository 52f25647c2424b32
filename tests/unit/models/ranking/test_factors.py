"""Click models of products, attention and experts: training, scoring and settings. Their formulas: test_formulas.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from builders.whole_click_model import whole_model
from torch import nn

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.data.encoded import EncodedRows
from rayrec.ingest.batches import sparse_features
from rayrec.layers.field_embeddings import width_with_weight
from rayrec.layers.keyed_embeddings import Embedded
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ranking.autoint import AutoIntConfig
from rayrec.models.ranking.dcnv3 import DCNv3Config
from rayrec.models.ranking.deepfm import DeepFMConfig
from rayrec.models.ranking.mmoe import MMoEConfig
from rayrec.models.ranking.ple import PLEConfig
from rayrec.models.ranking.widedeep import WideDeepConfig
from rayrec.models.ranking.xdeepfm import XDeepFMConfig
from rayrec.models.scoring_tables import RowFormat
from rayrec.schema import Label
from rayrec.workloads.recsys.scorer import PlainModel, make_scorer

ROWS, DIM = 17, 4
INPUTS = ModelInputs(2, ("a", "b", "c"), "click")
SEVERAL = replace(INPUTS, more_labels=(Label(name="like"),))
DEEPFM = DeepFMConfig(embedding_dim=DIM, mlp=(8, 6), batch_norm=True)
WIDEDEEP = WideDeepConfig(embedding_dim=DIM, mlp=(8,))
XDEEPFM = XDeepFMConfig(embedding_dim=DIM, interaction=(5, 3), mlp=(8,))
DCNV3 = DCNv3Config(embedding_dim=DIM, deep_layers=2, shallow_layers=3, deep_dropout=0.0, shallow_dropout=0.0)
AUTOINT = AutoIntConfig(embedding_dim=DIM, layers=2, attention_dim=6, heads=2, mlp=(8,))
MMOE = MMoEConfig(embedding_dim=DIM, experts=3, expert=(8, 6), gate=(5,), tower=(7,))
PLE = PLEConfig(embedding_dim=DIM, levels=2, own_experts=2, shared_experts=1, expert=(16,), tower=(8,))
CONFIGS: list[ClickModelConfig] = [DEEPFM, WIDEDEEP, XDEEPFM, DCNV3, AUTOINT, MMOE, PLE]
Reference = Callable[[nn.Module, torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]

each = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)


def inputs_of(config: ClickModelConfig) -> ModelInputs:
    return SEVERAL if config.SEVERAL_LABELS else INPUTS


def network(config: ClickModelConfig) -> nn.Module:
    """Without a parameter that is 0 or 1 at the start, and that a wrong formula could leave out."""
    torch.manual_seed(0)
    built = config.build(inputs_of(config))
    for parameter in built.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return built.train()


def delivery(config: ClickModelConfig, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense features and (rows, features, width) rows of tables."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 2, generator=chance), torch.randn(ROWS, 3, config.width, generator=chance)


def as_columns(values: torch.Tensor) -> Embedded:
    return Embedded.in_order(INPUTS.features, values.shape[2], values.flatten(1))


@each
def test_the_order_of_delivery_does_not_matter(config: ClickModelConfig) -> None:
    net, (dense, values) = network(config).eval(), delivery(config)
    order = (2, 0, 1)
    shuffled = Embedded(INPUTS.features, config.width, lambda: (values[:, list(order)].flatten(1), order))
    torch.testing.assert_close(net(dense, shuffled)["click"], net(dense, as_columns(values))["click"])


def rows(count: int) -> tuple[Batch, EncodedRows]:
    """Rows whose click depends on whether the categories of a and b are alike, and whose like on those of a and c."""
    chance = torch.Generator().manual_seed(count)
    ids = [torch.randint(0, 4, (count,), generator=chance).int().numpy() for _ in INPUTS.features]
    dense = torch.rand(count, 2, generator=chance)
    labels = {"click": torch.from_numpy(ids[0] == ids[1]).float(), "like": torch.from_numpy(ids[0] < ids[2]).float()}
    features = sparse_features(list(INPUTS.features), ids, count)
    return Batch({"dense": dense}, 1 / max(count, 1), features, labels), EncodedRows(dense.numpy(), ids, None)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@each
def test_it_learns_and_scores_as_it_trains(config: ClickModelConfig, precision: str) -> None:
    model = whole_model(config, [4, 4, 4], inputs=inputs_of(config), precision=precision)
    optimizer, (batch, encoded) = torch.optim.Adam(model.parameters(), lr=0.02), rows(64)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        if not losses:
            assert all(parameter.grad.any() for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert output.logits["click"].dtype == torch.float32
    model.eval()
    trained = model.score(batch.tensors["dense"], batch.sparse_features).detach()
    plain = PlainModel(model.head.network, inputs_of(config), width=config.table_width).requires_grad_(
        requires_grad=False
    )
    weights = model.state_dict()
    tables = [weights[name] for name in plain.table_weights().values()]
    scorer = make_scorer(plain, tables, row_format=RowFormat("fp32", config.table_width), device="cpu")
    tolerance = 1e-5 if precision == "fp32" else 0.05
    torch.testing.assert_close(torch.from_numpy(scorer.score(encoded)), trained, atol=tolerance, rtol=tolerance)


def test_numbers_start_as_xavier_layers_of_one_input() -> None:
    torch.manual_seed(0)
    inputs = replace(INPUTS, num_dense=4000)
    for config, std in ((DEEPFM.replace(embedding_dim=16), (2 / 17) ** 0.5), (DEEPFM, (2 / 5) ** 0.5)):
        built = config.build(inputs).fields
        assert built.number_vectors.std().item() == pytest.approx(std, rel=0.02)
        assert built.linear.weight.std().item() == pytest.approx(1.0, rel=0.04)


def test_widedeep_learns_one_bias_of_the_logit() -> None:
    """The linear model's is constant; a checkpoint of an earlier version, which learned both, keeps its value."""
    net, (dense, values) = network(WIDEDEEP), delivery(WIDEDEEP)
    assert [name for name, _ in net.named_parameters() if name.endswith("bias")] == [
        "deep.tower.layers.0.bias",
        "deep.logit.bias",
    ]
    before = net(dense, as_columns(values))["click"]
    net.load_state_dict({**net.state_dict(), "fields.linear.bias": torch.tensor([0.75])})
    torch.testing.assert_close(net(dense, as_columns(values))["click"], before + 0.75)


@each
def test_a_batch_without_rows_costs_nothing(config: ClickModelConfig) -> None:
    model = whole_model(config, [4, 4, 4], inputs=inputs_of(config))
    loss, output = model(rows(0)[0])
    loss.backward()
    assert loss.item() == 0.0
    assert output.logits["click"].shape == (0,)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.head.parameters())


def test_a_row_of_a_table_has_room_for_a_weight() -> None:
    assert [width_with_weight(dim) for dim in (1, 3, 4, 10, 16)] == [4, 4, 8, 12, 20]
    assert DEEPFM.replace(members=2).table_width == 16
    config, (dense, values) = WIDEDEEP, delivery(WIDEDEEP)
    net = network(config).eval()
    changed = values.clone()
    changed[:, :, DIM + 1 :] = torch.nan  # what is left of a row reaches nothing
    assert torch.equal(net(dense, as_columns(changed))["click"], net(dense, as_columns(values))["click"])


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (DEEPFM, {"mlp": (8, 0)}, r"DeepFMConfig.mlp: \(8, 0\) needs sizes of at least 1"),
        (DEEPFM, {"dropout": 1.0}, "DeepFMConfig.dropout: 1.0 must be at least 0 and below 1"),
        (XDEEPFM, {"interaction": ()}, r"XDeepFMConfig.interaction: \(\) needs one or more sizes of at least 1"),
        (XDEEPFM, {"mlp": (0,)}, r"XDeepFMConfig.mlp: \(0,\) needs sizes of at least 1"),
        (DCNV3, {"heads": 3}, r"DCNv3Config.embedding_dim: 4 must be a multiple of 6, 2 \* heads"),
        (DCNV3, {"deep_layers": 0}, "DCNv3Config.deep_layers: 0 must be at least 1"),
        (DCNV3, {"shallow_dropout": 1.0}, "DCNv3Config.shallow_dropout: 1.0 must be at least 0 and below 1"),
        (AUTOINT, {"heads": 4}, "AutoIntConfig.attention_dim: 6 must be a multiple of heads, 4"),
        (AUTOINT, {"layers": 0}, "AutoIntConfig.layers: 0 must be at least 1"),
        (AUTOINT, {"mlp": (0,)}, r"AutoIntConfig.mlp: \(0,\) needs sizes of at least 1"),
        (MMOE, {"experts": 0}, "MMoEConfig.experts: 0 must be at least 1"),
        (MMOE, {"expert": ()}, r"MMoEConfig.expert: \(\) needs one or more sizes of at least 1"),
        (MMOE, {"tower": (0,)}, r"MMoEConfig.tower: \(0,\) needs sizes of at least 1"),
        (PLE, {"levels": 0}, "PLEConfig.levels: 0 must be at least 1"),
        (PLE, {"gate": (0,)}, r"PLEConfig.gate: \(0,\) needs sizes of at least 1"),
        (PLE, {"dropout": 1.5}, "PLEConfig.dropout: 1.5 must be at least 0 and below 1"),
        (WIDEDEEP, {"mlp": (-1,)}, r"WideDeepConfig.mlp: \(-1,\) needs sizes of at least 1"),
        (WIDEDEEP, {"dropout": -0.1}, "WideDeepConfig.dropout: -0.1 must be at least 0 and below 1"),
    ],
)
def test_settings_that_make_no_network(config: ClickModelConfig, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        config.replace(**settings)
