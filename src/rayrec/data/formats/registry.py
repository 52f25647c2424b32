"""All formats, and the choice of one for a file."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Final

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.base import Format
from rayrec.data.formats.content import text_head
from rayrec.data.formats.criteo import Criteo
from rayrec.data.formats.csv import Csv
from rayrec.data.formats.impressions import Impressions
from rayrec.data.formats.jsonl import JsonLines
from rayrec.data.formats.lakehouse import find_version
from rayrec.data.formats.libffm import LibFfm
from rayrec.data.formats.libsvm import LibSvm
from rayrec.data.formats.npz import Npz
from rayrec.data.formats.parquet import Parquet
from rayrec.data.formats.slot_value import SlotValue
from rayrec.data.formats.user_items import UserItems
from rayrec.data.formats.vowpal_wabbit import VowpalWabbit
from rayrec.imports import function_in_file, is_in_file
from rayrec.schema import Schema

# In the order in which they are asked. Magic numbers are certain, JSON nearly so. Lines of libffm
# have more colons than those of libsvm, which `slot:value` would accept too. CSV takes any text.
FORMATS: Final[tuple[Format, ...]] = (
    Parquet(),
    Npz(),
    JsonLines(),
    Impressions(),
    LibFfm(),
    LibSvm(),
    VowpalWabbit(),
    SlotValue(),
    UserItems(),
    Criteo(),
    Csv(),
)
_MAX_CACHED: Final = 4096
_BOM: Final = b"\xef\xbb\xbf"


@lru_cache(maxsize=16)
def format_named(name: str) -> Format:
    """Return a format by its name, or the one in FILE.py:CLASS. Raises InputError if there is
    none.
    """
    if is_in_file(name):
        return function_in_file(name, returns=Format)()  # type: ignore[type-abstract]
    file_format = next((each for each in FORMATS if each.name == name), None)
    if file_format is None:
        names = ", ".join(each.name for each in FORMATS)
        raise InputError(f"schema: format must be one of {names}, or FILE.py:CLASS, got {name!r}")
    return file_format


# The first line that applies decides the format of a file:
#
#   version of a table    the table
#   `Schema.format`       that one, whatever the file has
#   name in .parquet      Parquet, without a request to a store
#   first bytes           Parquet, even if the schema has a delimiter
#   `Schema.delimiter`    CSV, if it is no tab
#   first bytes           the first format that recognizes them; CSV if none does
#
# Only the start of a file is read, so that a log with 100,000 files can be looked at.
def find_format(path: str, schema: Schema | None = None) -> Format:
    """Return the format of a file: its table's version, the schema's, else by the name of Parquet
    files, which saves a request, else by its first bytes. Reads them once per process. A schema
    with a delimiter is for CSV. Raises InputError if the file is unreadable or has no format.
    """
    table = find_version(path)
    if table is not None:
        return table
    # The format of events is not that of their lists.
    if schema is not None and schema.format is not None and schema.sequence is None:
        return format_named(schema.format)
    if storage.name_of(path).lower().endswith(".parquet"):
        return format_named(Parquet.name)
    version = None
    if not storage.is_url(path) and os.path.exists(path):
        status = os.stat(path)
        version = status.st_size, status.st_mtime_ns
    return _unless_delimited(_recognized(path, version), schema)


def format_of_text(text: bytes, schema: Schema) -> Format:
    """Return the format that a file with this text has, which ends with a line end."""
    if schema.format is not None:
        return format_named(schema.format)
    return _unless_delimited(_recognize(text), schema)


def _unless_delimited(file_format: Format, schema: Schema | None) -> Format:
    """Return a format that was recognized; CSV if the schema has a delimiter, but for Parquet."""
    has_delimiter = schema is not None and schema.delimiter != "\t"
    is_csv = has_delimiter and file_format.name != Parquet.name
    return format_named(Csv.name) if is_csv else file_format


@lru_cache(_MAX_CACHED)
def _recognized(path: str, version: tuple[int, int] | None) -> Format:
    del version  # Part of the cache key
    return _recognize(text_head(path).removeprefix(_BOM))


def _recognize(start: bytes) -> Format:
    return next((each for each in FORMATS if each.recognizes(start)), FORMATS[-1])
