"""Presets compared with rows computed by hand from the published pipelines' rules, and with
TorchRec's own code.
"""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.faults import rejects
from builders.logs import counts_of, learn, made_from, open_index
from builders.raw_blocks import find_block
from builders.same import assert_same
from builders.torchrec_scripts import torchrec_criteo, write_npy

from rayrec.data.encoding import presets
from rayrec.data.encoding.encoder import MLPERF_SIZES, Derivation, MultiHot
from rayrec.data.encoding.extension import extend
from rayrec.data.encoding.known_categories import (
    FREQUENCIES,
    OOVCounter,
    assign_buckets,
    bucket_names,
)
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import (
    ALL,
    FUXICTR_X1,
    FUXICTR_X4,
    MLPERF_V1,
    NVT,
    RAY_TEMPLATE,
    RAYREC,
    TORCHREC,
    Preset,
)
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.text_log import read_segments
from rayrec.data.raw_block import RawBlock
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.observe.console import Console
from rayrec.prepare.config import PreparationConfig
from rayrec.prepare.preprocess import vocabulary
from rayrec.schema import Feature, Schema
from rayrec.workloads.recsys.candidates import model_inputs

SCHEMA = Schema(
    tokens="hexadecimal",
    label="y",
    dense=("A", "B"),
    sparse=("C", "D"),
)
TOY = b"""1\t5\t0\ta0000001\t05db9164
0\t\t7\ta0000001\t
0\t-1\t\tffffffff\t05db9164
1\t0\t-3\t\t05db9164
0\t120\t2\t0000000a\t05db9164
1\t3\t1000000\ta0000001\t68fd1e64
"""


def index_of(
    folder: Path,
    *texts: bytes,
    schema: Schema = SCHEMA,
    segment_bytes: int = 40,
) -> LogIndex:
    for day, text in enumerate(texts):
        (folder / f"day_{day}").write_bytes(text)
    return open_index(folder, schema, segment_bytes=segment_bytes)


def encoded(
    preset: Preset,
    folder: Path,
    *texts: bytes,
) -> tuple[Preprocessor, np.ndarray, list[list[int]]]:
    index = index_of(folder, *(texts or (TOY,)))
    preprocessor = learn(index, SCHEMA, preset)
    rows = preprocessor.encode(read_segments(index.segments, SCHEMA))
    return preprocessor, rows.dense.T, [column.tolist() for column in rows.ids]


