"""Preprocessors that continue older ids with a log's new categories, or take ids from tables that
other programs wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoding.counts import Counts
from rayrec.data.encoding.known_categories import ENDS, FREQUENCIES
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import Preset, VocabularyColumn, build_vocabulary
from rayrec.data.encoding.rules import SparseColumn
from rayrec.data.logs.column_values import plain_array
from rayrec.data.logs.table_parser import parse_table
from rayrec.schema import Schema


@dataclass(frozen=True)
class Extension:
    """Preprocessor with an older one's ids and additional ids. Counts of categories are by each
    vocabulary's first column.
    """

    preprocessor: Preprocessor
    existing: dict[str, int]
    appended: dict[str, int]
    left_out: dict[str, int]
    """Categories beyond max_num_embeddings."""


def extension_rules(old: Preprocessor, source: str) -> Preset:
    """Return the rules of a Preprocessor. Raises InputError if it cannot be extended."""
    if old.multi_hot is not None:
        raise InputError(
            f"{source}: cannot be extended, because multi_hot bags depend on the table sizes; "
            "count all days again"
        )
    if "rules" not in old.constants:
        raise InputError(
            f"{source}: adopted data has ids instead of categories, so it has no vocabulary to "
            "extend"
        )
    return Preset().updated(old.constants["rules"], where=f"{source}: ")


def extend(
    old: Preprocessor,
    preset: Preset,
    counts: Counts,
    *,
    schema: Schema | None = None,
) -> Extension:
    """Append the categories in `counts` with at least min_count to the vocabularies of `old`,
    ordered by `preset`. Constants of numbers and hashed columns stay. `counts` come from a log with
    its columns, counted with its rules, `preset`. `schema` has today's side tables; None: the one
    of `old`. Memory: the tokens of both, and a sorted copy of one column's tokens.
    Raises InputError for a column that cannot keep its ids.
    """
    inputs = old.inputs
    sparse: list[SparseColumn] = []
    tokens: list[np.ndarray] = []
    existing: dict[str, int] = {}
    appended: dict[str, int] = {}
    left_out: dict[str, int] = {}
    for number, (name, owner) in enumerate(
        zip(inputs.sparse, inputs.vocabulary_owners, strict=True)
    ):
        if owner != number:
            sparse.append(sparse[owner])
            continue
        column = old.sparse[number]
        vocabulary = old.vocabulary(number)
        if column.num_tokens is not None:
            new = build_vocabulary(preset, counts, number)
            column, added, left_out[name] = _extended(preset, column, vocabulary, new, number, name)
            existing[name] = len(vocabulary)
            appended[name] = len(added)
            vocabulary = np.concatenate([vocabulary, added])
        sparse.append(column)
        tokens.append(vocabulary)
    ends = old.constants.get(ENDS, {})
    # Those of all rows are unknown
    constants = {name: value for name, value in old.constants.items() if name != FREQUENCIES}
    constants = {
        **constants,
        "rows": old.constants.get("rows", 0) + counts.rows,
        # Appended categories may be more frequent than earlier ids.
        ENDS: {
            name: ends[name]
            for name, owner in zip(inputs.sparse, inputs.vocabulary_owners, strict=True)
            if name in ends and not appended.get(inputs.sparse[owner])
        },
        "extends": old.hash(),
    }
    preprocessor = replace(
        old,
        schema=schema or old.schema,
        sparse=tuple(sparse),
        tokens=np.concatenate(tokens or [old.tokens]),
        constants=constants,
    )
    return Extension(preprocessor, existing, appended, left_out)


def add_indicators(old: Preprocessor, new: Preprocessor) -> tuple[Preprocessor, list[str]]:
    """Return `new` with the indicators of `old`, for a network that continues with the inputs of
    `old`, and the columns that lose their indicator. Their missing numbers are the mean, like those
    of any column.
    """
    if old.dense_names != new.dense_names:  # The networks do not fit anyway
        return new, []
    # A network's weights fit one transform.
    rules = [
        replace(rule if rule.kind == before.kind else before, indicator=before.indicator)
        for before, rule in zip(old.dense, new.dense, strict=True)
    ]
    lost = [
        name
        for name, before, rule in zip(new.dense_names, new.dense, rules, strict=True)
        if before.indicator > rule.indicator
    ]
    return replace(new, dense=tuple(rules)), lost


def _extended(
    preset: Preset,
    old: SparseColumn,
    vocabulary: np.ndarray,
    new: VocabularyColumn,
    number: int,
    name: str,
) -> tuple[SparseColumn, np.ndarray, int]:
    """Return the column's new rule, the tokens to append, and the number of omitted ones."""
    fresh = ~np.isin(new.tokens, vocabulary)
    added = new.tokens[fresh]
    num_old = len(vocabulary)
    gap, missing_id = _reserved_ids(preset, old, new, fresh, num_old, name)
    fixed = preset.num_embeddings[number] if preset.num_embeddings else None
    limit = fixed or preset.max_num_embeddings
    left_out = 0
    end = old.first_id + num_old + (gap is not None)
    if limit is not None and fixed is None and preset.beyond_limit == "hash":
        available = max(0, limit - end)
        left_out = max(0, len(added) - available)
        added = added[:available]
    rows = max(old.num_embeddings, end + len(added))
    if limit is not None:
        rows = min(rows, limit)
    column = replace(
        old,
        num_embeddings=rows,
        num_tokens=num_old + len(added),
        gap=gap,
        missing_id=missing_id % rows,
    )
    if preset.missing == "zero" and old.missing_id == old.unknown_id:
        # Category 0, which means an empty field, has an id now.
        for position in np.flatnonzero(added == 0).tolist():
            column = replace(column, missing_id=int(column.ids()[num_old + position]))
    return column, added, left_out


