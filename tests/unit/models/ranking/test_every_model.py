"""Common behavior of all click models: learning, matching scores, and rejected settings."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from builders import networks
from builders.click_models import SMALL, whole_model
from builders.faults import fails_with, rejects
from builders.networks import CONFIGS, DEEPFM, DIM, FINALMLP, INPUTS, WIDEDEEP, inputs_of
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from rayrec import models, recipes
from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.ingest.batches import sparse_features
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
from rayrec.layers.mlp import Dice
from rayrec.models.base import ClickModelConfig, ModelInputs, unpooled_features, width_with_weight
from rayrec.models.cost import network_cost, network_multiply_adds
from rayrec.models.ensemble import build_network, plain_name
from rayrec.models.heads import network_loss
from rayrec.models.ranking.dcnv3 import DCNv3Config
from rayrec.models.ranking.din import DIN, DINConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.linear import LinearConfig
from rayrec.models.scoring_tables import RowFormat
from rayrec.models.sharded_model import ClickModel, feature_names
from rayrec.schema import Label
from rayrec.workloads.recsys.scorer import PlainModel, make_scorer

each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def without_dropout(config: ClickModelConfig) -> ClickModelConfig:
    shares = [field.name for field in dataclasses.fields(config) if field.name.endswith("dropout")]
    return config.replace(**dict.fromkeys(shares, 0.0))


def rows_of(count: int) -> tuple[Batch, EncodedRows]:
    """Return rows whose click depends on whether a and b are equal, and whose other labels depend
    on a and c.
    """
    chance = torch.Generator().manual_seed(count)
    ids = [torch.randint(0, 4, (count,), generator=chance).int().numpy() for _ in INPUTS.features]
    dense = torch.rand(count, 2, generator=chance)
    like = torch.from_numpy(ids[0] < ids[2]).float()
    labels = {
        "click": torch.from_numpy(ids[0] == ids[1]).float(),
        "like": like,
        "seconds": 2 * like,
    }
    features = sparse_features(list(INPUTS.features), ids, count)
    return Batch({"dense": dense}, 1 / max(count, 1), features, labels), EncodedRows(
        dense.numpy(), ids
    )


def losses(model: ClickModel, batch: Batch, *, steps: int, learning_rate: float) -> list[float]:
    """Return the losses of steps that update every parameter."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
        optimizer.step()
        found.append(loss.item())
    assert all(
        logits.dtype == torch.float32 and not logits.requires_grad
        for logits in output.outputs.values()
    )
    assert not [
        name
        for name, parameter in model.named_parameters()
        if not optimizer.state[parameter]["exp_avg"].any()
    ]
    return found


def assert_scored_alike(
    model: ClickModel,
    config: ClickModelConfig,
    inputs: ModelInputs,
    rows: tuple[Batch, EncodedRows],
    tolerance: float,
) -> None:
    (batch, encoded), unpooled = rows, unpooled_features(config, inputs)
    model.eval()
    with torch.no_grad():
        trained = model.score(
            batch.tensors["dense"], batch.sparse_features, batch.sequence_features
        )
    plain = PlainModel(
        model.head.network,
        inputs,
        config.output_heads(inputs),
        width=config.table_width,
        sequences=config.sequences(inputs),
        unpooled=unpooled,
    ).requires_grad_(requires_grad=False)
    weights = model.state_dict()
    tables = [weights[table] for table in plain.table_weights().values()]
    scorer = make_scorer(
        plain, tables, row_format=RowFormat("fp32", config.table_width), device="cpu"
    )
    torch.testing.assert_close(
        torch.from_numpy(scorer.score(encoded)), trained, atol=tolerance, rtol=10 * tolerance
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@each
def test_model_learns_and_scoring_matches_training(
    config: ClickModelConfig, precision: str
) -> None:
    config = without_dropout(config)
    model = whole_model(config, [4, 4, 4], inputs=inputs_of(config), precision=precision)
    with torch.no_grad():
        for table in model.embeddings.parameters():
            table.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(0))
    rows = rows_of(64)
    found = losses(model, rows[0], steps=30, learning_rate=0.03)
    # A click is not a sum of its categories'
    assert found[-1] < (0.95 if isinstance(config, LinearConfig) else 0.6) * found[0]
    assert_scored_alike(
        model, config, inputs_of(config), rows, 1e-5 if precision == "fp32" else 0.05
    )


