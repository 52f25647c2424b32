"""Encoding against plain Python, and a Preprocessor that is loaded as it was saved or not at all."""

import ctypes
import dataclasses
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.config import InputError
from rayrec.data.encoding.encoder import build_slots, c_dense_column, find_ids, num_slots
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import RAYREC, make_preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.logs.text_parser import parse
from rayrec.native import library
from rayrec.schema import Schema

SCHEMA = Schema(tokens="hexadecimal", label="y", dense=("a", "b"), sparse=("s", "t", "u"))
TOKENS = {"s": [5, 0, 0xFFFFFFFF, 7], "t": list(range(1000, 6000))}
LARGE = 40_000_000
UNKNOWN_ID, MISSING_ID, FIRST_ID = 0, 1, 2


def make(schema: Schema = SCHEMA) -> Preprocessor:
    return Preprocessor(
        preset="test",
        schema=schema,
        dense=(DenseColumn(mean=0.5, scale=2.0, missing_value=-7.5), DenseColumn(mean=-0.25, scale=0.3)),
        sparse=(SparseColumn(6, 4), SparseColumn(5002, 5000), SparseColumn(LARGE, None)),
        tokens=np.array(TOKENS["s"] + TOKENS["t"], np.uint32),
        constants={"min_count": 2},
    )


def reference_dense(column: DenseColumn, value: int) -> float:
    return (math.copysign(math.log1p(abs(value)), value) - column.mean) * column.scale


def reference_id(column: int, token: int) -> int:
    if column == 2:
        return FIRST_ID + token % (LARGE - FIRST_ID)
    known = TOKENS["st"[column]]
    return FIRST_ID + known.index(token) if token in known else UNKNOWN_ID


def text_of(rows: list[tuple[int, list[int | None], list[int | None]]]) -> bytes:
    return b"".join(
        "\t".join(
            [str(label), *("" if x is None else str(x) for x in dense), *("" if x is None else f"{x:08x}" for x in sparse)]
        ).encode()
        + b"\n"
        for label, dense, sparse in rows
    )


def check(rows: list[tuple[int, list[int | None], list[int | None]]], order: list[int] | None = None) -> None:
    preprocessor = make()
    raw, faults = parse(SCHEMA, text_of(rows))
    assert not faults.total
    encoded = preprocessor.encode(raw, None if order is None else np.array(order, np.int64))
    assert (encoded.dense.dtype, encoded.ids.dtype, encoded.label.dtype) == (np.float32, np.int32, np.float32)
    rows = rows if order is None else [rows[i] for i in order]
    assert len(encoded) == len(rows)
    assert encoded.label.tolist() == [label for label, _, _ in rows]
    dense = [
        [c.missing_value if x is None else reference_dense(c, x) for c, x in zip(preprocessor.dense, row, strict=True)]
        for _, row, _ in rows
    ]
    np.testing.assert_array_almost_equal_nulp(encoded.dense, np.array(dense, np.float32).reshape(len(rows), 2), 1)
    ids = [[MISSING_ID if x is None else reference_id(c, x) for c, x in enumerate(row)] for _, _, row in rows]
    assert encoded.ids.T.tolist() == ids


integers = st.none() | st.integers(-20, 20) | st.integers(2000, 2100) | st.integers(1 - 10**18, 10**18 - 1)
tokens = (
    st.none() | st.sampled_from([0, 5, 7, 8, 0xFFFFFFFF, 999, 1000, 5999, 6000, LARGE - 3, LARGE - 2]) | st.integers(0, 2**32 - 1)
)
rows_strategy = st.lists(
    st.tuples(st.integers(0, 1), st.lists(integers, min_size=2, max_size=2), st.lists(tokens, min_size=3, max_size=3)), max_size=8
)


@settings(max_examples=150, deadline=None)
@given(rows_strategy, st.randoms(use_true_random=False))
def test_encode(rows: list, rng: random.Random) -> None:
    check(rows)
    check(rows, [rng.randrange(len(rows)) for _ in range(rng.randrange(6))] if rows else [])