def _reserved_ids(
    preset: Preset,
    old: SparseColumn,
    new: VocabularyColumn,
    fresh: np.ndarray,
    num_old: int,
    name: str,
) -> tuple[int | None, int]:
    """Return the id in the middle of an extended vocabulary that no category has, and that of empty
    fields. `fresh` marks the tokens of `new` that are appended to `num_old` others. Raises
    InputError for more than one id in the middle.
    """
    gaps = [] if old.gap is None else [old.gap]
    missing_id = old.missing_id
    if preset.missing == "token" and new.gap is not None and missing_id == old.unknown_id:
        # The empty field became frequent enough to be a separate category.
        missing_id = old.first_id + num_old + int(np.count_nonzero(fresh[: new.gap]))
        gaps.append(missing_id)
    follows = old.first_id + num_old + (old.gap is not None)
    if old.has_unique_ids and old.unknown_id == follows and fresh.any():
        # The row of unknown categories followed the vocabulary; it keeps its place, now in the
        # middle.
        gaps.append(old.unknown_id)
    if len(gaps) > 1:
        raise InputError(
            f"column {name}: its rows of empty fields and of unknown categories would both be in "
            "the middle of the vocabulary; count all days again with a preset whose unknown_id is "
            "a number"
        )
    return (gaps[0] if gaps else None), missing_id


_MAX_ID = 2**31 - 2
"""Maximum id of a vocabulary."""


def with_id_tables(preprocessor: Preprocessor, rules: Preset, folder: str) -> Preprocessor:
    """Return the Preprocessor of `rules` with the ids of a folder's tables: for each vocabulary a
    Parquet or CSV file whose name contains its column's name. Its two columns are the values and
    their ids. An empty value is the empty field. Values with the id of unknown categories share
    that row. Raises InputError for missing or unknown files, repeated values and ids, and gaps.
    """
    if rules.dense == "buckets" or rules.ids == "murmur3" or rules.token_modulo is not None:
        raise InputError(
            f"id_tables: preset {rules.name} does not look categories up as they are. Use another "
            "--preset"
        )
    inputs = preprocessor.inputs
    files = storage.list_files(folder)
    owners = [inputs.sparse[owner] for owner in dict.fromkeys(inputs.vocabulary_owners)]
    paths = {name: file.path for file in files for name in [_match_column(file.path, owners)]}
    if absent := [name for name in owners if name not in paths]:
        raise InputError(
            f"{folder}: no table for column {absent[0]}. Add {absent[0]}.parquet or {absent[0]}.csv"
        )
    if len(paths) < len(files):
        raise InputError(
            f"{folder}: must have one table for each column, got {len(files)} for {len(paths)}. "
            "Remove the others"
        )
    columns = {
        name: _column(preprocessor.schema, rules, name, path) for name, path in paths.items()
    }
    sparse = tuple(columns[inputs.sparse[owner]][0] for owner in inputs.vocabulary_owners)
    tokens = np.concatenate([columns[name][1] for name in owners])
    constants = {
        name: value for name, value in preprocessor.constants.items() if name != FREQUENCIES
    }
    return replace(preprocessor, sparse=sparse, tokens=tokens, constants={**constants, ENDS: {}})