@pytest.mark.parametrize("members", [1, 2])
@each
def test_sample_offset_applies_to_training_only(config: ClickModelConfig, members: int) -> None:
    config = without_dropout(config).replace(members=members)
    batch, _ = rows_of(16)
    plain, sampled = (
        whole_model(config, [4, 4, 4], inputs=INPUTS, logit_offset=offset) for offset in (0.0, 2.0)
    )
    loss, step = plain(batch)
    shifted_loss, shifted = sampled(batch)
    torch.testing.assert_close(shifted.outputs["click"], step.outputs["click"] + 2)
    assert shifted_loss != loss
    if network_loss(sampled.head.network) is None:
        expected = cross_entropy(step.outputs["click"] + 2, batch.labels["click"])
        torch.testing.assert_close(shifted_loss, expected)
    loss, step = plain.eval()(batch)
    shifted_loss, shifted = sampled.eval()(batch)
    assert torch.equal(shifted.outputs["click"], step.outputs["click"])
    assert shifted_loss == loss
    outputs = sampled.head.outputs(
        batch.tensors["dense"], sampled._pooled(batch.sparse_features), None, None
    )
    assert {plain_name(name) for name in outputs} - {"click"} <= set(config.loss_logits())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rows", [0, 1])
@each
def test_model_accepts_smallest_batches(
    config: ClickModelConfig, rows: int, precision: str
) -> None:
    model = whole_model(config, [4, 4, 4], inputs=inputs_of(config), precision=precision)
    before = {
        name: tensor.clone() for name, tensor in model.state_dict().items() if "running" in name
    }
    loss, output = model(rows_of(rows)[0])
    loss.backward()
    assert loss.isfinite()
    assert (loss.item() == 0.0) == (rows == 0)
    assert output.outputs["click"].shape == (rows,)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.head.parameters())
    # Its statistics are over all values of a row's heads
    if rows == 0 or not isinstance(config, DCNv3Config):
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def network(config: ClickModelConfig, precision: str = "fp32") -> nn.Module:
    """Return a network without vectors that are initially 0 or 1."""
    torch.manual_seed(0)
    built = config.build(inputs_of(config), precision=precision)
    for parameter in built.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return built.eval()


@each
def test_delivery_order_does_not_change_results(config: ClickModelConfig) -> None:
    chance = torch.Generator().manual_seed(1)
    dense = torch.randn(17, 2, generator=chance)
    values = torch.randn(17, 3, config.width, generator=chance)
    net = network(config)
    order = (2, 0, 1)
    given = KeyedEmbeddings.in_order(INPUTS.features, config.width, values.flatten(1))
    shuffled = KeyedEmbeddings(
        INPUTS.features, config.width, lambda: (values[:, list(order)].flatten(1), order)
    )
    expected = net(dense, given)["click"]
    torch.testing.assert_close(net(dense, shuffled)["click"], expected)
    close = network(config, "bf16")(dense, given)["click"]
    torch.testing.assert_close(close, expected, atol=0.05 * expected.abs().max().item(), rtol=0.05)


def test_delivery_order_does_not_change_bits_of_first_order() -> None:
    names = tuple("abcdefghijklmnopqrstuvwxyz")
    order = (*range(13, 26), *range(13))
    net = DLRMConfig(
        embedding_dim=4,
        bottom_mlp=(4,),
        top_mlp=(1,),
        first_order=True,
    ).build(ModelInputs(2, names))
    dense = torch.randn(99, 2)
    values = torch.randn(99, 26, 8)
    given = net(dense, KeyedEmbeddings(names, 8, lambda: (values.flatten(1), tuple(range(26)))))
    moved = net(
        dense, KeyedEmbeddings(names, 8, lambda: (values[:, list(order)].flatten(1), order))
    )
    assert torch.equal(given["label"], moved["label"])


