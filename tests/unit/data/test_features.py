"""Schema features: several labels, shared vocabularies, truncated and weighted lists, times."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders.faults import fails_with, rejects
from builders.logs import made_from
from builders.raw_blocks import find_block
from builders.same import assert_same
from hypothesis import given
from hypothesis import strategies as st

import rayrec
from rayrec.data.arrow import arrow_bytes, arrow_numbers, arrow_texts, as_numpy
from rayrec.data.encoded_rows import EncodedRows, JaggedIds, from_arrow, to_arrow
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import Preset, make_preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.formats.csv_reader import read_csv
from rayrec.data.frames import transform
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.logs.text_parser import parse
from rayrec.data.materialized.formats import check, from_named_columns, named_columns
from rayrec.data.raw_block import RawBlock, category_type
from rayrec.ingest.batches import BatchSlicer
from rayrec.models.base import ModelInputs
from rayrec.schema import Label, Schema, load_schema

YAML = """
label: click
labels: [{name: like}, {name: seconds, kind: number, missing: fault}]
dense: [price]
sparse: [user, item, history, tags]
lists: [history, tags]
features:
- {name: history, vocabulary: item, max_length: 3}
- {name: tags, weights: tag_weights}
timestamp: at
"""
SCHEMA = load_schema(YAML, "schema.yaml")
ROWS = pa.table(
    {
        "click": [1, 0, 1, 0],
        "like": pa.array([1, None, 0, None], pa.int8()),
        "seconds": [1.5, 0.0, 2.0, 3.0],
        "price": [1.0, None, 3.0, 4.0],
        "user": ["a", "b", "a", "c"],
        "item": [10, 20, 30, None],
        "history": pa.array([[20], [], [10, 20, 30, 40], None], pa.list_(pa.int64())),
        "tags": [["x", "y"], ["x"], [], ["z", None, "x"]],
        "tag_weights": [[0.5, 2.0], [1.0], [], [3.0, 9.0, 4.0]],
        "at": pa.array([0, 1, 2, 3_000_000], pa.timestamp("us")),
    }
)


def parsed(table: pa.Table = ROWS, schema: Schema = SCHEMA) -> RawBlock:
    raw, faults = parse_table(table, schema)
    assert not faults.total, faults.first
    return raw


def build_preprocessor(raw: RawBlock, schema: Schema = SCHEMA, min_count: int = 1) -> Preprocessor:
    return made_from(raw, schema, Preset(min_count=min_count))


@pytest.fixture(scope="module")
def encoded() -> tuple[Preprocessor, EncodedRows]:
    raw = parsed()
    preprocessor = build_preprocessor(raw)
    return preprocessor, preprocessor.encode(raw)


# -- The declaration
def test_yaml_declares_labels_and_features() -> None:
    assert SCHEMA.label_names == ("click", "like", "seconds")
    assert SCHEMA.vocabularies == ("user", "item", "item", "tags")
    assert SCHEMA.vocabulary_owners == (0, 1, 1, 3)
    assert SCHEMA.columns == (
        *(
            "click",
            "price",
            "user",
            "item",
            "history",
            "tags",
            "tag_weights",
            "like",
            "seconds",
            "at",
        ),
    )
    assert SCHEMA.unlabelled().columns == (
        "price",
        "user",
        "item",
        "history",
        "tags",
        "tag_weights",
    )
    assert Schema.described(SCHEMA.describe()) == SCHEMA


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "features: [{name: other}]",
            "features names other, which must be in sparse",
            id="features-name-other",
        ),
        pytest.param(
            "features: [{name: item, max_length: 3}]",
            "which need a column of lists",
            id="features-name-item-max_length-3",
        ),
        pytest.param(
            "features: [{name: history, max_length: 0}]",
            "must be at least 1",
            id="features-name-history",
        ),
        pytest.param(
            "features: [{name: history}, {name: history}]",
            "must name each column once",
            id="features-name-history-name",
        ),
        pytest.param(
            "features: [{vocabulary: item}]",
            r"features\[0\].name: Feature requires a value",
            id="features-vocabulary-item",
        ),
        pytest.param(
            "features: [{name: history, vocabulry: item}]",
            "did you mean 'vocabulary'",
            id="features-name-history-vocabulry",
        ),
        pytest.param(
            "features: [{name: history, vocabulary: item}, {name: item, vocabulary: sku}]",
            "has the vocabulary of item, which has another",
            id="features-name-history-has-the-vocabulary-of-item",
        ),
        pytest.param(
            "features: [{name: history, aligned_with: item}]",
            "aligned_with of feature history: must be a list .*, got item",
            id="features-name-history-aligned_with-of-feature-hi",
        ),
        pytest.param(
            "features: [{name: history, aligned_with: history}]",
            "must be a list that names another column of lists",
            id="features-name-history-must-be-a-list-that-names",
        ),
        pytest.param(
            "sparse: [a, b, c]\nlists: [a, b, c]\nfeatures: [{name: b, aligned_with: c}, {name: "
            "c, aligned_with: a}]",
            "aligned_with of feature b: must be a list without aligned_with, got c. Name a in both",
            id="sparse-a-b-c-nlists-a-b-c",
        ),
        pytest.param(
            "sparse: [a, b]\nlists: [a, b]\nfeatures: [{name: b, aligned_with: a, max_length: 3}]",
            "aligned_with of feature b: must have the max_length of a, None, got 3",
            id="sparse-a-b-nlists-a-b-nfeatures",
        ),
        pytest.param(
            "labels: [{name: item}]",
            "column names must be unique",
            id="labels-name-item",
        ),
        pytest.param(
            "labels: [{name: like, kind: sum}]",
            "Label.kind: has the wrong type .*, got 'sum'",
            id="labels-name-like-kind-sum",
        ),
        pytest.param(
            "timestamp: history",
            "timestamp must not be a column of lists, got history",
            id="timestamp-history",
        ),
        pytest.param(
            'tokens: hexadecimal\ndelimiter: "\\t"\nlists: []\ntimestamp: at',
            "timestamp needs tokens: any",
            id="tokens-hexadecimal-ndelimiter-t",
        ),
    ],
)
def test_schema_rejects_invalid_features(text: str, message: str) -> None:
    rejects(
        message,
        load_schema,
        f"sparse: [user, item, history]\nlists: [history]\n{text}",
        "schema.yaml",
    )


def test_aligned_lists_match_positions_and_keep_last_items() -> None:
    schema = load_schema(
        "label: click\nsparse: [items, shops]\nlists: [items, shops]\n"
        "features: [{name: items, max_length: 2}, {name: shops, aligned_with: items, max_length: "
        "2}]",
        "schema.yaml",
    )
    assert Schema.described(schema.describe()) == schema
    assert ModelInputs.from_schema(schema).aligned == (("shops", "items"),)
    items = [
        ["1", "2", "3"],
        [],
        ["1", None],
        ["1", "2"],
        ["1", None, "2"],
        None,
        ["1"],
    ]
    shops = [
        ["a", "b", "c"],
        None,
        ["a", ""],
        ["a"],
        ["a", "b", None],
        ["a"],
        ["a"],
    ]
    raw, faults = parse_table(pa.table({"click": [0] * 7, "items": items, "shops": shops}), schema)
    assert (raw.rows, faults.total) == (4, 3)
    assert [(fault.kind, fault.column, fault.row) for fault in faults.first] == [
        ("categories are not at the places of the list that it is aligned with", "shops", row)
        for row in (3, 4, 5)
    ]
    assert [column.lengths.tolist() for column in raw.lists] == [[2, 0, 1, 1]] * 2
    history, tags = parsed().lists
    assert (history.values.tolist(), history.lengths.tolist()) == ([20, 20, 30, 40], [1, 0, 3, 0])
    assert (tags.lengths.tolist(), tags.weights.tolist()) == (
        [2, 1, 0, 2],
        [0.5, 2.0, 1.0, 3.0, 4.0],
    )


# -- Reading
def column(name: str, values: pa.Array) -> pa.Table:
    return ROWS.set_column(ROWS.column_names.index(name), name, values)


@pytest.mark.parametrize(
    ("name", "values", "kind", "row"),
    [
        pytest.param("like", pa.array([1, 2, 0, None]), "label is not 0 or 1", 1, id="like"),
        pytest.param(
            "seconds",
            pa.array([1.0, 2.0, None, 1.0]),
            "label is missing",
            2,
            id="seconds",
        ),
        pytest.param(
            "seconds",
            pa.array([1.0, 2.0, 3.0, float("inf")]),
            "not a finite number",
            3,
            id="seconds-pa.array-1.0-2.0-3.0-float-inf",
        ),
        pytest.param(
            "tag_weights",
            pa.array([[1.0, 1.0], [], [], [1.0, 1.0, 1.0]]),
            "weights are not as many numbers",
            1,
            id="tag_weights",
        ),
        pytest.param(
            "tag_weights",
            pa.array([[1.0, None], [1.0], [], [1.0] * 3]),
            "weights are not as many numbers",
            0,
            id="tag_weights-pa.array-1.0-None-1.0-1.0-3",
        ),
        pytest.param(
            "tag_weights",
            pa.array([[1.0] * 2, [1.0], [1.0], [1.0] * 3]),
            "weights are not as many numbers",
            2,
            id="tag_weights-pa.array-1.0-2-1.0-1.0-1.0-3",
        ),
        pytest.param(
            "tag_weights",
            pa.array([[1.0] * 2, [float("nan")], [], [1.0] * 3]),
            "weights are not as many numbers",
            1,
            id="tag_weights-pa.array-1.0-2-float-nan-1.0-3",
        ),
        pytest.param("at", pa.array([0, 1, None, 3]), "not a time", 2, id="at"),
        pytest.param(
            "at",
            pa.array(["0", "2024-02-30", "2024-02-29", "1e9"]),
            "not a time",
            1,
            id="at-pa.array-0-2024-02-30-2024-02",
        ),
        pytest.param(
            "at",
            pa.array([0.0, 1.0, 2.0, float("nan")]),
            "not a time",
            3,
            id="at-pa.array-0.0-1.0-2.0-float-nan",
        ),
    ],
)
def test_invalid_value_reports_row_and_column(name: str, values: Any, kind: str, row: int) -> None:
    raw, faults = parse_table(column(name, values), SCHEMA)
    (fault,) = faults.first
    assert (raw.rows, fault.row, fault.column) == (
        3,
        row,
        "tags" if name == "tag_weights" else name,
    )
    assert fault.kind.startswith(kind)


def test_count_label_can_be_main_and_rejects_negative() -> None:
    schema = Schema(
        label=None,
        labels=(Label(name="views", kind="count", missing="fault"),),
        sparse=("user",),
        tokens="any",
    )
    raw, faults = parse_table(
        pa.table({"user": ["a", "b", "c"], "views": [3.0, -1.0, 0.0]}),
        schema,
    )
    assert (raw.labels["views"].tolist(), faults.counts) == (
        [3.0, 0.0],
        {"not a number of 0 or more": 1},
    )
    inputs = ModelInputs.from_schema(schema)
    assert (inputs.label, inputs.label_kind, inputs.label_names) == (
        "views",
        "count",
        schema.label_names,
    )
    assert ModelInputs.from_schema(schema.unlabelled()).label_kind == "binary"


def test_times_in_text() -> None:
    seconds = {
        "0": 0,
        "1.5": 1.5,
        "-1": -1,
        "1970-01-02": 86_400,
        "1970-01-01 00:00:01.25": 1.25,
        "2000-02-29": 951_782_400,
    }
    seconds |= dict.fromkeys(
        ("1970-01-01T00:00:01", "1970-01-01T00:00:01Z", "1970-01-01T02:00:01+02:00"),
        1,
    )
    for text, expected_s in seconds.items():
        times = parsed(column("at", pa.array([text, "0", text, "1"]))).times.tolist()
        assert times == [expected_s * 1_000_000, 0, expected_s * 1_000_000, 1_000_000]


def test_time_types_and_all_fields_of_taken_rows() -> None:
    timestamps = [
        pa.array([0, 1, 2, 3], pa.timestamp("s", "UTC")),
        pa.array([0, 1000, 2000, 3000], pa.timestamp("ms")),
    ]
    for values in (
        *timestamps,
        pa.array([0, 1, 2, 3]),
        pa.array([0.0, 1.0, 2.0, 3.0]),
    ):
        assert parsed(column("at", values)).times.tolist() == [0, 1_000_000, 2_000_000, 3_000_000]
    rejects("a time must be a date", parse_table, column("at", pa.array([True] * 4)), SCHEMA)
    raw = parsed()
    order = np.array([3, 0, 0, 2])
    parts = RawBlock.concatenated([raw.take(order[:1]), raw.take(order[1:])])
    preprocessor = build_preprocessor(raw)
    assert_same(preprocessor.encode(parts), preprocessor.encode(raw, order), ignored="row_numbers")


# -- Vocabulary and encoding
def test_shared_vocabulary_returns_same_ids(encoded: tuple[Preprocessor, EncodedRows]) -> None:
    preprocessor, rows = encoded
    item = rows.ids[1]
    history = rows.ids[SCHEMA.sparse.index("history")]
    assert item[1] == history.values[0]  # 20
    assert item[2] == history.values[3]  # 30
    missing = preprocessor.sparse[1].missing_id
    assert history.lengths.tolist() == [1, 1, 3, 1]
    assert (history.values[1], history.values[5], item[3]) == (missing, missing, missing)
    assert (preprocessor.sparse[1], preprocessor.hotness) == (
        preprocessor.sparse[2],
        [1, 1, None, None],
    )
    # 40 was seen in a history alone, and all four are stored once.
    assert preprocessor.vocabulary(1).tolist() == preprocessor.vocabulary(2).tolist()
    assert sorted(preprocessor.vocabulary(1).tolist()) == [10, 20, 30, 40]
    assert len(preprocessor.tokens) == 3 + 4 + 3


def test_shared_vocabulary_counts_and_forms_keep_every_column(
    tmp_path: Path,
    encoded: tuple[Preprocessor, EncodedRows],
) -> None:
    job = Preset(min_count=3).counting(SCHEMA)
    counts = job.empty()
    merged = job.empty()
    counts.add_rows(parsed(), 0)
    merged.add(counts.to_table())
    assert make_preprocessor(Preset(min_count=3), SCHEMA, merged).vocabulary(2).tolist() == [20]
    unshared = SCHEMA.unshared()
    assert build_preprocessor(parsed(schema=unshared), unshared, 3).vocabulary(2).tolist() == []
    frame = ROWS.to_pandas()
    inputs = transform(build_preprocessor(parsed()), frame)
    numbers = ["price", "price is missing"]
    assert list(inputs) == [
        "click",
        *numbers,
        "user",
        "item",
        "history",
        "tags",
        "tag_weights",
        "like",
        "seconds",
        "at",
    ]
    assert inputs["tag_weights"][3].tolist() == [3.0, 4.0]
    assert inputs["like"].isna().tolist() == [False, True, False, True]
    to_score = transform(build_preprocessor(parsed()), frame.drop(columns=["click", "at"]))
    assert list(to_score) == [*numbers, "user", "item", "history", "tags", "tag_weights"]
    assert isinstance(to_score, pd.DataFrame)
    preprocessor, rows = encoded
    assert_same(from_arrow(to_arrow(rows))[0], rows)
    file = str(tmp_path / "rows.parquet")
    pq.write_table(named_columns(rows, preprocessor.inputs), file)
    assert_same(from_named_columns(pq.read_table(file), preprocessor.inputs), rows)
    rejects(
        r"cannot store columns like, seconds, at\. Use --format parquet",
        check,
        "npy",
        preprocessor,
        labelled=True,
    )


# -- On the way to the model
def test_batch_has_labels_id_weights_and_times(encoded: tuple[Preprocessor, EncodedRows]) -> None:
    preprocessor, rows = encoded
    slicer = BatchSlicer(iter(from_arrow(to_arrow(rows))), preprocessor.inputs)
    one, two, filler = (slicer.take(size, loss_weight=1.0) for size in (3, 1, 0))
    assert list(one.labels) == ["click", "like", "seconds"]
    np.testing.assert_array_equal(one.labels["like"].numpy(), np.array([1, np.nan, 0], np.float32))
    assert one.timestamps.tolist() == [0, 1, 2]
    assert one.sparse_features["tags"].weights().tolist() == [0.5, 2.0, 1.0, 1.0]
    assert one.sparse_features["history"].weights().tolist() == [1.0] * 5
    assert two.sparse_features["tags"].weights().tolist() == [3.0, 4.0]
    # a weighted collection refuses a batch without weights
    assert filler.sparse_features.weights().tolist() == []
    assert {name: len(values) for name, values in filler.labels.items()} == dict.fromkeys(
        one.labels,
        0,
    )


def test_sequences_are_in_separate_field(encoded: tuple[Preprocessor, EncodedRows]) -> None:
    preprocessor, rows = encoded
    whole = BatchSlicer(iter([rows]), preprocessor.inputs).take(4, loss_weight=1.0).sparse_features
    schema = preprocessor.inputs.replace(features=SCHEMA.features[:1])
    batch = BatchSlicer(iter([rows]), schema, unpooled=("item", "history")).take(4, loss_weight=1.0)
    for features, keys in (
        (batch.sparse_features, ["user", "tags"]),
        *(
            (x, ["item", "history"])
            for x in (batch.sequence_features, batch.to(torch.device("cpu")).sequence_features)
        ),
    ):
        assert features.keys() == keys
        for key in keys:
            assert torch.equal(features[key].values(), whole[key].values())
            assert torch.equal(features[key].lengths(), whole[key].lengths())


# -- Frames, Arrow arrays and groups of rows
CRITEO = Schema(
    tokens="hexadecimal",
    label="y",
    dense=("a", "b"),
    sparse=("s", "t"),
)
LISTS: dict[str, Any] = {"dense": ("age",), "sparse": ("user", "genres"), "lists": ("genres",)}
CLICKS = Schema(
    label="liked",
    weight="weight",
    tokens="any",
    delimiter=",",
    **LISTS,
)
TEXT = b"1\t2\t-3\t00000005\t000003e8\n0\t\t70000\t\t000003e9\n1\t5\t\t00000007\t\n"
FRAME = pd.DataFrame(
    {"t": ["000003e8", "000003e9", None], "a": [2, None, 5], "b": [-3.0, 70000.0, np.nan]},
    index=[30, 10, 20],
).assign(unused=[object(), 1, "x"], s=["00000005", None, "00000007"], y=[1, 0, 1])
"""The column `unused` is of no type that Arrow has."""


def criteo(**changes: Any) -> Preprocessor:
    dense = (
        DenseColumn(mean=0.5, scale=2.0, missing_value=-7.5),
        DenseColumn(mean=-0.25, scale=0.3),
    )
    sparse = (SparseColumn(4, 2), SparseColumn(1000, None))
    return Preprocessor("test", CRITEO, dense, sparse, np.array([5, 7], np.uint32), **changes)


def clicks() -> Preprocessor:
    sparse = (SparseColumn(50, None), SparseColumn(60, None))
    return Preprocessor("test", CLICKS, (DenseColumn(),), sparse, np.zeros(0, np.uint64))


def trained_on(preprocessor: Preprocessor, text: bytes) -> pa.Table:
    raw, faults = parse(preprocessor.schema, text)
    assert not faults.total
    return named_columns(preprocessor.encode(raw), preprocessor.inputs)


@pytest.mark.parametrize("file_minimum", [None, {"": -4, "day_0": -9}])
def test_transform_matches_training(file_minimum: dict[str, int] | None) -> None:
    preprocessor = criteo(file_minimum=file_minimum)
    inputs = rayrec.transform(preprocessor, FRAME)
    assert pa.Table.from_pandas(
        inputs,
        preserve_index=False,
    ).replace_schema_metadata() == trained_on(preprocessor, TEXT)
    assert inputs.index.tolist() == [30, 10, 20]
    assert inputs.dtypes.astype(str).tolist() == [
        "int8",
        "float32",
        "float32",
        "int32",
        "int32",
    ]


def test_lists_weights_and_rows_without_label(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        "liked,age,user,genres,weight\n1,30,u1,a|b,2\n0,,7,,1.5\n1,4.5,u2,c,0\n"
    )
    frame = pd.DataFrame(
        {
            "liked": [True, False, True],
            "age": [30, None, 4.5],
            "weight": [2, 1.5, 0],
            "user": pd.Categorical(["u1", "7", "u2"]),
            "genres": [["a", "b"], None, ["c"]],
        }
    )
    raw, _ = parse_table(pa.concat_tables(read_csv(str(tmp_path / "log.csv"), CLICKS)), CLICKS)
    expected = named_columns(clicks().encode(raw), CLICKS).to_pandas()
    inputs = rayrec.transform(clicks(), frame)
    pd.testing.assert_frame_equal(inputs, expected, check_exact=True)
    assert [len(ids) for ids in inputs.genres] == [2, 1, 1]
    assert list(rayrec.transform(clicks(), frame.drop(columns="weight"))) == [
        "liked",
        "age",
        "user",
        "genres",
    ]
    inputs = rayrec.transform(criteo(), FRAME.drop(columns="y"))
    assert (list(inputs), inputs.s.tolist()) == (["a", "b", "s", "t"], [2, 1, 3])
    none = rayrec.transform(criteo(), FRAME.iloc[:0])
    assert (list(none), len(none)) == (["y", "a", "b", "s", "t"], 0)


@pytest.mark.parametrize("place", ["", "preprocessor"])
def test_transform_accepts_folders(tmp_path: Path, place: str) -> None:
    criteo().save(str(tmp_path / place))
    pd.testing.assert_frame_equal(
        rayrec.transform(tmp_path, FRAME),
        rayrec.transform(criteo(), FRAME),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"a": [1, 2.5, 3]},
            "DataFrame at row 1: not an integer in column a; fix or remove it, since",
            id="a-1-2.5-3",
        ),
        pytest.param(
            {"s": ["5", "00000005", "x"]},
            r"DataFrame at row 0: not 8 hexadecimal digits in column s \(2 of 3 rows are "
            r"invalid\);",
            id="s-5-00000005-x",
        ),
        pytest.param(
            {"y": [1, 0, None]},
            "DataFrame at row 2: label is missing in column y;",
            id="y-1-0-None",
        ),
        pytest.param(
            {"s": [1, 2, 3]},
            "DataFrame: column s is of type int64; needs 8 hexadecimal digits as text",
            id="s-1-2-3",
        ),
        pytest.param(
            {"t": ["000003e8", 3, None]},
            "DataFrame: .*column t.*; give each column one type",
            id="t-000003e8-3-None",
        ),
    ],
)
def test_transform_rejects_invalid_row(changes: dict[str, Any], message: str) -> None:
    rejects(message, rayrec.transform, criteo(), FRAME.assign(**changes))


VIEWS = {"string": pa.string_view(), "list<element: string>": pa.list_(pa.string_view())}


class Exported:
    """DataFrame of a library that exports Arrow's streams."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


