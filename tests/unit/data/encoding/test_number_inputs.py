"""Inputs of numbers in logs other than Criteo's: missing ones, their indicators, bounds, and counts
of numbers beyond.
"""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders.click_models import hashed_preprocessor
from builders.logs import made_from

from rayrec.data.encoding.clipping import (
    ClipCounter,
    ClipSum,
    ClipTotals,
    arrow_flags,
    clipping_report,
    clipping_warning,
)
from rayrec.data.encoding.encoder import indicator_names
from rayrec.data.encoding.extension import add_indicators, extend
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import MLPERF_V1, RAYREC, TORCHREC_2024, Preset
from rayrec.data.encoding.rules import DenseColumn
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.logs.text_parser import parse
from rayrec.data.raw_block import RawBlock
from rayrec.inference.export.write import encoder_program
from rayrec.schema import Schema
from rayrec.serve.requests import RequestBody
from rayrec.serve.row_readers import make_reader

LOG = Schema(
    label=None,
    dense=("seen", "age"),
    sparse=("user",),
    optional=("age",),
    nan="missing",
    tokens="any",
)
DAY = 1.7e9 + np.arange(100) * 864.0
AGES = np.linspace(20.0, 60.0, 100)


def block(seen: Any, age: Any, schema: Schema = LOG) -> RawBlock:
    columns = {"seen": seen, "user": ["a"] * len(seen)} | ({} if age is None else {"age": age})
    raw, faults = parse_table(pa.table(columns), schema)
    assert not faults.total, faults.first
    return raw


def with_gaps(values: np.ndarray, rows: list[int]) -> pa.Array:
    return pa.array(values, mask=np.isin(np.arange(len(values)), rows))


def trained(preset: Preset = RAYREC) -> Preprocessor:
    """Return the Preprocessor of a day of rows, with gaps in the ages."""
    return made_from(block(DAY, with_gaps(AGES, [3, 50])), LOG, preset)


# -- Missing numbers
def test_missing_number_is_mean_with_indicator() -> None:
    preprocessor = made_from(block(with_gaps(DAY, [0, 7]), AGES), LOG, RAYREC)
    assert preprocessor.inputs.dense == ("seen", "age", "seen is missing")
    dense = preprocessor.encode(block(with_gaps(DAY, [0, 7]), AGES)).dense
    assert dense[[0, 7]][:, [0, 2]].tolist() == [[0.0, 1.0]] * 2
    assert dense[1:7, 2].tolist() == [0.0] * 6
    assert np.abs(dense[:, 0]).max() < 2


@pytest.mark.parametrize(
    "age",
    [
        pytest.param(pa.array([None, 30.0]), id="null"),
        pytest.param(pa.array([float("nan"), 30.0]), id="nan"),
        pytest.param(pa.array(["", "30"]), id="empty text"),
        pytest.param(None, id="absent column"),
    ],
)
def test_all_kinds_of_missing_numbers_are_equal(age: Any) -> None:
    dense = trained().encode(block(DAY[:2], age)).dense
    assert dense[0, 1:].tolist() == [0.0, 1.0]
    assert dense[1, 2] == (1.0 if age is None else 0.0)


def test_absent_json_field_is_missing_number() -> None:
    raw, _ = make_reader(LOG).read(
        [
            RequestBody(
                "json",
                3,
                0,
                rows=[
                    {"seen": 1.7e9},
                    {"seen": 1.7e9, "age": None},
                    {},
                ],
            )
        ]
    )
    dense = trained().encode(raw).dense
    assert dense[:, 1:].tolist() == [[0.0, 1.0]] * 3
    assert dense[2, 0] == 0.0


@pytest.fixture
def preprocessor() -> Preprocessor:
    return trained()


def test_encode_py_gives_indicators(tmp_path: Path, preprocessor: Preprocessor) -> None:
    preprocessor.save(str(tmp_path))
    (tmp_path / "encode.py").write_text(encoder_program())
    encoder = runpy.run_path(str(tmp_path / "encode.py"))["Encoder"](str(tmp_path))
    rows = [
        {"seen": DAY[5], "age": 30.0},
        {"seen": DAY[99] + 1e9, "age": None},
        {"age": float("nan")},
        {},
    ]
    dense, _ = encoder.encode(rows)
    seen = [row.get("seen") for row in rows]
    expected = preprocessor.encode(
        block(pa.array(seen, pa.float64()), pa.array([30.0, None, float("nan"), None]))
    )
    assert dense.tobytes() == expected.dense.tobytes()
    assert dense[:, 2].tolist() == [0.0, 1.0, 1.0, 1.0]


