"""Comparison of rows, raw or encoded, field by field."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


def assert_same(one: Any, other: Any, *, ignored: str = "") -> None:
    """Check that two values have equal fields but for an ignored one, and arrays equal dtypes,
    shapes and bytes.
    """
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif dataclasses.is_dataclass(one):
        for name in {field.name for field in dataclasses.fields(one)} - {ignored}:
            assert_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, dict):
        assert [*one] == [*other]
        assert_same([*one.values()], [*other.values()])
    elif isinstance(one, Sequence | np.ndarray) and not isinstance(one, str):
        for actual, its in zip(one, other, strict=True):
            assert_same(actual, its)
    else:
        assert one == other