def test_exported_arrow_is_read() -> None:
    table = pa.Table.from_pandas(FRAME.drop(columns="unused"), preserve_index=False)
    table = pa.concat_tables([table] * 10)
    table = table.append_column("words", pa.array([["a", None]] * len(table)))
    views = [
        each.with_type(VIEWS.get(str(each.type).replace("large_", ""), each.type))
        for each in table.schema
    ]
    kinds = pa.array([n % 2 for n in range(len(table))])
    names, name_views = (
        pa.DictionaryArray.from_arrays(kinds, pa.array(["new", "old"], text))
        for text in (pa.string(), pa.string_view())
    )
    exported: Any = Exported(table.cast(pa.schema(views)).append_column("kind", name_views))
    table = table.append_column("kind", names)
    assert rayrec.transform(criteo(), exported).equals(rayrec.transform(criteo(), table))
    assert rayrec.draft_schema(exported) == rayrec.draft_schema(table)


def test_transform_rejects_other_data() -> None:
    rejects(
        "DataFrame: has no column named s; it has",
        rayrec.transform,
        criteo(),
        FRAME.drop(columns="s"),
    )
    rejects(
        "data must be a DataFrame, a pyarrow.Table or a ray.data.Dataset, got dict",
        rayrec.transform,
        criteo(),
        {"a": [1]},
    )


