"""Extension of a Preprocessor's vocabularies by new categories of a log, without changing existing ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoding.known_categories import ENDS
from rayrec.data.encoding.preprocessor import PREPROCESSOR_FOLDER, Preprocessor
from rayrec.data.encoding.presets import Preset, VocabularyColumn, build_vocabulary
from rayrec.data.encoding.rules import SparseColumn

if TYPE_CHECKING:
    from rayrec.data.encoding.counts import Counts


def preprocessor_folder(path: str) -> str:
    """Return the Preprocessor folder in a run, checkpoint, export, preprocessed log or `path` itself. Raises InputError."""
    for folder in (path, storage.join(path, PREPROCESSOR_FOLDER)):
        if storage.exists(storage.join(folder, "preprocessor.json")):
            return folder
    raise InputError(f"{path}: has no Preprocessor; use the --out folder of `rayrec vocabulary`, a run or a checkpoint")


@dataclass(frozen=True)
class Extension:
    """Preprocessor with an older one's ids and additional ids. Counts of categories are by each vocabulary's first column."""

    preprocessor: Preprocessor
    existing: dict[str, int]
    appended: dict[str, int]
    left_out: dict[str, int]
    """Categories beyond max_num_embeddings."""


def rules_of(old: Preprocessor, source: str) -> Preset:
    """Return the rules of a Preprocessor. Raises InputError if it cannot be extended."""
    if old.multi_hot is not None:
        raise InputError(f"{source}: cannot be extended, because multi_hot bags depend on the table sizes; count all days again")
    if "rules" not in old.constants:
        raise InputError(f"{source}: adopted data has ids instead of categories, so it has no vocabulary to extend")
    return Preset().updated(old.constants["rules"], where=f"{source}: ")


def extend(old: Preprocessor, preset: Preset, counts: Counts) -> Extension:
    """Append the categories in `counts` with at least min_count to the vocabularies of `old`, ordered by `preset`. Constants of
    numbers and hashed columns stay. `counts` come from a log with the columns of `old`, counted with its rules, `preset`. Memory:
    the tokens of both, and a sorted copy of one column's tokens. Raises InputError for a column that cannot keep its ids."""
    inputs = old.inputs
    sparse: list[SparseColumn] = []
    tokens: list[np.ndarray] = []
    existing: dict[str, int] = {}
    appended: dict[str, int] = {}
    left_out: dict[str, int] = {}
    for number, (name, owner) in enumerate(zip(inputs.sparse, inputs.vocabulary_owners, strict=True)):
        if owner != number:
            sparse.append(sparse[owner])
            continue
        column, vocabulary = old.sparse[number], old.vocabulary(number)
        if column.num_tokens is not None:
            new = build_vocabulary(preset, counts, number)
            column, added, left_out[name] = _extended(preset, column, vocabulary, new, number, name)
            existing[name], appended[name] = len(vocabulary), len(added)
            vocabulary = np.concatenate([vocabulary, added])
        sparse.append(column)
        tokens.append(vocabulary)
    owners = {name: inputs.sparse[owner] for name, owner in zip(inputs.sparse, inputs.vocabulary_owners, strict=True)}
    constants = {
        **old.constants,
        "rows": old.constants.get("rows", 0) + counts.rows,
        # Appended categories may be more frequent than earlier ids.
        ENDS: {name: ends for name, ends in old.constants.get(ENDS, {}).items() if not appended.get(owners[name])},
        "extends": old.hash(),
    }
    preprocessor = replace(old, sparse=tuple(sparse), tokens=np.concatenate(tokens or [old.tokens]), constants=constants)
    return Extension(preprocessor, existing, appended, left_out)


def _extended(
    preset: Preset, old: SparseColumn, vocabulary: np.ndarray, new: VocabularyColumn, number: int, name: str
) -> tuple[SparseColumn, np.ndarray, int]:
    """Return the column's new rule, the tokens to append, and the number of omitted ones."""
    fresh = ~np.isin(new.tokens, vocabulary)
    added = new.tokens[fresh]
    num_old, gap, missing_id = len(vocabulary), old.gap, old.missing_id
    if preset.missing == "token" and new.gap is not None and missing_id == old.unknown_id:
        # The empty field became frequent enough to be a separate category.
        if gap is not None:
            raise _gap_error(name)
        gap = missing_id = old.first_id + num_old + int(np.count_nonzero(fresh[: new.gap]))
    if old.has_unique_ids and old.unknown_id == old.first_id + num_old + (old.gap is not None) and len(added):
        # The row of unknown categories followed the vocabulary; it keeps its place, now in the middle.
        if gap is not None:
            raise _gap_error(name)
        gap = old.unknown_id
    fixed = preset.num_embeddings[number] if preset.num_embeddings else None
    limit, left_out = fixed or preset.max_num_embeddings, 0
    end = old.first_id + num_old + (gap is not None)
    if limit is not None and fixed is None and preset.beyond_limit == "hash":
        available = max(0, limit - end)
        left_out, added = max(0, len(added) - available), added[:available]
    rows = max(old.num_embeddings, end + len(added))
    rows = rows if limit is None else min(rows, limit)
    column = replace(old, num_embeddings=rows, num_tokens=num_old + len(added), gap=gap, missing_id=missing_id % rows)
    if preset.missing == "zero" and old.missing_id == old.unknown_id and len(zero := np.flatnonzero(added == 0)):
        column = replace(column, missing_id=int(column.ids()[num_old + int(zero[0])]))
    return column, added, left_out


def _gap_error(name: str) -> InputError:
    return InputError(
        f"column {name}: its rows of empty fields and of unknown categories would both be in the middle of the vocabulary; "
        "count all days again with a preset whose unknown_id is a number"
    )
