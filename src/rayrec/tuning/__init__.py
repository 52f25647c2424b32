"""Hyperparameter search for click models."""
