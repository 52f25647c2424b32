"""Preprocessors that are loaded as they were saved or not at all, and limits of their kernels."""

import ctypes
import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders.faults import rejects

from rayrec.data.encoding.encoder import build_slots, c_dense_column, find_ids, num_slots
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import RAYREC, make_preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.logs.table_parser import parse_table
from rayrec.native import library
from rayrec.schema import Schema

SCHEMA = Schema(tokens="hexadecimal", label="y", dense=("a", "b"), sparse=("s", "t", "u"))
LARGE = 40_000_000


def make() -> Preprocessor:
    dense = (DenseColumn(mean=0.5, scale=2.0, missing_value=-7.5), DenseColumn(mean=-0.25, scale=0.3))
    sparse = (SparseColumn(6, 4), SparseColumn(5002, 5000), SparseColumn(LARGE, None))
    tokens = np.array([5, 0, 0xFFFFFFFF, 7, *range(1000, 6000)], np.uint32)
    return Preprocessor("test", SCHEMA, dense, sparse, tokens, constants={"min_count": 2})


def test_lookup_returns_largest_int32_id() -> None:
    first_id = 2**31 - 10
    slots, known = np.zeros(16, np.uint64), np.arange(3, dtype=np.uint32)
    assert build_slots(known, (first_id + known).astype(np.int32), slots)
    assert find_ids(np.array([2, 3, 0], np.uint32), slots, 0).tolist() == [first_id + 2, 0, first_id]


def test_lookup_tables_are_at_most_two_thirds_full() -> None:
    for count in [*range(200), 10_000, 1 << 20]:
        slots = num_slots(count)
        assert slots & (slots - 1) == 0
        assert slots * 2 >= count * 3
        assert slots == 16 or slots < count * 3


def test_preprocessor_roundtrip(tmp_path: Path) -> None:
    rejects(r"preprocessor\.json not found", Preprocessor.load, str(tmp_path))
    preprocessor = make()
    preprocessor.save(str(tmp_path))
    again = Preprocessor.load(str(tmp_path))
    assert (again.hash(), again.describe()) == (preprocessor.hash(), preprocessor.describe())
    assert (again.tokens == preprocessor.tokens).all()
    assert again.tokens.dtype == np.uint32
    assert (again.slots == preprocessor.slots).all()
    assert again.num_embeddings == [6, 5002, LARGE]
    assert sorted(os.listdir(tmp_path)) == ["preprocessor.json", "tokens.npy"]


def test_hash_depends_on_all_fields() -> None:
    base = {field.name: getattr(make(), field.name) for field in dataclasses.fields(Preprocessor)}
    hashes = {make().hash()}
    other = base["tokens"].copy()
    other[-1] += 1
    for change in (
        {"preset": "other"},
        {"constants": {"min_count": 3}},
        {"dense": (base["dense"][0], DenseColumn(mean=-0.25, scale=float(np.nextafter(0.3, 1))))},
        {"tokens": other},
        {"schema": SCHEMA.replace(label="z")},
    ):
        hashes.add(Preprocessor(**{**base, **change}).hash())
    assert len(hashes) == 6