@pytest.mark.parametrize("num_rows", [0, 1, 255, 256, 257, 3000])
def test_encode_many_rows(num_rows: int) -> None:
    """More rows than a tile and, with 3,000, than the table of small logarithms pays for."""
    rng = random.Random(num_rows)
    rows = [
        (
            rng.randrange(2),
            [rng.choice([None, rng.randrange(-30, 3000), rng.randrange(10**9)]) for _ in range(2)],
            [rng.choice([None, 5, rng.randrange(900, 6100), rng.getrandbits(32)]) for _ in range(3)],
        )
        for _ in range(num_rows)
    ]
    check(rows)
    check(rows, rng.sample(range(num_rows), num_rows))


def test_small_integer_table_matches_computation() -> None:
    """A row is encoded alike alone (as when serving) and among thousands (as when training)."""
    raw, _ = parse(SCHEMA, text_of([(0, [x, -x], [None] * 3) for x in range(-20, 3000)]))
    many = make().encode(raw).dense
    alone = np.concatenate([make().encode(raw, np.array([i])).dense for i in range(raw.rows)])
    assert (many == alone).all()


def test_lookup_returns_largest_int32_id() -> None:
    first_id = 2**31 - 10
    slots, known = np.zeros(16, np.uint64), np.arange(3, dtype=np.uint32)
    assert build_slots(known, (first_id + known).astype(np.int32), slots)
    assert find_ids(np.array([2, 3, 0], np.uint32), slots, UNKNOWN_ID).tolist() == [first_id + 2, UNKNOWN_ID, first_id]


def test_lookup_tables_are_at_most_two_thirds_full() -> None:
    for count in [*range(200), 10_000, 1 << 20]:
        slots = num_slots(count)
        assert slots & (slots - 1) == 0
        assert slots * 2 >= count * 3
        assert slots == 16 or slots < count * 3


def test_unlabelled_rows_have_no_labels() -> None:
    raw, _ = parse(SCHEMA.unlabelled(), b"1\t2\t00000005\t\t\n")
    encoded = make().encode(raw)
    assert encoded.labels == {}
    assert encoded.ids.ravel().tolist() == [FIRST_ID, MISSING_ID, MISSING_ID]


# Saved and loaded ----------------------------------------------------------------------------------------------------


def test_preprocessor_roundtrip(tmp_path: Path) -> None:
    preprocessor = make()
    preprocessor.save(str(tmp_path))
    again = Preprocessor.load(str(tmp_path))
    assert again.hash() == preprocessor.hash()
    assert again.describe() == preprocessor.describe()
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
    with pytest.raises(InputError, match=str(tmp_path)):
        Preprocessor.load(str(tmp_path))


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
    with pytest.raises(InputError, match=f"{tmp_path}.*{why}"):
        Preprocessor.load(str(tmp_path))


def test_load_rejects_folder_without_description(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"preprocessor\.json not found"):
        Preprocessor.load(str(tmp_path))


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
    with pytest.raises(InputError, match=str(tmp_path)):
        Preprocessor.load(str(tmp_path))


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
    ids = np.arange(0, 50_000_000, 1000)
    raw, _ = parse_table(pa.table({"s": ids}), schema)
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


def test_hashes_of_earlier_versions_stay() -> None:
    """A description without the fields that were added since, and its hash, are what they were."""
    assert make().describe()["schema"] == {
        **{"label": "y", "dense": ["a", "b"], "sparse": ["s", "t", "u"], "tokens": "hexadecimal", "lists": []},
        **{"weight": None, "delimiter": "\t", "list_delimiter": "|"},
    }
    earlier = {**Schema(label=None, sparse=("s",), tokens="any").describe()}
    assert earlier.pop("category_rules") == 2
    assert Schema.described(earlier).category_rules == 1
    assert Schema.described(earlier).describe() == earlier
