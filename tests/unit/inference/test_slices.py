"""Metrics by slices: one slice per row, with the log's names, and their report."""

import numpy as np
import pyarrow as pa
import pytest
from builders.faults import rejects

from rayrec.inference.config import EvaluationConfig
from rayrec.inference.evaluate import ScoredRows, slices_of
from rayrec.inference.result_tables import evaluation_text

HEXADECIMAL = pa.chunked_array([pa.array([0xA, 0xB, 0xA, None], pa.uint32()), pa.array([0xC, 0xA, 0xB], pa.uint32())])
TEXT = pa.chunked_array(
    [pa.array(part, pa.large_string()).dictionary_encode() for part in (["x", "y", "x", None], ["z", "x", "y"])]
)


def _found(by: str, values: pa.ChunkedArray, most: int = 10) -> dict[str, list[int]]:
    result = slices_of(by, values, max_values=most)
    assert sorted(np.concatenate([chunk.rows for chunk in result]).tolist()) == list(range(len(values)))
    return {chunk.name: chunk.rows.tolist() for chunk in result}


def test_slices_by_value_frequency_and_day_keep_order() -> None:
    by_count = [("0000000a", [0, 2, 5]), ("0000000b", [1, 6]), ("0000000c", [4]), ("(missing)", [3])]
    assert list(_found("c", HEXADECIMAL).items()) == by_count
    assert _found("c", HEXADECIMAL, most=1) == {"0000000a": [0, 2, 5], "(others)": [1, 4, 6], "(missing)": [3]}
    assert _found("c", TEXT, most=2) == {"x": [0, 2, 5], "y": [1, 6], "(others)": [4], "(missing)": [3]}
    assert _found("i", pa.chunked_array([pa.array([-3, 10**17, -3, None])])) == {"-3": [0, 2], str(10**17): [1], "(missing)": [3]}
    names = pa.array(["1", "2-9", "(not in the vocabulary)"], pa.large_string())
    blocks = [[2, None, 1], [0, 2]]
    values = pa.chunked_array([pa.DictionaryArray.from_arrays(pa.array(block, pa.int32()), names) for block in blocks])
    expected = [("1", [3]), ("2-9", [2]), ("(not in the vocabulary)", [0, 4]), ("(missing)", [1])]
    assert list(_found("frequency:c", values).items()) == expected

    def days(codes: list[int]) -> pa.Array:
        names = pa.array(["day_9", "day_10", "day_11"], pa.large_string())
        return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), names)

    assert list(_found("day", pa.chunked_array([days([0, 0, 1]), days([2])]))) == ["day_9", "day_10", "day_11"]
    assert list(_found("day", pa.chunked_array([days([1, 1])]))) == ["day_10"]


def _table(rows: slice) -> pa.Table:
    return pa.table(
        {
            "row": np.arange(7)[rows],
            "logit": np.linspace(-1, 1, 7, dtype=np.float32)[rows],
            "label": np.array([0, 1, 0, 1, 1, 0, 1], np.float32)[rows],
            "key:c": HEXADECIMAL.combine_chunks()[rows],
            "key:t": TEXT.unify_dictionaries().combine_chunks()[rows],
        }
    )


def test_scored_rows_are_independent_of_table_sizes() -> None:
    full, chunks, other = ScoredRows(["c", "t"]), ScoredRows(["c", "t"]), ScoredRows()
    full.update(_table(slice(0, 7)))
    for start, stop in [(0, 3), (3, 4), (4, 7)]:
        chunks.update(_table(slice(start, stop)))
    other.update(_table(slice(1, 7)))
    assert (full.rows, full.checksums) == (chunks.rows, chunks.checksums)
    assert other.checksums != full.checksums
    np.testing.assert_array_equal(full.logits, chunks.logits)
    np.testing.assert_array_equal(full.labels, chunks.labels)
    for name, expected in (("c", HEXADECIMAL), ("t", TEXT)):
        assert full.key(name).to_pylist() == chunks.key(name).to_pylist() == expected.to_pylist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slice_top": 0}, "slice_top: must be at least 1, got 0"),
        ({"slice_by": ("day", "day")}, "slice_by: values must be unique"),
        ({"confidence": 1.5}, "confidence: must be between 0 and 1, such as 0.95, got 1.5"),
        ({"resamples": 1}, "resamples: must be at least 2, got 1"),
    ],
)
def test_evaluation_options_are_checked(options: dict[str, object], message: str) -> None:
    rejects(message, EvaluationConfig().updated, options)


METRICS = {"auroc": 0.75, "logloss": 0.5, "normalized_entropy": None, "calibration": 1.01, "rows": 20_000}
DIFFERENCES = {
    "auroc": {"difference": 0.01, "low": 0.005, "high": 0.015, "p_value": 0.001, "method": "delong"},
    "normalized_entropy": {"difference": None, "low": None, "high": None, "p_value": None, "method": "bootstrap"},
}


def test_evaluation_text_is_readable() -> None:
    plain = evaluation_text({**METRICS, "checkpoint": "runs/a"})
    assert plain.splitlines()[0].split() == ["auroc", "0.75000"]
    assert "runs/a" in plain
    result = {
        **METRICS,
        "label_rate": 0.25,
        "intervals": {"auroc": [0.74, 0.76], "normalized_entropy": [None, None]},
        "resampling": {"confidence": 0.9, "resamples": 1000, "seed": 0},
        "checkpoint": "runs/a",
        "compared": {**METRICS, "auroc": 0.74, "differences": DIFFERENCES, "checkpoint": "runs/b"},
        "slices": {"cat_5": [{"value": "0000000a", **METRICS, "label_rate": 0.1}]},
    }
    for chunk in result["slices"]["cat_5"]:  # type: ignore[index]
        chunk.update(intervals=result["intervals"], compared=result["compared"])
    lines = evaluation_text(result).splitlines()
    assert "0.75000  0.74000 to 0.76000  0.74000    +0.01000  +0.00500 to +0.01500  0.00100" in lines[1]
    assert [word for word in ("intervals of 90%", "runs/b") if word not in "\n".join(lines)] == []
    assert lines[-1].split()[:7] == ["0000000a", "20,000", "0.10000", "0.75000", "0.74000", "to", "0.76000"]
    assert evaluation_text({"accuracy": 0.9, "rows": 3}).split() == ["accuracy", "0.90000", "rows", "3"]
