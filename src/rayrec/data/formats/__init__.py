"""File formats of logs: found from content, read as Arrow tables with the files' own columns."""
