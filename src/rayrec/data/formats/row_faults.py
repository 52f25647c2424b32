"""Faults of a file's rows, which its reader marks."""

FAULT = "rayrec.fault"
"""Name of the column of faults, uint8: TOO_FEW or TOO_MANY fields, UNMATCHED quote, TRAILING text
after a closing quote, MALFORMED for a row that does not have the form of its format, or 0.
"""
TOO_FEW = 1
TOO_MANY = 2
UNMATCHED = 3
TRAILING = 4
MALFORMED = 5
