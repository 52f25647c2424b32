"""Schema fields on values (missing markers, list marks, label rules): equal inputs of files,
requests, frames and encode.py.
"""

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from builders.faults import rejects
from hypothesis import given
from hypothesis import strategies as st

from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import RAYREC, make_preprocessor
from rayrec.data.encoding.rules import bracket_items
from rayrec.data.formats.csv_reader import read_csv, read_csv_text
from rayrec.data.frames import transform_table
from rayrec.data.log_source import LogSource
from rayrec.data.logs import column_parser
from rayrec.data.logs.column_values import (
    EMPTY,
    REJECTED,
    VALUE,
    parse_numbers,
    split_lists,
    type_error,
)
from rayrec.data.logs.table_parser import check_table, parse_table
from rayrec.data.materialized.formats import from_named_columns, named_columns
from rayrec.data.raw_block import RawBlock
from rayrec.inference.export.plain_encoder import Encoder
from rayrec.schema import Feature, Label, LabelRule, Schema, load_schema
from rayrec.serve.requests import RequestBody
from rayrec.serve.row_readers import make_reader

SCHEMA = Schema(
    label=None,
    dense=("age", "price"),
    sparse=("user", "tags", "genres", "words"),
    lists=("tags", "genres", "words"),
    integers=("user",),
    missing=("NA", "\\N", "?", "-1"),
    features=(
        Feature(name="tags", list_delimiter="^"),
        Feature(name="genres", list_delimiter="brackets"),
        Feature(name="words", list_delimiter=","),
    ),
)
ROWS: list[dict[str, Any]] = [
    {
        "age": "31",
        "price": "2.5",
        "user": "7",
        "tags": "a^b",
        "genres": "['x', 'y']",
        "words": "the,end",
    },
    {
        "age": "NA",
        "price": "-1.0",
        "user": "NA",
        "tags": "NA^b",
        "genres": '["x", "ü, y"]',
        "words": "end, the",
    },
    {
        "age": "?",
        "price": "\\N",
        "user": "-1",
        "tags": "?",
        "genres": "['-1', None]",
        "words": "",
    },
    {
        "age": "-1",
        "price": "7",
        "user": "07",
        "tags": " a ^ b ",
        "genres": "[]",
        "words": "NA",
    },
    {
        "age": "",
        "price": "-12",
        "user": "",
        "tags": "",
        "genres": "",
        "words": "the",
    },
]
PLAIN: list[dict[str, Any]] = [
    {
        "age": 31,
        "price": 2.5,
        "user": 7,
        "tags": ["a", "b"],
        "genres": ["x", "y"],
        "words": ["the", "end"],
    },
    {
        "age": None,
        "price": None,
        "user": None,
        "tags": ["b"],
        "genres": ["x", "ü, y"],
        "words": ["end", "the"],
    },
    {
        "age": None,
        "price": None,
        "user": None,
        "tags": [],
        "genres": [],
        "words": [],
    },
    {
        "age": None,
        "price": 7,
        "user": 7,
        "tags": ["a", "b"],
        "genres": [],
        "words": [],
    },
    {
        "age": None,
        "price": -12,
        "user": None,
        "tags": [],
        "genres": [],
        "words": ["the"],
    },
]
"""The same rows without markers and marks."""


def csv_text(rows: list[dict[str, Any]]) -> bytes:
    def field(text: str) -> str:
        return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text

    lines = [",".join(rows[0]), *(",".join(map(field, row.values())) for row in rows)]
    return ("\n".join(lines) + "\n").encode()


def build_preprocessor(raw: RawBlock) -> Preprocessor:
    preset = RAYREC.replace(min_count=1)
    counts = preset.counting(raw.schema).empty()
    counts.add_rows(raw, 0)
    return make_preprocessor(preset, raw.schema, counts)


def json_block(rows: list[dict[str, Any]], schema: Schema) -> RawBlock:
    raw, outcomes = make_reader(schema).read([RequestBody("json", len(rows), 0, rows=rows)])
    assert outcomes == [slice(0, len(rows))]
    return raw