LN3_A = [2.07944155, 1.09861231, 0.693147182, 1.09861231, 4.81218433, 1.79175949]
LN3_B = [1.09861231, 2.30258512, 1.09861231, -math.inf, 1.60943794, 13.8155136]
LN3 = [LN3_A, LN3_B]
TORCHREC_DENSE = [
    [2.30258512, 1.60943794, 1.38629436, 1.60943794, 4.82831383, 2.07944155],
    [1.60943794, 2.48490667, 1.60943794, 0.693147182, 1.94591022, 13.8155155],
]
MLPERF_DENSE = [
    [1.79175949, 0, 0, 0, 4.79579067, 1.38629436],
    [0, 2.07944155, 0, 0, 1.09861231, 13.8155117],
]
INTEGERS = [[5, 0, -1, 0, 120, 3], [0, 7, 0, -3, 2, 1_000_000]]
NO_NUMBERS = np.zeros((0, 6))
ONCE = {"min_count": 1}
HASHED = [[4054911, 4054911, 21882121, 8124823, 5436790, 4054911], [9, 3, 9, 9, 9, 3]]
BUCKETS = [
    [3, 5, 1, 5, 4, 2],
    [5, 3, 5, 1, 2, 4],
    [1, 1, 3, 4, 2, 1],
    [1, 3, 1, 1, 1, 2],
]
IN_ORDER = [[2, 2, 3, 4, 5, 2], [2, 3, 2, 2, 2, 4]]
FREQUENT = [[2, 2, 1, 1, 1, 2], [2, 1, 2, 2, 2, 1]]
EXPECTED: list[tuple[Preset, dict[str, Any], Any, list[list[int]], list[int]]] = [
    # preset, changes, numbers, ids, tables
    (
        MLPERF_V1,
        {"token_modulo": 40_000_000},
        MLPERF_DENSE,
        [[0, 0, 1, 2, 3, 0], [0, 1, 0, 0, 0, 2]],
        [4 + 1, 3 + 1],
    ),
    (TORCHREC, ONCE, TORCHREC_DENSE, IN_ORDER, [6, 5]),
    (
        TORCHREC,
        {"min_count": 2},
        TORCHREC_DENSE,
        FREQUENT,
        [3, 3],
    ),
    (
        TORCHREC,
        {"min_count": 3},
        TORCHREC_DENSE,
        FREQUENT,
        [3, 3],
    ),
    (
        TORCHREC,
        {**ONCE, "num_embeddings": (4, 3)},
        TORCHREC_DENSE,
        [[2, 2, 3, 0, 1, 2], [2, 0, 2, 2, 2, 1]],
        [4, 3],
    ),
    (
        TORCHREC,
        {**ONCE, "max_num_embeddings": 4},
        TORCHREC_DENSE,
        [[2, 2, 3, 0, 1, 2], [2, 3, 2, 2, 2, 0]],
        [4, 4],
    ),
    (presets.TORCHREC_2024, ONCE, LN3, IN_ORDER, [6, 5]),
    (RAY_TEMPLATE, {}, LN3, FREQUENT, [3, 3]),
    # The empty field is a category like others: among those seen once, it comes first.
    (
        RAY_TEMPLATE,
        ONCE,
        LN3,
        [[2, 2, 5, 3, 4, 2], IN_ORDER[1]],
        [6, 5],
    ),
    (
        RAY_TEMPLATE,
        {**ONCE, "ids": "first_seen"},
        LN3,
        IN_ORDER,
        [6, 5],
    ),
    (
        NVT,
        {"num_embeddings": (40_000_000, 10)},
        LN3,
        HASHED,
        [40_000_000, 10],
    ),
    (FUXICTR_X4, ONCE, NO_NUMBERS, BUCKETS, [6, 6, 5, 4]),
    (
        FUXICTR_X4,
        {"min_count": 2},
        NO_NUMBERS,
        [[1] * 6] * 2 + [[1, 1, 2, 2, 2, 1], [1, 2, 1, 1, 1, 2]],
        [2, 2, 3, 3],
    ),
    (FUXICTR_X4, {"min_count": 10}, NO_NUMBERS, [[1] * 6] * 4, [2] * 4),
    (
        FUXICTR_X1,
        {},
        INTEGERS,
        [[1, 1, 4, 2, 3, 1], [1, 2, 1, 1, 1, 3]],
        [6, 5],
    ),
]


@pytest.mark.parametrize(
    (
        "preset",
        "changes",
        "numbers",
        "ids",
        "tables",
    ),
    EXPECTED,
)
def test_rows_of_presets(
    tmp_path: Path,
    preset: Preset,
    changes: Any,
    numbers: Any,
    ids: Any,
    tables: list[int],
) -> None:
    preprocessor, dense, found = encoded(preset.replace(**changes), tmp_path)
    np.testing.assert_allclose(dense, numbers, rtol=2e-7)
    assert (found, preprocessor.num_embeddings) == (ids, tables)
    assert preprocessor.inputs.sparse == (*(("A", "B") if preset is FUXICTR_X4 else ()), "C", "D")


def test_mlperf_v1_applies_token_modulo(tmp_path: Path) -> None:
    preprocessor, _, ids = encoded(MLPERF_V1.replace(token_modulo=10), tmp_path)
    # a0000001 = 2684354561 -> 1, ffffffff = 4294967295 -> 5, missing -> 0, 0000000a -> 0; 05db9164
    # -> 4, 68fd1e64 -> 2
    assert ids == [[0, 0, 1, 2, 2, 0], [0, 1, 0, 0, 0, 2]]
    unseen = index_of(
        tmp_path,
        TOY.replace(b"ffffffff", b"0000000f").replace(b"68fd1e64", b"00000003"),
    )
    ids = [
        column.tolist()
        for column in preprocessor.encode(read_segments(unseen.segments, SCHEMA)).ids
    ]
    # 15 mod 10 is known; 3 is not: the table's last row
    assert ids == [[0, 0, 1, 2, 2, 0], [0, 1, 0, 0, 0, 3]]


