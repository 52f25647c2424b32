"""From a raw log to what training starts with: Preprocessor, preprocessed data, data report."""