def same_block(block: RawBlock, expected: RawBlock) -> None:
    for name in ("numbers", "categories", "missing"):
        np.testing.assert_array_equal(getattr(block, name), getattr(expected, name))
    for column, other in zip(block.lists, expected.lists, strict=True):
        np.testing.assert_array_equal(column.values, other.values)
        np.testing.assert_array_equal(column.lengths, other.lengths)


def same_rows(rows: EncodedRows, dense: np.ndarray, ids: list[Any]) -> None:
    np.testing.assert_array_equal(rows.dense, dense)
    for column, other in zip(rows.ids, ids, strict=True):
        if isinstance(column, JaggedIds):
            values, lengths = (
                (other.values, other.lengths) if isinstance(other, JaggedIds) else other
            )
            np.testing.assert_array_equal(column.values, values)
            np.testing.assert_array_equal(column.lengths, lengths)
        else:
            np.testing.assert_array_equal(column, other)


EXPECTED = parse_table(pa.Table.from_pylist(PLAIN), SCHEMA.replace(missing=()))[0]


def test_csv_file_matches_plain_rows(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(csv_text(ROWS))
    table = next(read_csv(str(tmp_path / "log.csv"), SCHEMA))
    raw, faults = parse_table(table, SCHEMA)
    assert not faults.total
    same_block(raw, EXPECTED)


def test_parquet_strings_match_plain_rows() -> None:
    raw, faults = parse_table(pa.Table.from_pylist(ROWS), SCHEMA)
    assert not faults.total
    same_block(raw, EXPECTED)


def test_csv_request_matches_plain_rows() -> None:
    raw, outcomes = make_reader(SCHEMA).read(
        [RequestBody("csv", len(ROWS) + 1, 0, text=csv_text(ROWS), delimiter=",")]
    )
    assert outcomes == [slice(0, len(ROWS))]
    same_block(raw, EXPECTED)


def test_json_request_matches_plain_rows() -> None:
    marked = [dict(row) for row in PLAIN]
    marked[1] |= {
        "age": "NA",
        "price": -1.0,
        "user": "NA",
        "tags": ["NA", "b"],
    }
    marked[2] |= {
        "age": "?",
        "price": "\\N",
        "user": -1,
        "tags": ["?"],
        "genres": ["-1", -1, None],
    }
    marked[3] |= {"age": -1, "user": "07", "words": ["NA"]}
    same_block(json_block(marked, SCHEMA), EXPECTED)


def test_encode_py_matches_training(tmp_path: Path) -> None:
    preprocessor = build_preprocessor(parse_table(pa.Table.from_pylist(ROWS), SCHEMA)[0])
    preprocessor.save(str(tmp_path))
    for rows in (ROWS, PLAIN):
        same_rows(preprocessor.encode(EXPECTED), *Encoder(str(tmp_path)).encode(rows))


def test_transform_matches_training() -> None:
    preprocessor = build_preprocessor(parse_table(pa.Table.from_pylist(ROWS), SCHEMA)[0])
    rows = from_named_columns(
        transform_table(pa.Table.from_pylist(ROWS), preprocessor, source="rows"),
        preprocessor.inputs,
    )
    expected = preprocessor.encode(EXPECTED)
    same_rows(rows, expected.dense, list(expected.ids))


def test_saved_preprocessor_keeps_value_fields(tmp_path: Path) -> None:
    schema = SCHEMA.replace(label={"name": "rating", "at_least": 4.0})
    preprocessor = build_preprocessor(RawBlock.empty(schema))
    preprocessor.save(str(tmp_path))
    assert Preprocessor.load(str(tmp_path)).schema == schema


def test_old_schema_keeps_description() -> None:
    described = Schema(
        label="y",
        dense=("a",),
        sparse=("s", "t"),
        lists=("t",),
        features=(Feature(name="t"),),
    ).describe()
    assert not {"missing", "label_rule"} & described.keys()
    assert "list_delimiter" not in described["features"][0]


@pytest.mark.parametrize(
    ("array", "missing"),
    [
        pytest.param(pa.array([1, -1, 0]), [False, True, False], id="integers"),
        pytest.param(pa.array([1.0, -1.0, None]), [False, True, True], id="floats"),
        pytest.param(pa.array(["1", "-1.0", "NA"]), [False, True, True], id="text"),
        pytest.param(
            pa.array(["NA", "x", "1"]).dictionary_encode(),
            [True, None, False],
            id="dictionary",
        ),
    ],
)
def test_markers_in_numbers_by_type(array: pa.Array, missing: list[bool | None]) -> None:
    schema = Schema(label=None, dense=("a",), missing=("-1", "NA"))
    raw, faults = parse_table(pa.table({"a": array}), schema)
    assert raw.missing[:, 0].tolist() == [each for each in missing if each is not None]
    assert faults.total == missing.count(None)


def test_marker_zero_keeps_faults() -> None:
    raw, faults = parse_table(
        pa.table({"a": ["0", "x", "2"]}),
        Schema(label=None, dense=("a",), missing=("0",)),
    )
    assert (raw.missing[:, 0].tolist(), faults.total) == ([True, False], 1)


RATINGS = ["5", "3", "4.0", "", "x"]


def clicks(values: Any, rule: LabelRule, **fields: Any) -> tuple[list[float], dict[str, int]]:
    schema = Schema(
        label="y",
        label_rule=rule,
        dense=("a",),
        **fields,
    )
    raw, faults = parse_table(pa.table({"y": values, "a": np.arange(len(values))}), schema)
    return raw.labels["y"].tolist(), faults.counts


def test_label_at_least_splits_numbers() -> None:
    assert clicks(RATINGS, LabelRule(at_least=4)) == (
        [1, 0, 1],
        {"label is missing": 1, "not a finite number": 1},
    )


@pytest.mark.parametrize(
    ("values", "positive", "expected"),
    [
        pytest.param(["yes", "no", "maybe"], "yes", [1, 0, 0], id="words"),
        pytest.param([">50K", "<=50K"], ">50K", [1, 0], id="census"),
        pytest.param([-1, 1, -1], "1", [0, 1, 0], id="signs"),
        pytest.param(["-1", "1.0", "+1"], "1", [0, 1, 1], id="signs in text"),
        pytest.param([1.0, 2.0], "2", [0, 1], id="floats"),
        pytest.param([True, False], "true", [1, 0], id="booleans"),
    ],
)
def test_label_positive_matches_values(
    values: list[Any],
    positive: str,
    expected: list[float],
) -> None:
    assert clicks(values, LabelRule(positive=(positive,))) == (expected, {})


def test_label_markers_are_missing_labels() -> None:
    assert clicks(["1", "-1", "?", None], LabelRule(positive=("1",)), missing=("?", "-1")) == (
        [1, 0],
        {"label is missing": 2},
    )


def test_further_label_markers_are_missing() -> None:
    schema = Schema(
        label="y",
        labels=(Label(name="bought"),),
        dense=("a",),
        missing=("NA", "-1"),
    )
    raw, faults = parse_table(pa.table({"y": [0, 1], "bought": ["NA", "1"], "a": [1, 2]}), schema)
    assert np.isnan(raw.labels["bought"]).tolist() == [True, False]
    assert not faults.total


def test_request_ignores_label_rule() -> None:
    schema = SCHEMA.replace(label={"name": "answer", "positive": ["yes"]})
    same_block(json_block([{**row, "answer": "perhaps"} for row in PLAIN], schema), EXPECTED)


def test_text_outside_brackets_is_fault() -> None:
    table = pa.Table.from_pylist(
        [
            *ROWS,
            {**ROWS[0], "genres": "x, y"},
            {**ROWS[0], "genres": "['x'"},
        ]
    )
    _, faults = parse_table(table, SCHEMA)
    assert faults.counts == {"not a list in brackets": 2}


def test_list_weights_use_mark_of_list() -> None:
    schema = Schema(
        label=None,
        sparse=("s",),
        lists=("s",),
        features=(Feature(name="s", weights="w", list_delimiter="^"),),
    )
    raw, faults = parse_table(pa.table({"s": ["a^b", "a"], "w": ["1^0.5", "2"]}), schema)
    assert raw.lists[0].weights is not None
    assert (raw.lists[0].weights.tolist(), faults.total) == ([1, 0.5, 2], 0)


AGED = Schema(
    label=None,
    sparse=("item",),
    lists=("item",),
    features=(Feature(name="item", ages="age", max_length=3),),
)


def test_ages_become_seconds_to_next_item() -> None:
    """Without missing items, and exact for any age."""
    year = 31_536_000.0
    items = [["a", "b", None, "c"], [], ["d"], ["a", "b", "c", "d"], ["e", "f"], ["g", "h"]]
    ages = [
        [10.0, 7.5, None, 1.0],
        [],
        None,
        [9 * year + 4.25, 9 * year + 1.25, 9 * year, 0.5],
        [0.0, -2.0],
        [None, None],
    ]
    raw, faults = parse_table(pa.table({"item": items, "age": ages}), AGED)
    assert raw.lists[0].weights is not None
    gaps = np.split(raw.lists[0].weights, raw.lists[0].offsets[1:-1])
    assert [own.tolist() for own in gaps] == [
        [2.5, 6.5, 1.0],
        [],
        [0.0],
        [1.25, 9 * year, 0.5],
        [2.0, -2.0],
        [0.0, 0.0],
    ]
    assert not faults.total


def test_seconds_between_items_are_encoded_alike(tmp_path: Path) -> None:
    """By the Preprocessor, encode.py, and in preprocessed rows. Unknown ages, and those of rows
    without items, are 0.
    """
    rows = [
        {"item": ["a", None, "b"], "age": [70.0, None, 2.5]},
        {"item": [], "age": None},
        {"item": ["b", "c"], "age": None},
        {"item": ["a", "b", "c", "d"], "age": [9.0, 8.0, 5.0, 1.0]},
    ]
    raw, _ = parse_table(pa.Table.from_pylist(rows), AGED)
    preprocessor = build_preprocessor(raw)
    preprocessor.save(str(tmp_path))
    encoded = preprocessor.encode(raw)
    (ids,) = encoded.ids
    assert isinstance(ids, JaggedIds)
    assert ids.weights is not None
    assert ids.weights.tolist() == [67.5, 2.5, 0, 0, 0, 3, 4, 1]
    (stored,) = from_named_columns(named_columns(encoded, AGED), AGED).ids
    assert isinstance(stored, JaggedIds)
    _, (plain,) = Encoder(str(tmp_path)).encode(rows)
    for other in (plain, (stored.values, stored.lengths, stored.weights)):
        for part, expected in zip(other, (ids.values, ids.lengths, ids.weights), strict=True):
            np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("ages", [[1.0], [1.0, None], [1.0, float("inf")], [1.0, 2.0, 3.0]])
def test_other_ages_are_faults(ages: list[float | None]) -> None:
    _, faults = parse_table(pa.table({"item": [["a", "b"]], "age": [ages]}), AGED)
    assert faults.counts == {"ages are not as many numbers as categories": 1}


def test_settings_of_ages_are_checked() -> None:
    rejects("must have weights or ages, got both", Feature, name="a", weights="w", ages="t")
    plain = {"label": None, "sparse": ("a",), "features": (Feature(name="a", ages="t"),)}
    rejects("has max_length, weights, ages or list_delimiter", Schema, **plain)


def test_list_mark_may_be_delimiter_in_quotes() -> None:
    schema = Schema(
        label=None,
        sparse=("s",),
        lists=("s",),
        delimiter=",",
        features=(Feature(name="s", list_delimiter=","),),
    )
    table = read_csv_text(
        b'"a,b"\nc\n',
        schema,
        delimiter=",",
        columns=["s"],
        path="rows",
    )
    assert parse_table(table, schema)[0].lists[0].lengths.tolist() == [2, 1]


def test_brackets_match_python() -> None:
    rng = random.Random(0)
    texts = [
        "[" + "".join(rng.choice("ab,'\"[] \\1nN") for _ in range(rng.randrange(12))) + "]"
        for _ in range(20_000)
    ]
    lists, bad = split_lists(pa.array(texts), "brackets", trim=False)
    for text, items, is_bad in zip(texts, lists.to_pylist(), bad.tolist(), strict=True):
        expected = bracket_items(text)
        assert is_bad == (expected is None), text
        if expected is not None:
            assert [item.decode() for item in items if item] == [
                item for item in expected if item
            ], text


def test_brackets_read_json_and_python() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        items = [
            "".join(rng.choice("aüß😀,'\"\\\n []") for _ in range(rng.randrange(1, 6)))
            for _ in range(rng.randrange(4))
        ]
        for text in (
            json.dumps(items),
            json.dumps(items, ensure_ascii=False),
            repr(items),
        ):
            assert [item for item in bracket_items(text) or [] if item] == items


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{label: {name: y, at_least: 3, positive: [a]}, dense: [a]}",
            "either at_least or positive",
        ),
        ("{label: {name: y, at_least: .nan}, dense: [a]}", "must be a finite number"),
        ("{label: {at_least: 3}, dense: [a]}", "label must name a column"),
        ("{label: {name: y, at_leas: 3}, dense: [a]}", "did you mean 'at_least'?"),
        (
            "{label: {name: y, at_least: 3}, dense: [a], tokens: hexadecimal}",
            "label_rule needs tokens: any",
        ),
        ("{label: y, dense: [a], missing: [NA], tokens: hexadecimal}", "missing needs tokens: any"),
        ("{sparse: [a], features: [{name: a, list_delimiter: ';'}]}", "need a column of lists"),
        (
            "{sparse: [a], lists: [a], features: [{name: a, list_delimiter: '::'}]}",
            "one ASCII character",
        ),
    ],
)
def test_schema_rejects_value_fields(text: str, message: str) -> None:
    assert message in rejects("", load_schema, text, "schema.yaml")