def test_torchrec_subtracts_file_minimum(tmp_path: Path) -> None:
    second = TOY.replace(b"-3", b"-9").replace(b"a0000001", b"b0000001")
    preprocessor, dense, ids = encoded(TORCHREC.replace(min_count=1), tmp_path, TOY, second)
    assert preprocessor.file_minimum == {"": -9, "day_0": -3, "day_1": -9}
    np.testing.assert_allclose(dense[0, [0, 6]], np.log([10, 16]), rtol=2e-7)
    np.testing.assert_allclose(dense[1, [3, 9]], np.log([2, 2]), rtol=2e-7)
    np.testing.assert_allclose(dense[0, [1, 7]], np.log([5, 11]), rtol=2e-7)  # missing
    assert ids[0] == [2, 2, 3, 4, 5, 2, 6, 6, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="published"),
        pytest.param({"missing": 1, "first_id": 2}, id="missing unlike unknown"),
    ],
)
@pytest.mark.parametrize("limit", [None, 7, 2**31 + 5])
def test_fuxictr_x4_ids_are_independent_of_block_size(
    limit: int | None,
    changes: dict[str, Any],
) -> None:
    draw = np.random.default_rng(3)
    numbers = np.where(draw.random((5000, 2)) < 0.7, draw.integers(-3, 3000, (5000, 2)), 0)
    numbers[:8, 0] = [-(10**17), -(2**31), -1, 0, 2, 2047, 2048, 10**17]
    columns = [*numbers.T.tolist(), *draw.integers(0, 300, (2, 5000)).tolist()]
    raw = find_block(
        SCHEMA.unlabelled(),
        dict(zip((*SCHEMA.dense, *SCHEMA.sparse), columns, strict=True)),
    )
    preset = FUXICTR_X4.replace(num_embeddings=limit and (limit,) * 4, **changes)
    preprocessor = made_from(raw, SCHEMA, preset)
    chosen = draw.permutation(5000)
    together = np.array(preprocessor.encode(raw, chosen).ids)
    alone = np.concatenate(
        [np.array(preprocessor.encode(raw, rows).ids) for rows in np.split(chosen, 10)],
        axis=1,
    )
    np.testing.assert_array_equal(together, alone)
    # And the ids are those of the categories that were counted.
    buckets = Derivation(buckets=True).applied(raw)
    known = np.split(
        preprocessor.tokens,
        np.cumsum([column.num_tokens for column in preprocessor.sparse])[:-1],
    )
    for column in range(2):
        expected = {
            token: number + preset.first_id for number, token in enumerate(known[column].tolist())
        }
        rule = preprocessor.sparse[column]
        ids = [
            expected.get(token, rule.unknown_id) % (limit or 2**40)
            for token in buckets.categories[chosen, column].tolist()
        ]
        missing = buckets.is_missing(SCHEMA.dense[column])[chosen]
        assert together[column].tolist() == np.where(missing, rule.missing_id, ids).tolist()


def test_rayrec_with_and_without_max_num_embeddings(tmp_path: Path) -> None:
    preprocessor, dense, ids = encoded(RAYREC, tmp_path)
    assert ids == [[2, 2, 0, 1, 0, 2], [2, 1, 2, 2, 2, 0]]
    assert preprocessor.num_embeddings == [3, 3]
    present = np.array([math.copysign(math.log1p(abs(x)), x) for x in (5, -1, 0, 120, 3)])
    np.testing.assert_allclose(
        dense[0, [0, 2, 3, 4, 5]],
        (present - present.mean()) / present.std(),
        rtol=1e-5,
    )
    assert dense[0, 1] == dense[0, 3]  # missing counts as 0
    preprocessor, _, ids = encoded(RAYREC.replace(min_count=1, max_num_embeddings=4), tmp_path)
    assert preprocessor.num_embeddings == [4, 4]
    a = 2 + 0xA0000001 % 2
    f = 2 + 0xFFFFFFFF % 2
    ten = 2 + 10 % 2
    assert ids[0] == [a, a, f, 1, ten, a]


