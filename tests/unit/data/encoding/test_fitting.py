"""Constants of formulas from training rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.faults import rejects
from builders.logs import open_index

from rayrec.data.encoding import fitting
from rayrec.data.encoding.fitting import (
    fit,
    fit_to_table,
    mean_and_deviation,
    quantile_edges,
    with_constants_of,
)
from rayrec.data.engine import ThreadEngine
from rayrec.data.logs.table_parser import derived_columns, parse_table
from rayrec.schema import Feature, FittedFunction, Schema


def schema_of(**formulas: str) -> Schema:
    features = tuple(Feature(name=name, formula=text) for name, text in formulas.items())
    return Schema(label=None, dense=("x",), features=features)


def constants_of(schema: Schema) -> dict[tuple[str, int], tuple[float, ...]]:
    return {(each.feature, each.number): each.constants for each in schema.fitted}


def bins_of(values: np.ndarray, num_bins: int) -> list[int]:
    """Return the number of values in each bin."""
    edges = quantile_edges(values, num_bins)
    return np.bincount(np.searchsorted(np.array(edges), values, side="right")).tolist()


def test_bins_have_equally_many_values() -> None:
    values = np.random.default_rng(0).permutation(1000) / 7
    assert bins_of(values, 4) == [250] * 4
    assert bins_of(values, 7) == [143, 143, 143, 142, 143, 143, 143]


@pytest.mark.parametrize(
    ("values", "num_bins", "edges"),
    [
        pytest.param([0.0, 1.0], 2, (1.0,), id="two values"),
        pytest.param([0.0] * 9 + [5.0], 4, (5.0,), id="frequent lowest value"),
        pytest.param([1.0, *[5.0] * 9], 4, (5.0,), id="frequent highest value"),
        pytest.param([1.0, *[5.0] * 8, 9.0], 3, (5.0, 9.0), id="frequent value between"),
        pytest.param([3.0] * 4, 3, (), id="one value"),
        pytest.param([], 3, (), id="none"),
        pytest.param([-0.0, 0.0, 1.0, 1.0], 2, (1.0,), id="zeros of both signs"),
        pytest.param([1.0, 2.0, 3.0], 1, (), id="one bin"),
        pytest.param([3.0, 1.0, 2.0], 9, (2.0, 3.0), id="more bins than values"),
    ],
)
def test_value_belongs_to_one_bin(
    values: list[float],
    num_bins: int,
    edges: tuple[float, ...],
) -> None:
    assert quantile_edges(np.array(values), num_bins) == edges


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 3.0], (2.0, 1.0)), ([4.0, 4.0], (4.0, 1.0)), ([], (0.0, 1.0))],
)
def test_deviation_is_never_zero(values: list[float], expected: tuple[float, float]) -> None:
    assert mean_and_deviation(np.array(values)) == expected


def test_inner_functions_are_fitted_first() -> None:
    x = np.random.default_rng(1).lognormal(size=500)
    schema = schema_of(level="quantile(zscore(x) + y, 3)", y="zscore(log(x)) * 2")
    table = pa.table({"x": x})
    fitted = fit_to_table(schema, table, path="")
    logarithm = np.log1p(x)
    y = (logarithm - logarithm.mean()) / logarithm.std() * 2
    edges = quantile_edges((x - x.mean()) / x.std() + y, 3)
    constants = constants_of(fitted)
    assert list(constants) == [("y", 0), ("level", 0), ("level", 1)]
    np.testing.assert_allclose(constants["level", 1], edges, rtol=1e-12)
    columns = derived_columns(table, fitted)
    np.testing.assert_allclose(columns["y"], y, rtol=1e-9, atol=1e-12)
    assert sorted(np.unique(columns["level"].to_pylist(), return_counts=True)[1]) == [166, 167, 167]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    x = np.random.default_rng(2).normal(size=5000)
    table = pa.table({"x": pa.array(x, mask=np.arange(5000) % 9 == 0)})
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=700)
    return tmp_path / "log.parquet"


def values_of(log: Path, start: int, stop: int) -> Any:
    return pq.read_table(log)["x"][start:stop].drop_null().to_numpy()


def test_training_rows_alone_count(log: Path) -> None:
    schema = schema_of(level="quantile(x, 5)", score="zscore(x)")
    fitted = fit(schema, open_index(log, schema), (500, 3210), ThreadEngine(2))
    values = values_of(log, 500, 3210)
    assert constants_of(fitted) == {
        ("level", 0): quantile_edges(values, 5),
        ("score", 0): mean_and_deviation(values),
    }


def test_invalid_rows_do_not_count(tmp_path: Path) -> None:
    rows = [f"{label},{n}" for n, label in enumerate([1, 0, 7, 1, 0, "no"])]
    (tmp_path / "log.csv").write_text("\n".join(["label,x", *rows]) + "\n")
    schema = schema_of(score="zscore(x)").replace(label="label", delimiter=",")
    index = open_index(tmp_path / "log.csv", schema, cache=tmp_path / "cache")
    assert index.rows == 4
    fitted = fit(schema, index, (0, 4), ThreadEngine(2))
    assert constants_of(fitted)["score", 0] == mean_and_deviation(np.array([0.0, 1, 3, 4]))


def test_long_log_is_sampled_evenly(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "MAX_ROWS", 640)
    schema = schema_of(score="zscore(x)")
    fitted = fit(schema, open_index(log, schema), (0, 5000), ThreadEngine(2))
    starts = [4990 * number // 63 for number in range(64)]
    values = np.concatenate([values_of(log, start, start + 10) for start in starts])
    assert constants_of(fitted)["score", 0] == mean_and_deviation(values)


def test_unfitted_formula_is_rejected() -> None:
    schema = schema_of(level="quantile(x, 5)")
    rejects("quantile has constants from the training rows", parse_table, pa.table({}), schema)
    for fitted in (
        FittedFunction(feature="level", number=1, constants=(1.0,)),
        FittedFunction(feature="other", number=0, constants=(1.0,)),
    ):
        rejects("fitted", schema.replace, fitted=(fitted,))


def test_equal_formulas_keep_constants() -> None:
    old = schema_of(level="quantile(x, 5)", score="zscore(x)")
    old = fit_to_table(old, pa.table({"x": np.arange(50.0)}), path="")
    new = with_constants_of(schema_of(level="quantile(x, 4)", score="zscore(x)"), old)
    assert [each.feature for each in new.fitted] == ["score"]
    assert constants_of(new)["score", 0] == constants_of(old)["score", 0]