def test_schema_lists_are_text_as_written() -> None:
    schema = load_schema(
        "{label: {name: y, positive: [yes, 1]}, dense: [no, 2020], missing: [null, NULL, ~, -1, "
        "NaN]}",
        "x",
    )
    assert schema.dense == ("no", "2020")
    assert schema.missing == ("null", "NULL", "~", "-1", "NaN")
    assert schema.label_rule == LabelRule(positive=("yes", "1"))


def test_other_label_has_no_rule() -> None:
    schema = Schema(label="y", label_rule=LabelRule(at_least=4), dense=("a",))
    assert schema.replace(label="z").label_rule is None
    assert schema.replace(dense=("b",)).label_rule == schema.label_rule


def test_timestamp_may_be_dense() -> None:
    schema = Schema(label=None, dense=("at",), timestamp="at")
    assert schema.columns == ("at",)
    raw, _ = parse_table(pa.table({"at": [5, 7]}), schema)
    assert raw.times is not None
    assert raw.times.tolist() == [5_000_000, 7_000_000]
    preprocessor = build_preprocessor(raw)
    encoded = preprocessor.encode(raw)
    again = from_named_columns(
        transform_table(pa.table({"at": [5, 7]}), preprocessor, source="rows"),
        schema,
    )
    np.testing.assert_array_equal(again.dense, encoded.dense)
    np.testing.assert_array_equal(again.timestamps, raw.times)