def test_preset_roundtrip_keeps_constants(tmp_path: Path) -> None:
    index = index_of(tmp_path, TOY)
    hashes = set()
    for name, preset in presets.ALL.items():
        changed = preset.replace(num_embeddings=(7, 8)) if preset.ids == "murmur3" else preset
        preprocessor = learn(index, SCHEMA, changed)
        assert preprocessor.preset == name
        preprocessor.save(str(tmp_path / "preprocessors" / name))
        again = Preprocessor.load(str(tmp_path / "preprocessors" / name))
        assert again.hash() == preprocessor.hash()
        raw = read_segments(index.segments, SCHEMA)
        assert_same(again.encode(raw), preprocessor.encode(raw))
        assert again.constants["rules"] == changed.to_dict()
        hashes.add(again.hash())
    assert len(hashes) == len(presets.ALL)


@pytest.mark.parametrize(
    "preset",
    [preset for preset in presets.ALL.values() if preset.dense != "buckets"],
)
def test_ids_are_independent_of_tasks(click_log: Path, tmp_path: Path, preset: Preset) -> None:
    text = b"".join((click_log / "train.txt").read_bytes().splitlines(keepends=True)[:3000])
    indices = (
        index_of(tmp_path, text, schema=CRITEO, segment_bytes=size)
        for size in (7_000, 100_000, 1 << 24)
    )
    assert len({learn(index, CRITEO, preset).hash() for index in indices}) == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        pytest.param(
            lambda: presets.by_name("torchrec-2025"),
            "did you mean 'torchrec-2024'",
            id="presets.by_name-torchrec",
        ),
        pytest.param(
            lambda: RAYREC.replace(min_count=0),
            "min_count",
            id="RAYREC.replace-min_count",
        ),
        pytest.param(lambda: Preset(ids="murmur3"), "num_embeddings", id="Preset-ids-murmur3"),
        pytest.param(
            lambda: RAYREC.replace(first_id=1),
            "first_id",
            id="RAYREC.replace-first_id-1",
        ),
    ],
)
def test_preset_rejects_invalid_values(make: Callable[..., Any], why: str) -> None:
    assert presets.by_name("torchrec") is TORCHREC
    rejects(why, make)


# -- TorchRec's own code
@pytest.mark.parametrize("min_count", [1, 3])
@pytest.mark.usefixtures("capsys")
def test_against_torchrec_itself(click_log: Path, tmp_path: Path, min_count: int) -> None:
    """Two days through tsv_to_npys and sparse_to_contiguous: bit-identical ids, dense to float32
    rounding.
    """
    lines = (click_log / "train.txt").read_bytes().splitlines(keepends=True)
    raw = tmp_path / "raw"
    npy = tmp_path / "npy"
    raw.mkdir()
    index = index_of(
        raw,
        b"".join(lines[:900]),
        b"".join(lines[900:1500]),
        schema=CRITEO,
        segment_bytes=20_000,
    )
    ours = learn(index, CRITEO, TORCHREC.replace(min_count=min_count)).encode(
        read_segments(index.segments, CRITEO)
    )
    write_npy([raw / "day_0", raw / "day_1"], npy)
    with torchrec_criteo() as criteo:
        sparse = [str(npy / f"day_{day}_sparse.npy") for day in (0, 1)]
        criteo.BinaryCriteoUtils.sparse_to_contiguous(
            sparse,
            str(npy),
            frequency_threshold=min_count,
        )
    parts = ("sparse_contig_freq", "dense", "labels")
    ids, dense, labels = (
        np.concatenate([np.load(npy / f"day_{day}_{part}.npy") for day in (0, 1)]) for part in parts
    )
    assert (ids == np.array(ours.ids).T).all()
    np.testing.assert_allclose(ours.dense, dense, rtol=3e-7)
    assert (ours.label == labels[:, 0]).all()


