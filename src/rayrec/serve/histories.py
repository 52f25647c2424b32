"""Histories in requests: those of users, stored for requests that name only a user, and the times
of items.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoding.known_categories import ValueTokens
from rayrec.data.encoding.rules import age_gaps
from rayrec.data.logs.column_values import (
    VALUE,
    is_list,
    parse_times,
    plain_array,
    read_times,
    resolved,
    type_error,
)
from rayrec.schema import Schema
from rayrec.serve.requests import RequestError
from rayrec.serve.row_readers import kind_of, time_text
from rayrec.storage import cache

USER: Final = "user"
"""Field of a request's row with its user, and the usual name of the column."""
TIMES: Final = "times"
"""Field of a request's row with the time of each item in its history."""
TIME: Final = "time"
"""Field of a request's row with the time for which it asks."""
_SECOND: Final = 1e6
"""Microseconds of a second."""
_FORMAT: Final = 2
_BATCH_ROWS: Final = 1 << 16
_ARRAYS: Final[dict[str, type[np.generic]]] = {
    "users": np.uint64,
    "starts": np.int64,
    "ends": np.int64,
    "until": np.int64,
    "items": np.uint64,
    "gaps": np.float32,
}
"""Files with converted histories. [users]: users' tokens, ascending; start and end in the items;
time of age 0 in microseconds, 0 if unknown. [items]: item tokens; `History.gaps`, none without
ages.
"""


def user_column(schema: Schema) -> str:
    """Return the column of users: the schema's, else USER."""
    return USER if schema.sequence is None else schema.sequence.user


@dataclass(frozen=True)
class History:
    """Items of one user, in chronological order."""

    tokens: np.ndarray
    """Tokens of the items, uint64 [items]."""
    gaps: np.ndarray | None = None
    """Seconds from each item to the next one, from the last one to `until`, float32 [items]. None
    without times.
    """
    until: int = 0
    """Time in microseconds since 1970."""


@dataclass(frozen=True)
class _Columns:
    """Columns of files with histories."""

    user: str
    item: str
    ages: str | None
    """Ages of the items in seconds. None: not read, or absent."""
    time: str | None
    """Time of age 0. None: not read, or absent."""

    @classmethod
    def from_schema(cls, schema: Schema, item: str) -> _Columns:
        """Return the columns that files may have."""
        sequence = schema.sequence
        ages = schema.feature(item).ages
        since = None if ages is None or sequence is None else sequence.time
        return cls(user_column(schema), item, ages, since)


# Histories are converted once per machine, and mapped by all replicas there. They are tokens, not
# ids of a model, so that one conversion serves every version:
#
#   Parquet files -> tokens, batch by batch -> arrays in the cache folder, named by the files' sizes
#   and times -> mapped; a user is found by a binary search
@final
class Histories:
    """Items of users, in chronological order. Thread-safe."""

    def __init__(self, folder: str, user: str) -> None:
        self.user = user
        """Name of the column of users."""
        self._arrays = {
            name: _mapped(os.path.join(folder, name), dtype) for name, dtype in _ARRAYS.items()
        }
        self._users = self._arrays["users"]

    @property
    def num_users(self) -> int:
        return len(self._users)

    def find(self, user: int) -> History | None:
        """Return the items of a user, a token. None if the user is unknown."""
        token = np.uint64(user)
        index = int(np.searchsorted(self._users, token))
        if index == len(self._users) or self._users[index] != token:
            return None
        items = slice(int(self._arrays["starts"][index]), int(self._arrays["ends"][index]))
        tokens = np.asarray(self._arrays["items"][items])
        if not len(self._arrays["gaps"]):
            return History(tokens)
        gaps = np.asarray(self._arrays["gaps"][items])
        return History(tokens, gaps, int(self._arrays["until"][index]))


