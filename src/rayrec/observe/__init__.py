"""Run events and their views."""
