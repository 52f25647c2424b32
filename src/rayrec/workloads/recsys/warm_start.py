"""Warm start of a click model: maps each category to its row in another run's tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rayrec.checkpoint import Checkpoint
from rayrec.checkpoint.state import RowMap
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import SparseColumn
from rayrec.workloads.base import RunContext, WarmStart
from rayrec.workloads.recsys.scorer import (
    click_settings,
    empty_model,
    expected_weights,
    load_preprocessor,
)
from rayrec.workloads.recsys.settings import ClickSettings, Prepared
from rayrec.workloads.scoring import require_same_optimizer, require_same_weights, stored_settings

_TOKENS_AT_ONCE: Final = 1 << 20
"""Categories per lookup batch."""


@dataclass(frozen=True)
class TableRemap:
    """Row mapping and category counts of one warm-started embedding table."""

    row_map: RowMap
    kept: int
    """Number of categories in both vocabularies."""
    fresh: int
    """Number of categories only in the new vocabulary."""
    dropped: int
    """Number of categories only in the old vocabulary."""

    def counts(self) -> dict[str, int]:
        return {"kept": self.kept, "fresh": self.fresh, "dropped": self.dropped}


def warm_start(
    workload: ClickSettings, context: RunContext, prepared: Prepared, checkpoint: Checkpoint
) -> WarmStart:
    """Prepare a warm start. See `Workload.warm_start`. Driver memory: the checkpoint's
    Preprocessor, a sorted copy of one vocabulary, and 4 bytes (8 beyond 2^31 rows) per row in
    tables that do not keep all old ids.
    """
    _require_same_model(workload, checkpoint)
    old = load_preprocessor(checkpoint.path)
    new = prepared.preprocessor.get()
    require_same_inputs(checkpoint, old, new)
    empty = empty_model(workload.model, preprocessor=new, precision=context.config.precision)
    require_same_weights(checkpoint, expected_weights(empty, old))
    owners = new.inputs.vocabulary_owners
    by_owner = {
        owner: remap_table(
            old.sparse[owner],
            new.sparse[owner],
            old.vocabulary(owner),
            new.vocabulary(owner),
            where=f"init_from {checkpoint.path}: column {new.inputs.sparse[owner]}",
        )
        for owner in dict.fromkeys(owners)
    }
    maps = {
        weight: by_owner[owner].row_map
        for weight, owner in zip(empty.table_weights().values(), owners, strict=True)
    }
    counts = {
        new.inputs.sparse[owner]: table_counts.counts() for owner, table_counts in by_owner.items()
    }
    totals = {
        name: sum(table_counts[name] for table_counts in counts.values())
        for name in ("kept", "fresh", "dropped")
    }
    return WarmStart(
        checkpoint.path,
        context.engine.share(maps),
        {"preprocessor": old.hash(), **totals, "tables": counts},
    )


def _require_same_model(workload: ClickSettings, checkpoint: Checkpoint) -> None:
    """Check that the checkpoint has this run's model, widths and optimizers. Raises InputError."""
    stored = stored_settings(checkpoint)
    model, _ = click_settings(checkpoint, own=type(workload.model))
    if type(model) is not type(workload.model):
        raise InputError(
            f"init_from {checkpoint.path}: model must be {type(workload.model).__name__}, as in "
            f"this run, got {type(model).__name__}"
        )
    if model.table_width != workload.model.table_width:
        raise InputError(
            f"init_from {checkpoint.path}: embedding width (embedding_dim times members) must be "
            f"{workload.model.table_width}, as in this run, got {model.table_width}"
        )
    if not checkpoint.has_only_weights():
        require_same_optimizer(
            checkpoint, stored, "sparse_optimizer", workload.sparse_optimizer, fields=("kind",)
        )
        require_same_optimizer(
            checkpoint,
            stored,
            "dense_optimizer",
            workload.dense_optimizer,
            fields=("kind", "momentum"),
        )


