"""Encoding of raw rows as model inputs: rules, vocabularies, counts, presets."""
