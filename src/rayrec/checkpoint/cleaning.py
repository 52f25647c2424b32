"""Removes what a run needs no more: checkpoints by its retention, saves that were torn, files of attempts that lost."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rayrec import storage
from rayrec.checkpoint.discovery import Checkpoint, committed, file_sizes, torn
from rayrec.checkpoint.format import MANIFEST, DamagedError, UnreadableError, is_data_file
from rayrec.checkpoint.lease import Lease
from rayrec.checkpoint.save_retry import PATIENCE_S
from rayrec.config import InputError

_logger = logging.getLogger(__name__)


def sweep(run_folder: str, lease: Lease) -> None:
    """Removes the folders of saves that were never committed, as long as the run is ours."""
    for folder in torn(run_folder):
        if lease.valid():
            storage.remove_folder(folder)


def prune(
    run_folder: str,
    retention: Retention,
    *,
    newest: int,
    scores: dict[int, float | None],
    damaged: Collection[int] = (),
) -> None:
    """Removes what retention does not keep, after step `newest` was committed. `scores` holds those known, by step, and is
    added to. `damaged`: steps that were passed over and not written again; they go, and stand in for no good one.

    Later steps than `newest` are left alone: a restart passed over them, and will come to write them again.
    """
    present, removed = {}, []
    for checkpoint in committed(run_folder):
        if checkpoint.step > newest:
            continue
        present[checkpoint.step] = checkpoint
        if checkpoint.step in damaged:
            removed.append(checkpoint.step)
        elif checkpoint.step not in scores:
            try:
                scores[checkpoint.step] = checkpoint.manifest()["score"]
            except UnreadableError:
                del present[checkpoint.step]  # it may be readable tomorrow
            except DamagedError:
                removed.append(checkpoint.step)  # no use to anyone, and was told when it was passed over
            except InputError:
                del present[checkpoint.step]  # of another version: not ours to judge
    known = [(step, scores[step]) for step in present if step in scores and step not in removed]
    for step in [*removed, *to_remove(known, retention, in_use={newest})]:
        remove_checkpoint(present[step])
        scores.pop(step, None)


def remove_checkpoint(checkpoint: Checkpoint) -> None:
    """The manifest goes first: what is left by a crash in between is no checkpoint any more."""
    storage.remove_file(storage.join(checkpoint.path, MANIFEST))
    storage.remove_folder(checkpoint.path)


def remove_unreferenced(folder: str, referenced: Iterable[str], *, tag: str) -> None:
    """Removes the data files of earlier attempts at the same step from a committed checkpoint; `tag` is this one's.

    Those of later tags stay: a successor of ours may be writing them.
    """
    for name in file_sizes(folder).keys() - set(referenced):
        if is_data_file(name) and tag_of(name) < tag:
            storage.remove_file(storage.join(folder, name))


def tag_of(name: str) -> str:
    """Of a data file, finished or not."""
    return name.split(".", maxsplit=1)[0].partition("-")[2]


@contextlib.contextmanager
def tolerated(what: str) -> Iterator[None]:
    """Cleaning that fails loses nothing: it is warned of, and comes again with the next save or attempt."""
    try:
        with storage.patience(PATIENCE_S):
            yield
    except (OSError, InputError) as error:
        _logger.warning("%s: %s", what, error)


@dataclass(frozen=True)
class Retention:
    """What is kept of a run's checkpoints, beside those in use."""

    num_to_keep: int = 2
    """Newest ones."""
    keep_best: int = 1
    """Those with the best scores."""
    keep_every: int | None = None
    """Steps whose multiples are kept for good; None: none."""


def to_remove(saved: Sequence[tuple[int, float | None]], retention: Retention, *, in_use: Collection[int]) -> list[int]:
    """The steps to remove, lowest first, of (step, score) of the checkpoints there are.

    Higher scores are better, of equal ones the later is; None (or NaN) was not evaluated and is never among the best.
    """
    newest = sorted(step for step, _ in saved)[-retention.num_to_keep :] if retention.num_to_keep else []
    scored = sorted((score, step) for step, score in saved if score is not None and not math.isnan(score))
    best = [step for _, step in scored[-retention.keep_best :]] if retention.keep_best else []
    kept = {*newest, *best, *in_use}
    return sorted(
        step
        for step, _ in saved
        if step not in kept and (retention.keep_every is None or step % retention.keep_every != 0)
    )