def open_histories(
    path: str,
    schema: Schema,
    item: str,
    *,
    needs_time: bool = False,
) -> Histories:
    """Open the histories in Parquet files, with a user column and lists `item`, and their ages if
    the schema has some. `path` is a file, a folder or a glob. Converts them into the cache folder
    if needed. Raises InputError for other files, a user with several rows, and if a network
    `needs_time` of age 0, which the files lack.
    """
    files = storage.list_files(path)
    columns = _Columns.from_schema(schema, item)
    rules = (
        _FORMAT,
        *vars(columns).values(),
        needs_time,
        schema.missing,
        schema.integers,
        schema.category_rules,
    )
    versions = [(file.path, file.size_bytes, file.modified_ns) for file in files]
    key = cache.version_key(storage.absolute(path), (versions, rules))
    parent = storage.absolute(cache.folder())
    os.makedirs(parent, exist_ok=True)
    folder = os.path.join(parent, f"{key}-histories")
    with storage.locked(f"{folder}.lock"):
        if not os.path.exists(folder):
            with storage.writing_folder(folder) as target:
                reader = _Reader(schema, columns, needs_time=needs_time)
                _convert([file.path for file in files], target, reader)
    return Histories(folder, columns.user)


@dataclass(frozen=True)
class _Part:
    """Histories of a batch of rows with a user."""

    users: np.ndarray
    """Tokens, uint64 [rows]."""
    lengths: np.ndarray
    """Number of items, int64 [rows]."""
    tokens: np.ndarray
    """Tokens of the items, uint64 [items]."""
    gaps: np.ndarray
    """Seconds between them, float32 [items], or none without ages."""
    until: np.ndarray
    """Time of age 0 in microseconds, 0 if unknown, int64 [rows]."""


def _convert(paths: Sequence[str], target: str, reader: _Reader) -> None:
    """Write the arrays of the histories in some files. Memory: the arrays of users."""
    users = [np.zeros(0, np.uint64)]
    until = [np.zeros(0, np.int64)]
    ends = [np.zeros(1, np.int64)]
    with (
        open(os.path.join(target, "items"), "wb") as items,
        open(os.path.join(target, "gaps"), "wb") as gaps,
    ):
        for path in paths:
            for part in reader.read(path):
                users.append(part.users)
                until.append(part.until)
                ends.append(ends[-1][-1] + np.cumsum(part.lengths, dtype=np.int64))
                part.tokens.tofile(items)
                part.gaps.tofile(gaps)
    names = np.concatenate(users)
    borders = np.concatenate(ends)
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    if (ordered[1:] == ordered[:-1]).any():
        raise InputError(
            f"{paths[0]}: a user has several rows. Give each user one row with all items, as "
            "`rayrec sequences` does."
        )
    arrays = {
        "users": ordered,
        "starts": borders[:-1][order],
        "ends": borders[1:][order],
        "until": np.concatenate(until)[order],
    }
    for name, values in arrays.items():
        values.tofile(os.path.join(target, name))