# -- With lists
ROWS = 24


def inputs_with_lists(config: ClickModelConfig) -> ModelInputs:
    labels = (Label(name="like"),) * config.SEVERAL_LABELS
    return ModelInputs(
        2,
        ("item", "history", "tags"),
        "click",
        labels,
        ("item", "item", "tags"),
        lists=(("history", 5), ("tags", None)),
    )


def rows_with_lists(inputs: ModelInputs, unpooled: tuple[str, ...]) -> tuple[Batch, EncodedRows]:
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 6, (ROWS,), generator=chance).int()
    history = torch.randint(0, 12, (int(lengths.sum()),), generator=chance).int()
    item, tags = (
        torch.randint(0, size, (ROWS,), generator=chance).int().numpy() for size in (12, 3)
    )
    ids: list[Any] = [
        item,
        JaggedIds(history.numpy(), lengths.numpy()),
        JaggedIds(tags, torch.ones(ROWS).int().numpy()),
    ]

    def features(numbers: list[int]) -> Any:
        keys = [inputs.features[number] for number in numbers]
        return sparse_features(keys, [ids[number] for number in numbers], ROWS) if numbers else None

    pooled = [number for number, name in enumerate(inputs.features) if name not in unpooled]
    listed = [number for number, name in enumerate(inputs.features) if name in unpooled]
    dense = torch.rand(ROWS, 2, generator=chance)
    labels = {
        name: torch.randint(0, 2, (ROWS,), generator=chance).float() for name in inputs.label_names
    }
    batch = Batch(
        {"dense": dense}, 1 / ROWS, features(pooled), labels, sequence_features=features(listed)
    )
    return batch, EncodedRows(dense.numpy(), ids)


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("name", models.names("ranking"))
def test_replacement_model_learns_lists(name: str, members: int) -> None:
    like = DLRMConfig(embedding_dim=8, bottom_mlp=(8,), embedding_penalty=1e-6)
    config: ClickModelConfig = models.config_class(name).replacing(like).replace(members=members)
    inputs = inputs_with_lists(config)
    model = whole_model(config, (12, 12, 3), inputs=inputs)
    rows = rows_with_lists(inputs, unpooled_features(config, inputs))
    torch.manual_seed(0)
    found = losses(model, rows[0], steps=6, learning_rate=0.001)
    assert found[-1] < found[0]
    assert list(model(rows[0])[1].outputs) == list(inputs.label_names)
    assert_scored_alike(model, config, inputs, rows, 1e-5)
    assert network_cost(model.head.network, inputs, config).multiply_adds > 0