def test_column_without_gaps_has_no_indicator() -> None:
    preprocessor = made_from(block(DAY, AGES), LOG, RAYREC)
    assert preprocessor.inputs.dense == ("seen", "age")
    assert preprocessor.encode(block(DAY[:1], None)).dense[0, 1] == 0.0


def test_empty_column_has_no_indicator_and_ignores_values() -> None:
    preprocessor = made_from(block(DAY, pa.nulls(100, pa.float64())), LOG, RAYREC)
    assert preprocessor.inputs.dense == ("seen", "age")
    assert np.abs(preprocessor.encode(block(DAY[:2], [1e9, -3.0])).dense[:, 1]).max() < 1e-5


def test_indicator_names_avoid_columns() -> None:
    schema = LOG.replace(sparse=("age is missing", "seen is missing*"))
    assert indicator_names(("age", "seen"), schema) == ("age is missing*", "seen is missing")


RAW = (MLPERF_V1, TORCHREC_2024, RAYREC.replace(dense_standardized=False))


@pytest.mark.parametrize("preset", RAW, ids=lambda preset: preset.name)
def test_presets_without_standardizing_keep_raw_zero(preset: Preset) -> None:
    preprocessor = trained(preset)
    zero = DenseColumn(preset.dense, preset.dense_shift, preset.dense_lowest or 0).apply(
        np.zeros(1)
    )[0]
    assert preprocessor.inputs.dense == LOG.dense
    assert preprocessor.encode(block(DAY[:1] * 1e3, None)).dense[0, 1] == zero
    assert all(rule.lower is rule.upper is None for rule in preprocessor.dense)


def test_criteo_logs_keep_raw_zero() -> None:
    schema = Schema(
        label=None,
        dense=("n",),
        sparse=("s",),
        tokens="hexadecimal",
    )
    raw, _ = parse(
        schema,
        b"".join(
            b"%s\t%08x\n" % (b"" if row % 7 == 0 else b"%d" % (10**6 + row), 1)
            for row in range(100)
        ),
    )
    preprocessor = made_from(raw, schema, RAYREC)
    (rule,) = preprocessor.dense
    assert set(preprocessor.describe()["dense"][0]) == {
        "kind",
        "shift",
        "lowest",
        "mean",
        "scale",
        "missing_value",
    }
    assert rule.missing_value == np.float32(-rule.mean * rule.scale)
    assert preprocessor.inputs == schema


def test_preprocessors_of_earlier_versions_encode_as_before() -> None:
    before = hashed_preprocessor(
        [9],
        LOG,
        dense=(DenseColumn(mean=21.25, scale=1e5, missing_value=-2e6), DenseColumn()),
    )
    assert [set(rule) for rule in before.describe()["dense"]] == [
        {
            "kind",
            "shift",
            "lowest",
            "mean",
            "scale",
            "missing_value",
        }
    ] * 2
    dense = before.encode(block(pa.array([None, 1.7e9]), None)).dense
    expected = [-2e6, np.float32((np.log1p(1.7e9) - 21.25) * 1e5)]
    assert dense.tolist() == [[value, 0.0] for value in expected]


def test_extension_keeps_numbers_and_indicators(preprocessor: Preprocessor) -> None:
    counts = RAYREC.counting(LOG).empty()
    counts.add_rows(block(with_gaps(DAY, [2]), AGES), 0)
    extended = extend(preprocessor, RAYREC, counts).preprocessor
    assert extended.dense == preprocessor.dense
    assert extended.inputs.dense == ("seen", "age", "age is missing")


def test_warm_start_keeps_indicators_of_network() -> None:
    ages = trained()
    times = made_from(block(with_gaps(DAY, [1]), AGES), LOG, RAYREC)
    continued, lost = add_indicators(ages, times)
    assert (continued.inputs.dense, lost) == (ages.inputs.dense, ["seen"])
    assert [rule.mean for rule in continued.dense] == [rule.mean for rule in times.dense]
    assert continued.encode(block(with_gaps(DAY[:1], [0]), None)).dense.tolist() == [
        [0.0, 0.0, 1.0]
    ]
    assert add_indicators(ages, ages) == (ages, [])


# -- Bounds
def test_inputs_stay_in_counted_range(preprocessor: Preprocessor) -> None:
    dense = preprocessor.encode(block([DAY[0] - 1e6, DAY[-1] + 1e6, 0.0, 1e18], [30.0] * 4)).dense[
        :,
        0,
    ]
    counted = preprocessor.encode(block(DAY, AGES)).dense[:, 0]
    np.testing.assert_allclose(
        dense,
        [
            counted.min(),
            counted.max(),
            counted.min(),
            counted.max(),
        ],
        atol=3e-6,
    )
    assert ClipCounter(preprocessor).count(preprocessor.encode(block(DAY, AGES)).dense)[
        0
    ].tolist() == [100, 0]


