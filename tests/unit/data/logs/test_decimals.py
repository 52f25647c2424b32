"""Categories that are decimal numbers: whole ones of any size are exact, as in text."""

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import RAYREC, make_preprocessor
from rayrec.data.formats.csv_reader import read_csv_text
from rayrec.data.frames import transform
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.raw_block import RawBlock
from rayrec.inference.export.plain_encoder import Encoder
from rayrec.schema import Schema

IDS = Schema(label=None, sparse=("id",), delimiter=",")
BOTH = Schema(
    label=None,
    sparse=("id", "ids"),
    lists=("ids",),
    group="id",
    delimiter=",",
)
LARGE = [
    "9007199254740993",
    "9007199254740995",
    "-9007199254740993",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "99999999999999999999",
    "7",
    "0",
]


def parse_texts(values: Sequence[str], schema: Schema = IDS) -> RawBlock:
    columns = tuple(schema.sparse)
    text = "".join(",".join([value] * len(columns)) + "\n" for value in values).encode()
    raw, faults = parse_table(
        read_csv_text(
            text,
            schema,
            delimiter=",",
            columns=columns,
            path="",
        ),
        schema,
    )
    assert faults.total == 0
    return raw


def decimals(values: Sequence[str | None], kind: pa.DataType) -> pa.Array:
    return pa.array([None if value is None else Decimal(value) for value in values], kind)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(pa.decimal128(20, 0), id="number of Spark"),
        pytest.param(pa.decimal128(38, 10), id="number with a scale"),
        pytest.param(pa.decimal256(50, 2), id="wide"),
    ],
)
def test_large_decimals_match_text(kind: pa.DataType) -> None:
    raw, faults = parse_table(pa.table({"id": decimals(LARGE, kind)}), IDS)
    assert faults.total == 0
    np.testing.assert_array_equal(raw.categories, parse_texts(LARGE).categories)
    assert len(np.unique(raw.categories)) == len(LARGE)


def test_decimals_of_negative_scale_match_text() -> None:
    values = ["12345678901234567800", "100"]
    raw, _ = parse_table(pa.table({"id": decimals(values, pa.decimal128(18, -2))}), IDS)
    np.testing.assert_array_equal(raw.categories, parse_texts(values).categories)


def test_decimals_in_lists_and_groups_are_exact() -> None:
    column = decimals(LARGE, pa.decimal128(20, 0))
    lists = pa.ListArray.from_arrays(pa.array(range(len(LARGE) + 1), pa.int32()), column)
    raw, faults = parse_table(pa.table({"id": column, "ids": lists}), BOTH)
    expected = parse_texts(LARGE, BOTH)
    assert faults.total == 0
    np.testing.assert_array_equal(raw.lists[0].values, expected.lists[0].values)
    np.testing.assert_array_equal(raw.group_keys(), expected.group_keys())


def test_fractions_and_null_are_not_categories() -> None:
    raw, faults = parse_table(
        pa.table({"id": decimals(["1.50", None, "2.00"], pa.decimal128(20, 2))}),
        IDS,
    )
    assert faults.counts == {"not a whole number in range": 1}
    assert (raw.categories[:, 0].tolist(), raw.missing[:, 0].tolist()) == ([0, 2], [True, False])


def test_decimals_of_integers_are_64_bit() -> None:
    schema = IDS.replace(integers=("id",))
    raw, faults = parse_table(pa.table({"id": decimals(LARGE, pa.decimal128(20, 0))}), schema)
    assert faults.counts == {"not a whole number in range": 4}
    np.testing.assert_array_equal(
        raw.categories.view(np.int64)[:, 0],
        [int(v) for v in LARGE if -(2**63) <= int(v) < 2**63],
    )


def test_decimal_counts_of_criteo_are_exact() -> None:
    schema = Schema(label=None, dense=("count",), tokens="hexadecimal")
    values = ["9007199254740993", "-999999999999999999"]
    raw, faults = parse_table(
        pa.table({"count": decimals([*values, "1.5"], pa.decimal128(20, 1))}),
        schema,
    )
    assert (raw.numbers[:, 0].tolist(), faults.total) == ([int(value) for value in values], 1)


def counted(values: Sequence[str]) -> Preprocessor:
    preset = RAYREC.replace(min_count=1)
    counts = preset.counting(IDS).empty()
    counts.add_rows(parse_texts(values), 0)
    return make_preprocessor(preset, IDS, counts)


def test_decimals_of_frames_and_encoder_are_exact(tmp_path: Path) -> None:
    preprocessor = counted(LARGE)
    expected = preprocessor.encode(parse_texts(LARGE)).ids[0]
    assert len(np.unique(expected)) == len(LARGE)
    frame = pd.DataFrame({"id": [Decimal(value) for value in LARGE]})
    np.testing.assert_array_equal(transform(preprocessor, frame)["id"], expected)
    preprocessor.save(str(tmp_path / "prepared"))
    _, (ids,) = Encoder(str(tmp_path / "prepared")).encode(frame.to_dict("records"))
    np.testing.assert_array_equal(ids, expected)
