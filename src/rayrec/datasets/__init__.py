"""Datasets, one file each: schema, reading and splits."""