@final
class _Reader:
    """Reader of files with histories. All have ages, or none."""

    def __init__(self, schema: Schema, columns: _Columns, *, needs_time: bool) -> None:
        self._columns = columns
        self._needs_time = needs_time
        self._user_tokens = ValueTokens(columns.user, schema)
        self._item_tokens = ValueTokens(columns.item, schema)
        self._has_ages: bool | None = None

    def read(self, path: str) -> Iterator[_Part]:
        """Yield the histories of a file. Raises InputError for other columns."""
        with _opened(path) as parquet:
            columns = self._checked(parquet.schema_arrow, path)
            names = [name for name in vars(columns).values() if name is not None]
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=names):
                yield self._part(pa.Table.from_batches([batch]), columns, path)

    def _part(self, table: pa.Table, columns: _Columns, path: str) -> _Part:
        values = plain_array(table.column(columns.user))
        users, has_user = self._user_tokens.read(values, path=path)
        table = table.filter(pa.array(has_user))
        lists = plain_array(table.column(columns.item))
        counts = _lengths(lists)
        items = resolved(pc.list_flatten(lists))
        tokens, is_item = self._item_tokens.read(items, path=path)
        row_of = np.repeat(np.arange(len(lists)), counts)[is_item]
        lengths = np.bincount(row_of, minlength=len(lists))
        gaps = np.zeros(0, np.float32)
        if columns.ages is not None:
            ages = _ages(plain_array(table.column(columns.ages)), counts, f"{path}: {columns.ages}")
            gaps = age_gaps(ages[is_item], lengths)
        until = np.zeros(len(lists), np.int64)
        if columns.time is not None:
            times = plain_array(table.column(columns.time))
            until, status = parse_times(times, columns.time, type_error(table.schema, path))
            if (status != VALUE).any():
                raise InputError(
                    f"{path}: {columns.time} must have a time in each row. Fill it in."
                )
        return _Part(users, lengths, tokens, gaps, until)

    def _checked(self, file_schema: pa.Schema, path: str) -> _Columns:
        """Return the columns to read of a file. Raises InputError without a user or without lists
        of items, and for times that are absent.
        """
        columns = self._columns
        names = file_schema.names
        if columns.item not in names or not is_list(file_schema.field(columns.item).type):
            raise InputError(
                f"{path}: histories must have a column {columns.item} with lists, got "
                f"{', '.join(names)}."
            )
        if columns.user not in names or types.is_nested(file_schema.field(columns.user).type):
            raise InputError(
                f"{path}: histories must have a column {columns.user} with a user a row, got "
                f"{', '.join(names)}. Rename the column of users."
            )
        has_ages = columns.ages in names
        if self._has_ages not in (None, has_ages):
            raise InputError(
                f"{path}: histories must have a column {columns.ages} in all files or in none. "
                "Write it into all."
            )
        self._has_ages = has_ages
        if not has_ages:
            return replace(columns, ages=None, time=None)
        if columns.time in names:
            return columns
        if self._needs_time:
            raise InputError(
                f"{path}: histories must have the time of age 0 in a column "
                f"{columns.time or 'named by time of the schema'}, because the model has "
                "request_time. Build them with `rayrec sequences`."
            )
        return replace(columns, time=None)


def _opened(path: str) -> pq.ParquetFile:
    filesystem, inner = storage.resolve(path)
    try:
        return pq.ParquetFile(inner, filesystem=filesystem)
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"{path}: histories must be Parquet files with users and lists of items ({error})"
        ) from None


def _lengths(lists: pa.Array) -> np.ndarray:
    counts = pc.fill_null(pc.list_value_length(lists), 0)
    return counts.to_numpy(zero_copy_only=False).astype(np.int64)


def _ages(lists: pa.Array, counts: np.ndarray, column: str) -> np.ndarray:
    """Return the age of each item, 0 in rows without ages, float64 [items]. Raises InputError
    unless other rows have as many as items.
    """
    num_ages = _lengths(lists)
    has_ages = num_ages > 0
    if (num_ages != counts)[has_ages].any():
        raise InputError(f"{column} must have as many numbers as items in each row. Fix it.")
    ages = np.zeros(counts.sum())
    values = pc.cast(pc.list_flatten(lists), pa.float64()).fill_null(0.0)
    ages[np.repeat(has_ages, counts)] = values.to_numpy(zero_copy_only=False)
    return ages


def _mapped(path: str, dtype: type[np.generic]) -> np.ndarray:
    """Map a file of numbers."""
    if not os.path.getsize(path):
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r")