def test_hint_skips_empty_labels(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        "stars,user\n" + "".join(f"{star},u\n" for star in (1, 5, 3, 2, 4, "")) * 20
    )
    line = rejects(
        "",
        LogSource.at(str(tmp_path / "log.csv")).check_head,
        Schema(label="stars", sparse=("user",)),
    )
    assert (
        "found 1, 2, 3, 4, 5 in column stars; derive one, such as stars >= 4, or write in the "
        "schema" in line
    )


AT = 1_574_000_000  # 2019-11-17 14:13:20 UTC


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        pytest.param(AT, AT, id="seconds"),
        pytest.param(AT * 1000 + 250, AT + 0.25, id="milliseconds"),
        pytest.param(AT * 10**6, AT, id="microseconds"),
        pytest.param(float(AT), AT, id="float"),
        pytest.param(str(AT * 1000), AT, id="milliseconds in text"),
        pytest.param("2019-11-17T14:13:20Z", AT, id="ISO 8601"),
        pytest.param("2019/11/17 14:13:20", AT, id="slashes"),
        pytest.param("11/17/2019 2:13:20 PM", AT, id="United States"),
        pytest.param("17.11.2019 14:13:20", AT, id="dots"),
        pytest.param("17.11.2019", AT - AT % 86400, id="date with dots"),
        pytest.param("17/11/2019", None, id="month 17"),
        pytest.param("soon", None, id="word"),
    ],
)
def test_timestamp_reads_common_formats(value: Any, seconds: float | None) -> None:
    schema = Schema(label=None, dense=("a",), timestamp="at")
    raw, faults = parse_table(pa.table({"a": [1], "at": [value]}), schema)
    assert raw.times is not None
    assert raw.times.tolist() == ([] if seconds is None else [seconds * 10**6])
    assert faults.total == (seconds is None)