@pytest.mark.parametrize("sizes", [(), (0,), (3, 0), (0, 3), (-1, 3)], ids=str)
def test_bag_sizes_below_one_are_rejected(sizes: tuple[int, ...]) -> None:
    rejects(r"multi_hot\.sizes: must be 1 or more each", MultiHot, sizes=sizes)


# -- Multi-hot
def test_multi_hot_bags_start_with_id() -> None:
    bags = MultiHot(sizes=(3, 1, 5))
    ids = [
        np.array([7, 9, 7], np.int32),
        np.array([1, 2, 3], np.int32),
        np.array([0, 2**24 + 1, 5], np.int32),
    ]
    sizes = [10, 4, 40_000_000]
    out = bags.expand(ids, sizes)
    assert [column.shape for column in out] == [(3, 3), (3,), (3, 5)]
    assert (out[0][0] == out[0][2]).all()
    assert [out[0][:, 0].tolist(), out[2][:, 0].tolist()] == [[7, 9, 7], [0, 2**24 + 1, 5]]
    assert all(
        (column >= 0).all() and (column < size).all()
        for column, size in zip(out, sizes, strict=True)
    )
    wide = bags.expand([column.astype(np.int64) for column in ids], sizes)
    assert (wide[2] == out[2]).all()
    assert wide[2].dtype == np.int64
    assert sum(MLPERF_SIZES) == 214


def bags_of(size: int, distribution: str) -> np.ndarray:
    """Return the ids that 20,000 bags add to their own."""
    ids = np.arange(20_000, dtype=np.int32)
    return MultiHot(sizes=(11,), distribution=distribution).expand([ids], [size])[0][:, 1:]


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_uniform_bags_match_distribution(size: int) -> None:
    uniform = bags_of(size, "uniform")
    expected = np.random.RandomState(0).randint(0, size, uniform.shape)
    quantiles = (0.1, 0.5, 0.9)
    np.testing.assert_allclose(
        np.quantile(uniform, quantiles),
        np.quantile(expected, quantiles),
        rtol=0,
        atol=max(1, size * 0.01),
    )


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_pareto_bags_match_distribution(size: int) -> None:
    pareto = bags_of(size, "pareto")
    drawn = np.random.RandomState(0).pareto(a=0.25, size=pareto.shape)
    overflow = drawn >= 2**31
    drawn[overflow] = 0
    expected = np.where(overflow, -(2**31) % size, drawn.astype(np.int64) % size)
    for value in (0, 1, 2, 5, -(2**31) % size):
        assert abs((pareto == value).mean() - (expected == value).mean()) < 0.006


@pytest.mark.parametrize("missing", [1, "token", "zero", "unknown"])
def test_frequency_buckets_match_counts(tmp_path: Path, missing: int | str) -> None:
    # the first some hundred times, the last once
    drawn = np.minimum(np.random.default_rng(0).geometric(0.02, 5000), 400)
    fields = ["" if value == 7 else f"{value:08x}" for value in drawn.tolist()]
    index = index_of(
        tmp_path,
        "".join(f"0\t1\t1\t{field}\t{field}\n" for field in fields).encode(),
        segment_bytes=10_000,
    )
    preprocessor = learn(index, SCHEMA, RAYREC.replace(missing=missing, min_count=2, counted="all"))
    rows = preprocessor.encode(read_segments(index.segments, SCHEMA))
    names = bucket_names(preprocessor, "D")
    assert names == [*["1", "2-9", "10-99", "100-999"][: len(names) - 1], "(not in the vocabulary)"]
    found = [names[bucket] for bucket in assign_buckets(preprocessor, "D", np.asarray(rows.ids[1]))]
    for value, amount, name in zip(
        drawn.tolist(),
        np.bincount(drawn)[drawn].tolist(),
        found,
        strict=True,
    ):
        if value == 7:  # the caller knows which rows have none
            continue
        if amount < 2:
            expected = "(not in the vocabulary)"
        elif amount < 10:
            expected = "2-9"
        else:
            expected = f"{10 ** (len(str(amount)) - 1)}-"
        assert name.startswith(expected), (amount, name)
    assert {"2-9", "10-99", "(not in the vocabulary)"} <= set(found)


