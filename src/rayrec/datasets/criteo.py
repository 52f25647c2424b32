"""Criteo click logs with the same columns: Kaggle Display Advertising (one file) and the 1TB logs
(one file per day).
"""

from rayrec.data.logs.splits import Split
from rayrec.datasets.published_files import PUBLISHED
from rayrec.schema import Schema

SCHEMA = Schema(
    label="label",
    dense=tuple(f"int_{i}" for i in range(13)),
    sparse=tuple(f"cat_{i}" for i in range(26)),
    tokens="hexadecimal",
)
"""Schema: label, 13 integers, 26 categories of 8 hexadecimal digits. Any feature may be empty."""

KAGGLE_SPLIT = Split(kind="sevenths")
"""Split of train.txt, which has seven days in time order."""

TERABYTE_SPLIT = Split(kind="last_file")
"""Split of day_0 to day_23, with the last day held out."""

KAGGLE_FILES = PUBLISHED["criteo_kaggle"]
"""Files train.txt and test.txt. The latter has no labels (39 columns)."""

FULL_DAYS = PUBLISHED["criteo_full"]
"""Files of the 1TB click logs: 24 days, of which usually the first 23 are for training."""

SMALL_DAYS = PUBLISHED["criteo_small"]
"""Files of four training days and the same last day (`criteo_small` of Intel e2eAIOK)."""
