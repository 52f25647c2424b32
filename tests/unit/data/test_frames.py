"""DataFrames and Datasets become the model inputs that training reads of the same rows as text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import rayrec
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.logs.csv_reader import read_csv
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.logs.text_parser import parse
from rayrec.data.materialized.formats import named_columns
from rayrec.schema import Schema

CRITEO = Schema(tokens="hexadecimal", label="y", dense=("a", "b"), sparse=("s", "t"))
CLICKS = Schema(
    label="liked",
    weight="weight",
    dense=("age",),
    sparse=("user", "genres"),
    lists=("genres",),
    tokens="any",
    delimiter=",",
)
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


def criteo(**changes: object) -> Preprocessor:
    return Preprocessor(
        preset="test",
        schema=CRITEO,
        dense=(DenseColumn(mean=0.5, scale=2.0, missing_value=-7.5), DenseColumn(mean=-0.25, scale=0.3)),
        sparse=(SparseColumn(4, 2), SparseColumn(1000, None)),
        tokens=np.array([5, 7], np.uint32),
        **changes,  # type: ignore[arg-type]
    )


def clicks() -> Preprocessor:
    return Preprocessor(
        preset="test",
        schema=CLICKS,
        dense=(DenseColumn(),),
        sparse=(SparseColumn(50, None), SparseColumn(60, None)),
        tokens=np.zeros(0, np.uint64),
    )


def trained_on(preprocessor: Preprocessor, text: bytes) -> pa.Table:
    raw, faults = parse(preprocessor.schema, text)
    assert not faults.total
    return named_columns(preprocessor.encode(raw), preprocessor.inputs)


@pytest.mark.parametrize("file_minimum", [None, {"": -4, "day_0": -9}])
def test_a_frame_is_what_training_reads_of_its_rows_as_text(file_minimum: dict[str, int] | None) -> None:
    preprocessor = criteo(file_minimum=file_minimum)
    inputs = rayrec.transform(preprocessor, FRAME)
    assert pa.Table.from_pandas(inputs, preserve_index=False).replace_schema_metadata() == trained_on(
        preprocessor, TEXT
    )
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
    assert list(inputs) == ["a", "b", "s", "t"]
    assert inputs.s.tolist() == [2, 1, 3]


def test_no_rows() -> None:
    inputs = rayrec.transform(criteo(), FRAME.iloc[:0])
    assert len(inputs) == 0
    assert list(inputs) == ["y", "a", "b", "s", "t"]


@pytest.mark.parametrize("place", ["", "preprocessor"])
def test_a_folder_of_a_preprocessor_or_of_a_run(tmp_path: Path, place: str) -> None:
    criteo().save(str(tmp_path / place))
    pd.testing.assert_frame_equal(rayrec.transform(tmp_path, FRAME), rayrec.transform(criteo(), FRAME))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": [1, 2.5, 3]}, "DataFrame at row 1: not an integer in column a; correct or remove it, since"),
        (
            {"s": ["5", "00000005", "x"]},
            r"DataFrame at row 0: not 8 hexadecimal digits in column s \(2 of 3 rows are faulty\);",
        ),
        ({"y": [1, 0, None]}, "DataFrame at row 2: label is missing in column y;"),
        ({"s": [1, 2, 3]}, "DataFrame: column s is of type int64; 8 hexadecimal digits as text are needed"),
        ({"t": ["000003e8", 3, None]}, "DataFrame: .*column t.*; give each column one type"),
    ],
)
def test_a_faulty_row_is_refused(changes: dict[str, list[object]], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        rayrec.transform(criteo(), FRAME.assign(**changes))
    assert "\n" not in str(raised.value)


def test_other_data_is_refused() -> None:
    with pytest.raises(InputError, match="DataFrame: has no column named s; it has"):
        rayrec.transform(criteo(), FRAME.drop(columns="s"))
    with pytest.raises(InputError, match=r"transform: dict is neither a pandas DataFrame nor a ray\.data\.Dataset"):
        rayrec.transform(criteo(), {"a": [1]})  # type: ignore[call-overload]


@pytest.mark.ray
def test_a_dataset(local_ray: None) -> None:
    import ray
    import ray.data

    columns = FRAME.drop(columns="unused")
    dataset = ray.data.from_pandas([columns, columns.iloc[:2]])
    inputs = pa.concat_tables(ray.get(rayrec.transform(criteo(), dataset).to_arrow_refs()))
    first = trained_on(criteo(), TEXT)
    assert inputs.replace_schema_metadata() == pa.concat_tables([first, first.slice(0, 2)])
    faulty = rayrec.transform(criteo(), ray.data.from_pandas(columns.assign(a=[1, 2, 2.5])))
    with pytest.raises(ray.exceptions.RayTaskError, match="Dataset, in a block at row 2: not an integer in column a"):
        faulty.materialize()
