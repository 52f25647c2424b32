"""Reaches, starts and supervises clusters; never loads torch."""
