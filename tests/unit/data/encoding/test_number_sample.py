"""Samples of numbers: quantiles, equal for any division of the rows, and the columns they call
skewed.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders.logs import made_from

from rayrec.data.encoding import number_sample
from rayrec.data.encoding.counts import Counts
from rayrec.data.encoding.extension import add_indicators
from rayrec.data.encoding.number_sample import NUM_BINS, QUANTILES, NumberSample
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import RAYREC, make_preprocessor
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.raw_block import RawBlock
from rayrec.schema import Schema
from rayrec.workloads.recsys.candidates import bin_ends

LOG = Schema(label=None, dense=("n", "m"), sparse=("user",), nan="missing", tokens="any")
PRESET = RAYREC.replace(dense="by_skew")


def block(n: Any, m: Any = None) -> RawBlock:
    columns = {"n": n, "m": np.arange(len(n)) / 7 if m is None else m, "user": ["a"] * len(n)}
    raw, faults = parse_table(pa.table(columns), LOG)
    assert not faults.total, faults.first
    return raw


def sample_of(*blocks: RawBlock) -> NumberSample:
    sample = NumberSample(2)
    for each in blocks:
        sample.add_block(each)
    return sample


def normal(rows: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=rows)


def test_quantiles_divide_rows_equally() -> None:
    values = np.random.default_rng(0).permutation(64).astype(float)
    quantiles = sample_of(block(values)).quantiles(0)
    assert quantiles == [0.0, *(2.0 * number - 1 for number in range(1, NUM_BINS + 1))]


def test_few_values_are_all_quantiles() -> None:
    assert sample_of(block([7.0, 3.0, 5.0] * 100)).quantiles(0) == [3.0, 5.0, 7.0]


def test_frequent_value_takes_one_bin() -> None:
    values = np.concatenate([np.zeros(9000), np.arange(1, 1001)])
    quantiles = sample_of(block(values, np.zeros(10_000))).quantiles(0)
    assert quantiles[:2] == [0.0, 0.0]
    np.testing.assert_allclose(np.diff(quantiles[1:]), 1000 / 31, atol=2)


def test_equal_rows_are_counted() -> None:
    raw = block([0.0] * 90 + [5.0] * 10, [1.0] * 100)
    sample = sample_of(raw, raw)
    assert (len(sample.keys), sorted(sample.amounts)) == (2, [20, 180])


def test_missing_numbers_have_no_quantiles() -> None:
    sample = sample_of(block(pa.array([None, 4.0, None, 2.0]), pa.nulls(4, pa.float64())))
    assert (min(sample.quantiles(0)), max(sample.quantiles(0))) == (2.0, 4.0)
    assert sample.quantiles(1) == []
    assert not sample.is_skewed(1)


def test_sample_does_not_depend_on_division(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_sample, "MAX_ROWS", 100)
    values = normal(1000)
    whole = sample_of(block(values, values))
    parts = [block(part, part) for part in np.array_split(values, 7)]
    merged = NumberSample(2)
    for part in reversed(parts):
        merged.merge(sample_of(part))
    for sample in (sample_of(*parts), merged):
        assert sample.keys.tolist() == whole.keys.tolist()
        assert sample.numbers.tobytes() == whole.numbers.tobytes()
    assert len(whole.keys) == 100
    assert whole.quantiles(0)[16] == pytest.approx(np.median(values), abs=0.4)


def test_counts_of_tasks_keep_sample() -> None:
    counting = PRESET.counting(LOG)
    total = counting.total(None, None)
    parts = [block(part) for part in np.array_split(normal(300), 3)]
    for part in parts:
        counts = counting.empty()
        counts.add_rows(part, 0)
        total.add(counts.to_table())
    assert total.sample is not None
    assert total.sample.keys.tolist() == sample_of(*parts).keys.tolist()
    assert total.plain_moments[0].present == 300


def test_log_without_numbers_is_counted() -> None:
    schema = LOG.replace(dense=())
    raw, _ = parse_table(pa.table({"user": ["a", "b"]}), schema)
    counting = PRESET.counting(schema)
    total = counting.total(None, None)
    counts = counting.empty()
    counts.add_rows(raw, 0)
    total.add(counts.to_table())
    preprocessor = make_preprocessor(PRESET, schema, total)
    assert (preprocessor.constants[QUANTILES], bin_ends(preprocessor)) == ({}, ())


@pytest.mark.parametrize(
    ("values", "skewed"),
    [
        pytest.param(normal(2000), False, id="normal"),
        pytest.param(1.7e9 + np.arange(2000.0), False, id="times"),
        pytest.param(np.exp(1.5 * normal(2000)), True, id="amounts"),
        pytest.param(np.where(normal(2000) > 1.6, 5000.0, 0.0), True, id="mostly 0"),
        pytest.param(np.zeros(2000), False, id="constant"),
    ],
)
def test_skewed_columns_take_signed_logarithm(values: np.ndarray, skewed: bool) -> None:
    preprocessor = made_from(block(values), LOG, PRESET)
    assert preprocessor.dense[0].kind == ("signed_log" if skewed else "identity")
    assert preprocessor.dense[1].kind == "identity"
    inputs = preprocessor.encode(block(values)).dense[:, 0]
    assert abs(inputs.mean()) < 1e-3
    assert inputs.std() == pytest.approx(0.0 if values.std() == 0 else 1.0, abs=0.1)


def test_preprocessor_states_quantiles(tmp_path: Any) -> None:
    made_from(block(normal(200)), LOG, PRESET).save(str(tmp_path))
    stored = Preprocessor.load(str(tmp_path))
    quantiles = stored.constants[QUANTILES]
    assert list(quantiles) == ["n", "m"]
    assert quantiles["n"] == sorted(quantiles["n"])
    assert len(quantiles["n"]) == NUM_BINS + 1


def test_bins_are_quantiles_of_inputs() -> None:
    raw = block(pa.array([None, *np.exp(2 * normal(500))]))
    preprocessor = made_from(raw, LOG, PRESET)
    n, _, indicator = bin_ends(preprocessor)
    inputs = preprocessor.encode(raw).dense[1:, 0]
    shares = [(inputs <= end).mean() for end in n]
    np.testing.assert_allclose(shares, np.arange(NUM_BINS + 1) / NUM_BINS, atol=0.003)
    assert indicator == (0.0, 1.0)


def test_other_presets_have_no_quantiles() -> None:
    preprocessor = made_from(block(normal(200)), LOG, RAYREC)
    assert QUANTILES not in preprocessor.constants
    assert preprocessor.dense[0].kind == "signed_log"
    assert bin_ends(preprocessor) == ()


def test_criteo_logs_keep_signed_logarithm() -> None:
    criteo = Schema(label=None, dense=("n",), sparse=("s",), tokens="hexadecimal")
    counting = PRESET.counting(criteo)
    assert (counting.samples, counting.transform) == (False, None)
    assert isinstance(counting.empty(), Counts)
    assert make_preprocessor(PRESET, criteo, counting.empty()).dense[0].kind == "signed_log"


def test_warm_start_keeps_transform_of_network() -> None:
    old = made_from(block(normal(200)), LOG, PRESET)
    new = made_from(block(np.exp(3 * normal(200))), LOG, PRESET)
    continued, _ = add_indicators(old, new)
    assert (old.dense[0].kind, new.dense[0].kind) == ("identity", "signed_log")
    assert continued.dense == (old.dense[0], new.dense[1])
