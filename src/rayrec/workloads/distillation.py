"""A small click model learns from a large one: its teacher's probabilities become a part of what rows are to be scored as."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rayrec import storage
from rayrec.checkpoint import Checkpoint, open_checkpoint
from rayrec.config import Config, InputError
from rayrec.data.encoded import EncodedRows
from rayrec.data.preprocessor import Preprocessor
from rayrec.metrics.binary import sigmoid

RECORD = "teacher.json"
"""File in a run's folder that names its teacher, so that a resumed run has the same one."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Config):
    """Whom a click model learns from beside the labels."""

    checkpoint: str | None = None
    """Folder of a click model's checkpoint, or of its run, reachable from every node; its Preprocessor is taken over."""
    weight: float = 0.0
    """Share of the teacher's probability in what rows are to be scored as, the label having the rest; 0: no teacher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight <= 1:
            raise InputError(f"teacher.weight: {self.weight} must lie between 0 and 1")

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

    checkpoint: str
    """Folder of its weights."""
    weight: float


def open_teacher(config: TeacherConfig, *, run: str) -> Teacher | None:
    """On the driver: the teacher, or None where there is none; a resumed run has the one it began with.

    Raises InputError where there is no such checkpoint, or its weights are not those the run began with.
    """
    if config.checkpoint is None:
        return None
    record = storage.join(run, RECORD)
    known = storage.read_json(record) if storage.exists(record) else None
    opened = open_checkpoint(config.checkpoint if known is None else known["checkpoint"])
    weights = hashlib.sha256(json.dumps(opened.manifest(), sort_keys=True).encode()).hexdigest()[:16]
    if known is None:
        storage.write_json(record, {"checkpoint": opened.path, "weights": weights})
    elif known["weights"] != weights:
        raise InputError(
            f"{opened.path}: the teacher's weights changed since {run} began to learn from them; start a new run"
        )
    return Teacher(opened.path, config.weight)


def load_targets(teacher: Teacher, preprocessor: Preprocessor) -> Callable[[EncodedRows], np.ndarray]:
    """On a worker: a function that gives what each labelled row is to be scored as, float32 (rows,): (1 - weight) * label +
    weight * the teacher's probability. Binary cross entropy with it is the same mean of those with label and probability, since
    it is linear in the target (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", at temperature 1).

    Memory: the teacher's weights, once a worker. Raises InputError for damaged weights and those of another kind of model.
    """
    from rayrec.workloads.recsys_scorer import click_settings, load_scorer

    model, precision = click_settings(Checkpoint(teacher.checkpoint))
    scorer = load_scorer(
        model, precision=precision, checkpoint=teacher.checkpoint, preprocessor=preprocessor, device="cpu"
    )
    share = np.float32(teacher.weight)

    def targets(rows: EncodedRows) -> np.ndarray:
        assert rows.labels is not None
        return (1 - share) * rows.labels + share * sigmoid(scorer.score(rows))

    return targets
