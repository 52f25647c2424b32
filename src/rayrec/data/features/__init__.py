"""Declared features: side tables and functions of columns."""
