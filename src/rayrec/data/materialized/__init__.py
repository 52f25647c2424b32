"""Preprocessed data: rows of model inputs, written once and read in place of a raw log, with the same batches."""
