"""Scoring, evaluation and export of checkpoints."""
