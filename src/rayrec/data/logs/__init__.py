"""Readers of raw logs: text, CSV and Parquet files to raw rows."""
