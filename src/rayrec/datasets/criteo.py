"""Criteo's click logs: Kaggle Display Advertising (one file) and the 1TB click logs (a file a day), same columns."""

from __future__ import annotations

from rayrec.data.split import TimeSplit
from rayrec.schema import Schema

SCHEMA = Schema(
    label="label",
    dense=tuple(f"int_{i}" for i in range(13)),
    sparse=tuple(f"cat_{i}" for i in range(26)),
)
"""Label, 13 integers, 26 categories of 8 hexadecimal digits; any feature may be empty."""

KAGGLE_SPLIT = TimeSplit(kind="sevenths")
"""train.txt holds seven days in order of time."""

TERABYTE_SPLIT = TimeSplit(kind="last_file")
"""day_0 to day_23; the last day is held out."""
