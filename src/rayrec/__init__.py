"""rayrec: from raw logs to a served model on Ray. Names are imported when first used; `import rayrec` loads no torch."""