def _match_column(path: str, names: list[str]) -> str:
    """Return the longest column name that is a whole word of a file name. Raises InputError."""
    words = f"_{storage.name_of(path).rsplit('.', 1)[0].replace('-', '_').replace('.', '_')}_"
    matches = [name for name in names if f"_{name.replace('-', '_').replace('.', '_')}_" in words]
    if not matches:
        raise InputError(
            f"{path}: its name has no column with a vocabulary. Name it after one of "
            f"{', '.join(names)}"
        )
    return max(matches, key=len)


def _column(schema: Schema, rules: Preset, name: str, path: str) -> tuple[SparseColumn, np.ndarray]:
    """Return the rule and the vocabulary of a column's table."""
    values, ids = _read(path)
    tokens, missing = _parse_tokens(values, schema, name, path)
    if len(ids) and not 0 <= ids.min() <= ids.max() <= _MAX_ID:
        raise InputError(
            f"{path}: IDs must be from 0 to {_MAX_ID:,}, got {ids.min():,} to {ids.max():,}. "
            "Renumber the values"
        )
    if missing.sum() > 1 or len(np.unique(tokens[~missing])) < np.count_nonzero(~missing):
        raise InputError(f"{path}: a value has several IDs. Give each value one row")
    separate = ~missing & (ids != rules.unknown_id)
    order = np.argsort(ids[separate])
    tokens = tokens[separate][order]
    ordered = ids[separate][order]
    missing_id = int(ids[missing][0]) if missing.any() else None
    first, stop, gap = _id_range(ordered, missing_id, rules, path)
    unknown_id = rules.unknown_id
    if unknown_id is None:
        unknown_id = max(stop, (missing_id or 0) + 1)
    if missing_id is None:
        zero = np.flatnonzero(tokens == 0).tolist() if rules.missing == "zero" else []
        if zero:
            missing_id = first + zero[0]
        else:
            missing_id = rules.missing if isinstance(rules.missing, int) else unknown_id
            if first <= missing_id < stop:
                raise InputError(
                    f"{path}: ID {missing_id} of empty fields ({rules.name}) is a value's. Add an "
                    "empty value"
                )
    rows = max(stop, unknown_id + 1, missing_id + 1)
    return SparseColumn(rows, len(tokens), first, unknown_id, missing_id, gap), tokens


def _parse_tokens(
    values: pa.Array,
    schema: Schema,
    name: str,
    path: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a table's values, and which are empty fields. Raises InputError for
    values that cannot be in the column.
    """
    alone = Schema(
        label=None,
        sparse=(name,),
        tokens=schema.tokens,
        integers=(name,) if name in schema.integers else (),
        category_rules=schema.category_rules,
    )
    block, faults = parse_table(pa.table({name: values}), alone, path=path)
    if faults.total:
        raise InputError(f"{path}: {faults.describe()}")
    return block.categories[:, 0], block.is_missing(name)


def _id_range(
    ordered: np.ndarray,
    missing_id: int | None,
    rules: Preset,
    path: str,
) -> tuple[int, int, int | None]:
    """Return the range [first, stop) of ascending ids, and the empty field's id if it is within.
    Raises InputError for repeated ids and gaps.
    """
    if not len(ordered):
        return rules.first_id, rules.first_id, None
    if len(repeated := ordered[1:][ordered[1:] == ordered[:-1]]):
        raise InputError(
            f"{path}: ID {repeated[0]:,} belongs to several values. Give each value an ID of its "
            "own"
        )
    first = int(ordered[0])
    stop = int(ordered[-1]) + 1
    gap = missing_id if missing_id is not None and first <= missing_id < stop else None
    unused = np.setdiff1d(np.arange(first, min(stop, first + len(ordered) + 1)), ordered)
    if len(unused := unused[unused != gap]):
        raise InputError(
            f"{path}: IDs must have no gaps, but no value has ID {unused[0]:,}. Number the values "
            "consecutively"
        )
    return first, stop, gap


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
        return plain_array(values), pc.fill_null(
            pc.cast(plain_array(ids), pa.int64()),
            -1,
        ).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise InputError(
            f"{path}: must be Parquet or CSV with two columns, values and integer IDs ({error})"
        ) from None