def test_outlier_inputs_are_clipped_at_eight() -> None:
    values = np.append(np.random.default_rng(0).normal(size=999), [1e6])
    raw = block(np.resize(DAY, 1000), values)
    preprocessor = made_from(raw, LOG, Preset(dense="identity"))
    assert preprocessor.encode(raw).dense[-1, 1] == 8.0
    assert ClipCounter(preprocessor).count(preprocessor.encode(raw).dense)[1].tolist() == [1000, 1]


def test_bounded_logarithm_is_never_nan() -> None:
    raw = block(DAY, AGES)
    preprocessor = made_from(raw, LOG, Preset(dense="log"))
    dense = preprocessor.encode(block(DAY[:3], [-1.0, -5.0, 20.0])).dense[:, 1]
    assert dense[0] == dense[1] == preprocessor.dense[1].lower
    assert np.isfinite(dense).all()


def test_kernel_bounds_match_rule() -> None:
    schema = Schema(
        label=None,
        dense=("n",),
        sparse=("s",),
        tokens="hexadecimal",
    )
    values = np.concatenate([np.arange(-3000, 3000), [-(10**17), 10**17]])
    raw, _ = parse(schema, b"".join(b"%d\t%08x\n" % (value, 1) for value in values))
    for kind in ("identity", "log"):
        rule = DenseColumn(
            kind,
            2.0,
            mean=3.0,
            mean_low=1e-3,
            scale=0.5,
            lower=-1.5,
            upper=2.25,
        )
        preprocessor = hashed_preprocessor([9], schema, dense=(rule,))
        for rows in (np.arange(raw.rows), np.arange(100)):  # Few rows are computed one by one
            encoded = preprocessor.encode(raw, rows).dense[:, 0]
            np.testing.assert_allclose(encoded, rule.apply(values[rows]), rtol=1e-6)
            assert (encoded.min(), encoded.max()) == (-1.5, rule.apply(values[rows]).max())


@pytest.mark.parametrize(
    "changes",
    [
        {"lower": 1.0},
        {"lower": 1.0, "upper": 0.0},
        {"lower": float("nan"), "upper": 1.0},
        {"indicator": 1},
    ],
)
def test_damaged_bounds_are_rejected(changes: dict[str, Any]) -> None:
    rule = dataclasses.replace(DenseColumn(), **changes)
    with pytest.raises(Exception, match="column seen has the invalid rule"):
        hashed_preprocessor([9], LOG, dense=(rule, DenseColumn())).check()


# -- Counts
LATER = block(DAY + 86400, with_gaps(AGES, list(range(0, 100, 2))))
"""Rows of the next day, half of them without an age."""


def test_clipped_numbers_are_counted_by_column(preprocessor: Preprocessor) -> None:
    dense = preprocessor.encode(LATER).dense
    counter = ClipCounter(preprocessor)
    total = ClipSum(preprocessor)
    assert counter.names == ("seen", "age")
    assert counter.count(dense).tolist() == [[100, 100], [50, 0]]
    total.add(dense[:40])
    total.add(dense[40:])
    assert total.counts.tolist() == [[100, 100], [50, 0]]
    assert clipping_report(dict(zip(total.names, total.counts.tolist(), strict=True))) == {
        "seen": {"clipped": 100, "share": 1.0}
    }


def test_clipped_columns_of_tables_are_totalled(preprocessor: Preprocessor) -> None:
    flags = ClipCounter(preprocessor).columns(preprocessor.encode(LATER).dense)
    table = pa.table(
        {"row": np.arange(100), **{name: arrow_flags(values) for name, values in flags.items()}}
    )
    totals = ClipTotals(("seen", "age"))
    assert totals.strip(table.slice(10)).column_names == ["row"]
    assert totals.counts == {"seen": [90, 90], "age": [45, 0]}


def test_clipping_above_one_percent_warns() -> None:
    warning = clipping_warning({"seen": (1000, 11), "age": (1000, 10), "price": (0, 0)})
    assert warning.startswith(
        "beyond the range of the training rows, and used as its end: seen (1.1% of its values). "
        "Train again"
    )
    assert clipping_warning({"age": (1000, 10)}) == ""


def test_earlier_preprocessors_have_no_bounds() -> None:
    before = hashed_preprocessor([9], LOG)
    assert ClipCounter(before).names == ()
    assert ClipCounter(before).count(before.encode(LATER).dense).shape == (0, 2)
