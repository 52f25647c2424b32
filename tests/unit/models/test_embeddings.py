"""Initial table values: equal for any sharding, and within their bound."""

from typing import Any

import pytest
import torch
from builders.faults import rejects
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec.models.base import TableInit
from rayrec.models.embeddings import TableValues, build_embeddings
from rayrec.models.scoring_tables import table_name

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
