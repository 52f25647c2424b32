"""Agreement of kernels, the Arrow path and an export's encode.py on the rules of ids and numbers
(data/encoding/rules.py).
"""

import ctypes
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders import click_models
from builders.faults import fails_with, rejects
from builders.logs import made_from
from builders.raw_blocks import find_block
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.encoding import encoder, presets
from rayrec.data.encoding.encoder import (
    Derivation,
    MultiHot,
    build_slots,
    c_dense_column,
    find_ids,
    num_slots,
)
from rayrec.data.encoding.preprocessor import Preprocessor, stored_schema
from rayrec.data.encoding.presets import RAYREC, Preset, make_preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn, bucket_tokens, expand_bag
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.logs.text_parser import parse
from rayrec.inference.export.write import encoder_program
from rayrec.native import library
from rayrec.schema import Feature, Schema

CHECKED = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
NUMBERS = st.integers(-(10**18) + 1, 10**18 - 1) | st.integers(-20, 3000)
ONE_NUMBER = Schema(tokens="hexadecimal", label=None, dense=("d",))


@pytest.fixture(scope="module")
def encoder_class(tmp_path_factory: pytest.TempPathFactory) -> Any:
    program = tmp_path_factory.mktemp("export") / "encode.py"
    program.write_text(encoder_program())
    assert all(f"{word} rayrec" not in program.read_text() for word in ("import", "from"))
    return runpy.run_path(str(program))["Encoder"]


@st.composite
def sparse_columns(draw: st.DrawFn, *, wide: bool) -> tuple[SparseColumn, list[int]]:
    """Draw a column with random fields, and its vocabulary."""
    hashed = draw(st.booleans())
    bits = 64 if wide else 32
    rows = draw(st.integers(1, 60) | st.integers(1, 2**40))
    tokens = (
        []
        if hashed
        else draw(
            st.lists(st.integers(0, 2**bits - 1) | st.integers(0, 40), max_size=8, unique=True)
        )
    )
    largest = rows - 1 if hashed else min(rows - 1, 2**31 - 1)
    column = SparseColumn(
        num_embeddings=rows,
        num_tokens=None if hashed else len(tokens),
        first_id=draw(st.integers(0, largest) if hashed else st.integers(0, 100)),
        unknown_id=draw(st.integers(0, largest)),
        missing_id=draw(st.integers(0, rows - 1)),
        gap=draw(st.none() | st.integers(0, 110)),
        token_modulo=draw(st.none() | st.integers(1, 50) | st.integers(1, 2**32 - 1)),
        murmur3=draw(st.booleans()) and not wide,
        mixed=draw(st.booleans()),
    )
    return column, tokens