def test_dense_times_are_equal_in_files_and_requests() -> None:
    schema = Schema(label=None, dense=("at",))
    _, faults = parse_table(pa.table({"at": ["11/17/2019", "2019-11-17"]}), schema)
    assert faults.counts == {"not a finite number": 1}


def test_date_is_no_weight() -> None:
    schema = Schema(label="y", weight="w", dense=("a",))
    _, faults = parse_table(pa.table({"y": [0, 1], "w": ["2019-11-17", "2"], "a": [1, 2]}), schema)
    assert faults.total == 1


@pytest.mark.parametrize(
    "text",
    [
        "0.1",
        "-0.0",
        "+2.50",
        "9007199254740992",
        "9007199254740993",
        "123456789012345678",
        "1234567890123456789",
        "1e22",
        "1e23",
        "5e-22",
        "7.2057594037927933e16",
        "0.000000000000000000000000000001e40",
        ".5",
        "5.",
        "2.2250738585072011e-308",
        "8.5e-400",
    ],
)
def test_text_numbers_are_nearest_doubles(text: str) -> None:
    values, status = parse_numbers(
        pa.array([text, "x", None]),
        "number",
        type_error(pa.schema([]), ""),
    )
    assert values.tobytes() == np.array([float(text), 0, 0]).tobytes()
    assert status.tolist() == [VALUE, REJECTED, EMPTY]


