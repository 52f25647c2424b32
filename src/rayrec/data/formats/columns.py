"""Columns of a file and its folders, and their check against a schema."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

from rayrec import storage
from rayrec.config import InputError, first_of
from rayrec.schema import Schema

_MISSING: Final = ("", "__HIVE_DEFAULT_PARTITION__")
"""Folder values of a missing value. Hive and Spark write the second."""


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


def check_file(path: str, names: Sequence[str], schema: Schema, *, hint: str = "") -> None:
    """Check that the schema's columns are among a file's own columns `names` and those of its
    folders. Raises InputError with the nearest names, and a `hint`.
    """
    check_columns(
        pick_columns(path, names),
        schema.columns,
        path=path,
        hint=hint,
        optional=schema.optional,
    )


def check_extra(names: Sequence[str], extra: Sequence[str], *, path: str) -> None:
    """Check that each of the columns `extra` is among `names` once.

    Args:
        names: Columns of a file, or of rows in memory.
        extra: Columns to find.
        path: Source of the names, for messages.

    Raises InputError with the nearest names.
    """
    for name in extra:
        count = list(names).count(name)
        if count == 1:
            continue
        if count:
            raise InputError(f"keep: {path} has {count} columns named {name}; rename one")
        nearest = _nearest(name, names)
        hint = (
            f"did you mean {' or '.join(nearest)}?"
            if nearest
            else f"it has {first_of(names, _SHOWN_NAMES) or 'none'}"
        )
        raise InputError(f"keep: {path} has no column {name}; {hint}")


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """Return up to three names that are similar to `name`, the most similar first."""
    by_letters: dict[str, str] = {}
    for other in names:
        by_letters.setdefault(other.strip("' ").casefold(), other)
    return [
        by_letters[letters]
        for letters in difflib.get_close_matches(name.strip().casefold(), by_letters)
    ]


# -- Columns of folders KEY=VALUE
def partition_names(path: str) -> list[str]:
    """Return the folders KEY=VALUE directly above a file, as stored (percent-encoded), the
    outermost first.
    """
    names: list[str] = []
    for name in reversed(storage.folder_names(path)):
        if not storage.PARTITION.fullmatch(name):
            break
        names.insert(0, name)
    return names


def parse_partitions(path: str) -> dict[str, str | None]:
    """Return the partition columns of a file and their values, None if missing."""
    columns: dict[str, str | None] = {}
    for name in partition_names(path):
        key, _, value = name.partition("=")
        columns[unquote(key)] = None if value in _MISSING else unquote(value)
    return columns


# A writer may store a partition's column in the file, too. The file's values are then typed and
# win.
def missing_partitions(path: str, names: Sequence[str]) -> dict[str, str | None]:
    """Return the partition columns of a file that are not among its own columns `names`, which take
    precedence.
    """
    return {key: value for key, value in parse_partitions(path).items() if key not in names}


def pick_columns(path: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a file's rows: its own columns `names`, then those of its
    partitions.
    """
    return (*names, *missing_partitions(path, names))
