"""Schema features: several labels, shared vocabularies, truncated and weighted lists, times."""

from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders.faults import rejects
from builders.logs import made_from
from builders.same import assert_same

from rayrec.data.encoded_rows import EncodedRows, from_arrow, to_arrow
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import Preset, make_preprocessor
from rayrec.data.frames import transform
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.materialized.formats import check, from_named_columns, named_columns
from rayrec.data.raw_block import RawBlock
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


def preprocessor_of(raw: RawBlock, schema: Schema = SCHEMA, min_count: int = 1) -> Preprocessor:
    return made_from(raw, schema, Preset(min_count=min_count))


@pytest.fixture(scope="module")
def encoded() -> tuple[Preprocessor, EncodedRows]:
    raw = parsed()
    preprocessor = preprocessor_of(raw)
    return preprocessor, preprocessor.encode(raw)


# The declaration -----------------------------------------------------------------------------------------------------
def test_yaml_declares_labels_and_features() -> None:
    assert SCHEMA.label_names == ("click", "like", "seconds")
    assert SCHEMA.vocabularies == ("user", "item", "item", "tags")
    assert SCHEMA.vocabulary_owners == (0, 1, 1, 3)
    assert SCHEMA.columns == (*("click", "price", "user", "item", "history", "tags", "tag_weights", "like", "seconds", "at"),)
    assert SCHEMA.unlabelled().columns == ("price", "user", "item", "history", "tags", "tag_weights")
    assert Schema.described(SCHEMA.describe()) == SCHEMA


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("features: [{name: other}]", "features names other, which must be in sparse"),
        ("features: [{name: item, max_length: 3}]", "which need a column of lists"),
        ("features: [{name: history, max_length: 0}]", "must be at least 1"),
        ("features: [{name: history}, {name: history}]", "must name each column once"),
        ("features: [{vocabulary: item}]", r"features\[0\].name: Feature requires a value"),
        ("features: [{name: history, vocabulry: item}]", "did you mean 'vocabulary'"),
        (
            "features: [{name: history, vocabulary: item}, {name: item, vocabulary: sku}]",
            "has the vocabulary of item, which itself has another one",
        ),
        ("features: [{name: history, aligned_with: item}]", "aligned_with of feature history: must be a list .*, got item"),
        ("features: [{name: history, aligned_with: history}]", "must be a list that names another column of lists"),
        (
            "sparse: [a, b, c]\nlists: [a, b, c]\nfeatures: [{name: b, aligned_with: c}, {name: c, aligned_with: a}]",
            "aligned_with of feature b: must be a list without aligned_with, got c. Name a in both",
        ),
        (
            "sparse: [a, b]\nlists: [a, b]\nfeatures: [{name: b, aligned_with: a, max_length: 3}]",
            "aligned_with of feature b: must have the max_length of a, None, got 3",
        ),
        ("labels: [{name: item}]", "column names must be unique"),
        ("labels: [{name: like, kind: sum}]", "Label.kind: has the wrong type .*, got 'sum'"),
        ("timestamp: user", "column names must be unique"),
        ('tokens: hexadecimal\ndelimiter: "\\t"\nlists: []\ntimestamp: at', "timestamp needs tokens: any"),
    ],
)
def test_schema_rejects_invalid_features(text: str, message: str) -> None:
    rejects(message, load_schema, f"sparse: [user, item, history]\nlists: [history]\n{text}", "schema.yaml")


def test_aligned_lists_require_matching_positions() -> None:
    schema = load_schema(
        "label: click\nsparse: [items, shops]\nlists: [items, shops]\n"
        "features: [{name: items, max_length: 2}, {name: shops, aligned_with: items, max_length: 2}]",
        "schema.yaml",
    )
    assert Schema.described(schema.describe()) == schema
    assert ModelInputs.of(schema).aligned == (("shops", "items"),)
    items = [["1", "2", "3"], [], ["1", None], ["1", "2"], ["1", None, "2"], None, ["1"]]
    shops = [["a", "b", "c"], None, ["a", ""], ["a"], ["a", "b", None], ["a"], ["a"]]
    raw, faults = parse_table(pa.table({"click": [0] * 7, "items": items, "shops": shops}), schema)
    assert (raw.rows, faults.total) == (4, 3)
    assert [(fault.kind, fault.column, fault.row) for fault in faults.first] == [
        ("categories are not at the places of the list that it is aligned with", "shops", row) for row in (3, 4, 5)
    ]
    assert [column.lengths.tolist() for column in raw.lists] == [[2, 0, 1, 1]] * 2


