"""Inspection of the installed packages and the machine."""
