"""Exports of click models: their folder, what writes and reads it, and how its scores are compared with the checkpoint's."""