def require_same_inputs(checkpoint: Checkpoint, old: Preprocessor, new: Preprocessor) -> None:
    """Check that both Preprocessors provide the same features in the same order. Raises
    InputError.
    """
    pairs = {
        "numbers": (old.inputs.dense, new.inputs.dense),
        "sparse columns": (old.inputs.sparse, new.inputs.sparse),
        "shared vocabularies": (old.inputs.vocabularies, new.inputs.vocabularies),
        "kind of categories": (old.schema.tokens, new.schema.tokens),
        "bags of ids": (old.multi_hot, new.multi_hot),
    }
    if old.dense_names == new.dense_names and old.inputs.dense != new.inputs.dense:
        raise InputError(
            f"init_from {checkpoint.path}: numbers must be {new.inputs.dense}, as in this run, got "
            f"{old.inputs.dense}. Extend the vocabulary of the checkpoint (`rayrec vocabulary "
            "--extend`), which keeps its inputs, or leave out --workload.preprocessor."
        )
    for description, (stored, expected) in pairs.items():
        if stored != expected:
            raise InputError(
                f"init_from {checkpoint.path}: {description} must be {expected}, as in this run, "
                f"got {stored}. Use one schema."
            )
    if new.multi_hot is not None and old.num_embeddings != new.num_embeddings:
        raise InputError(
            f"init_from {checkpoint.path}: table rows differ, and the bags of multi_hot depend on "
            "them. Use one Preprocessor."
        )


def remap_table(
    old: SparseColumn,
    new: SparseColumn,
    old_tokens: np.ndarray,
    new_tokens: np.ndarray,
    *,
    where: str,
) -> TableRemap:
    """Map rows of the new to the old table by token, reserved rows (unknown, missing, below the
    first) too. Raises InputError, from `where`, for rows without counterpart: hashed columns of
    other sizes, and categories that share rows differently.
    """
    if old.token_modulo != new.token_modulo or (old.num_tokens is None) != (new.num_tokens is None):
        raise InputError(
            f"{where}: hashing does not match the checkpoint. Use the rules of its Preprocessor."
        )
    if old.num_tokens is None:
        if old != new:
            raise InputError(
                f"{where}: must be hashed to {old.num_embeddings:,} rows by the checkpoint's rule, "
                f"got {new.num_embeddings:,} rows. Use the same rows and rule."
            )
        return TableRemap(RowMap(new.num_embeddings, old.num_embeddings), 0, 0, 0)
    count = len(old_tokens)
    if _extends(old, new, old_tokens, new_tokens):
        return TableRemap(
            RowMap(new.num_embeddings, old.num_embeddings), count, len(new_tokens) - count, 0
        )
    if not (old.has_unique_ids and new.has_unique_ids):
        raise InputError(
            f"{where}: several categories share a row, and the vocabularies differ. Extend the "
            "vocabulary of the checkpoint (`rayrec vocabulary --extend`)."
        )
    sources = np.full(new.num_embeddings, -1, np.int32 if old.num_embeddings <= 2**31 else np.int64)
    reserved = min(old.first_id, new.first_id)
    sources[:reserved] = np.arange(reserved)
    sources[new.missing_id] = old.missing_id
    sources[new.unknown_id] = old.unknown_id  # after missing_id, because both may be one row
    num_shared = _join(sources, old.ids(), new.ids(), old_tokens, new_tokens)
    return TableRemap(
        RowMap(new.num_embeddings, old.num_embeddings, sources),
        num_shared,
        len(new_tokens) - num_shared,
        count - num_shared,
    )


def _extends(
    old: SparseColumn, new: SparseColumn, old_tokens: np.ndarray, new_tokens: np.ndarray
) -> bool:
    """Return whether the new table keeps all old rows and their numbers, and new categories use
    other rows.
    """
    count = len(old_tokens)
    same_rules = (
        replace(new, num_embeddings=old.num_embeddings, num_tokens=old.num_tokens, gap=old.gap)
        == old
    )
    if (
        not same_rules
        or len(new_tokens) < count
        or not np.array_equal(new_tokens[:count], old_tokens)
    ):
        return False
    ids = new.ids()
    if not np.array_equal(ids[:count], old.ids()):
        return False
    shared = old.num_embeddings == new.num_embeddings and not new.has_unique_ids
    return shared or bool((ids[count:] >= old.num_embeddings).all())


def _join(
    sources: np.ndarray,
    old_ids: np.ndarray,
    new_ids: np.ndarray,
    old_tokens: np.ndarray,
    new_tokens: np.ndarray,
) -> int:
    """Write the old id of each shared token at its new id. Return the number of shared tokens."""
    if not len(old_tokens):
        return 0
    order = np.argsort(old_tokens, kind="stable")
    ordered = old_tokens[order]
    num_shared = 0
    for start in range(0, len(new_tokens), _TOKENS_AT_ONCE):
        tokens = new_tokens[start : start + _TOKENS_AT_ONCE]
        positions = np.minimum(np.searchsorted(ordered, tokens), len(ordered) - 1)
        is_shared = ordered[positions] == tokens
        sources[new_ids[start : start + len(tokens)][is_shared]] = old_ids[
            order[positions[is_shared]]
        ]
        num_shared += int(np.count_nonzero(is_shared))
    return num_shared
