"""Formulas of declared features: parser and types."""
