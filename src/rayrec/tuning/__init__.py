"""Search for the best settings of a recipe: many runs that share one reading of the log."""
