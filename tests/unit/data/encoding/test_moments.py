"""Moments of numbers: standardized inputs of every transform and spread, whatever the division into
tasks.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders.faults import rejects
from builders.logs import made_from
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.data.encoding.moments import Moments
from rayrec.data.encoding.presets import Preset, make_preprocessor
from rayrec.data.encoding.rules import DenseColumn
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.logs.text_parser import parse
from rayrec.data.raw_block import RawBlock
from rayrec.schema import Schema

CHECKED = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
NUMBER = Schema(
    label=None,
    dense=("x",),
    sparse=("s",),
    tokens="any",
)
HOUR = 1.7e9 + np.arange(3600.0)


def block(values: Sequence[float] | np.ndarray | pa.Array) -> RawBlock:
    raw, faults = parse_table(pa.table({"x": values, "s": ["a"] * len(values)}), NUMBER)
    assert not faults.total, faults.first
    return raw


def inputs_of(values: np.ndarray, **rules: Any) -> np.ndarray:
    """Return the standardized inputs of the counted rows."""
    raw = block(values)
    return made_from(raw, NUMBER, Preset(**rules)).encode(raw).dense[:, 0].astype(np.float64)


def check_standardized(inputs: np.ndarray) -> None:
    assert abs(inputs.mean()) < 1e-3
    assert abs(inputs.std() - 1) < 1e-3


RULES = (
    {"dense": "identity"},
    {"dense": "identity", "dense_lowest": 3},
    {"dense": "log", "dense_shift": 2.0, "dense_lowest": 0},
    {"dense": "log", "dense_shift": 0.5, "dense_lowest": 0},
    {"dense": "log", "dense_shift": 1e6, "dense_lowest": -100},
    {"dense": "signed_log"},
)


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(map(str, rules.values())))
@given(
    mean=st.sampled_from([0.0, 1e-6, 1.0, 500.0, 1.7e9, 1e15]),
    spread=st.sampled_from([1e-12, 1e-9, 1e-6, 1e-3, 0.1, 0.3]),
    seed=st.integers(0, 99),
)
@CHECKED
def test_inputs_have_mean_0_and_deviation_1(
    rules: dict[str, Any],
    mean: float,
    spread: float,
    seed: int,
) -> None:
    # Uniform values have no outliers, which bounds would change.
    values = mean + (mean or 1.0) * spread * np.random.default_rng(seed).uniform(-1, 1, 400)
    rule = DenseColumn(rules["dense"], rules.get("dense_shift", 1.0), rules.get("dense_lowest", 0))
    # Below, the numbers themselves, or their logarithms, differ in the last bits only, and the
    # error of one is no longer small.
    if len(np.unique(rule.transform(values))) > 50:
        check_standardized(inputs_of(values, **rules))


@pytest.mark.parametrize(
    ("values", "rules"),
    [
        pytest.param(
            np.random.default_rng(0).uniform(300, 700, 1000),
            {"dense": "identity"},
            id="identity",
        ),
        pytest.param(HOUR, {"dense": "identity"}, id="hour"),
        pytest.param(HOUR, {"dense": "signed_log"}, id="hour, logarithm"),
        pytest.param(np.linspace(0, 1e-6, 500), {"dense": "signed_log"}, id="small rates"),
        pytest.param(np.linspace(-1e-9, 1e-9, 500), {"dense": "identity"}, id="around zero"),
        pytest.param(
            1e9 * (1 + 1e-12 * np.linspace(-1, 1, 4001)),
            {"dense": "signed_log"},
            id="last digits",
        ),
    ],
)
def test_inputs_of_examples_are_standardized(values: np.ndarray, rules: dict[str, Any]) -> None:
    check_standardized(inputs_of(values, **rules))


@pytest.mark.parametrize("value", [0.0, -5.0, 1.7e9, 1e-300, 1e18])
@pytest.mark.parametrize(
    "rules",
    [{"dense": "identity"}, {"dense": "signed_log"}],
    ids=lambda rules: rules["dense"],
)
def test_constant_column_is_zero(value: float, rules: dict[str, Any]) -> None:
    assert inputs_of(np.full(7, value), **rules).tolist() == [0.0] * 7


def test_criteo_integers_use_transform_of_preset() -> None:
    schema = Schema(
        tokens="hexadecimal",
        label=None,
        dense=("x",),
        sparse=("s",),
    )
    values = np.random.default_rng(0).integers(300, 700, 500)
    raw, _ = parse(schema, b"".join(b"%d\t%08x\n" % (value, 1) for value in values))
    for rules in (RULES[0], RULES[2], RULES[5]):
        check_standardized(
            made_from(raw, schema, Preset(**rules)).encode(raw).dense[:, 0].astype(np.float64)
        )


@given(
    values=st.lists(
        st.floats(-1e18, 1e18) | st.sampled_from([1.7e9, 1.7e9 + 1, -0.0, 5e-324, 1e-200]),
        min_size=1,
        max_size=60,
    ),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    dense=st.sampled_from(["identity", "signed_log"]),
)
@CHECKED
def test_preprocessor_is_independent_of_tasks(
    values: list[float],
    cuts: list[int],
    dense: Any,
) -> None:
    raw = block(values)
    preset = Preset(dense=dense)
    expected = made_from(raw, NUMBER, preset)
    borders = [0, *sorted(min(cut, raw.rows) for cut in cuts), raw.rows]
    total = preset.counting(NUMBER).empty()
    for start, stop in reversed(list(itertools.pairwise(borders))):
        part = preset.counting(NUMBER).empty()
        part.add_rows(raw.cut(start, stop), start)
        total.add(part.to_table())
    assert make_preprocessor(preset, NUMBER, total).hash() == expected.hash()


@given(
    st.lists(
        st.floats(
            allow_nan=False,
            allow_infinity=False,
            max_value=1e150,
            min_value=-1e150,
        ),
        min_size=1,
        max_size=40,
    )
)
@CHECKED
def test_sums_match_fsum(values: list[float]) -> None:
    moments = Moments()
    moments.add_values(np.array(values))
    mean, low = moments.mean()
    assert mean + low == pytest.approx(math.fsum(values) / len(values), rel=1e-15, abs=1e-320)
    assert moments.total == sum(map(exact, values))
    assert (moments.lowest, moments.highest) == (min(values), max(values))
    assert moments.present == len(values)


def exact(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return (numerator << 1074) // denominator


def test_bins_have_room_for_many_rows() -> None:
    values = np.full((1 << 20) + 3, -1e18)
    moments = Moments()
    moments.add_values(values)
    assert moments.total == -exact(1e18) * len(values)
    assert moments.squares == exact(1e18) ** 2 * len(values)
    assert moments.deviation() == 0.0


def test_numbers_without_logarithm_are_rejected() -> None:
    raw = block([1.0, -3.0, -1.0, 5.0])
    rejects(
        r"column x: 2 numbers have no logarithm after dense_shift 1\. Raise it",
        made_from,
        raw,
        NUMBER,
        Preset(dense="log"),
    )
