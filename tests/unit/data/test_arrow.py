"""Arrow arrays are what pyarrow's own conversions make, and come back as they were."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from rayrec.data.arrow import arrow_bytes, arrow_numbers, arrow_texts, numpy_of


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


def test_missing_numbers() -> None:
    values, missing = np.arange(11.0), np.arange(11) % 3 == 0
    array = arrow_numbers(values, missing)
    assert array.equals(pa.array(values, mask=missing))
    assert arrow_numbers(values, missing.astype(np.uint8)).equals(array)
    np.testing.assert_array_equal(numpy_of(array.drop_null()), values[~missing])
    with pytest.raises(AssertionError):
        numpy_of(array)


def test_numbers_share_their_memory() -> None:
    values = np.arange(4)
    assert np.shares_memory(numpy_of(arrow_numbers(values)), values)


@pytest.mark.parametrize("texts", [[], [""], ["a", "", "käse"]], ids=repr)
def test_texts_and_bytes(texts: list[str]) -> None:
    assert arrow_texts(texts).equals(pa.array(texts, pa.large_string()))
    values = [text.encode() for text in texts]
    assert arrow_bytes(values).equals(pa.array(values, pa.large_binary()))