@pytest.mark.parametrize("wide", [False, True])
@given(data=st.data())
@CHECKED
def test_kernels_match_rules(wide: bool, data: st.DataObject) -> None:
    column, known = data.draw(sparse_columns(wide=wide))
    dtype = np.uint64 if wide else np.uint32
    any_token = st.integers(0, np.iinfo(dtype).max) | st.integers(0, 60)
    tokens = np.array(
        data.draw(
            st.lists(st.sampled_from(known) | any_token if known else any_token, max_size=12)
        ),
        dtype,
    )
    missing = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))),
        bool,
    )
    schema = Schema(label=None, sparse=("s",), tokens="any" if wide else "hexadecimal")
    raw = find_block(
        schema,
        {"s": [None if m else t for t, m in zip(tokens.tolist(), missing.tolist(), strict=True)]},
    )
    preprocessor = Preprocessor("test", raw.schema, (), (column,), np.array(known, dtype))
    preprocessor.check()
    id_of = dict(zip(known, column.ids().tolist(), strict=True)) if known else {}

    def find_ids(apply_modulo: np.ndarray) -> np.ndarray:
        return np.array(
            [id_of.get(token, column.unknown_id) for token in apply_modulo.tolist()],
            np.int64,
        )

    desired = column.encode(tokens, missing, find_ids, preprocessor.id_dtype)
    found = np.asarray(preprocessor.encode(raw).ids[0])
    assert (found.dtype, found.tolist()) == (desired.dtype, desired.tolist())
    assert ((found >= 0) & (found < column.num_embeddings)).all()


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        (
            SparseColumn(90, 3),
            {
                **{
                    "num_embeddings": 4,
                    "num_tokens": None,
                    "first_id": 7,
                    "unknown_id": 9,
                    "missing_id": 8,
                    "gap": 3,
                },
                **{"token_modulo": 6, "murmur3": True, "mixed": True},
            },
        ),
        (
            DenseColumn(kind="log"),
            {
                **{
                    "kind": "identity",
                    "shift": 4.0,
                    "lowest": 0,
                    "mean": 0.5,
                    "scale": 2.0,
                    "missing_value": 1.5,
                },
                **{"mean_low": 0.25, "lower": -2.0, "upper": 3.0},
            },
        ),
    ],
)
def test_kernel_structs_match_rules(
    rule: SparseColumn | DenseColumn,
    changes: dict[str, Any],
) -> None:
    def in_c(column: SparseColumn | DenseColumn) -> bytes:
        """Return the kernel's input: its column, and the table of ids."""
        if isinstance(column, DenseColumn):
            return bytes(encoder.c_dense_column(column))
        table = b"" if column.num_tokens is None else column.ids().tobytes()
        return (
            bytes(
                encoder._c_sparse_column(
                    column,
                    None if column.num_tokens is None else np.zeros(16, np.uint64),
                )
            )
            + table
        )

    # No kernel writes indicators: logs of hexadecimal tokens have none.
    assert set(changes) == {field.name for field in dataclasses.fields(rule)} - {"indicator"}
    for name, value in changes.items():
        assert in_c(dataclasses.replace(rule, **{name: value})) != in_c(rule), name


@given(st.lists(NUMBERS, max_size=20))
@example(
    [
        int(np.exp(np.sqrt(k))) + step
        for k, step in itertools.product(range(1, 1700, 97), (-1, 0, 1))
    ]
)
@CHECKED
def test_bucket_kernel_matches_rule(integers: list[int]) -> None:
    found = (
        Derivation(buckets=True).applied(find_block(ONE_NUMBER, {"d": integers})).categories[:, 0]
    )
    assert found.tolist() == bucket_tokens(np.array(integers, np.int64)).tolist()


@given(
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=6),
    size=st.integers(1, 40),
    rows=st.integers(2**31, 2**40) | st.integers(1, 2**40),
    column=st.integers(0, 60),
    seed=st.integers(-(2**63), 2**63 - 1),
    distribution=st.sampled_from(["uniform", "pareto"]),
)
@CHECKED
def test_bag_kernel_matches_rule(
    ids: list[int],
    size: int,
    rows: int,
    column: int,
    seed: int,
    distribution: Any,
) -> None:
    bags = MultiHot(sizes=(1,) * column + (size,), distribution=distribution, seed=seed)
    given_ids = np.array(ids, np.int64)
    found = bags.expand([given_ids] * (column + 1), [rows] * (column + 1))[column].reshape(
        len(ids),
        size,
    )
    assert (
        found.tolist()
        == expand_bag(
            given_ids,
            size,
            rows,
            column=column,
            seed=seed,
            pareto=distribution == "pareto",
        ).tolist()
    )