def resaved(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], object]:
    return lambda path: np.save(path, change(np.load(path)))


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    "damage",
    [
        rewritten(lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        rewritten(lambda data: data[:-3]),
        rewritten(lambda data: data[:20]),  # in the header
        rewritten(lambda data: b""),
        rewritten(lambda data: b"\x93NUMPY" + os.urandom(50)),
        resaved(lambda tokens: np.append(tokens[:1], tokens[:-1])),  # one comes twice
        resaved(lambda tokens: tokens[:-1]),
        resaved(lambda tokens: np.append(tokens, np.uint32(1))),
        lambda path: np.save(path, np.array([{"a": 1}], object), allow_pickle=True),
        Path.unlink,
    ],
)
def test_load_rejects_damaged_tokens(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    make().save(str(tmp_path))
    damage(tmp_path / "tokens.npy")
    rejects(str(tmp_path), Preprocessor.load, str(tmp_path))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda stored: {**stored, "profile": "x"}, ""),
        (lambda stored: {**stored, "dense": stored["dense"][:1]}, ""),
        (lambda stored: {**stored, "sparse": stored["sparse"][:2]}, ""),
        (lambda stored: {**stored, "sparse": [{"num_embeddings": 3}] * 3}, ""),
        (lambda stored: {**stored, "schema": {"label": "y"}}, ""),
        (lambda stored: {key: value for key, value in stored.items() if key != "constants"}, ""),
        (lambda stored: {key: value for key, value in stored.items() if key != "hash"}, ""),
        (lambda stored: {**stored, "version": 99}, "version 99, this rayrec reads version 2"),
        (lambda stored: None, r"preprocessor\.json: damaged"),
    ],
)
def test_load_rejects_damaged_description(tmp_path: Path, change: Callable[[dict[str, Any]], Any], why: str) -> None:
    make().save(str(tmp_path))
    path = tmp_path / "preprocessor.json"
    changed = change(json.loads(path.read_text()))
    path.write_text(json.dumps(changed) if changed else "{")
    rejects(f"{tmp_path}.*{why}", Preprocessor.load, str(tmp_path))


def save_forged(folder: Path, *, tokens: np.ndarray | None = None, **changes: Any) -> None:
    """Saves a Preprocessor whose hash is right though its values are not."""
    good = make()
    object.__setattr__(good, "tokens", good.tokens if tokens is None else tokens)
    object.__setattr__(good, "sparse", (dataclasses.replace(good.sparse[0], **changes), *good.sparse[1:]))
    good.save(str(folder))


@pytest.mark.parametrize(
    "forged",
    [
        *[{name: value} for name in ("first_id", "unknown_id", "missing_id") for value in (-1, 2**31, 2.5)],
        {"num_embeddings": 0},
        {"num_embeddings": 2**50},
        {"token_modulo": 0},
        {"token_modulo": 2**33},
        {"gap": -1},
        *[{"tokens": np.zeros(5004, dtype)} for dtype in (np.uint8, np.int64, np.float32)],
        {"tokens": np.zeros((5004, 1), np.uint32)},
    ],
    ids=str,
)
def test_check_rejects_values_unsafe_for_kernels(tmp_path: Path, forged: dict[str, Any]) -> None:
    save_forged(tmp_path, **forged)
    rejects(str(tmp_path), Preprocessor.load, str(tmp_path))


def test_encode_handles_smallest_integer() -> None:
    column, out = DenseColumn(), np.empty(2, np.float32)
    values = np.array([-(2**63), 2**63 - 1], np.int64)
    library().rayrec_transform_dense(
        ctypes.c_void_p(values.ctypes.data),
        ctypes.c_int64(2),
        ctypes.byref(c_dense_column(column)),
        ctypes.c_void_p(out.ctypes.data),
    )
    assert out.tolist() == [-np.float32(63 * math.log(2)), np.float32(63 * math.log(2))]


def test_hashing_spreads_multiples_and_keeps_old_ids() -> None:
    schema = Schema(label=None, sparse=("s",), tokens="any")
    raw, _ = parse_table(pa.table({"s": np.arange(0, 50_000_000, 1000)}), schema)
    preset = RAYREC.replace(max_num_embeddings=100_002)
    counts = preset.counting(schema).empty()
    counts.add_rows(raw, 0)
    counts.tokens[0].count_values(np.arange(1, 200_001, dtype=np.uint64).repeat(2))
    mixed = make_preprocessor(preset, schema, counts)
    assert mixed.sparse[0].mixed
    assert len(set(mixed.encode(raw).ids[0].tolist())) > 35_000
    before = dataclasses.replace(mixed, sparse=(dataclasses.replace(mixed.sparse[0], mixed=False),))
    assert set(before.encode(raw).ids[0].tolist()) == {2 + 1000 * i for i in range(100)}
    assert "mixed" not in before.describe()["sparse"][0]
    assert before.hash() != mixed.hash()


def test_descriptions_of_earlier_versions_stay() -> None:
    earlier = {**Schema(label=None, sparse=("s",), tokens="any").describe()}
    assert earlier.pop("category_rules") == 2
    assert (Schema.described(earlier).category_rules, Schema.described(earlier).describe()) == (1, earlier)