# Reading -------------------------------------------------------------------------------------------------------------
def test_max_length_keeps_last_items_and_weights() -> None:
    history, tags = parsed().lists
    assert (history.values.tolist(), history.lengths.tolist()) == ([20, 20, 30, 40], [1, 0, 3, 0])
    assert (tags.lengths.tolist(), tags.weights.tolist()) == ([2, 1, 0, 2], [0.5, 2.0, 1.0, 3.0, 4.0])


def column(name: str, values: pa.Array) -> pa.Table:
    return ROWS.set_column(ROWS.column_names.index(name), name, values)


@pytest.mark.parametrize(
    ("name", "values", "kind", "row"),
    [
        ("like", pa.array([1, 2, 0, None]), "label is not 0 or 1", 1),
        ("seconds", pa.array([1.0, 2.0, None, 1.0]), "label is missing", 2),
        ("seconds", pa.array([1.0, 2.0, 3.0, float("inf")]), "not a finite number", 3),
        ("tag_weights", pa.array([[1.0, 1.0], [], [], [1.0, 1.0, 1.0]]), "weights are not as many numbers", 1),
        ("tag_weights", pa.array([[1.0, None], [1.0], [], [1.0] * 3]), "weights are not as many numbers", 0),
        ("tag_weights", pa.array([[1.0] * 2, [1.0], [1.0], [1.0] * 3]), "weights are not as many numbers", 2),
        ("tag_weights", pa.array([[1.0] * 2, [float("nan")], [], [1.0] * 3]), "weights are not as many numbers", 1),
        ("at", pa.array([0, 1, None, 3]), "not a time", 2),
        ("at", pa.array(["0", "2024-02-30", "2024-02-29", "1e9"]), "not a time", 1),
        ("at", pa.array([0.0, 1.0, 2.0, float("nan")]), "not a time", 3),
    ],
)
def test_invalid_value_reports_row_and_column(name: str, values: pa.Array, kind: str, row: int) -> None:
    raw, faults = parse_table(column(name, values), SCHEMA)
    (fault,) = faults.first
    assert (raw.rows, fault.row, fault.column) == (3, row, "tags" if name == "tag_weights" else name)
    assert fault.kind.startswith(kind)


def test_count_label_can_be_main_and_rejects_negative() -> None:
    schema = Schema(label=None, labels=(Label(name="views", kind="count", missing="fault"),), sparse=("user",), tokens="any")
    raw, faults = parse_table(pa.table({"user": ["a", "b", "c"], "views": [3.0, -1.0, 0.0]}), schema)
    assert (raw.labels["views"].tolist(), faults.counts) == ([3.0, 0.0], {"not a number of 0 or more": 1})
    inputs = ModelInputs.of(schema)
    assert (inputs.label, inputs.label_kind, inputs.label_names) == ("views", "count", schema.label_names)
    assert ModelInputs.of(schema.unlabelled()).label_kind == "binary"


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("0", 0),
        ("1.5", 1_500_000),
        ("-1", -1_000_000),
        ("1970-01-02", 86_400_000_000),
        ("1970-01-01T00:00:01", 1_000_000),
        ("1970-01-01 00:00:01.25", 1_250_000),
        ("1970-01-01T00:00:01Z", 1_000_000),
        ("1970-01-01T02:00:01+02:00", 1_000_000),
        ("2000-02-29", 951_782_400_000_000),
    ],
)
def test_times_in_text(text: str, microseconds: int) -> None:
    assert parsed(column("at", pa.array([text, "0", text, "1"]))).times.tolist() == [microseconds, 0, microseconds, 1_000_000]


def test_other_types_of_time() -> None:
    for values in (
        pa.array([0, 1, 2, 3], pa.timestamp("s", "UTC")),
        pa.array([0, 1000, 2000, 3000], pa.timestamp("ms")),
        pa.array([0, 1, 2, 3]),
        pa.array([0.0, 1.0, 2.0, 3.0]),
    ):
        assert parsed(column("at", values)).times.tolist() == [0, 1_000_000, 2_000_000, 3_000_000]
    rejects("a time must be a date", parse_table, column("at", pa.array([True] * 4)), SCHEMA)


def test_take_and_concatenate_keep_all_fields() -> None:
    raw = parsed()
    order = np.array([3, 0, 0, 2])
    parts = RawBlock.concatenated([raw.take(order[:1]), raw.take(order[1:])])
    preprocessor = preprocessor_of(raw)
    assert_same(preprocessor.encode(parts), preprocessor.encode(raw, order), ignored="row_numbers")


