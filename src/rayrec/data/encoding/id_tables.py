"""Vocabularies of a Preprocessor from tables of values and their ids that other programs made."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoding.known_categories import ENDS
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import Preset
from rayrec.data.encoding.rules import SparseColumn
from rayrec.data.logs.column_values import plain_array
from rayrec.data.logs.table_parser import parse_table
from rayrec.schema import Schema

_MAX_ID = 2**31 - 2
"""Maximum id of a vocabulary."""


def with_id_tables(preprocessor: Preprocessor, rules: Preset, folder: str) -> Preprocessor:
    """Return the Preprocessor of `rules` with the ids of a folder's tables: for each vocabulary a Parquet or CSV file whose name
    contains its column's name. Its two columns are the values and their ids. An empty value is the empty field. Values with the
    id of unknown categories share that row. Raises InputError for missing or unknown files, repeated values and ids, and gaps."""
    if rules.dense == "buckets" or rules.ids == "murmur3" or rules.token_modulo is not None:
        raise InputError(f"id_tables: preset {rules.name} does not look categories up as they are. Use another --preset")
    inputs, files = preprocessor.inputs, storage.list_files(folder)
    owners = [inputs.sparse[owner] for owner in dict.fromkeys(inputs.vocabulary_owners)]
    paths = {name: file.path for file in files for name in [_column_of(file.path, owners)]}
    if absent := [name for name in owners if name not in paths]:
        raise InputError(f"{folder}: no table for column {absent[0]}. Add {absent[0]}.parquet or {absent[0]}.csv")
    if len(paths) < len(files):
        raise InputError(f"{folder}: must have one table for each column, got {len(files)} for {len(paths)}. Remove the others")
    columns = {name: _column(preprocessor.schema, rules, name, path) for name, path in paths.items()}
    sparse = tuple(columns[inputs.sparse[owner]][0] for owner in inputs.vocabulary_owners)
    tokens = np.concatenate([columns[name][1] for name in owners])
    return replace(preprocessor, sparse=sparse, tokens=tokens, constants={**preprocessor.constants, ENDS: {}})


def _column_of(path: str, names: list[str]) -> str:
    """Return the longest column name that is a whole word of a file name. Raises InputError."""
    words = f"_{storage.name_of(path).rsplit('.', 1)[0].replace('-', '_').replace('.', '_')}_"
    matches = [name for name in names if f"_{name.replace('-', '_').replace('.', '_')}_" in words]
    if not matches:
        raise InputError(f"{path}: its name has no column with a vocabulary. Name it after one of {', '.join(names)}")
    return max(matches, key=len)


def _column(schema: Schema, rules: Preset, name: str, path: str) -> tuple[SparseColumn, np.ndarray]:
    """Return the rule and the vocabulary of a column's table."""
    values, ids = _read(path)
    integers = (name,) if name in schema.integers else ()
    alone = Schema(label=None, sparse=(name,), tokens=schema.tokens, integers=integers, category_rules=schema.category_rules)
    block, faults = parse_table(pa.table({name: values}), alone, path=path)
    if faults.total:
        raise InputError(f"{path}: {faults.describe()}")
    tokens, missing = block.categories[:, 0], block.is_missing(name)
    if len(ids) and not 0 <= ids.min() <= ids.max() <= _MAX_ID:
        raise InputError(f"{path}: IDs must be from 0 to {_MAX_ID:,}, got {ids.min():,} to {ids.max():,}. Renumber the values")
    if missing.sum() > 1 or len(np.unique(tokens[~missing])) < np.count_nonzero(~missing):
        raise InputError(f"{path}: a value has several IDs. Give each value one row")
    separate = ~missing & (ids != rules.unknown_id)
    order = np.argsort(ids[separate])
    tokens, ordered = tokens[separate][order], ids[separate][order]
    if len(repeated := ordered[1:][ordered[1:] == ordered[:-1]]):
        raise InputError(f"{path}: ID {repeated[0]:,} belongs to several values. Give each value an ID of its own")
    first, stop = (int(ordered[0]), int(ordered[-1]) + 1) if len(ordered) else (rules.first_id, rules.first_id)
    missing_id = int(ids[missing][0]) if missing.any() else None
    gap = missing_id if missing_id is not None and first <= missing_id < stop else None
    unused = np.setdiff1d(np.arange(first, min(stop, first + len(ordered) + 1)), ordered)
    if len(unused := unused[unused != gap]):
        raise InputError(f"{path}: IDs must have no gaps, but no value has ID {unused[0]:,}. Number the values consecutively")
    unknown_id = max(stop, (missing_id or 0) + 1) if rules.unknown_id is None else rules.unknown_id
    if missing_id is None:
        zero = np.flatnonzero(tokens == 0) if rules.missing == "zero" else tokens[:0]
        missing_id = first + int(zero[0]) if len(zero) else rules.missing if isinstance(rules.missing, int) else unknown_id
        if not len(zero) and first <= missing_id < stop:
            raise InputError(f"{path}: ID {missing_id} of empty fields ({rules.name}) is a value's. Add an empty value")
    rows = max(stop, unknown_id + 1, missing_id + 1)
    return SparseColumn(rows, len(tokens), first, unknown_id, missing_id, gap), tokens


def _read(path: str) -> tuple[pa.Array, np.ndarray]:
    """Return the values, and the ids int64 [values], -1 if missing. Raises InputError."""
    try:
        data = pa.BufferReader(storage.read_bytes(path))
        if path.endswith(".parquet"):
            table = pq.read_table(data)
        else:
            named = pa.csv.ReadOptions(column_names=["value", "id"], skip_rows=1)
            types = pa.csv.ConvertOptions(column_types={"value": pa.string(), "id": pa.int64()})
            table = pa.csv.read_csv(data, named, convert_options=types)
        values, ids = table.columns
        return plain_array(values), pc.fill_null(pc.cast(plain_array(ids), pa.int64()), -1).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise InputError(f"{path}: must be Parquet or CSV with two columns, values and integer IDs ({error})") from None