@given(
    values=st.lists(NUMBERS, min_size=1, max_size=12),
    column=st.builds(
        DenseColumn,
        kind=st.sampled_from(["signed_log", "log", "identity"]),
        shift=st.floats(-5, 5),
        lowest=st.integers(-(2**62), 2**62) | st.integers(-9, 9),
        mean=st.floats(-5, 5),
        scale=st.floats(0.01, 9),
        missing_value=st.floats(-9, 9, width=32),
    ),
)
@CHECKED
def test_dense_kernel_matches_rule(values: list[int], column: DenseColumn) -> None:
    raw = find_block(
        ONE_NUMBER,
        {"d": [None if place % 3 == 2 else value for place, value in enumerate(values)]},
    )
    preprocessor = Preprocessor("test", raw.schema, (column,), (), np.zeros(0, np.uint32))
    preprocessor.check()
    desired = column.encode(np.array(values), np.arange(len(values)) % 3 == 2)
    np.testing.assert_allclose(preprocessor.encode(raw).dense[:, 0], desired, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"mixed": 1}, id="mixed-1"),
        pytest.param({"murmur3": "yes"}, id="murmur3-yes"),
        pytest.param({"unknown_id": 2**31}, id="unknown_id-2-31"),
        pytest.param({"first_id": 2**31 - 3}, id="first_id-2-31-3"),
        pytest.param({"token_modulo": 0}, id="token_modulo-0"),
    ],
)
def test_check_rejects_rules_beyond_kernels(change: dict[str, Any]) -> None:
    column = SparseColumn(**{**vars(SparseColumn(2**33, 5)), **change})
    schema = Schema(tokens="hexadecimal", sparse=("s",))
    rejects(
        "^preprocessor: .*column s ",
        Preprocessor("test", schema, (), (column,), np.arange(5, dtype=np.uint32)).check,
    )


def test_murmur3_rejects_wide_categories() -> None:
    column = SparseColumn(9, None, murmur3=True)
    schema = Schema(sparse=("s",), tokens="any")
    message = "murmur3 needs categories of 8 hexadecimal digits"
    tokens = np.zeros(0, np.uint64)
    rejects(message, Preprocessor, "test", schema, (), (column,), tokens)


# -- Preprocessors that are made from logs
def assert_same(
    found: tuple[np.ndarray, list[Any]],
    desired: EncodedRows,
    names: tuple[str, ...],
) -> None:
    dense, ids = found
    np.testing.assert_allclose(dense, desired.dense, rtol=1e-6, atol=1e-6)
    for name, own, theirs in zip(names, ids, desired.ids, strict=True):
        single = isinstance(theirs, np.ndarray)
        for one, other in zip(
            *(((own,), (theirs,)) if single else (own, (theirs.values, theirs.lengths))),
            strict=True,
        ):
            assert one.tolist() == other.tolist(), name


RULES = st.fixed_dictionaries(
    {
        "dense": st.sampled_from(["signed_log", "identity", "log"]),
        "dense_shift": st.just(3.0),
        "dense_lowest": st.sampled_from([0, 5, -2]),
        "dense_standardized": st.booleans(),
        "ids": st.sampled_from(["frequency", "first_seen"]),
        "unknown_id": st.sampled_from([0, 1, None]),
        "missing": st.sampled_from([0, 1, "token", "zero", "unknown"]),
        "min_count": st.integers(1, 3),
        "max_num_embeddings": st.none() | st.integers(3, 12),
        "beyond_limit": st.sampled_from(["hash", "modulo"]),
    }
)
TEXTS = st.text(alphabet="aé 07-+.truefalsn|,", max_size=5) | st.sampled_from(
    ["true", "FALSE", "nan", "x" * 33, "-0", "7"]
)
DATES = st.dates(datetime.date(1960, 1, 1), datetime.date(2060, 1, 1)) | st.sampled_from(
    [datetime.date(2024, 2, 3)]
)
KINDS: list[tuple[st.SearchStrategy[Any], pa.DataType]] = [
    (TEXTS, pa.string()),
    (TEXTS, pa.large_string()),
    (TEXTS.map(str.encode), pa.binary()),
    (st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 12), pa.int64()),
    (st.integers(2**63, 2**63 + 9) | st.integers(0, 9), pa.uint64()),
    (st.integers(-9, 9).map(float) | st.just(float("nan")), pa.float64()),
    (st.booleans(), pa.bool_()),
    (DATES, pa.date32()),
    (TEXTS, pa.dictionary(pa.int32(), pa.string())),
    (st.decimals(-9, 9, places=0), pa.decimal128(9, 2)),
]
DENSE_KINDS: list[tuple[st.SearchStrategy[Any], pa.DataType]] = [
    (st.floats(-(10.0**17), 10.0**17) | st.just(float("nan")), pa.float64()),
    (st.floats(-9, 9, width=32), pa.float32()),
    (st.integers(-(10**17), 10**17), pa.int64()),
    (
        st.sampled_from(
            [
                "1",
                "-2.5",
                "1e3",
                ".5",
                "7.",
                "true",
                "FALSE",
                "",
                "+4",
            ]
        ),
        pa.string(),
    ),
    (DATES, pa.date32()),
    (
        st.datetimes(datetime.datetime(1960, 1, 1), datetime.datetime(2060, 1, 1)),
        pa.timestamp("us"),
    ),
    (st.booleans(), pa.bool_()),
]
NUM_ROWS = 14


