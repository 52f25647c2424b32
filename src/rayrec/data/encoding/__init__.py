"""From raw rows to model inputs: rules, vocabularies, counts, presets."""