def test_unlabelled_logs_have_exact_frequencies(tmp_path: Path) -> None:
    values = [3] * 4 + [5] * 2 + [6] * 2 + [7] + [8] + [9]
    lines = [f"1\t1\t{value:08x}\t{value % 2:08x}\n" for value in values]
    schema = SCHEMA.replace(label=None)
    preset = RAYREC.replace(min_count=1, counted="all")
    index = index_of(tmp_path, "".join(lines).encode(), schema=schema)
    preprocessor = learn(index, schema, preset)
    assert preprocessor.constants[FREQUENCIES] == {
        "C": [[4, 1], [2, 2], [1, 3]],
        "D": [[8, 1], [3, 1]],
    }
    inputs = model_inputs(preprocessor)
    shares = inputs.frequencies_of("C")
    assert shares is not None
    assert (shares * 11).tolist() == pytest.approx([4, 2, 2, 1, 1, 1])
    ids = np.asarray(preprocessor.encode(read_segments(index.segments, schema)).ids[0])
    amounts = np.bincount(inputs.candidates_of("C").numbers(ids))
    assert amounts.tolist() == [4, 2, 2, 1, 1, 1]
    assert FREQUENCIES not in learn(index_of(tmp_path, TOY), SCHEMA, preset).constants


def test_frequency_buckets_reject_unknown_counts(tmp_path: Path) -> None:
    index = index_of(tmp_path, TOY)
    shared = RAYREC.replace(min_count=1, max_num_embeddings=4, beyond_limit="modulo")
    for preset, column, why in (
        (MLPERF_V1, "D", "token counts are unknown"),
        (shared, "C", "token counts are unknown"),  # several tokens have one id
        (shared, "A", "takes A as a number; choose a sparse column"),
    ):
        rejects(why, bucket_names, learn(index, SCHEMA, preset), column)


# -- Extended Preprocessors: old categories keep their ids, new ones get further ids
make_vocabulary = functools.partial(vocabulary, console=Console(quiet=True))
ONE_NUMBER = Schema(
    tokens="hexadecimal",
    label="y",
    dense=("A",),
    sparse=("C", "D"),
)


def lines(*columns: str) -> bytes:
    """Return Criteo text of rows with one-digit tokens in column C, `.` if empty; D repeats C."""
    tokens = ["" if digit == "." else digit * 8 for column in columns for digit in column]
    return "".join(f"0\t3\t{token}\t{token}\n" for token in tokens).encode()


def read(text: bytes, folder: Path) -> RawBlock:
    folder.mkdir(parents=True)
    (folder / "day_0").write_bytes(text)
    return read_segments(open_index(folder, ONE_NUMBER).segments, ONE_NUMBER)


def extended(preset: Preset, old: str, new: str, folder: Path) -> tuple[Preprocessor, Preprocessor]:
    """Extend by column C as read by `lines`, and check that no old id has changed."""
    before = made_from(read(lines(old), folder / "old"), ONE_NUMBER, preset)
    extension = extend(
        before,
        preset,
        counts_of(read(lines(new), folder / "new"), ONE_NUMBER, preset),
    )
    after = extension.preprocessor
    raw = read(lines("".join(sorted(set(old + new)))), folder / "both")
    old_ids = before.encode(raw).ids[0]
    new_ids = after.encode(raw).ids[0]
    known = OOVCounter(before).count(raw, before.encode(raw))[:, 0] == 0
    assert known.any()
    # an empty field may become a category
    if before.sparse[0].missing_id == before.sparse[0].unknown_id:
        known &= ~raw.is_missing("C")
    assert (old_ids[known] == new_ids[known]).all()
    assert before.sparse[0].unknown_id == after.sparse[0].unknown_id
    assert max(new_ids) < after.num_embeddings[0]
    assert extension.existing["C"] == before.sparse[0].num_tokens
    assert extension.appended["C"] == after.sparse[0].num_tokens - before.sparse[0].num_tokens
    assert before.dense == after.dense
    assert after.constants["extends"] == before.hash() != after.hash()
    assert after.inputs == before.inputs
    after.save(str(folder / "saved"))
    assert Preprocessor.load(str(folder / "saved")).hash() == after.hash()
    return before, after