@st.composite
def own_logs(draw: st.DrawFn) -> tuple[Schema, pa.Table, pa.Table]:
    """Draw a schema of any columns, the counted rows, and further rows."""

    def column(values: st.SearchStrategy[Any], kind: pa.DataType) -> pa.Array:
        few = st.sampled_from(draw(st.lists(values, min_size=1, max_size=5)))  # so that they repeat
        return pa.array(
            draw(st.lists(st.none() | few, min_size=2 * NUM_ROWS, max_size=2 * NUM_ROWS)),
            kind,
        )

    dense = tuple(f"d{number}" for number in range(draw(st.integers(0, 2))))
    columns = {name: column(*draw(st.sampled_from(DENSE_KINDS))) for name in dense}
    items, kind = draw(st.sampled_from(KINDS[:4]))
    columns["s"] = columns["like"] = column(*draw(st.sampled_from(KINDS)))
    columns["whole"] = column(
        st.sampled_from(
            [
                "7",
                " 07",
                "+7.0",
                "-3",
                "true",
                "nan",
                "",
                "12",
            ]
        ),
        pa.string(),
    )
    columns["lists"] = column(st.lists(items | st.none(), max_size=4), pa.list_(kind))
    columns["split"] = column(TEXTS, pa.string())
    sparse = (*draw(st.permutations(list(columns)[len(dense) :])), "absent")
    like = Feature(name="like", vocabulary=draw(st.sampled_from(["s", None])))
    lists = Feature(name="lists", max_length=draw(st.none() | st.integers(1, 3)))
    rules = draw(st.sampled_from([1, 2]))
    schema = Schema(
        label=None,
        dense=dense,
        sparse=sparse,
        features=(like, lists),
        nan="missing",
        tokens="any",
        category_rules=rules,
        lists=("lists", "split"),
        integers=("whole",),
        optional=("absent",),
    )
    table = pa.table(columns)
    return schema, table.slice(0, NUM_ROWS), table.slice(NUM_ROWS)


@given(log=own_logs(), rules=RULES, fixed=st.none() | st.integers(2, 9))
@CHECKED
def test_encode_py_matches_custom_schemas(
    encoder_class: Any,
    tmp_path_factory: pytest.TempPathFactory,
    log: Any,
    rules: dict[str, Any],
    fixed: int | None,
) -> None:
    schema, counted, further = log
    sizes = None if fixed is None else (fixed,) * len(schema.sparse)
    raw, faults = parse_table(counted, schema)
    assert not faults.total
    preprocessor = made_from(raw, schema, Preset(**rules, num_embeddings=sizes))
    folder = str(tmp_path_factory.mktemp("made"))
    preprocessor.save(folder)
    assert Preprocessor.load(folder).hash() == preprocessor.hash()
    for table in (counted, further):
        raw, _ = parse_table(table, schema)
        assert_same(
            encoder_class(folder).encode(table.to_pylist()),
            preprocessor.encode(raw),
            schema.sparse,
        )


