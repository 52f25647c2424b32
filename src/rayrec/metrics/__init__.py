"""Exact metrics over any number of rows and processes."""
