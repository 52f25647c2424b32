"""Views of a run in other tools, fed by its events."""