# -- Settings
REFUSED: list[tuple[ClickModelConfig, dict[str, object], str]] = [
    (networks.AUTOINT, {"heads": 4}, "attention_dim: must be a multiple of heads 4, got 6"),
    (networks.CROSSES, {"low_rank": 0}, "low_rank: must be at least 1, got 0"),
    (networks.CROSSES, {"experts": 2}, "experts: needs low_rank, got experts 2. Set both"),
    (networks.CROSSES, {"low_rank": 2, "experts": 0}, "experts: must be at least 1, got 0"),
    (
        networks.CROSSES,
        {"structure": "stacked_parallel", "mlp": ()},
        "mlp: must have one or more sizes",
    ),
    (networks.CROSSES, {"structure": "both"}, "structure"),
    (networks.DCNV3, {"heads": 3}, r"embedding_dim: must be a multiple of 6, 2 \* heads, got 4"),
    (networks.DLRM, {"bottom_mlp": (32, 8)}, ".*must end with embedding_dim 4"),
    (networks.DLRM, {"top_mlp": (32, 2)}, ".*must end with 1, the logit"),
    (networks.DLRM, {"top_mlp": ()}, ".*must have 1 or more values"),
    (
        networks.DLRM,
        {"interaction": "projection", "projection_first": (24, 13)},
        ".*multiple of embedding_dim 4",
    ),
    (networks.DLRM, {"interaction": "concat"}, ".*has the wrong type"),
    (
        networks.FINALMLP,
        {"heads": 4},
        r"heads: must divide the last widths of both MLPs, \(6, 4\), got 4",
    ),
    (
        networks.FINALMLP,
        {"second_context": ("a",)},
        "second_context: needs gates. Set feature_gates.",
    ),
    (networks.FINALNET, {"first_tower": ()}, ".*must have 1 or more values"),
    (networks.FINALNET, {"second_tower": (7,)}, ".*must each be at least 2 and a multiple of 2"),
    (
        LinearConfig(),
        {"embedding_dim": 8},
        "embedding_dim: must be at least 0 and at most 0, got 8",
    ),
    (
        LinearConfig(),
        {"number_scale": 0.0},
        "number_scale: must be above 0, got 0.0",
    ),
    (
        LinearConfig(),
        {"category_scale": float("nan")},
        "category_scale: must be above 0, got nan",
    ),
    (networks.MASKNET, {"mlp": ()}, "mlp: must not be empty"),
    (networks.MASKNET, {"reduction_ratio": 0.0}, "reduction_ratio: must be above 0, got 0.0"),
    (networks.MMOE, {"expert": ()}, r"expert: must have 1 or more values, got \(\)"),
    (networks.WIDEDEEP, {"dropout": -0.1}, "dropout: must be at least 0 and below 1, got -0.1"),
    (networks.XDEEPFM, {"interaction": ()}, r"interaction: must have 1 or more values, got \(\)"),
]


@pytest.mark.parametrize(("config", "settings", "message"), REFUSED)
def test_model_config_rejects_invalid_settings(
    config: ClickModelConfig, settings: dict[str, object], message: str
) -> None:
    rejects(rf"^{type(config).__name__}\.{message}", config.replace, **settings)


@pytest.mark.parametrize("name", models.names("ranking"))
def test_counts_sizes_and_dropout_are_bounded(name: str) -> None:
    config: ClickModelConfig = models.config_class(name)()  # type: ignore[misc]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        message = "must be at least 1, got 0"
        wrong: Any = None
        if field.name.endswith("dropout"):
            wrong = 1.0
            message = "must be at least 0 and below 1, got 1.0"
        elif "tuple" in str(field.type) or "Sizes" in str(field.type):
            wrong = (0,)
            message = "must each be at least"
        elif type(value) is int and value and (name, field.name) != ("finalmlp", "heads"):
            wrong = 0
        if wrong is not None and field.name not in ("models", "first_context", "second_context"):
            rejects(
                rf"^{type(config).__name__}\.{field.name}: {message}",
                config.replace,
                **{field.name: wrong},
            )


# -- Default settings of every click model: new settings must not change weight names or training
NUM_ROWS = 32
GOLDEN = Path(__file__).parents[3] / "golden" / "click_models.json"