def hexadecimal(preprocessor: Preprocessor) -> str:
    return "".join(f"{token:08x}"[0] for token in preprocessor.vocabulary(0).tolist())


def test_extension_appends_by_falling_count_or_in_row_order(tmp_path: Path) -> None:
    before, after = extended(RAYREC, "aabbb", "ccddda.efeaaaa", tmp_path)
    assert (hexadecimal(before), hexadecimal(after)) == ("ba", "badce")
    assert (after.num_embeddings, after.constants["rows"]) == ([7, 7], 5 + 14)
    before, after = extended(TORCHREC, "bbbaaa", "cdcdcddbbb", tmp_path / "torchrec")
    assert (hexadecimal(before), hexadecimal(after)) == ("ba", "bacd")
    assert after.file_minimum == before.file_minimum


@pytest.mark.parametrize("preset", [MLPERF_V1, FUXICTR_X4.replace(min_count=1, dense="identity")])
def test_extension_keeps_last_row_of_unknown_categories(tmp_path: Path, preset: Preset) -> None:
    before, after = extended(preset, "aab", "ccd", tmp_path)
    unknown = before.sparse[0].unknown_id
    assert unknown == before.num_embeddings[0] - 1
    assert after.sparse[0].ids().tolist() == [
        *before.sparse[0].ids().tolist(),
        unknown + 1,
        unknown + 2,
    ]
    assert after.num_embeddings[0] == before.num_embeddings[0] + 2
    again = extend(
        after,
        preset,
        counts_of(read(lines("e"), tmp_path / "more"), ONE_NUMBER, preset),
    ).preprocessor
    assert again.sparse[0].ids().tolist() == [*after.sparse[0].ids().tolist(), unknown + 3]


def test_extension_adds_frequent_empty_field_and_hashed_stay(tmp_path: Path) -> None:
    before, after = extended(RAY_TEMPLATE, "aaabbb", "cccc...ddd", tmp_path)
    assert before.sparse[0].missing_id == before.sparse[0].unknown_id
    # the empty field comes before those as frequent
    assert after.sparse[0].ids().tolist() == [2, 3, 4, 6]
    assert after.sparse[0].missing_id == 5
    before, after = extended(MLPERF_V1, "aab", "c..d", tmp_path / "zero")
    assert before.sparse[0].missing_id == before.sparse[0].unknown_id
    assert after.vocabulary(0)[after.sparse[0].ids() == after.sparse[0].missing_id].tolist() == [0]
    nvt = NVT.replace(num_embeddings=(11, 7))
    before = made_from(read(lines("aab"), tmp_path / "hashed"), ONE_NUMBER, nvt)
    after = extend(before, nvt, counts_of(read(lines("ccdd"), tmp_path / "more"), ONE_NUMBER, nvt))
    assert after.preprocessor.sparse == before.sparse
    assert after.existing == after.appended == {}


def test_extension_omits_rare_categories_beyond_limit(tmp_path: Path) -> None:
    preset = RAYREC.replace(max_num_embeddings=5)
    before = made_from(read(lines("aabb"), tmp_path / "first"), ONE_NUMBER, preset)
    extension = extend(
        before,
        preset,
        counts_of(read(lines("ccddda"), tmp_path / "log"), ONE_NUMBER, preset),
    )
    assert list(hexadecimal(extension.preprocessor)) == ["a", "b", "d"]
    assert extension.left_out == {"C": 1, "D": 1}
    _, after = extended(
        preset.replace(beyond_limit="modulo"),
        "aabb",
        "ccddda",
        tmp_path / "modulo",
    )
    assert (after.num_embeddings[0], after.sparse[0].ids().tolist()) == (5, [2, 3, 4, 0])


