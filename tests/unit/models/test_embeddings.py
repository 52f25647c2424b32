"""Initial table values: equal for any sharding, and within their bound."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.click_models import whole_model
from builders.faults import fails_with, rejects
from builders.own_click_model import WithoutLabelConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import retrieval
from ranks.checkpoint import run_ranks
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec import models, recipes
from rayrec.batch import Batch
from rayrec.checkpoint import Checkpoint, full_tensors
from rayrec.config import InputError
from rayrec.metrics.means import RowMetrics
from rayrec.models.base import ClickModelConfig, ModelInputs, TableInit, stored_model
from rayrec.models.ensemble import build_network
from rayrec.models.heads import NumberHead, label_heads
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.models.scoring_tables import (
    QUANTIZATIONS,
    DeviceTables,
    HostTables,
    Lookup,
    Quantization,
    RowFormat,
    table_name,
)
from rayrec.models.sharded_model import TableValues, build_embeddings
from rayrec.schema import Label
from rayrec.workloads.recsys.scorer import PlainModel

TABLE: dict[str, Any] = {
    "seed": 3,
    "table": "cat_1",
    "num_embeddings": 150_000,
    "embedding_dim": 8,
}


@pytest.mark.parametrize("start", [None, TableInit(kind="normal", std=0.5)])
def test_shard_values_match_full_table(start: TableInit | None) -> None:
    whole = torch.empty(150_000, 8)
    TableValues(**TABLE, start=start).fill(whole)
    for row, column, rows, columns in (
        (0, 0, 10, 8),
        (65_530, 4, 20, 4),
        (140_000, 0, 10_000, 8),
        (1, 2, 149_999, 2),
    ):
        part = torch.empty(rows, columns)
        TableValues(**TABLE, start=start).fill(part, row_offset=row, column_offset=column)
        assert torch.equal(part, whole[row : row + rows, column : column + columns])
    by_threads = torch.empty(150_000, 8)
    TableValues(**TABLE, start=start).fill(by_threads, threads=3)
    assert torch.equal(by_threads, whole)


def test_initial_values_match_distribution_and_start_on_meta() -> None:
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
    TableValues(**TABLE, start=TableInit(kind="xavier", std=9.0)).fill(whole)
    assert whole.std().item() == pytest.approx((2 / 150_008) ** 0.5, rel=0.01)
    rejects(r"std: must be above 0 .*, got 0\.0", TableInit, kind="normal", std=0.0)
    # Runs and golden curves of earlier versions start with these values.
    part = torch.empty(2, 3)
    TableValues(3, "cat_1", 100, 3).fill(part)
    assert part.view(torch.int32).flatten().tolist() == [
        -1114835955,
        -1127736896,
        1027692397,
        -1116264761,
        -1120535357,
        1014909978,
    ]
    one = build_embeddings(
        [100, 50],
        embedding_dim=4,
        seed=1,
        device="cpu",
    )
    torch.manual_seed(99)
    two = build_embeddings(
        [100, 50, 7],
        embedding_dim=4,
        seed=1,
        device="cpu",
    )
    other = build_embeddings(
        [100, 50],
        embedding_dim=4,
        seed=2,
        device="cpu",
    )
    assert torch.equal(one.embedding_bags["cat_1"].weight, two.embedding_bags["cat_1"].weight)
    assert not torch.equal(one.embedding_bags["cat_1"].weight, other.embedding_bags["cat_1"].weight)
    assert (
        build_embeddings([10_000_000], embedding_dim=16, seed=0)
        .embedding_bags["cat_0"]
        .weight.is_meta
    )
    rejects(
        "cat_1: must have at least one row, got 0",
        build_embeddings,
        [5, 0],
        embedding_dim=4,
        seed=0,
    )


ODD_NAMES = [
    "type",
    "keys",
    "items",
    "update",
    "user.id",
    "user%2Eid",
    "%table:a",
    "",
    "training",
    "_modules",
    "\u00fcser/id \u5e97",
    "a b",
]


def test_table_name_supports_any_and_keeps_ordinary_names() -> None:
    odd = build_embeddings(
        [5] * len(ODD_NAMES),
        embedding_dim=4,
        seed=1,
        device="cpu",
        table_of={n: n for n in ODD_NAMES},
    )
    assert len(odd.state_dict()) == len(ODD_NAMES)
    keys = [f"embedding_bags.{table_name(name)}.weight" for name in ODD_NAMES]
    assert list(odd.state_dict()) == keys
    batch = KeyedJaggedTensor(
        ODD_NAMES,
        torch.arange(len(ODD_NAMES)) % 5,
        lengths=torch.ones(len(ODD_NAMES), dtype=torch.int32),
    )
    pooled = odd(batch)
    assert list(pooled.keys()) == ODD_NAMES
    for number, (name, key) in enumerate(zip(ODD_NAMES, keys, strict=True)):
        assert torch.equal(pooled[name][0], odd.state_dict()[key][number % 5])
    for name in (
        "cat_0",
        "user_id",
        "Typ",
        "user%2Eid",
        "\u00fcser/id \u5e97",
        "a b",
    ):
        assert table_name(name) == name
    assert table_name("user.id") == "%table:user%2Eid"


# -- Networks without labels in the training loop, and conversion of outputs to columns and fields
INPUTS = ModelInputs(1, ("item",), lists=(("item", None),))
CONFIG = WithoutLabelConfig(embedding_dim=4)


def batch(*numbers: float) -> Batch:
    rows = len(numbers)
    ids = KeyedJaggedTensor(
        keys=["item"],
        values=torch.arange(rows),
        lengths=torch.ones(rows, dtype=torch.int32),
    )
    return Batch(
        {"dense": torch.tensor(numbers).unsqueeze(1)},
        1.0,
        weights=torch.full((rows,), 2.0),
        sequence_features=ids,
    )


def test_unlabeled_model_learns_and_predicts_columns_and_fields() -> None:
    model = whole_model(CONFIG, [4], inputs=INPUTS)
    metrics = RowMetrics()
    loss, output = model(batch(0.0, 1.0, 2.0))
    assert (loss.item(), dict(output.measures)) == (6.0, {})
    model.eval()
    for rows in (batch(0.0, 1.0, 2.0), batch(5.0)):
        metrics.update(model(rows)[1])
    assert metrics.compute() == {"loss": 2.0, "large": 3.5}
    assert CONFIG.score(metrics.compute()) == -2.0
    heads = CONFIG.output_heads(INPUTS)
    model = PlainModel(build_network(CONFIG, INPUTS), INPUTS, heads, width=4, sequences=("item",))
    tensors = model.predict(
        torch.ones(3, 1),
        torch.zeros(3, 0),
        torch.rand(3, 4),
        torch.ones(3, dtype=torch.int64),
    )
    values = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
    columns: dict[str, np.ndarray] = {}
    for head in heads:
        assert (
            head.json_schema().keys()
            == head.answer(values, lambda feature: np.arange(0, 40, 10)).keys()
        )
        columns |= head.columns(values, lambda feature: np.arange(0, 40, 10))
    assert {name: values.shape for name, values in columns.items()} == {
        "best": (3, 2),
        "scores": (3, 2),
        "user": (3, 4),
    }
    assert columns["best"].tolist() == [[30, 10]] * 3


def test_label_fields_match_schema_and_ensembles_need_mean() -> None:
    heads = label_heads("click", (Label(name="like"), Label(name="seconds", kind="number")))
    values: dict[str, Any] = {head.name: np.zeros(2, np.float32) for head in heads}
    fields = [list(head.answer(values, np.array)) for head in heads]
    assert (
        fields
        == [
            ["scores", "logits"],
            ["score_like"],
            ["score_seconds"],
        ]
        == [list(h.json_schema()) for h in heads]
    )
    columns = [name for head in heads for name in head.columns(values, np.array)]
    assert columns == [
        "score",
        "logit",
        "score_like",
        "logit_like",
        "score_seconds",
        "logit_seconds",
    ]
    assert isinstance(heads[2], NumberHead)
    (head,) = label_heads("views", kind="count")
    logs = torch.tensor([0.0, 1.0, -1.0])
    counts = torch.tensor([2.0, 0.0, 1.0])
    weights = torch.tensor([1.0, 0.5, 2.0])
    expected = functional.poisson_nll_loss(logs, counts, reduction="none") * weights
    torch.testing.assert_close(head.losses({"views": logs}, {"views": counts}, weights), expected)
    metrics = head.accumulator()
    metrics.update(logs, counts)
    means = logs.exp().double().numpy()
    desired = counts.double().numpy()
    deviance = 2 * np.mean(
        np.where(desired > 0, desired * np.log(np.maximum(desired, 1) / means), 0) - desired + means
    )
    assert metrics.compute() == pytest.approx(
        {"deviance": deviance, "calibration": means.sum() / 3, "rows": 3}
    )
    assert ClickModelConfig.score(CONFIG, metrics.compute()) == pytest.approx(-deviance)
    fields = head.answer({"views": logs.numpy()}, np.array)
    assert fields.keys() == head.json_schema().keys()
    np.testing.assert_array_equal(fields["scores"], np.exp(logs.numpy()))
    rejects(
        r"^WithoutLabelConfig.members: must be 1 without logits to average, got 2",
        CONFIG.replace,
        members=2,
    )
    rejects(
        r"^EnsembleConfig.models\[1\]: must predict a label, got WithoutLabelConfig",
        EnsembleConfig,
        models=(DLRMConfig(), CONFIG),
    )


# -- Loading of stored configurations, which may only select networks of rayrec
class OwnConfig(ClickModelConfig):
    pass


def test_stored_model_restores_settings() -> None:
    for model in (DLRMConfig(cross_layers=2), FinalNetConfig(first_tower=(8,))):
        assert stored_model(model.to_dict(), where="f") == model
    own = OwnConfig(embedding_dim=3)
    found = stored_model(own.to_dict(), where="f", own=OwnConfig)
    assert (type(found), found) == (OwnConfig, own)


def test_stored_model_rejects_other_classes(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (
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
    ):
        with pytest.raises(
            InputError,
            match=r"^f: network must be rayrec's, got .*\. Pass its training recipe",
        ):
            stored_model({"class": name, "embedding_dim": 4}, where="f")
        assert capsys.readouterr().out == ""


def test_stored_class_replaces_recipe_class_of_every_family() -> None:
    """By model name or stored class path. Keeps the settings that all click models share."""
    recipe = recipes.criteo_demo()
    model = recipe.replace(
        workload={"model": {"class": "finalnet", "first_tower": [8]}}
    ).workload.model
    assert model == FinalNetConfig(embedding_dim=16, embedding_penalty=3e-4, first_tower=(8,))
    changed = recipe.replace(workload={"model": FinalNetConfig(members=2)})
    assert recipes.load_config(changed.to_yaml()) == changed
    back = changed.replace(workload={"model": {"class": "dlrm"}}).workload.model
    assert back == DLRMConfig(embedding_dim=16, bottom_mlp=(512, 256, 16), members=2)
    # its own class keeps its settings
    assert recipe.replace(workload={"model": {"class": "dlrm"}}) == recipe
    own = recipe.replace(workload={"model": {"class": f"{__name__}.OwnConfig"}}).workload.model
    assert own == OwnConfig(embedding_dim=16, embedding_penalty=3e-4)
    for unknown in ("deepest", "os.system", "rayrec.models.base.ClickModelConfig"):
        with pytest.raises(
            InputError,
            match=rf"model\.class: .*; rayrec's models are {', '.join(models.names())}",
        ):
            recipe.replace(workload={"model": {"class": unknown}})
    for name in models.names():
        cls = models.config_class(name)
        assert cls is not None, name
        assert models.config_class(f"{cls.__module__}.{cls.__qualname__}") is cls
        assert issubclass(cls, ClickModelConfig)
        cls()  # Every field has a default


# -- Retrieval models on two workers, on one, and in plain PyTorch have equal weights within float
# error
@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for size in (1, 2):
        run_ranks(retrieval.train, size, str(folder))
    return folder


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(full_tensors(Checkpoint(str(folder)), "model."))


@pytest.mark.parametrize("name", retrieval.MODELS)
def test_retrieval_with_two_workers_matches_one(name: str, trained: Path) -> None:
    alone, together = (_weights(trained / f"{name}_{size}" / "end") for size in (1, 2))
    start = _weights(trained / f"{name}_1" / "start")
    assert alone.keys() == together.keys()
    for key, values in alone.items():
        torch.testing.assert_close(together[key], values, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(values, start[key]) for key, values in alone.items())


def test_two_towers_match_plain_pytorch(trained: Path) -> None:
    weights = {
        key: value.clone().requires_grad_()
        for key, value in _weights(trained / "two_tower_2" / "start").items()
    }
    tables = {
        key: weights[key]
        for key in weights
        if key.endswith(("bags.user.weight", "embeddings.item.weight"))
    }
    users, items = (
        next(weights[key] for key in tables if f".{name}." in key) for name in ("user", "item")
    )
    counts = torch.zeros(1 << 16)
    network = [key for key in weights if "tower." in key]

    def vector(side: str, rows: torch.Tensor) -> torch.Tensor:
        named = {
            key.rpartition(".")[2]: weights[key] for key in network if f"{side}_tower.1." in key
        }
        return functional.normalize(functional.linear(rows, **named), dim=1)

    for step in range(len(retrieval.ROWS)):
        user, item = (torch.from_numpy(ids) for ids in retrieval.pairs(step))
        counts = counts * 0.99 + torch.bincount(item, minlength=1 << 16)
        logits = (
            vector("user", users[user])
            @ vector("item", items[item]).T
            / retrieval.TWO_TOWER.temperature
        )
        logits = logits - (counts[item] / counts.sum()).log()
        same = (item[:, None] == item) & ~torch.eye(len(item), dtype=torch.bool)
        loss = functional.cross_entropy(
            logits.masked_fill(same, -torch.inf),
            torch.arange(len(item)),
        )
        trainable = {**tables, **{key: weights[key] for key in network}}
        gradients = torch.autograd.grad(loss, list(trainable.values()))
        with torch.no_grad():
            for (key, values), gradient in zip(trainable.items(), gradients, strict=True):
                values -= retrieval.RATES["sparse" if key in tables else "dense"] * gradient
    found = _weights(trained / "two_tower_2" / "end")
    for key in (*tables, *network):
        torch.testing.assert_close(found[key], weights[key].detach(), rtol=1e-4, atol=1e-6)


# -- Scoring tables: the kernel's sums against NumPy, packed formats, and torch operators against
# both
def _unpacked(table: np.ndarray, row_format: RowFormat) -> np.ndarray:
    """Dequantize by the formats' definition. PyTorch's operators may round once less."""
    dim = row_format.dim
    if row_format.quantization == "int8":
        affine = np.ascontiguousarray(table[:, dim:]).view(np.float32)
        integers = table[:, :dim]
        torchs = torch.ops.quantized.embedding_bag_byte_unpack(torch.from_numpy(table))
    elif row_format.quantization == "int4":
        affine = np.ascontiguousarray(table[:, dim // 2 :]).view(np.float16).astype(np.float32)
        integers = np.stack([table[:, : dim // 2] & 15, table[:, : dim // 2] >> 4], axis=2).reshape(
            len(table),
            dim,
        )
        torchs = torch.ops.quantized.embedding_bag_4bit_unpack(torch.from_numpy(table))
    else:
        return table.astype(np.float32)
    values = integers.astype(np.float32) * affine[:, :1] + affine[:, 1:]
    np.testing.assert_allclose(
        values,
        torchs.numpy(),
        rtol=1e-5,
        atol=1e-5 * np.abs(values).max(initial=0),
    )
    return values


def _expected(tables: list[np.ndarray], lookups: list[Lookup], rows: int) -> np.ndarray:
    columns = []
    for table, lookup in zip(tables, lookups, strict=True):
        lengths = (
            lookup.ids.size // max(rows, 1) if lookup.offsets is None else np.diff(lookup.offsets)
        )
        columns.append(np.zeros((rows, table.shape[1]), np.float32))
        # In this order
        np.add.at(columns[-1], np.repeat(np.arange(rows), lengths), table[lookup.ids.reshape(-1)])
    return np.concatenate(columns, axis=1)


@settings(max_examples=60, deadline=None)
@given(
    quantization=st.sampled_from(QUANTIZATIONS),
    half_dim=st.integers(1, 20),
    rows=st.integers(0, 150),
    sizes=st.lists(st.sampled_from([0, 1, 3, -1]), min_size=1, max_size=4),
    id_type=st.sampled_from([np.int32, np.int64]),
    seed=st.integers(0, 1000),
)
def test_pooled_lookups_match_numpy(
    quantization: Quantization,
    half_dim: int,
    rows: int,
    sizes: list[int],
    id_type: type,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    row_format = RowFormat(quantization, 2 * half_dim)
    tables = []
    lookups = []
    for size in sizes:  # -1: any number
        num_embeddings = int(rng.integers(1, 300))
        values = (
            rng.standard_normal((num_embeddings, 2 * half_dim)) * 10.0 ** rng.integers(-6, 2)
        ).astype(np.float32)
        tables.append(row_format.pack(values, table="t"))
        lengths = rng.integers(0, 5, rows) if size < 0 else np.full(rows, size)
        ids = rng.integers(0, num_embeddings, lengths.sum()).astype(id_type)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64) if size < 0 else None
        lookups.append(Lookup(ids, offsets))
    expected = _expected([_unpacked(table, row_format) for table in tables], lookups, rows)
    host = HostTables(row_format, tables)
    np.testing.assert_array_equal(host.pool(lookups, rows).numpy(), expected)
    if rows:
        device = DeviceTables(row_format, [torch.from_numpy(table) for table in tables])
        np.testing.assert_allclose(
            device.pool(lookups, rows).numpy(),
            expected,
            rtol=1e-5,
            atol=1e-5,
        )
        assert device.size_bytes == host.size_bytes == sum(table.nbytes for table in tables)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_weighted_lookup_matches_numpy(quantization: Quantization) -> None:
    rng = np.random.default_rng(0)
    row_format = RowFormat(quantization, 6)
    table = row_format.pack(rng.standard_normal((9, 6)).astype(np.float32), table="t")
    values = _unpacked(table, row_format)
    weights = rng.standard_normal(4).astype(np.float32)
    lookup = Lookup(np.array([8, 0, 3, 8]), np.array([0, 3, 3, 4]), weights)
    pooled = HostTables(row_format, [table]).pool([lookup], 3).numpy()
    first = weights[0] * values[8] + weights[1] * values[0] + weights[2] * values[3]
    np.testing.assert_array_equal(
        pooled,
        np.stack([first, np.zeros(6, np.float32), weights[3] * values[8]]),
    )


def test_weighted_lookup_accepts_rows_larger_than_stack() -> None:
    dim = 3 << 20  # 12 MiB, where a thread's stack has 8 or less
    table = np.arange(dim, dtype=np.float32).reshape(1, dim)
    lookup = Lookup(np.array([0, 0]), np.array([0, 2]), np.array([0.5, 1.5], np.float32))
    (pooled,) = HostTables(RowFormat("fp32", dim), [table]).pool([lookup], 1)
    np.testing.assert_array_equal(
        pooled.numpy(),
        np.float32(0.5) * table[0] + np.float32(1.5) * table[0],
    )


@pytest.mark.parametrize("quantization", ["fp32", "int8"])
def test_unpooled_lookups_and_skipped_columns_match_numpy(quantization: Quantization) -> None:
    rng = np.random.default_rng(0)
    row_format = RowFormat(quantization, 4)
    packed = [
        row_format.pack(rng.standard_normal((9, 4)).astype(np.float32), table="t") for _ in range(3)
    ]
    values = [_unpacked(table, row_format) for table in packed]
    ids = np.array([8, 0], np.int32)
    list_ids = np.array([3, 3, 0, 7, 1])
    for tables in (
        HostTables(row_format, packed),
        DeviceTables(row_format, [torch.from_numpy(a) for a in packed]),
    ):
        np.testing.assert_allclose(
            tables.one_by_one(1, list_ids).numpy(),
            values[1][list_ids],
            rtol=1e-6,
        )
        pooled = tables.pool([Lookup(ids), None, Lookup(ids)], 2).numpy()
        np.testing.assert_allclose(
            pooled,
            np.concatenate([values[0][ids], values[2][ids]], axis=1),
            rtol=1e-6,
        )
        np.testing.assert_array_equal(
            tables.pool_one_each(np.stack([ids] * 3)).numpy()[:, [*range(4), *range(8, 12)]],
            pooled,
        )
        assert (tables.one_by_one(1, list_ids[:0]).shape, tables.pool([None] * 3, 2).shape) == (
            (0, 4),
            (2, 0),
        )
        fails_with(AssertionError, "beyond its table's", tables.one_by_one, 1, np.array([9]))


def test_finite_half_values_match_numpy() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].reshape(-1, 16)
    tables = HostTables(RowFormat("fp16", 16), [halves])
    pooled = tables.pool([Lookup(np.arange(len(halves), dtype=np.int32))], len(halves)).numpy()
    np.testing.assert_array_equal(pooled.view(np.uint32), halves.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1])
@pytest.mark.parametrize("kind", [HostTables, DeviceTables])
def test_lookup_rejects_id_outside_table(kind: type, bad: int) -> None:
    arrays = [np.zeros((9, 4), np.float32), np.zeros((5, 4), np.float32)]
    tables = kind(
        RowFormat("fp32", 4),
        arrays if kind is HostTables else [torch.from_numpy(a) for a in arrays],
    )
    good = Lookup(np.arange(5, dtype=np.int32))
    fails_with(
        AssertionError,
        "beyond its table's",
        tables.pool,
        [good, Lookup(np.array([0, 1, bad, 2, 3], np.int32))],
        5,
    )


def test_concurrent_lookups_return_separate_sums() -> None:
    rng = np.random.default_rng(0)
    tables = HostTables(
        RowFormat("fp32", 8),
        [rng.standard_normal((1000, 8)).astype(np.float32) for _ in range(3)],
    )
    batches = [[Lookup(rng.integers(0, 1000, 500)) for _ in range(3)] for _ in range(40)]
    alone = [tables.pool(batch, 500) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda batch: tables.pool(batch, 500), batches))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    ("quantization", "share"),
    [
        ("fp16", 0.5),
        ("int8", 24 / 64),
        ("int4", 12 / 64),
    ],
)
def test_packed_rows_are_smaller_and_close(quantization: Quantization, share: float) -> None:
    values = np.random.default_rng(0).standard_normal((1000, 16)).astype(np.float32)
    row_format = RowFormat(quantization, 16)
    packed = row_format.pack(values, table="t")
    assert packed.nbytes == values.nbytes * share
    step = {"fp16": 0.005, "int8": 8 / 255, "int4": 8 / 15}[quantization]
    assert (
        np.abs(row_format.unpack(torch.from_numpy(packed)).numpy() - values).max() < step / 2 * 1.1
    )


@pytest.mark.parametrize("quantization", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1e39])
def test_pack_rejects_values_outside_range(quantization: Quantization, value: float) -> None:
    values = np.zeros((3, 4), np.float32)
    with np.errstate(over="ignore"):
        values[1, 2] = value
    rejects(
        r"table cat_3: values must fit into .*, got",
        RowFormat(quantization, 4).pack,
        values,
        table="cat_3",
    )


def test_int4_rejects_odd_embedding_dim() -> None:
    rejects("int4 needs an even embedding_dim, got 5", RowFormat("int4", 5).check)
    RowFormat("int8", 5).check()
