"""Frames, Arrow arrays and groups of rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from builders.faults import fails_with, rejects

import rayrec
from rayrec.data.arrow import arrow_bytes, arrow_numbers, arrow_texts, numpy_of
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.logs.csv_reader import read_csv
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.logs.text_parser import parse
from rayrec.data.materialized.formats import named_columns
from rayrec.schema import Schema

CRITEO = Schema(tokens="hexadecimal", label="y", dense=("a", "b"), sparse=("s", "t"))
LISTS: dict[str, Any] = {"dense": ("age",), "sparse": ("user", "genres"), "lists": ("genres",)}
CLICKS = Schema(label="liked", weight="weight", tokens="any", delimiter=",", **LISTS)
TEXT = b"1\t2\t-3\t00000005\t000003e8\n0\t\t70000\t\t000003e9\n1\t5\t\t00000007\t\n"
FRAME = pd.DataFrame(
    {
        "t": ["000003e8", "000003e9", None],
        "unused": [object(), 1, "x"],  # of no type that Arrow has
        "a": [2, None, 5],
        "b": [-3.0, 70000.0, np.nan],
        "s": ["00000005", None, "00000007"],
        "y": [1, 0, 1],
    },
    index=[30, 10, 20],
)


def criteo(**changes: Any) -> Preprocessor:
    dense = (DenseColumn(mean=0.5, scale=2.0, missing_value=-7.5), DenseColumn(mean=-0.25, scale=0.3))
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
    assert pa.Table.from_pandas(inputs, preserve_index=False).replace_schema_metadata() == trained_on(preprocessor, TEXT)
    assert inputs.index.tolist() == [30, 10, 20]
    assert inputs.dtypes.astype(str).tolist() == ["int8", "float32", "float32", "int32", "int32"]


def test_lists_and_weights(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("liked,age,user,genres,weight\n1,30,u1,a|b,2\n0,,7,,1.5\n1,4.5,u2,c,0\n")
    frame = pd.DataFrame(
        {
            "liked": [True, False, True],
            "age": [30, None, 4.5],
            "user": pd.Categorical(["u1", "7", "u2"]),
            "genres": [["a", "b"], None, ["c"]],
            "weight": [2, 1.5, 0],
        }
    )
    raw, _ = parse_table(pa.concat_tables(read_csv(str(tmp_path / "log.csv"), CLICKS)), CLICKS)
    expected = named_columns(clicks().encode(raw), CLICKS).to_pandas()
    inputs = rayrec.transform(clicks(), frame)
    pd.testing.assert_frame_equal(inputs, expected, check_exact=True)
    assert [len(ids) for ids in inputs.genres] == [2, 1, 1]
    assert list(rayrec.transform(clicks(), frame.drop(columns="weight"))) == ["liked", "age", "user", "genres"]


def test_rows_to_score_have_no_label() -> None:
    inputs = rayrec.transform(criteo(), FRAME.drop(columns="y"))
    assert (list(inputs), inputs.s.tolist()) == (["a", "b", "s", "t"], [2, 1, 3])
    none = rayrec.transform(criteo(), FRAME.iloc[:0])
    assert (list(none), len(none)) == (["y", "a", "b", "s", "t"], 0)


@pytest.mark.parametrize("place", ["", "preprocessor"])
def test_transform_accepts_folders(tmp_path: Path, place: str) -> None:
    criteo().save(str(tmp_path / place))
    pd.testing.assert_frame_equal(rayrec.transform(tmp_path, FRAME), rayrec.transform(criteo(), FRAME))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": [1, 2.5, 3]}, "DataFrame at row 1: not an integer in column a; fix or remove it, since"),
        ({"s": ["5", "00000005", "x"]}, r"DataFrame at row 0: not 8 hexadecimal digits in column s \(2 of 3 rows are invalid\);"),
        ({"y": [1, 0, None]}, "DataFrame at row 2: label is missing in column y;"),
        ({"s": [1, 2, 3]}, "DataFrame: column s is of type int64; 8 hexadecimal digits as text are needed"),
        ({"t": ["000003e8", 3, None]}, "DataFrame: .*column t.*; give each column one type"),
    ],
)
def test_transform_rejects_invalid_row(changes: dict[str, list[object]], message: str) -> None:
    rejects(message, rayrec.transform, criteo(), FRAME.assign(**changes))


def test_transform_rejects_other_data() -> None:
    rejects("DataFrame: has no column named s; it has", rayrec.transform, criteo(), FRAME.drop(columns="s"))
    rejects("data must be a pandas DataFrame or a ray.data.Dataset, got dict", rayrec.transform, criteo(), {"a": [1]})


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
    fails_with(ray.exceptions.RayTaskError, "Dataset, in a block at row 2: not an integer in column a", faulty.materialize)


# Arrow arrays are what pyarrow's own conversions make, and come back as they were ------------------------------------
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64])
@pytest.mark.parametrize("rows", [0, 1, 19])
def test_numbers(dtype: type, rows: int) -> None:
    values = np.arange(2 * rows).astype(dtype)[::2]  # not contiguous
    array = arrow_numbers(values)
    assert array.equals(pa.array(values))
    array.validate(full=True)
    back = numpy_of(array.slice(rows // 2))
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, values[rows // 2 :])
    np.testing.assert_array_equal(numpy_of(pa.chunked_array([array, array[:1]])), [*values, *values[:1]])
    assert numpy_of(pa.chunked_array([], array.type)).dtype == dtype


def test_arrow_numbers_have_missing_ones_and_share_memory() -> None:
    values, missing = np.arange(11.0), np.arange(11) % 3 == 0
    array = arrow_numbers(values, missing)
    assert array.equals(pa.array(values, mask=missing))
    assert arrow_numbers(values, missing.astype(np.uint8)).equals(array)
    np.testing.assert_array_equal(numpy_of(array.drop_null()), values[~missing])
    fails_with(AssertionError, "", numpy_of, array)
    values = np.arange(4)
    assert np.shares_memory(numpy_of(arrow_numbers(values)), values)


@pytest.mark.parametrize("texts", [[], [""], ["a", "", "käse"]], ids=repr)
def test_texts_and_bytes(texts: list[str]) -> None:
    assert arrow_texts(texts).equals(pa.array(texts, pa.large_string()))
    values = [text.encode() for text in texts]
    assert arrow_bytes(values).equals(pa.array(values, pa.large_binary()))


# Keys of the values that rows are grouped by -------------------------------------------------------------------------
@pytest.mark.parametrize(("tokens", "one", "other"), [("hexadecimal", "0000000b", "00000000"), ("any", "ann", "bob")])
def test_keys_of_categories(tokens: Any, one: str, other: str) -> None:
    schema = Schema(label="click", sparse=("item", "user"), group="user", tokens=tokens)
    table = pa.table({"click": [0, 1, 0, 1, 1], "item": ["0000000a"] * 5, "user": [one, other, None, one, ""]})
    raw, faults = parse_table(table, schema)
    keys = raw.group_keys()
    assert (faults.total, keys.dtype) == (0, np.int64)
    assert keys[0] == keys[3] != keys[1]
    assert keys[2] == keys[4] == 0
    assert 0 not in keys[[0, 1]]
    assert raw.group_keys(np.array([3, 1])).tolist() == keys[[3, 1]].tolist()


def test_group_requires_single_category_column() -> None:
    schema = Schema(tokens="hexadecimal", label="click", dense=("age",), sparse=("item", "user"), group="user")
    for group in ("age", "nobody"):
        rejects(rf"group must be a column of sparse with one category per row, got {group}", schema.replace, group=group)
    rejects(r"group must be .*, got tags", Schema, sparse=("tags",), lists=("tags",), tokens="any", delimiter=",", group="tags")
