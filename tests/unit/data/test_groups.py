"""Keys of the values that rows are grouped by."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from rayrec.config import InputError
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.logs.text_parser import parse
from rayrec.schema import Schema

HEXADECIMAL = Schema(tokens="hexadecimal", label="click", dense=("age",), sparse=("item", "user"), group="user")


def test_keys_of_hexadecimal_categories() -> None:
    lines = ["1\t3\t0000000a\t0000000b", "0\t\t\t0000000b", "0\t3\t0000000a\t00000000", "1\t3\t0000000a\t"]
    raw, faults = parse(HEXADECIMAL, ("\n".join(lines) + "\n").encode())
    assert not faults.total
    keys = raw.group_keys(np.array([0, 1, 2, 3, 0]))
    assert keys.dtype == np.int64
    assert keys[0] == keys[1] == keys[4]
    assert keys[3] == 0
    assert len({0, *keys.tolist()}) == 3


def test_keys_of_any_categories() -> None:
    schema = Schema(label="click", sparse=("item", "user"), group="user", tokens="any", delimiter=",")
    users = pa.array(["ann", "bob", None, "ann", ""])
    table = pa.table({"click": [0, 1, 0, 1, 1], "item": [1, 2, 3, 4, 5], "user": users})
    raw, faults = parse_table(table, schema, path="x")
    assert not faults.total
    keys = raw.group_keys()
    assert keys[0] == keys[3] != keys[1]
    assert keys[2] == keys[4] == 0
    assert 0 not in keys[[0, 1]]


def test_a_group_is_a_column_of_one_category() -> None:
    for changes in ({"group": "age"}, {"group": "nobody"}):
        with pytest.raises(InputError, match=r"schema: group names (age|nobody), which is not a column of sparse"):
            HEXADECIMAL.replace(**changes)
    with pytest.raises(InputError, match="group names tags"):
        Schema(sparse=("tags",), lists=("tags",), tokens="any", delimiter=",", group="tags")


def test_a_group_changes_no_preprocessor() -> None:
    plain = HEXADECIMAL.replace(group=None)
    assert plain == HEXADECIMAL
    assert plain.describe() == HEXADECIMAL.describe()