# Vocabulary and encoding ---------------------------------------------------------------------------------------------
def test_shared_vocabulary_returns_same_ids(encoded: tuple[Preprocessor, EncodedRows]) -> None:
    preprocessor, rows = encoded
    item, history = rows.ids[1], rows.ids[SCHEMA.sparse.index("history")]
    assert item[1] == history.values[0]  # 20
    assert item[2] == history.values[3]  # 30
    missing = preprocessor.sparse[1].missing_id
    assert history.lengths.tolist() == [1, 1, 3, 1]
    assert (history.values[1], history.values[5], item[3]) == (missing, missing, missing)
    assert (preprocessor.sparse[1], preprocessor.hotness) == (preprocessor.sparse[2], [1, 1, None, None])
    # 40 was seen in a history alone, and all four are stored once.
    assert preprocessor.vocabulary(1).tolist() == preprocessor.vocabulary(2).tolist()
    assert sorted(preprocessor.vocabulary(1).tolist()) == [10, 20, 30, 40]
    assert len(preprocessor.tokens) == 3 + 4 + 3


def test_shared_vocabulary_counts_all_columns() -> None:
    """20 occurs once as an item and twice in a history: only the sum reaches three."""
    job = Preset(min_count=3).counting(SCHEMA)
    counts, merged = job.empty(), job.empty()
    counts.add_rows(parsed(), 0)
    merged.add(counts.to_table())
    assert make_preprocessor(Preset(min_count=3), SCHEMA, merged).vocabulary(2).tolist() == [20]
    unshared = SCHEMA.unshared()
    assert preprocessor_of(parsed(schema=unshared), unshared, 3).vocabulary(2).tolist() == []


def test_transform_gives_every_column() -> None:
    frame = ROWS.to_pandas()
    inputs = transform(preprocessor_of(parsed()), frame)
    assert list(inputs) == [*("click", "price", "user", "item", "history", "tags", "tag_weights", "like", "seconds", "at")]
    assert inputs["tag_weights"][3].tolist() == [3.0, 4.0]
    assert inputs["like"].isna().tolist() == [False, True, False, True]
    to_score = transform(preprocessor_of(parsed()), frame.drop(columns=["click", "at"]))
    assert list(to_score) == ["price", "user", "item", "history", "tags", "tag_weights"]
    assert isinstance(to_score, pandas.DataFrame)


# On the way to the model ---------------------------------------------------------------------------------------------
def test_arrow_and_preprocessed_parquet_keep_everything(tmp_path: Path, encoded: tuple[Preprocessor, EncodedRows]) -> None:
    preprocessor, rows = encoded
    assert_same(from_arrow(to_arrow(rows))[0], rows)
    file = str(tmp_path / "rows.parquet")
    pq.write_table(named_columns(rows, SCHEMA), file)
    assert_same(from_named_columns(pq.read_table(file), SCHEMA), rows)
    rejects(r"cannot store columns like, seconds, at\. Use --format parquet", check, "npy", preprocessor, labelled=True)


def test_batch_has_labels_id_weights_and_times(encoded: tuple[Preprocessor, EncodedRows]) -> None:
    _, rows = encoded
    slicer = BatchSlicer(iter(from_arrow(to_arrow(rows))), SCHEMA)
    one, two, filler = (slicer.take(size, loss_weight=1.0) for size in (3, 1, 0))
    assert list(one.labels) == ["click", "like", "seconds"]
    np.testing.assert_array_equal(one.labels["like"].numpy(), np.array([1, np.nan, 0], np.float32))
    assert one.timestamps.tolist() == [0, 1, 2]
    assert one.sparse_features["tags"].weights().tolist() == [0.5, 2.0, 1.0, 1.0]
    assert one.sparse_features["history"].weights().tolist() == [1.0] * 5
    assert two.sparse_features["tags"].weights().tolist() == [3.0, 4.0]
    assert filler.sparse_features.weights().tolist() == []  # a weighted collection refuses a batch without weights
    assert {name: len(values) for name, values in filler.labels.items()} == dict.fromkeys(one.labels, 0)


def test_sequences_are_in_separate_field(encoded: tuple[Preprocessor, EncodedRows]) -> None:
    _, rows = encoded
    whole = BatchSlicer(iter([rows]), SCHEMA).take(4, loss_weight=1.0).sparse_features
    schema = SCHEMA.replace(features=SCHEMA.features[:1])
    batch = BatchSlicer(iter([rows]), schema, unpooled=("item", "history")).take(4, loss_weight=1.0)
    for features, keys in (
        (batch.sparse_features, ["user", "tags"]),
        *((x, ["item", "history"]) for x in (batch.sequence_features, batch.to(torch.device("cpu")).sequence_features)),
    ):
        assert features.keys() == keys
        for key in keys:
            assert torch.equal(features[key].values(), whole[key].values())
            assert torch.equal(features[key].lengths(), whole[key].lengths())