# Times are those of logs: dates and times as text, or numbers since 1970. As in the lists of a log,
# only the seconds from each item to the next one reach a network:
#
#   times of items       gaps between them; without times all are 0, as if all were at once
#   time of the request  gap after the newest item, for networks that read it: the row's time, else
#                        the server's clock
@final
class ItemTimes:
    """Parser of the times in the rows of requests."""

    def __init__(self, *, reads_request_time: bool) -> None:
        self._reads_request_time = reads_request_time

    def gaps(
        self,
        rows: Sequence[dict[str, Any]],
        sizes: Sequence[int],
        is_id: np.ndarray,
    ) -> np.ndarray:
        """Return the seconds from each item to the next one, from the last one to the row's time,
        float32 [present items]. Raises RequestError.

        Args:
            rows: Rows of a request.
            sizes: Number of values in each history.
            is_id: Which values of the histories are items, bool [values].
        """
        has_times = np.array([row.get(TIMES) is not None for row in rows], bool)
        if not has_times.any():
            return np.zeros(np.count_nonzero(is_id), np.float32)
        row_of = np.repeat(np.arange(len(rows)), sizes)
        times = np.zeros(len(row_of), np.int64)
        times[has_times[row_of]] = _item_times(rows, sizes)
        times = times[is_id]
        row_of = row_of[is_id]
        lengths = np.bincount(row_of, minlength=len(rows))
        request_times = np.zeros(len(rows), np.int64)
        if self._reads_request_time:
            request_times = _request_times(rows)
        ages = (request_times[row_of] - times) / _SECOND
        return np.where(has_times[row_of], age_gaps(ages, lengths), np.float32(0))

    def stored(
        self,
        rows: Sequence[dict[str, Any]],
        histories: Mapping[int, History],
    ) -> list[np.ndarray]:
        """Return the seconds between the items of stored histories by row, float32 [items] each.
        Raises RequestError.
        """
        all_gaps = []
        request_times = _request_times(rows) if self._reads_request_time else None
        for row, history in histories.items():
            gaps = history.gaps
            if gaps is None:
                gaps = np.zeros(len(history.tokens), np.float32)
            elif request_times is not None and len(gaps):
                last = float(gaps[-1]) + (int(request_times[row]) - history.until) / _SECOND
                gaps = np.append(gaps[:-1], np.float32(last))
            all_gaps.append(gaps)
        return all_gaps


def _request_times(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return the time for which each row asks, in microseconds since 1970, int64 [rows]. Raises
    RequestError.
    """
    request_times = np.full(len(rows), time.time_ns() // 1000)
    named = [number for number, row in enumerate(rows) if row.get(TIME) is not None]
    texts = [time_text(rows[number][TIME], TIME, number) for number in named]
    request_times[named] = _microseconds(texts, np.array(named, np.int64), TIME)
    return request_times


def _item_times(rows: Sequence[dict[str, Any]], sizes: Sequence[int]) -> np.ndarray:
    """Return the times of rows that have some, in microseconds since 1970, int64 [values]. Raises
    RequestError.
    """
    texts: list[str | None] = []
    row_of: list[int] = []
    for number, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        values = row.get(TIMES)
        if values is None:
            continue
        if type(values) is not list or len(values) != size:
            got = f"{len(values)} times" if type(values) is list else kind_of(values)
            raise RequestError(
                400,
                f"row {number}: {TIMES} must be a list with the time of each of {size} items, got "
                f"{got}",
                row=number,
                field=TIMES,
            )
        texts += [time_text(value, TIMES, number) for value in values]
        row_of += [number] * size
    return _microseconds(texts, np.array(row_of, np.int64), TIMES)


def _microseconds(texts: Sequence[str | None], row_of: np.ndarray, field: str) -> np.ndarray:
    """Return times in microseconds since 1970, int64 [texts]. Raises RequestError for other
    text.
    """
    values, status = read_times(pa.array(texts, pa.large_string()))
    bad = np.flatnonzero(status != VALUE)
    if len(bad):
        row = int(row_of[bad[0]])
        message = f"row {row}: {field} must be times as in the log, got {texts[bad[0]]!r}"
        raise RequestError(400, message, row=row, field=field)
    return values