def measured(name: str) -> dict[str, Any]:
    """Return checksums of initial weights with two numbers and three features, and the losses of
    three steps.
    """
    config = models.config_class(name)()  # type: ignore[misc]
    labels = (Label(name="like"),) if config.SEVERAL_LABELS else ()
    lists = (("history", None),) if name == "din" else ()
    inputs = ModelInputs(
        2, ("item", "history", "tag"), "click", labels, ("item", "item", "tag"), lists=lists
    )
    torch.manual_seed(0)
    network = build_network(config, inputs).train()
    weights = {name: tensor for name, tensor in network.state_dict().items() if tensor.numel()}
    names = "\n".join(f"{name} {list(tensor.shape)}" for name, tensor in weights.items())
    chance = torch.Generator().manual_seed(1)
    dense = torch.randn(NUM_ROWS, 2, generator=chance)
    values = torch.randn(NUM_ROWS, 3, config.table_width, generator=chance) * 0.1
    history = JaggedEmbeddings(values[:, 1], torch.ones(NUM_ROWS, dtype=torch.int64))
    desired = {
        label: torch.randint(0, 2, (NUM_ROWS,), generator=chance).float()
        for label in inputs.label_names
    }
    start = {
        "names": crc32(names.encode()),
        "sum": sum(tensor.double().sum().item() for tensor in weights.values()),
        "squares": sum(tensor.double().square().sum().item() for tensor in weights.values()),
    }
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    losses = []
    torch.manual_seed(2)
    for _ in range(3):
        optimizer.zero_grad()
        if lists:
            pooled = values[:, [0, 2]].flatten(1)
            outputs = network(
                dense,
                KeyedEmbeddings.in_order(
                    inputs.features, config.table_width, pooled, {"history": history}
                ),
            )
        else:
            outputs = network(
                dense,
                KeyedEmbeddings.in_order(inputs.features, config.table_width, values.flatten(1)),
            )
        own = network_loss(network)
        batch = Batch({"dense": dense}, 1.0, None, desired)
        loss = (
            own(outputs, batch).mean()
            if own
            else sum(cross_entropy(outputs[name], desired[name]) for name in desired)
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {**start, "losses": losses}


@pytest.mark.parametrize("name", models.names("ranking"))
def test_default_settings_keep_weights(name: str) -> None:
    found = measured(name)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("RAYREC_WRITE_GOLDEN"):
        golden[name] = found
        GOLDEN.write_text(json.dumps(golden, indent=2) + "\n")
    expected = golden[name]
    assert found["names"] == expected["names"]
    assert [found["sum"], found["squares"]] == pytest.approx(
        [expected["sum"], expected["squares"]], rel=1e-6, abs=1e-4
    )
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-4)


# -- Single click models: DLRM's cost and settings, initial values, WideDeep's bias, FinalMLP's
# context, DIN
def _widedeep() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (
        WIDEDEEP.replace(dropout=0.0).build(INPUTS).eval(),
        torch.randn(17, 2),
        torch.randn(17, 3, WIDEDEEP.width),
    )