NUMBERS = st.text("0179+-.eE ", max_size=4) | st.text("019.", min_size=17, max_size=21)


@given(st.lists(st.none() | NUMBERS | st.sampled_from(["nan", "inf", "true", "1e18"]), min_size=1))
def test_checked_rows_match_parsed_rows(texts: list[str | None]) -> None:
    schema = Schema(label=None, dense=("price",))
    table = pa.table({"price": pa.array(texts, pa.string())})
    is_valid, faults = check_table(table, schema)
    rows, expected = parse_table(table, schema)
    assert is_valid.sum() == rows.rows
    assert faults.to_dict() == expected.to_dict()


PAIRS = Schema(
    label=None,
    dense=("a", "b"),
    sparse=("u", "v", "k", "l"),
    integers=("k", "l"),
    missing=("NA", "-1"),
)
VALUES = st.sampled_from(
    [None, "", "NA", "-1", "-1.0", "7", "07", " 7", "2.5", "1e19", "nan", "x", "true", "2024-05-01"]
)


@given(
    st.lists(st.tuples(*[VALUES] * 6), max_size=6),
    st.sampled_from([pa.large_string(), pa.large_binary(), pa.string()]),
    st.sampled_from(["fault", "missing"]),
)
def test_few_rows_are_parsed_like_many(
    rows: list[tuple[str | None, ...]], kind: pa.DataType, nan: str
) -> None:
    schema = PAIRS.replace(nan=nan)
    columns = zip(*rows, strict=True) if rows else [()] * 6
    names = (*PAIRS.dense, *PAIRS.sparse)
    table = pa.table(
        {name: pa.array(column, kind) for name, column in zip(names, columns, strict=True)}
    )
    together, faults = parse_table(table, schema)
    with mock.patch.object(column_parser, "_MAX_JOINED_VALUES", 0):
        expected, expected_faults = parse_table(table, schema)
    assert faults == expected_faults
    same_block(together, expected)


def test_columns_of_different_types_are_parsed_separately() -> None:
    numbers = {"a": [1.5, None], "b": [float("inf"), 2.0]}
    table = pa.table({**numbers, "u": [1, 2], "v": ["x", "y"], "k": [1, None], "l": ["3", "4"]})
    block, faults = parse_table(table, PAIRS)
    assert faults.counts == {"not a finite number": 1}
    assert faults.first[0].column == "b"
    np.testing.assert_array_equal(block.numbers, [[0.0, 2.0]])
    np.testing.assert_array_equal(block.missing, [[True, False, False, False, True, False]])
