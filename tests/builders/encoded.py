"""Encoded rows, compared to the last bit, also those of an export's `encode.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from builders.same import assert_same

from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.inference.export.plain_encoder import Encoder


def check_same(actual: EncodedRows, expected: EncodedRows, name: str) -> None:
    """Check that the inputs of rows have equal types and bytes. `name` tells whose rows differ."""
    assert_same({name: [actual.dense, *actual.ids]}, {name: [expected.dense, *expected.ids]})


def encoded_by(encoder: Encoder, rows: Sequence[Mapping[str, Any]]) -> EncodedRows:
    """Return rows as `encode.py` encodes them, with ids of 32 bits."""
    dense, ids = encoder.encode(rows)
    columns = [
        JaggedIds(column[0].astype(np.int32), column[1].astype(np.int32))
        if isinstance(column, tuple)
        else column.astype(np.int32)
        for column in ids
    ]
    return EncodedRows(dense, columns, None)
