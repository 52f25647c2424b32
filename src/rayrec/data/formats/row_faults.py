"""Faults of a file's rows, which its reader marks."""

FAULT = "rayrec.fault"
"""Column with the fault of each row, uint8, 0 if it has none: TOO_FEW or TOO_MANY fields, UNMATCHED
quote, TRAILING text after a closing quote. MALFORMED: not in the format's form.
"""
TOO_FEW = 1
TOO_MANY = 2
UNMATCHED = 3
TRAILING = 4
MALFORMED = 5
