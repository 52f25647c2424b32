"""The HTML report on a run, and on several runs side by side."""
