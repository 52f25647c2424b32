"""From a raw log to what training starts with: Preprocessor, ready-made data, data report."""
