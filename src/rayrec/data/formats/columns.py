"""Columns of a file against those of a schema."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from rayrec.config import InputError, first_of
from rayrec.schema import Schema


def present_columns(names: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Return the schema's columns without the optional ones that are not among `names`."""
    return tuple(name for name in schema.columns if name in names or name not in schema.optional)


_SHOWN_NAMES = 12


def check_columns(
    names: Sequence[str],
    required: Sequence[str],
    *,
    path: str,
    hint: str = "",
    optional: Sequence[str] = (),
) -> None:
    """Check that each wanted column exists once; optional ones may be absent. Raises InputError
    with the nearest names.
    """
    for name in required:
        count = list(names).count(name)
        if count != 1 and not (count == 0 and name in optional):
            plain = [
                name if name.strip() == name and name else repr(name) for name in map(str, names)
            ]
            problem = "no column" if not count else f"{count} columns"
            nearest = [] if count else _nearest(name, plain)
            meant = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
            fix = (
                "fix it, or the schema: `rayrec schema FILE` drafts one for `rayrec train clicks "
                "--schema`"
            )
            raise InputError(
                f"{path}: has {problem} named {name}{meant}; it has "
                f"{first_of(plain, _SHOWN_NAMES) or 'none'}{hint}; {fix}"
            )


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """Return up to three names that are similar to `name`, the most similar first."""
    by_letters: dict[str, str] = {}
    for other in names:
        by_letters.setdefault(other.strip("' ").casefold(), other)
    return [
        by_letters[letters]
        for letters in difflib.get_close_matches(name.strip().casefold(), by_letters)
    ]
