"""Preprocessed data: rows of model inputs, written once and read in place of a raw log, with the same batches."""

from rayrec.data.materialized.dataset import (
    FORMATS,
    MAPPED,
    PreprocessedDataset,
    is_preprocessed,
    open_preprocessed,
    open_verified,
    read,
)

__all__ = [
    "FORMATS",
    "MAPPED",
    "PreprocessedDataset",
    "is_preprocessed",
    "open_preprocessed",
    "open_verified",
    "read",
]