@pytest.mark.parametrize("name", list(presets.ALL))
@given(
    rows=st.lists(
        st.tuples(
            st.tuples(*[st.none() | NUMBERS] * 2),
            st.tuples(*[st.none() | st.integers(0, 9)] * 3),
        ),
        min_size=2,
        max_size=30,
    ),
    modulo=st.none() | st.integers(2, 5),
    rules=st.fixed_dictionaries(
        {},
        optional={"max_num_embeddings": st.integers(3, 6), "min_count": st.integers(1, 3)},
    ),
    sizes=st.none() | st.lists(st.integers(1, 9), min_size=5, max_size=5),
    bags=st.none() | st.sampled_from(["uniform", "pareto"]),
)
@settings(CHECKED, max_examples=25)
def test_encode_py_matches_preprocessors_of_criteo_logs(
    encoder_class: Any,
    tmp_path_factory: Any,
    name: str,
    rows: Any,
    modulo: Any,
    rules: Any,
    sizes: Any,
    bags: Any,
) -> None:
    schema = Schema(
        label=None,
        dense=("a", "b"),
        sparse=("x", "y", "z"),
        tokens="hexadecimal",
    )
    preset = presets.ALL[name].replace(token_modulo=modulo, dense_shift=10.0, **rules)
    num_sparse = len(preset.inputs(schema).sparse)
    num_embeddings = None
    if sizes:
        num_embeddings = tuple(sizes[:num_sparse])
    elif preset.ids == "murmur3":
        num_embeddings = (7,) * num_sparse
    preset = preset.replace(
        num_embeddings=num_embeddings,
        multi_hot=bags and MultiHot(sizes=(2, 1, 3, 1, 4)[:num_sparse], distribution=bags, seed=7),
    )
    lines = []
    for numbers, tokens in rows:
        fields = ["" if token is None else f"{token * 0x1234567 % 2**32:08x}" for token in tokens]
        lines.append(
            "\t".join(["" if number is None else str(number) for number in numbers] + fields)
        )
    raw, faults = parse(schema, "".join(f"{line}\n" for line in lines).encode())
    assert not faults.total
    counted = raw.cut(0, len(lines) // 2)
    try:
        preprocessor = made_from(counted, schema, preset)
    except InputError:  # a logarithm of a missing number
        assume(False)
        raise
    folder = str(tmp_path_factory.mktemp("made"))
    preprocessor.save(folder)
    encoder = encoder_class(folder)
    found = encoder.encode(encoder.parse(lines))
    with np.errstate(invalid="ignore"):
        assert_same(found, preprocessor.encode(raw), preprocessor.inputs.sparse)


@pytest.mark.parametrize("number", [-(2**63) - 1, -(2**63), -(2**63) + 1, 2**63 - 1, 2**63])
def test_encode_py_matches_integers_at_limits(
    encoder_class: Any,
    tmp_path: Path,
    number: int,
) -> None:
    schema = Schema(label=None, sparse=("s",), tokens="any")
    preprocessor = click_models.hashed_preprocessor([2**40 - 87], schema)
    preprocessor.save(str(tmp_path))
    values = pa.table({"s": [str(number)]})
    _, (ids,) = encoder_class(str(tmp_path)).encode(values.to_pylist())
    assert (
        ids.tolist()
        == np.asarray(preprocessor.encode(parse_table(values, schema)[0]).ids[0]).tolist()
    )


def test_encode_py_reads_all_preprocessor_settings(encoder_class: Any, tmp_path: Path) -> None:
    """`encode.py` knows all that `describe` can store, so that no new setting is ignored."""
    columns: dict[str, Any] = {
        "dense": ("a",),
        "sparse": ("s", "t"),
        "lists": ("t",),
        "integers": ("s",),
        "optional": ("s",),
    }
    schema = Schema(
        label="y",
        features=(Feature(name="t", max_length=3),),
        labels=(),
        timestamp="at",
        nan="missing",
        tokens="any",
        **columns,
    )
    columns = (SparseColumn(9, None, mixed=True), SparseColumn(9, 2, token_modulo=5, gap=3))
    Preprocessor("test", schema, (DenseColumn(),), columns, np.arange(2, dtype=np.uint64)).save(
        str(tmp_path)
    )
    encoder_class(str(tmp_path))


@pytest.mark.parametrize(
    "place",
    [
        (),
        ("schema",),
        ("sparse", 0),
        ("dense", 0),
        ("schema", "features", 0),
    ],
)
def test_encode_py_rejects_unknown_settings(
    encoder_class: Any,
    tmp_path: Path,
    place: tuple[Any, ...],
) -> None:
    schema = Schema(
        dense=("a",),
        sparse=("s",),
        features=(Feature(name="s"),),
        tokens="any",
    )
    Preprocessor(
        "test",
        schema,
        (DenseColumn(),),
        (SparseColumn(9, None),),
        np.zeros(0, np.uint64),
    ).save(str(tmp_path))
    path = tmp_path / "preprocessor.json"
    stored = json.loads(path.read_text())
    target = stored
    for step in place:
        target = target[step]
    target["power"] = 1
    path.write_text(json.dumps(stored))
    fails_with(
        ValueError,
        r"^preprocessor\.json: unknown setting power in [^\n]*$",
        encoder_class,
        str(tmp_path),
    )


# -- Preprocessors that are loaded as they were saved or not at all, and limits of their kernels
SCHEMA = Schema(
    tokens="hexadecimal",
    label="y",
    dense=("a", "b"),
    sparse=("s", "t", "u"),
)
make = functools.partial(click_models.make_preprocessor, SCHEMA, constants={"min_count": 2})


def test_lookup_has_largest_int32_id_and_is_two_thirds_full() -> None:
    first_id = 2**31 - 10
    slots = np.zeros(16, np.uint64)
    known = np.arange(3, dtype=np.uint32)
    assert build_slots(known, (first_id + known).astype(np.int32), slots)
    assert find_ids(np.array([2, 3, 0], np.uint32), slots, 0).tolist() == [
        first_id + 2,
        0,
        first_id,
    ]
    for count in [*range(200), 10_000, 1 << 20]:
        slots = num_slots(count)
        assert slots & (slots - 1) == 0
        assert slots * 2 >= count * 3
        assert slots == 16 or slots < count * 3


@pytest.mark.parametrize(
    "subfolder",
    [pytest.param("", id="itself"), pytest.param("preprocessor", id="run")],
)
def test_preprocessor_loads_from_run_folder(tmp_path: Path, subfolder: str) -> None:
    preprocessor = make()
    preprocessor.save(str(tmp_path / subfolder))
    assert Preprocessor.load(str(tmp_path)).hash() == preprocessor.hash()
    assert stored_schema(str(tmp_path)) == preprocessor.schema


def test_preprocessor_roundtrip(tmp_path: Path) -> None:
    absent = rejects(r"preprocessor\.json not found", Preprocessor.load, str(tmp_path))
    assert "use the --out folder of `rayrec vocabulary`, a run or a checkpoint" in absent
    preprocessor = make()
    preprocessor.save(str(tmp_path))
    again = Preprocessor.load(str(tmp_path))
    assert (again.hash(), again.describe()) == (preprocessor.hash(), preprocessor.describe())
    assert (again.tokens == preprocessor.tokens).all()
    assert again.tokens.dtype == np.uint32
    assert (again.slots == preprocessor.slots).all()
    assert again.num_embeddings == [7, 7, 7]
    assert sorted(os.listdir(tmp_path)) == ["preprocessor.json", "tokens.npy"]


def test_hash_depends_on_all_fields() -> None:
    base = {field.name: getattr(make(), field.name) for field in dataclasses.fields(Preprocessor)}
    hashes = {make().hash()}
    other = base["tokens"].copy()
    other[-1] += 1
    dense = (base["dense"][0], DenseColumn(mean=0.5, scale=float(np.nextafter(0.3, 1))))
    changes = [
        {"preset": "other"},
        {"constants": {"min_count": 3}},
        {"dense": dense},
        {"tokens": other},
    ]
    for change in (*changes, {"schema": SCHEMA.replace(label="z")}):
        hashes.add(Preprocessor(**{**base, **change}).hash())
    assert len(hashes) == 6


def resaved(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], object]:
    return lambda path: np.save(path, change(np.load(path)))


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def test_load_rejects_damaged_tokens(tmp_path: Path) -> None:
    for damage in (
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
    ):
        make().save(str(tmp_path))
        damage(tmp_path / "tokens.npy")
        rejects(str(tmp_path), Preprocessor.load, str(tmp_path))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param(lambda stored: {**stored, "profile": "x"}, "", id="stored-stored-profile-x"),
        pytest.param(
            lambda stored: {**stored, "dense": stored["dense"][:1]},
            "",
            id="stored-stored-dense",
        ),
        pytest.param(
            lambda stored: {**stored, "sparse": stored["sparse"][:2]},
            "",
            id="stored-stored-sparse",
        ),
        pytest.param(
            lambda stored: {**stored, "sparse": [{"num_embeddings": 3}] * 3},
            "",
            id="case-3",
        ),
        pytest.param(
            lambda stored: {**stored, "schema": {"label": "y"}},
            "",
            id="stored-stored-schema",
        ),
        pytest.param(
            lambda stored: {key: value for key, value in stored.items() if key != "constants"},
            "",
            id="stored-key-value-for-key",
        ),
        pytest.param(
            lambda stored: {key: value for key, value in stored.items() if key != "hash"},
            "",
            id="case-6",
        ),
        pytest.param(
            lambda stored: {**stored, "version": 99},
            "version 99, this rayrec reads version 2",
            id="stored-stored-version-99",
        ),
        pytest.param(lambda stored: None, r"preprocessor\.json: damaged", id="stored-None"),
    ],
)
def test_load_rejects_damaged_description(
    change: Callable[..., Any],
    why: str,
    tmp_path: Path,
) -> None:
    make().save(str(tmp_path))
    path = tmp_path / "preprocessor.json"
    changed = change(json.loads(path.read_text()))
    path.write_text(json.dumps(changed) if changed else "{")
    rejects(f"{tmp_path}.*{why}", Preprocessor.load, str(tmp_path))


