"""Histories of users, for requests that name only a user."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoding.known_categories import ValueTokens
from rayrec.data.logs.column_values import is_list, plain_array, resolved
from rayrec.schema import Schema
from rayrec.storage import cache

USER: Final = "user"
"""Field of a request's row with its user, and the usual name of the column."""
_FORMAT: Final = 1
_BATCH_ROWS: Final = 1 << 16
_ARRAYS: Final = ("users", "starts", "ends", "items")
"""Files with converted histories: users' tokens, ascending, uint64 [users]; start and end in the
items, int64 [users]; item tokens, uint64 [items].
"""


def user_column(schema: Schema) -> str:
    """Return the column of users: the schema's, else USER."""
    return USER if schema.sequence is None else schema.sequence.user


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
        arrays = {name: _mapped(os.path.join(folder, name)) for name in _ARRAYS}
        self._users = arrays["users"].view(np.uint64)
        self._starts = arrays["starts"]
        self._ends = arrays["ends"]
        self._items = arrays["items"].view(np.uint64)

    @property
    def num_users(self) -> int:
        return len(self._users)

    def items(self, user: int) -> np.ndarray | None:
        """Return the tokens of a user's items, uint64 [items], None if the user, a token, is
        unknown.
        """
        token = np.uint64(user)
        index = int(np.searchsorted(self._users, token))
        if index == len(self._users) or self._users[index] != token:
            return None
        return self._items[int(self._starts[index]) : int(self._ends[index])]


def open_histories(path: str, schema: Schema, item: str) -> Histories:
    """Open the histories in Parquet files, with a user column and lists `item`. `path` is a file, a
    folder or a glob. Converts them into the cache folder if needed. Raises InputError for other
    files, and for a user with several rows.
    """
    files = storage.list_files(path)
    user = user_column(schema)
    rules = (_FORMAT, user, item, schema.missing, schema.integers, schema.category_rules)
    versions = [(file.path, file.size_bytes, file.modified_ns) for file in files]
    key = cache.version_key(storage.absolute(path), (versions, rules))
    parent = storage.absolute(cache.folder())
    os.makedirs(parent, exist_ok=True)
    folder = os.path.join(parent, f"{key}-histories")
    with storage.locked(f"{folder}.lock"):
        if not os.path.exists(folder):
            with storage.writing_folder(folder) as target:
                _convert([file.path for file in files], target, schema, item)
    return Histories(folder, user)


def _convert(paths: Sequence[str], target: str, schema: Schema, item: str) -> None:
    """Write the arrays of the histories in some files. Memory: the arrays of users."""
    users = [np.zeros(0, np.uint64)]
    ends = [np.zeros(1, np.int64)]
    with open(os.path.join(target, "items"), "wb") as file:
        for path in paths:
            for some_users, lengths, tokens in _batches(path, schema, item):
                users.append(some_users)
                ends.append(ends[-1][-1] + np.cumsum(lengths, dtype=np.int64))
                tokens.tofile(file)
    names = np.concatenate(users)
    borders = np.concatenate(ends)
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    if (ordered[1:] == ordered[:-1]).any():
        raise InputError(
            f"{paths[0]}: a user has several rows. Give each user one row with all items, as "
            "`rayrec sequences` does."
        )
    arrays = {"users": ordered, "starts": borders[:-1][order], "ends": borders[1:][order]}
    for name, values in arrays.items():
        values.tofile(os.path.join(target, name))


def _batches(
    path: str,
    schema: Schema,
    item: str,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield users' tokens, uint64 [rows], numbers of items, int64 [rows], and their tokens, uint64
    [items], of rows with a user.
    """
    user_tokens = ValueTokens(user_column(schema), schema)
    item_tokens = ValueTokens(item, schema)
    with _opened(path) as parquet:
        user = _columns(parquet.schema_arrow, path, schema, item)
        for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=[user, item]):
            table = pa.Table.from_batches([batch])
            users, has_user = user_tokens.read(plain_array(table.column(user)), path=path)
            lists = table.column(item).combine_chunks().filter(pa.array(has_user))
            if isinstance(lists, pa.ChunkedArray):
                lists = lists.combine_chunks()
            counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
            items = resolved(pc.list_flatten(lists))
            tokens, is_item = item_tokens.read(items, path=path)
            row_of = np.repeat(np.arange(len(lists)), counts)[is_item]
            yield users, np.bincount(row_of, minlength=len(lists)), tokens


def _opened(path: str) -> pq.ParquetFile:
    filesystem, inner = storage.resolve(path)
    try:
        return pq.ParquetFile(inner, filesystem=filesystem)
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"{path}: histories must be Parquet files with users and lists of items ({error})"
        ) from None


def _columns(file_schema: pa.Schema, path: str, schema: Schema, item: str) -> str:
    """Return the column of users. Raises InputError without one, or without lists of items."""
    if item not in file_schema.names or not is_list(file_schema.field(item).type):
        raise InputError(
            f"{path}: histories must have a column {item} with lists, got "
            f"{', '.join(file_schema.names)}."
        )
    user = user_column(schema)
    if user not in file_schema.names or types.is_nested(file_schema.field(user).type):
        raise InputError(
            f"{path}: histories must have a column {user} with a user a row, got "
            f"{', '.join(file_schema.names)}. Rename the column of users."
        )
    return user


def _mapped(path: str) -> np.ndarray:
    """Map a file of numbers, int64."""
    if not os.path.getsize(path):
        return np.zeros(0, np.int64)
    return np.memmap(path, np.int64, "r")
