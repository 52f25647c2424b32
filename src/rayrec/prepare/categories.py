"""What counting the categories of a log tells: how many and how frequent they are, and which a model would not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayrec.data import report
from rayrec.data.counting import Counts, count_log
from rayrec.data.engine import Engine
from rayrec.data.log import LogIndex
from rayrec.data.preprocessor import Preprocessor, bucket_integers
from rayrec.data.profiles import RAYREC, Profile
from rayrec.data.stretches import Slice, parts_of
from rayrec.prepare.config import PreparationConfig


@dataclass(frozen=True)
class Categories:
    """What was found."""

    columns: dict[str, dict[str, Any]]
    """Of each sparse column."""
    dense_unknown: dict[str, float | None]
    """Rates of unknown values in dense columns, where the Preprocessor makes categories of them."""
    unknown_to: str | None
    """What does not know the unknown categories; None where there is nothing to compare."""
    top: tuple[np.ndarray, ...]
    """uint64 (at most report.TOP) a sparse column: its most frequent categories"""


def examine_categories(
    index: LogIndex,
    slices: Sequence[Slice],
    *,
    config: PreparationConfig,
    given: Preprocessor | None,
    engine: Engine,
    progress: Callable[[str, int, int | None], None],
) -> Categories:
    """Counts the whole log and, where no Preprocessor is given, its last slice once more: what the past knew is the
    difference. Memory is bounded as for `rayrec vocabulary`, but for one column's categories at a time."""
    buckets = given is not None and given.integer_buckets
    # Each column by itself, also those that share a vocabulary.
    job = replace(RAYREC.counting(config.schema.unshared()), prepare=bucket_integers if buckets else None)
    shift = len(config.schema.dense) if buckets else 0  # they come first among the counted columns

    def count(start: int, what: str) -> Counts:
        return count_log(
            job,
            list(parts_of(index.segments, start, index.rows)),
            engine=engine,
            memory_bytes=config.memory_bytes,
            progress=lambda rows: progress(what, rows, index.rows - start),
        )

    past = next((piece.start for piece in reversed(slices) if piece.stop > piece.start), 0)
    with count(0, "categories (rows)") as counts:
        found = [_column(counts, shift + s) for s in range(len(config.schema.sparse))]
        columns = dict(zip(config.schema.sparse, (column for column, _ in found), strict=True))
        top = tuple(tokens for _, tokens in found)
        if given is not None:
            for s, name in enumerate(config.schema.sparse):
                columns[name].update(_judged(given, counts, shift + s))
            names = config.schema.dense if buckets else ()
            dense_unknown = {name: _judged(given, counts, d)["unknown_rate"] for d, name in enumerate(names)}
            return Categories(columns, dense_unknown, f"Preprocessor {given.hash()}", top)
        if not past:
            return Categories(columns, {}, None, top)
        last = next(piece.name for piece in slices if piece.start == past and piece.stop > past)
        with count(past, f"categories of {last} (rows)") as latest:
            for s, name in enumerate(config.schema.sparse):
                columns[name]["unknown_rate"] = _unknown_to_the_past(counts, latest, s, config.rules)
    known = f"what comes before {last}, categories seen {config.rules.min_count} times or more (rates are of {last})"
    return Categories(columns, {}, known, top)


def _column(counts: Counts, number: int) -> tuple[dict[str, Any], np.ndarray]:
    tokens, amounts, _ = counts.kept(number, 2)
    distinct = counts.num_distinct(number)
    found = report.concentration(int(amounts.sum()) + distinct - len(amounts), distinct, amounts)
    column = {
        "values": found.values,
        "distinct": distinct,
        **{f"top_{n}_rate": held for n, held in found.top.items()},
        "once_rate": found.once,
        "unknown_rate": None,
    }
    return column, report.most_frequent(tokens, amounts)


def _unknown_to_the_past(counts: Counts, latest: Counts, number: int, rules: Profile) -> float | None:
    """Share of the latest values whose category came fewer than min_count times before."""
    tokens, amounts = report.merged(*latest.kept(number)[:2], rules.token_modulo)
    # Only what came min_count times before and once since matters, unless categories fall together.
    kept = counts.kept(number, 1 if rules.token_modulo else rules.min_count + 1)
    all_tokens, all_amounts = report.merged(*kept[:2], rules.token_modulo)
    both, here, there = np.intersect1d(tokens, all_tokens, assume_unique=True, return_indices=True)
    return report.unknown_rate(tokens, amounts, both[all_amounts[there] - amounts[here] >= rules.min_count])


def _judged(given: Preprocessor, counts: Counts, number: int) -> dict[str, float | None]:
    """What a Preprocessor's column number `number` makes of its categories."""
    column = given.sparse[number]
    tokens, amounts, _ = counts.kept(number)
    vocabulary = given.vocabulary(number)
    found: dict[str, float | None] = {"unknown_rate": None}
    if column.num_tokens is not None:
        looked_up = report.merged(tokens, amounts, column.token_modulo)
        found["unknown_rate"] = report.unknown_rate(*looked_up, np.sort(vocabulary))
    ids = column.first_id + (column.num_tokens or 0) + (column.gap is not None)
    if column.num_tokens is None or column.token_modulo or ids > column.num_embeddings:
        found["collision_rate"] = report.collision_rate(column, vocabulary, tokens, amounts)
    return found
