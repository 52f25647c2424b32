"""Reads and prepares data: parsing, vocabularies, transforms, loaders and the synthetic click
log.
"""