def _clicks(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return net(
        dense, KeyedEmbeddings.in_order(INPUTS.features, values.shape[2], values.flatten(1))
    )["click"]


def test_widedeep_learns_one_bias_and_width_has_linear_weight() -> None:
    """Check that the linear model's bias is constant. Checkpoints of earlier versions, which
    trained both, keep its value.
    """
    net, dense, values = _widedeep()
    biases = [name for name, _ in net.named_parameters() if name.endswith("bias")]
    assert biases == ["deep.tower.layers.0.bias", "deep.logit.bias"]
    before = _clicks(net, dense, values)
    net.load_state_dict({**net.state_dict(), "fields.linear.bias": torch.tensor([0.75])})
    torch.testing.assert_close(_clicks(net, dense, values), before + 0.75)
    assert [width_with_weight(dim) for dim in (1, 3, 4, 10, 16)] == [4, 4, 8, 12, 20]
    assert DEEPFM.replace(members=2).table_width == 16
    net, dense, values = _widedeep()
    changed = values.clone()
    changed[:, :, DIM + 1 :] = torch.nan  # The rest of a row must not affect anything
    assert torch.equal(_clicks(net, dense, changed), _clicks(net, dense, values))
    gated = FINALMLP.replace(feature_gates=True, first_context=("c", "numbers"))
    with pytest.raises(
        InputError, match=r"first_context: feature 'd' not found\. Features are a, b, c, numbers"
    ):
        gated.replace(first_context=("d",)).sequences(INPUTS)
    assert gated.sequences(INPUTS) == ()


def test_linear_model_replaces_other_models() -> None:
    assert LinearConfig.replacing(DLRMConfig(embedding_penalty=0.1, members=2)) == LinearConfig(
        embedding_penalty=0.1, members=2
    )
    assert DLRMConfig.replacing(LinearConfig(members=2)).embedding_dim == 16
    recipe = recipes.criteo_ensemble("log")
    demo = recipes.criteo_demo("log")
    dlrm, final, linear = recipe.workload.model.models  # type: ignore[attr-defined]
    assert dlrm == demo.workload.model.replace(embedding_penalty=0.0)  # type: ignore[attr-defined]
    assert (final.embedding_dim, linear) == (16, LinearConfig())
    assert recipe.replace(recipe=demo.recipe, workload=demo.workload) == demo


# -- DLRM against torchrec's, its loss over uneven batches, its settings and cost
SIZES = [50, 3, 700, 20]


def build(config: DLRMConfig = SMALL, **settings: object) -> ClickModel:
    return whole_model(config, SIZES, **settings)


def test_multiply_adds_count_built_layers_and_match_kaggle_dlrm() -> None:
    for interaction, products in (
        ("dot", 5 * 5 * 8),
        ("cross", 0),
        ("projection", 2 * 2 * 8),
    ):
        config = SMALL.replace(interaction=interaction)
        model = build(config)
        weights = sum(
            p.numel()
            for n, p in model.named_parameters()
            if p.dim() == 2 and "embedding_bags" not in n
        )
        assert (
            network_multiply_adds(model.head.network, model.head.inputs, config)
            == weights + products
        )
        assert model.training
    kaggle = DLRMConfig(
        interaction="dot", embedding_dim=16, bottom_mlp=(512, 256, 64, 16), top_mlp=(512, 256, 1)
    )
    model = whole_model(kaggle, [2] * 26)
    assert network_multiply_adds(model.head.network, model.head.inputs, kaggle) == 486_032


def test_uneven_workers_average_to_mean_from_seeded_weights() -> None:
    torch.manual_seed(0)
    ids = [torch.randint(0, size, (48,)).numpy() for size in SIZES]
    dense = torch.randn(48, 13)
    label = torch.randint(0, 2, (48,)).float()

    def batch(start: int, stop: int) -> Batch:
        features = sparse_features(
            feature_names(len(SIZES)), [column[start:stop] for column in ids], stop - start
        )
        return Batch({"dense": dense[start:stop]}, 2 / 48, features, {"label": label[start:stop]})

    model = build()
    expected = cross_entropy(model.score(dense, batch(0, 48).sparse_features), label)
    parts = [model(batch(start, stop))[0] for start, stop in ((0, 31), (31, 48))]
    torch.testing.assert_close((parts[0] + parts[1]) / 2, expected)
    torch.manual_seed(5)
    one = build(seed=1).state_dict()
    state = torch.get_rng_state()
    two = build(seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(
        one["top_mlp.layers.0.weight"], build(seed=2).state_dict()["top_mlp.layers.0.weight"]
    )


def test_bottom_mlp_follows_embedding_dim_unless_set() -> None:
    assert SMALL.replace(embedding_dim=16).bottom_mlp == (16, 16)
    assert SMALL.replace(embedding_dim=16, bottom_mlp=(64, 16)).bottom_mlp == (64, 16)
    assert SMALL.updated({"class": SMALL.to_dict()["class"], "embedding_dim": 16}).bottom_mlp == (
        16,
        16,
    )
    other = SMALL.updated({"class": "deepfm", "embedding_dim": 16})
    assert (type(other).__name__, other.embedding_dim) == ("DeepFMConfig", 16)
    rejects("must end with embedding_dim 16", SMALL.replace, embedding_dim=16, bottom_mlp=(32, 8))


# -- DIN's sequences, training and settings; its formula is in test_formulas.py
WIDTH = 4
DIN_ROWS = 9
LISTED = ModelInputs(
    2,
    ("item", "history", "tags"),
    "click",
    vocabularies=("item", "item", "tags"),
    lists=(("history", 5), ("tags", None)),
)
SMALL_DIN = DINConfig(embedding_dim=WIDTH, attention=(6, 3), mlp=(8, 5))
LENGTHS = torch.tensor([3, 0, 5, 1, 2, 0, 4, 5, 1])


def din_network(*, precision: str = "fp32") -> DIN:
    torch.manual_seed(0)
    built = SMALL_DIN.build(LISTED, precision=precision)
    assert isinstance(built, DIN)
    for module in built.modules():
        if isinstance(module, Dice):
            nn.init.normal_(module.slope)
            nn.init.normal_(module.norm.running_mean)
            nn.init.uniform_(module.norm.running_var, 0.5, 2)
    return built


def embedded(
    values: torch.Tensor, item: torch.Tensor, tags: torch.Tensor, *, lengths: torch.Tensor = LENGTHS
) -> KeyedEmbeddings:
    """Build embeddings delivered in a different order than the features."""
    lists = {"history": JaggedEmbeddings(values, lengths)}
    pooled = torch.cat([tags, item], dim=1)
    return KeyedEmbeddings(
        LISTED.features, WIDTH, lambda: (pooled, (2, 0)), sequences=lambda: lists
    )


def test_din_selects_sequences_other_networks_receive_sums() -> None:
    values = torch.randn(int(LENGTHS.sum()), WIDTH)
    item = torch.randn(DIN_ROWS, WIDTH)
    tags = torch.randn(DIN_ROWS, WIDTH)
    sums = torch.stack([part.sum(0) for part in values.split(LENGTHS.tolist())])
    given = embedded(values, item, tags)
    torch.testing.assert_close(given["history"], sums)
    torch.testing.assert_close(given.stacked(), torch.stack([item, sums, tags], dim=1))
    torch.testing.assert_close(given.flattened(), torch.cat([item, sums, tags], dim=1))
    fails_with(KeyError, "item", given.sequences, "item")
    assert SMALL_DIN.targets(LISTED) == {"history": "item"}
    assert unpooled_features(SMALL_DIN, LISTED) == ("item", "history")
    assert unpooled_features(DLRMConfig(), LISTED) == ()
    alone = ModelInputs(0, ("item", "tags"), lists=(("tags", None),))
    rejects(
        "the schema must have a list with the vocabulary of a single-category column",
        unpooled_features,
        SMALL_DIN,
        alone,
    )
    weighted = ModelInputs(
        0, LISTED.features, vocabularies=LISTED.vocabularies, lists=LISTED.lists, weighted=True
    )
    rejects(
        "^DINConfig: lists with weights must be summed, got unpooled lists history",
        unpooled_features,
        SMALL_DIN,
        weighted,
    )


def test_aligned_lists_use_one_unit_and_bf16_is_close() -> None:
    single = ("item", "shop")
    lists = ("items", "shops", "tags")
    inputs = ModelInputs(
        0,
        (*single, *lists),
        vocabularies=("item", "shop", "item", "shop", "tags"),
        lists=tuple((name, None) for name in lists),
        aligned=(("shops", "items"), ("tags", "items")),
    )
    # tags have no target, so they are summed
    assert SMALL_DIN.units(inputs) == (("items", "shops"),)
    assert SMALL_DIN.units(dataclasses.replace(inputs, aligned=())) == (("items",), ("shops",))
    values = torch.randn(int(LENGTHS.sum()), WIDTH)
    item = torch.randn(DIN_ROWS, WIDTH)
    tags = torch.randn(DIN_ROWS, WIDTH)
    dense = torch.randn(DIN_ROWS, 2)
    nothing = torch.zeros(0, WIDTH)
    exact, rough = (din_network(precision=kind).eval() for kind in ("fp32", "bf16"))
    expected = exact(dense, embedded(values, item, tags))["click"]
    close = rough(dense, embedded(values, item, tags))["click"]
    torch.testing.assert_close(close, expected, atol=0.05 * expected.abs().max().item(), rtol=0.05)
    no_rows = embedded(nothing, nothing, nothing, lengths=LENGTHS[:0])
    for net in (exact.train(), rough.train()):
        assert net(dense[:0], no_rows)["click"].shape == (0,)
    attention = 5 * (2 * WIDTH * 6 + 6 * 3 + 3) + WIDTH * 6
    assert (
        network_multiply_adds(din_network(), LISTED, SMALL_DIN)
        == attention + 5 * WIDTH * 8 + 8 * 5 + 5
    )