@pytest.mark.parametrize("name", [name for name in ALL if name != "nvt"])
def test_extension_keeps_ids_for_all_presets(click_log: Path, tmp_path: Path, name: str) -> None:
    text = (click_log / "train.txt").read_bytes().splitlines(keepends=True)
    (tmp_path / "first.txt").write_bytes(b"".join(text[:3000]))
    (tmp_path / "second.txt").write_bytes(b"".join(text[12000:15000]))
    config = PreparationConfig(preset=name, engine="threads")
    make_vocabulary(str(tmp_path / "first.txt"), out=str(tmp_path / "old"), config=config)
    second = str(tmp_path / "second.txt")
    extending = PreparationConfig(engine="threads")
    made = make_vocabulary(
        second,
        out=str(tmp_path / "new"),
        extend=str(tmp_path / "old"),
        config=extending,
    )
    alone = make_vocabulary(second, out=str(tmp_path / "alone"), config=config)
    old, new, other = (
        Preprocessor.load(str(tmp_path / folder)) for folder in ("old", "new", "alone")
    )
    assert (made["extends"], made["hash"]) == (old.hash(), new.hash())
    assert made["rows"] == 6000 == old.constants["rows"] + alone["rows"]
    assert new.dense == old.dense
    for place, column in enumerate(old.inputs.sparse):
        before = ids_by_token(old, place)
        after = ids_by_token(new, place)
        assert before.items() <= after.items()
        assert list(after)[: len(before)] == list(before)
        fresh = [token for token in other.vocabulary(place).tolist() if token not in before]
        assert list(after)[len(before) :] == fresh
        assert len(set(after.values())) == len(after)
        assert {after[token] for token in fresh}.isdisjoint({new.sparse[place].unknown_id})
        assert (made["kept"][column], made["appended"][column]) == (len(before), len(fresh))


def ids_by_token(preprocessor: Preprocessor, column: int) -> dict[int, int]:
    tokens = preprocessor.vocabulary(column).tolist()
    return dict(zip(tokens, preprocessor.sparse[column].ids().tolist(), strict=True))


ANY = Schema(
    label="label",
    dense=("a",),
    sparse=("b", "c"),
    features=(Feature(name="c", vocabulary="b"),),
    tokens="any",
)
CONFIG = PreparationConfig(schema=ANY, engine="threads", min_count=2)


@pytest.fixture
def second(own_cache: None, tmp_path: Path) -> str:
    """Return a log whose categories are to extend those of a first one, in `old`."""
    (tmp_path / "first.csv").write_text("label,a,b,c\n1,2,x,y\n0,3,x,y\n0,5,z,z\n")
    (tmp_path / "second.csv").write_text("label,a,b,c\n1,9,w,x\n0,3,w,v\n0,5,v,v\n")
    make_vocabulary(str(tmp_path / "first.csv"), out=str(tmp_path / "old"), config=CONFIG)
    return str(tmp_path / "second.csv")


def test_extension_is_shared_with_vocabulary(tmp_path: Path, second: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "old").rename(tmp_path / "run" / "preprocessor")  # a run's folder will do
    made = make_vocabulary(
        second,
        out=str(tmp_path / "new"),
        extend=str(tmp_path / "run"),
        config=CONFIG,
    )
    assert (made["appended"], made["num_embeddings"]["b"]) == (
        {"b": 2},
        made["num_embeddings"]["c"],
    )
    new = Preprocessor.load(str(tmp_path / "new"))
    assert new.sparse[0] == new.sparse[1]
    assert json.loads((tmp_path / "new" / "preprocessor.json").read_text())["hash"] == made["hash"]


@pytest.mark.parametrize(
    ("old", "changes", "message"),
    [
        pytest.param("old", {"schema": ANY.replace(dense=())}, "columns must match", id="old"),
        pytest.param(
            "old",
            {"preset": "ray-template"},
            "--preset: must be rayrec, .* got ray-template",
            id="old-preset-ray-template",
        ),
        pytest.param(
            "old",
            {"min_count": 3},
            "--min-count: must be 2, .* got 3",
            id="old-min_count-3",
        ),
        pytest.param("", {}, "has no Preprocessor", id="has-no-Preprocessor"),
    ],
)
def test_extension_rejects_other_rules(
    old: str,
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    second: str,
) -> None:
    rejects(
        message,
        make_vocabulary,
        second,
        out=str(tmp_path / "new"),
        extend=str(tmp_path / old),
        config=CONFIG.replace(**changes),
    )
    assert not (tmp_path / "new").exists()
