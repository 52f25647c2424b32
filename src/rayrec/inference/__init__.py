"""Scores, metrics and exports of checkpoints."""
