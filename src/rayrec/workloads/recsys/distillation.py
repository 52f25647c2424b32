"""A small click model learns from a large one: its teacher's probabilities become a part of what rows are to be scored as."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rayrec import storage
from rayrec.checkpoint import Checkpoint, open_checkpoint
from rayrec.config import Config, InputError
from rayrec.data.encoded import EncodedRows
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.metrics.binary import sigmoid

if TYPE_CHECKING:
    from rayrec.workloads.recsys.scorer import ClickScorer

RECORD = "teacher.json"
"""File in a run's folder that names its teacher, so that a resumed run has the same one."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Config):
    """Whom a click model learns from beside the labels."""

    checkpoint: str | tuple[str, ...] | None = None
    """Folder of a click model's checkpoint, or of its run, reachable from every node; its Preprocessor is taken over. Several:
    the logit of the teacher is the mean of theirs; they must have been trained with one Preprocessor and precision."""
    weight: float = 0.0
    """Share of the teacher's probability in what rows are to be scored as, the label having the rest; 0: no teacher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight <= 1:
            raise InputError(f"teacher.weight: {self.weight} must lie between 0 and 1")
        if self.checkpoint is not None and not all(self.checkpoints):
            raise InputError("teacher.checkpoint: names no folder; give one or more runs or checkpoints, or leave it out")

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """As given; none: there is no teacher."""
        if self.checkpoint is None:
            return ()
        return (self.checkpoint,) if isinstance(self.checkpoint, str) else self.checkpoint or ("",)

    def check(self) -> None:
        """Raises InputError for a weight without a teacher, and a teacher without a weight."""
        if self.weight and self.checkpoint is None:
            raise InputError(
                "teacher.checkpoint: whom to learn from? pass --workload.teacher.checkpoint RUN (a trained click model)"
            )
        if self.checkpoint is not None and not self.weight:
            raise InputError(
                "teacher.weight: is 0, so that nothing is learnt from the teacher; pass --workload.teacher.weight 0.5"
            )


@dataclass(frozen=True)
class Teacher:
    """A teacher that was found; what workers are told."""

    checkpoints: tuple[str, ...]
    """Folders of its weights; several: it is the mean of these models."""
    weight: float


def open_teacher(config: TeacherConfig, *, run: str) -> Teacher | None:
    """On the driver: the teacher, or None where there is none; a resumed run has the one it began with.

    Raises InputError where there is no such checkpoint, or its weights are not those the run began with.
    """
    if config.checkpoint is None:
        return None
    record = storage.join(run, RECORD)
    known = storage.read_json(record) if storage.exists(record) else []
    known = known if isinstance(known, list) else [known]  # an earlier version wrote one
    opened = [open_checkpoint(each) for each in ([each["checkpoint"] for each in known] or config.checkpoints)]
    found = [{"checkpoint": each.path, "weights": _hash_of(each)} for each in opened]
    if not known:
        storage.write_json(record, found)
    for before, now in zip(known, found, strict=False):
        if before["weights"] != now["weights"]:
            raise InputError(
                f"{now['checkpoint']}: the teacher's weights changed since {run} began to learn from them; start a new run"
            )
    return Teacher(tuple(each.path for each in opened), config.weight)


def _hash_of(checkpoint: Checkpoint) -> str:
    return hashlib.sha256(json.dumps(checkpoint.manifest(), sort_keys=True).encode()).hexdigest()[:16]


def load_targets(teacher: Teacher, preprocessor: Preprocessor) -> Callable[[EncodedRows], np.ndarray]:
    """On a worker: a function that gives what each labelled row is to be scored as, float32 (rows,): (1 - weight) * label +
    weight * the teacher's probability. Binary cross entropy with it is the same mean of those with label and probability, since
    it is linear in the target (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", at temperature 1).

    Memory: the teacher's weights, once a worker. Raises InputError for damaged weights, those of another kind of model, and
    models that do not fit together.
    """
    scorer = _load_scorer(teacher.checkpoints, preprocessor)
    share = np.float32(teacher.weight)

    def targets(rows: EncodedRows) -> np.ndarray:
        return (1 - share) * rows.label + share * sigmoid(scorer.score(rows))

    return targets


def _load_scorer(checkpoints: tuple[str, ...], preprocessor: Preprocessor) -> ClickScorer:
    from rayrec.workloads.recsys.scorer import click_settings, load_mean_scorer, load_scorer

    if len(checkpoints) > 1:
        return load_mean_scorer(checkpoints, preprocessor=preprocessor, device="cpu")
    (checkpoint,) = checkpoints
    model, precision = click_settings(Checkpoint(checkpoint))
    return load_scorer(model, precision=precision, checkpoint=checkpoint, preprocessor=preprocessor, device="cpu")
