"""Readers of raw logs: text, CSV and Parquet files to rows as a log gives them."""