def save_forged(folder: Path, *, tokens: np.ndarray | None = None, **changes: Any) -> None:
    """Saves a Preprocessor whose hash is right though its values are not."""
    good = make()
    object.__setattr__(good, "tokens", good.tokens if tokens is None else tokens)
    object.__setattr__(
        good,
        "sparse",
        (dataclasses.replace(good.sparse[0], **changes), *good.sparse[1:]),
    )
    good.save(str(folder))


def test_check_rejects_values_unsafe_for_kernels(tmp_path: Path) -> None:
    forged: list[dict[str, Any]] = [
        {name: id_} for name in ("first_id", "unknown_id", "missing_id") for id_ in (-1, 2**31, 2.5)
    ]
    forged += [
        {"num_embeddings": 0},
        {"num_embeddings": 2**50},
        {"token_modulo": 0},
        {"token_modulo": 2**33},
        {"gap": -1},
    ]
    forged += [{"tokens": np.zeros(15, dtype)} for dtype in (np.uint8, np.int64, np.float32)]
    for values in (*forged, {"tokens": np.zeros((15, 1), np.uint32)}):
        save_forged(tmp_path, **values)
        rejects(str(tmp_path), Preprocessor.load, str(tmp_path))


def test_smallest_integer_is_encoded_and_multiples_spread() -> None:
    column = DenseColumn()
    out = np.empty(2, np.float32)
    values = np.array([-(2**63), 2**63 - 1], np.int64)
    source, target = (ctypes.c_void_p(array.ctypes.data) for array in (values, out))
    library().rayrec_transform_dense(
        source,
        ctypes.c_int64(2),
        ctypes.byref(c_dense_column(column)),
        target,
    )
    assert out.tolist() == [-np.float32(63 * math.log(2)), np.float32(63 * math.log(2))]
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
    assert (Schema.described(earlier).category_rules, Schema.described(earlier).describe()) == (
        1,
        earlier,
    )
