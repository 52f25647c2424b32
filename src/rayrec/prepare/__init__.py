"""Preparation of raw logs for training: Preprocessor, preprocessed data, data report."""
