"""Scoring tables: the kernel's sums against NumPy, packed formats against PyTorch, and torch operators against both."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from builders.faults import fails_with, rejects
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.models.scoring_tables import QUANTIZATIONS, DeviceTables, HostTables, Lookup, Quantization, RowFormat


def _unpacked(table: np.ndarray, row_format: RowFormat) -> np.ndarray:
    """Dequantize by the formats' definition. PyTorch's operators may round once less."""
    dim = row_format.dim
    if row_format.quantization == "int8":
        affine = np.ascontiguousarray(table[:, dim:]).view(np.float32)
        integers, torchs = table[:, :dim], torch.ops.quantized.embedding_bag_byte_unpack(torch.from_numpy(table))
    elif row_format.quantization == "int4":
        affine = np.ascontiguousarray(table[:, dim // 2 :]).view(np.float16).astype(np.float32)
        integers = np.stack([table[:, : dim // 2] & 15, table[:, : dim // 2] >> 4], axis=2).reshape(len(table), dim)
        torchs = torch.ops.quantized.embedding_bag_4bit_unpack(torch.from_numpy(table))
    else:
        return table.astype(np.float32)
    values = integers.astype(np.float32) * affine[:, :1] + affine[:, 1:]
    np.testing.assert_allclose(values, torchs.numpy(), rtol=1e-5, atol=1e-5 * np.abs(values).max(initial=0))
    return values


def _expected(tables: list[np.ndarray], lookups: list[Lookup], rows: int) -> np.ndarray:
    columns = []
    for table, lookup in zip(tables, lookups, strict=True):
        ids = lookup.ids.reshape(-1)
        offsets = lookup.offsets if lookup.offsets is not None else np.arange(rows + 1) * (ids.size // max(rows, 1))
        pooled = np.zeros((rows, table.shape[1]), np.float32)
        for row in range(rows):
            for position in range(offsets[row], offsets[row + 1]):
                pooled[row] += table[ids[position]]  # In this order, in float32
        columns.append(pooled)
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
    quantization: Quantization, half_dim: int, rows: int, sizes: list[int], id_type: type, seed: int
) -> None:
    rng, row_format = np.random.default_rng(seed), RowFormat(quantization, 2 * half_dim)
    tables, lookups = [], []
    for size in sizes:  # -1: any number
        num_embeddings = int(rng.integers(1, 300))
        values = (rng.standard_normal((num_embeddings, 2 * half_dim)) * 10.0 ** rng.integers(-6, 2)).astype(np.float32)
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
        np.testing.assert_allclose(device.pool(lookups, rows).numpy(), expected, rtol=1e-5, atol=1e-5)
        assert device.size_bytes == host.size_bytes == sum(table.nbytes for table in tables)


@pytest.mark.parametrize("quantization", ["fp32", "int8"])
def test_unpooled_lookups_and_skipped_columns_match_numpy(quantization: Quantization) -> None:
    rng, row_format = np.random.default_rng(0), RowFormat(quantization, 4)
    packed = [row_format.pack(rng.standard_normal((9, 4)).astype(np.float32), table="t") for _ in range(3)]
    values = [_unpacked(table, row_format) for table in packed]
    ids, list_ids = np.array([8, 0], np.int32), np.array([3, 3, 0, 7, 1])
    for tables in (HostTables(row_format, packed), DeviceTables(row_format, [torch.from_numpy(a) for a in packed])):
        np.testing.assert_allclose(tables.one_by_one(1, list_ids).numpy(), values[1][list_ids], rtol=1e-6)
        assert tables.one_by_one(1, list_ids[:0]).shape == (0, 4)
        pooled = tables.pool([Lookup(ids), None, Lookup(ids)], 2).numpy()
        np.testing.assert_allclose(pooled, np.concatenate([values[0][ids], values[2][ids]], axis=1), rtol=1e-6)
        assert tables.pool([None, None, None], 2).shape == (2, 0)
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
    tables = kind(RowFormat("fp32", 4), arrays if kind is HostTables else [torch.from_numpy(a) for a in arrays])
    good = Lookup(np.arange(5, dtype=np.int32))
    fails_with(AssertionError, "beyond its table's", tables.pool, [good, Lookup(np.array([0, 1, bad, 2, 3], np.int32))], 5)


def test_concurrent_lookups_return_separate_sums() -> None:
    rng = np.random.default_rng(0)
    tables = HostTables(RowFormat("fp32", 8), [rng.standard_normal((1000, 8)).astype(np.float32) for _ in range(3)])
    batches = [[Lookup(rng.integers(0, 1000, 500)) for _ in range(3)] for _ in range(40)]
    alone = [tables.pool(batch, 500) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda batch: tables.pool(batch, 500), batches))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(("quantization", "share"), [("fp16", 0.5), ("int8", 24 / 64), ("int4", 12 / 64)])
def test_packed_rows_are_smaller_and_close(quantization: Quantization, share: float) -> None:
    values = np.random.default_rng(0).standard_normal((1000, 16)).astype(np.float32)
    row_format = RowFormat(quantization, 16)
    packed = row_format.pack(values, table="t")
    assert packed.nbytes == values.nbytes * share
    step = {"fp16": 0.005, "int8": 8 / 255, "int4": 8 / 15}[quantization]
    assert np.abs(row_format.unpack(torch.from_numpy(packed)).numpy() - values).max() < step / 2 * 1.1


@pytest.mark.parametrize("quantization", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1e39])
def test_pack_rejects_values_outside_range(quantization: Quantization, value: float) -> None:
    values = np.zeros((3, 4), np.float32)
    with np.errstate(over="ignore"):
        values[1, 2] = value
    rejects(r"table cat_3: values must fit into .*, got", RowFormat(quantization, 4).pack, values, table="cat_3")


def test_int4_rejects_odd_embedding_dim() -> None:
    rejects("int4 needs an even embedding_dim, got 5", RowFormat("int4", 5).check)
    RowFormat("int8", 5).check()
