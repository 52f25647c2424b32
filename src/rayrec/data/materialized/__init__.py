"""Preprocessed data: rows of model inputs, written once and read instead of a raw log, with the
same batches.
"""