@pytest.mark.ray
def test_transform_dataset_matches_dataframe(local_ray: None) -> None:
    import ray
    import ray.data

    columns = FRAME.drop(columns="unused")
    dataset = ray.data.from_pandas([columns, columns.iloc[:2]])
    inputs = pa.concat_tables(ray.get(rayrec.transform(criteo(), dataset).to_arrow_refs()))
    first = trained_on(criteo(), TEXT)
    assert inputs.replace_schema_metadata() == pa.concat_tables([first, first.slice(0, 2)])
    faulty = rayrec.transform(criteo(), ray.data.from_pandas(columns.assign(a=[1, 2, 2.5])))
    fails_with(
        ray.exceptions.RayTaskError,
        "Dataset, in a block at row 2: not an integer in column a",
        faulty.materialize,
    )


# -- Arrow arrays are what pyarrow's own conversions make, and come back as they were
@pytest.mark.parametrize(
    "dtype",
    [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64],
)
@pytest.mark.parametrize("rows", [0, 1, 19])
def test_numbers(dtype: type, rows: int) -> None:
    values = np.arange(2 * rows).astype(dtype)[::2]  # not contiguous
    array = arrow_numbers(values)
    assert array.equals(pa.array(values))
    array.validate(full=True)
    back = as_numpy(array.slice(rows // 2))
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, values[rows // 2 :])
    np.testing.assert_array_equal(
        as_numpy(pa.chunked_array([array, array[:1]])),
        [*values, *values[:1]],
    )
    assert as_numpy(pa.chunked_array([], array.type)).dtype == dtype


def test_arrow_numbers_have_missing_ones_and_share_memory() -> None:
    values = np.arange(11.0)
    missing = np.arange(11) % 3 == 0
    array = arrow_numbers(values, missing)
    assert array.equals(pa.array(values, mask=missing))
    assert arrow_numbers(values, missing.astype(np.uint8)).equals(array)
    np.testing.assert_array_equal(as_numpy(array.drop_null()), values[~missing])
    fails_with(AssertionError, "", as_numpy, array)
    values = np.arange(4)
    assert np.shares_memory(as_numpy(arrow_numbers(values)), values)


@pytest.mark.parametrize("texts", [[], [""], ["a", "", "käse"]], ids=repr)
def test_texts_and_bytes(texts: list[str]) -> None:
    assert arrow_texts(texts).equals(pa.array(texts, pa.large_string()))
    values = [text.encode() for text in texts]
    assert arrow_bytes(values).equals(pa.array(values, pa.large_binary()))


# -- Keys of the values that rows are grouped by
@pytest.mark.parametrize(
    ("tokens", "one", "other"),
    [("hexadecimal", "0000000b", "00000000"), ("any", "ann", "bob")],
)
def test_keys_of_categories(tokens: Any, one: str, other: str) -> None:
    schema = Schema(
        label="click",
        sparse=("item", "user"),
        group="user",
        tokens=tokens,
    )
    table = pa.table(
        {"click": [0, 1, 0, 1, 1], "item": ["0000000a"] * 5, "user": [one, other, None, one, ""]}
    )
    raw, faults = parse_table(table, schema)
    keys = raw.group_keys()
    assert (faults.total, keys.dtype) == (0, np.int64)
    assert keys[0] == keys[3] != keys[1]
    assert keys[2] == keys[4] == 0
    assert 0 not in keys[[0, 1]]
    assert raw.group_keys(np.array([3, 1])).tolist() == keys[[3, 1]].tolist()


def test_group_requires_single_category_column() -> None:
    schema = Schema(
        tokens="hexadecimal",
        label="click",
        dense=("age",),
        sparse=("item", "user"),
        group="user",
    )
    for group in ("age", "nobody"):
        rejects(
            rf"group must be a column of sparse with one category per row, got {group}",
            schema.replace,
            group=group,
        )
    rejects(
        r"group must be .*, got tags",
        Schema,
        sparse=("tags",),
        lists=("tags",),
        tokens="any",
        delimiter=",",
        group="tags",
    )


# -- Encoding of raw columns compared with the rules, which unit/data/encoding compares with
# published pipelines
ANY = Schema(
    label="y",
    dense=("a", "b"),
    sparse=("s", "t", "u", "v"),
    lists=("t", "v"),
    tokens="any",
    weight="w",
)
HEXADECIMAL = Schema(
    tokens="hexadecimal",
    label="y",
    dense=("a", "b"),
    sparse=("s", "t", "u"),
)
KNOWN = {
    "any": ([5, 2**40, 2**64 - 1, 7], [2**24 + 1, 0]),
    "hexadecimal": ([5, 0, 2**32 - 1, 7], [*range(1000, 6000)]),
}
LARGE = 40_000_000
Row = tuple[int, float, list[float | None], list[int | list[int] | None]]


def make(schema: Schema = ANY) -> Preprocessor:
    dense = [
        DenseColumn(mean=0.5, scale=2.0, missing_value=-7.5),
        DenseColumn("identity", scale=0.5),
    ]
    sparse = [
        SparseColumn(6, 4),
        SparseColumn(5, 2, gap=3, missing_id=3),
        SparseColumn(LARGE, None),
    ]
    if schema is HEXADECIMAL:
        dense[1], sparse[1] = DenseColumn(mean=-0.25, scale=0.3), SparseColumn(5002, 5000)
    else:
        sparse.append(SparseColumn(10, None, missing_id=1, first_id=2))
    known = np.array(
        [token for column in KNOWN[schema.tokens] for token in column],
        category_type(schema),
    )
    return Preprocessor("test", schema, (*dense,), (*sparse,), known)


def raw_of(rows: list[Row], schema: Schema = ANY) -> RawBlock:
    columns = {name: [row[2][d] for row in rows] for d, name in enumerate(schema.dense)}
    columns |= {name: [row[3][s] for row in rows] for s, name in enumerate(schema.sparse)}
    return find_block(
        schema,
        columns,
        labels={"y": np.array([row[0] for row in rows], np.float32)} if schema.label else {},
        weights=np.array([row[1] for row in rows], np.float32) if schema.weight else None,
    )


def drawn_rows(schema: Schema, count: int, rng: random.Random) -> list[Row]:
    """Draw rows with known, unknown and missing categories, and with numbers of all sizes."""
    (first, second), bits = KNOWN[schema.tokens], 64 if schema is ANY else 32
    limits = [1e18, -1e18, 0.5] if schema is ANY else [10**18 - 1, 1 - 10**18]

    def category() -> int:
        others = (
            LARGE - 3,
            LARGE - 2,
            rng.choice(second),
            rng.randrange(900, 6100),
            rng.getrandbits(bits),
        )
        return rng.choice([*first, *others])

    def number() -> float | None:
        drawn = rng.uniform(-1e3, 1e3) if schema is ANY else rng.randrange(10**6)
        return rng.choice(
            [
                None,
                rng.randrange(-30, 3000),
                rng.randrange(10**9),
                drawn,
                *limits,
            ]
        )

    def cells() -> list[Any]:
        single = [rng.choice([None, category()]) for _ in range(3)]
        if schema is not ANY:
            return single
        one, other = ([category() for _ in range(rng.randrange(4))] for _ in range(2))
        return [single[0], one, single[1], other]

    return [
        (
            rng.randrange(2),
            rng.random(),
            [number(), number()],
            cells(),
        )
        for _ in range(count)
    ]


def check_rows(schema: Schema, rows: list[Row], order: list[int] | None) -> None:
    preprocessor = make(schema)
    encoded = preprocessor.encode(
        raw_of(rows, schema),
        None if order is None else np.array(order, np.int64),
    )
    rows = rows if order is None else [rows[i] for i in order]
    assert len(encoded) == len(rows)
    assert_same(encoded.label, np.array([row[0] for row in rows], np.float32))
    assert_same(
        encoded.weights,
        np.array([row[1] for row in rows], np.float32) if schema.weight else None,
    )
    for d, rule in enumerate(preprocessor.dense):
        check_numbers(encoded.dense[:, d], rule, [row[2][d] for row in rows])
    for s, rule in enumerate(preprocessor.sparse):
        check_ids(encoded.ids[s], rule, [row[3][s] for row in rows], schema, s)
    for again in from_arrow(to_arrow(encoded)):
        assert_same(list(again.ids), list(encoded.ids))


def check_numbers(encoded: np.ndarray, rule: DenseColumn, values: list[Any]) -> None:
    present = np.array([0 if value is None else value for value in values], np.float64)
    expected = rule.encode(present, np.array([value is None for value in values], bool))
    np.testing.assert_array_almost_equal_nulp(encoded, expected, 1)


def check_ids(ids: Any, rule: SparseColumn, cells: list[Any], schema: Schema, column: int) -> None:
    known = {}
    if rule.num_tokens is not None:
        known = dict(zip(KNOWN[schema.tokens][column], rule.ids().tolist(), strict=True))
    is_list = schema.sparse[column] in schema.lists
    bags = cells if is_list else [[] if cell is None else [cell] for cell in cells]
    tokens = np.array([token for bag in bags for token in bag or [0]], category_type(schema))
    missing = np.array([not bag for bag in bags for _ in bag or [0]], bool)

    def find(asked: np.ndarray) -> np.ndarray:
        return np.array([known.get(token, rule.unknown_id) for token in asked.tolist()], np.int64)

    assert isinstance(ids, JaggedIds) == is_list
    if isinstance(ids, JaggedIds):
        assert_same(ids.lengths, np.array([len(bag) or 1 for bag in bags], np.int32))
        ids = ids.values
    assert_same(ids, rule.encode(tokens, missing, find, np.dtype(np.int32)))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 255, 256, 257, 5000])
@pytest.mark.parametrize("schema", [ANY, HEXADECIMAL], ids=KNOWN)
def test_encode_matches_rules(schema: Schema, rows: int) -> None:
    """More rows than a tile and, with 5,000, than the table of small logarithms pays for."""
    rng = random.Random(rows)
    made = drawn_rows(schema, rows, rng)
    check_rows(schema, made, None)
    check_rows(schema, made, [rng.randrange(rows) for _ in range(rows + 5)] if rows else [])


def test_small_integer_table_matches_computation() -> None:
    """A row is encoded alike alone (as when serving) and among thousands (as when training)."""
    raw = find_block(
        HEXADECIMAL,
        {"a": range(-20, 3000), "b": range(20, -3000, -1), **dict.fromkeys("stu", [None] * 3020)},
    )
    preprocessor = make(HEXADECIMAL)
    alone = np.concatenate([preprocessor.encode(raw, np.array([i])).dense for i in range(raw.rows)])
    assert (preprocessor.encode(raw).dense == alone).all()


@pytest.mark.parametrize(
    ("schema", "cells"),
    [(ANY, [5, [], None, [3, 4]]), (HEXADECIMAL, [5, None, None])],
    ids=KNOWN,
)
def test_unlabelled_rows_have_neither_labels_nor_weights(schema: Schema, cells: list[Any]) -> None:
    encoded = make(schema).encode(raw_of([(0, 1.0, [1.0, None], cells)], schema.unlabelled()))
    assert (encoded.labels, encoded.weights) == ({}, None)


@given(
    st.lists(st.integers(0, 8), min_size=3, max_size=3).map(sorted),
    st.randoms(use_true_random=False),
)
def test_take_and_concatenate(cuts: list[int], rng: random.Random) -> None:
    low, high, count = cuts
    rows = drawn_rows(ANY, count, rng)
    joined = RawBlock.concatenated(
        [
            raw_of(rows[:low]),
            raw_of(rows[low:high]),
            raw_of(rows[high:]),
        ]
    )
    assert_same(joined, raw_of(rows))
    assert_same(joined.cut(low, high), raw_of(rows[low:high]))
    order = [rng.randrange(len(rows)) for _ in range(5)] if rows else []
    assert_same(joined.take(np.array(order, np.int64)), raw_of([rows[i] for i in order]))


def test_files_follow_their_rows() -> None:
    rows: list[Row] = [
        (
            0,
            1.0,
            [1.0, None],
            [5, [], None, [3, 4]],
        )
    ] * 3
    first = replace(raw_of(rows), files=(("a", 0, 2), ("b", 2, 3)))
    joined = RawBlock.concatenated([first, replace(raw_of(rows), files=(("c", 0, 3),))])
    assert joined.files == (("a", 0, 2), ("b", 2, 3), ("c", 3, 6))
    assert joined.cut(1, 4).files == (("a", 0, 1), ("b", 1, 2), ("c", 2, 3))
    assert joined.cut(3, 5).files == (("c", 0, 2),)
