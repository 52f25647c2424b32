"""Drafted joins of side tables with a log, by the names and values of columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from rayrec import storage
from rayrec.config import InputError, first_of
from rayrec.data.features.inputs import as_text, canonical
from rayrec.data.logs.column_values import Markers
from rayrec.formula.types import CATEGORY
from rayrec.prepare.draft_columns import Column, split_words

_MIN_OVERLAP: Final = 0.5
"""Minimum fraction of a log's values that a key of another name must have."""
_SHOWN: Final = 8
_MAX_ITEMS: Final = 1000
"""Items of a list that is a list in the file. `last` says that the lookup is one."""

Role = Literal["number", "category", "list"]


@dataclass(frozen=True)
class Join:
    """Side table of a draft, and the features that look it up."""

    name: str
    path: str
    key: str
    """Column of the table."""
    log_column: str
    """Column of the log that has its values."""
    features: list[dict[str, str]]
    """Fields of the schema's features."""
    overlap: float
    """Fraction of the log's different values that the table has."""
    form: Mapping[str, Any]
    """Fields of the schema's table for the form of its files."""

    @property
    def note(self) -> str:
        """Sentence on what was decided."""
        text = (
            f"Table {self.name}: {self.key} is the key of {self.log_column}, of which the table "
            f"has {self.overlap:.0%}."
        )
        if "header" in self.form:
            text += " It has no header: its columns are named by their position. Rename them here."
        return text


# A key has one row for each value. Of several candidates the first of these wins, then the one that
# has most of the log's values:
#
#   same name       any value in common is enough: a table may have few of the log's items
#   a common word   in the log's column and the key or table: `user_id`, and `id` in users
#   other name      half of the log's values, since small integers are in any column of integers
def find_join(
    path: str,
    columns: Mapping[str, Column],
    roles: Mapping[str, Role],
    log_columns: Mapping[str, Column],
    *,
    names: Collection[str],
    form: Mapping[str, Any],
) -> Join:
    """Find the key of a table, and draft a feature for each of its other columns.

    Args:
        path: Path of the table.
        columns: Columns of its first rows.
        roles: Use of each column that a model can have.
        log_columns: Categories of the log, one per row.
        names: Names of the draft's columns, which new features must not have.
        form: Fields of the schema's table for the form of its files.

    Raises InputError if no column has the values of a column of the log, once each.
    """
    table = re.sub(r"\W+", "_", storage.name_of(path).split(".", maxsplit=1)[0]).strip("_")
    candidates = list(_candidates(table, columns, log_columns))
    if not candidates:
        raise InputError(
            f"{path}: no column has values of {first_of(list(log_columns), _SHOWN)} in the log, "
            "each in one row. Write the schema's tables by hand, or join before"
        )
    # The first of equal ones
    (_, _, overlap), key, log_column_name = max(candidates, key=lambda candidate: candidate[0])
    features = []
    for name, role in roles.items():
        if name == key:
            continue
        new_name = name if name not in names else f"{table}_{name}"
        lookup = f"lookup({_quoted(table)}, {_quoted(log_column_name)}, {_quoted(name)})"
        features.append({"name": new_name, "from": _formula(lookup, role, columns[name])})
    return Join(table, path, key, log_column_name, features, overlap, form)


_Score = tuple[bool, bool, float]
"""Whether the names are equal, whether they share a word, and the overlap of the values."""


def _candidates(
    table: str, columns: Mapping[str, Column], log_columns: Mapping[str, Column]
) -> Iterator[tuple[_Score, str, str]]:
    """Yield the score of each possible key with each column that the log has, and their names."""
    texts = {name: _texts(column) for name, column in log_columns.items()}
    for key, column in columns.items():
        values = _texts(column)
        if values is None or values.null_count or len(pc.unique(values)) < len(values):
            continue
        for name, log_values in texts.items():
            if log_values is None:
                continue
            distinct = pc.unique(log_values.drop_null())
            is_present = pc.is_in(distinct, value_set=values)
            overlap = (pc.sum(is_present).as_py() or 0) / max(len(distinct), 1)
            log_column = log_columns[name]
            is_same = _has_same_name(column, log_column)
            words = _words_of(column) | _words(table)
            has_common_word = bool(words & _words_of(log_column))
            is_row_number = column.is_named and column.kind == "row number" and not has_common_word
            is_enough = overlap >= _MIN_OVERLAP or (is_same and overlap > 0)
            if is_enough and not is_row_number:
                yield (is_same, has_common_word, overlap), key, name


# Names by position, of files without a header, mean nothing.
def _has_same_name(column: Column, other: Column) -> bool:
    is_named = column.is_named and other.is_named
    return is_named and column.name.casefold() == other.name.casefold()


def _words_of(column: Column) -> set[str]:
    return _words(column.name) if column.is_named else set()


def _formula(lookup: str, role: Role, column: Column) -> str:
    """Return the formula of a looked up column."""
    if role == "number":
        return f"number({lookup})"
    if role == "list" and column.detail:
        return f"split({lookup}, {column.detail!r})"
    return f"last({lookup}, {_MAX_ITEMS})" if role == "list" else lookup


def _words(name: str) -> set[str]:
    """Return the words of a name in the singular, without `id`, which any key may have."""
    return {word.removesuffix("s") for word in split_words(name)} - {"id"}


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else f"`{name}`"


def _texts(column: Column) -> pa.Array | None:
    """Return the categories of a column as text, None if it has none."""

    def error(name: str, fix: str) -> InputError:
        return InputError(f"column {name}: {fix}")

    try:
        values, rejected = canonical(
            column.array, CATEGORY, column.name, error, Markers.from_texts(())
        )
    except InputError:
        return None
    return None if rejected.any() else as_text(values)
