"""Distillation of click models: targets mix the labels with a teacher's probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rayrec import storage
from rayrec.bounds import Fraction
from rayrec.checkpoint import Checkpoint, open_checkpoint
from rayrec.config import Config, InputError, json_hash
from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.metrics.binary import sigmoid

RECORD = "teacher.json"
"""File in the run folder that records its teacher, so that a resumed run uses the same one."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Config):
    """Teacher model, in addition to the labels."""

    checkpoint: str | None = None
    """Folder of a click model's checkpoint or run, reachable from every node. Its Preprocessor is
    reused. For the mean of several models, join them with `rayrec ensemble`.
    """
    weight: Fraction = 0.0
    """Weight of the teacher's probability in the target. The label has the remaining weight. 0
    disables the teacher.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint == "":
            raise InputError(
                "teacher.checkpoint: must be a run or checkpoint, got an empty value. Omit it."
            )

    def check(self) -> None:
        """Check that both a teacher and a weight are set, or neither. Raises InputError."""
        if self.weight and self.checkpoint is None:
            raise InputError(
                "teacher.checkpoint: must be a click model, got None. Pass "
                "--workload.teacher.checkpoint RUN."
            )
        if self.checkpoint is not None and not self.weight:
            raise InputError(
                "teacher.weight: must be above 0 with a checkpoint, got 0. Pass "
                "--workload.teacher.weight 0.5."
            )


@dataclass(frozen=True)
class Teacher:
    """Resolved teacher for workers."""

    checkpoint: str
    """Checkpoint folder."""
    weight: float


def open_teacher(config: TeacherConfig, *, run: str) -> Teacher | None:
    """Return the teacher on the driver, or None if not configured. A resumed run keeps its original
    teacher. Raises InputError if the checkpoint is missing or its weights changed since the run
    started.
    """
    if config.checkpoint is None:
        return None
    record = storage.join(run, RECORD)
    recorded = storage.read_json(record) if storage.exists(record) else None
    if isinstance(recorded, list):  # Written by an earlier version
        if len(recorded) > 1:
            raise InputError(
                f"{run}: has {len(recorded)} teachers. Join them with `rayrec ensemble`, and "
                "start a new run."
            )
        recorded = recorded[0]
    checkpoint = open_checkpoint(recorded["checkpoint"] if recorded else config.checkpoint)
    current = {"checkpoint": checkpoint.path, "weights": json_hash(checkpoint.manifest())}
    if recorded is None:
        storage.write_json(record, current)
    elif recorded["weights"] != current["weights"]:
        raise InputError(
            f"{checkpoint.path}: the teacher's weights changed since {run} started. Start a new "
            "run."
        )
    return Teacher(checkpoint.path, config.weight)


def load_targets(
    teacher: Teacher, preprocessor: Preprocessor, *, logit_offset: float = 0.0
) -> Callable[[EncodedRows], np.ndarray]:
    """Return a function that computes targets on a worker: (1 - weight) * label + weight * teacher
    probability, float32 [rows]. Binary cross entropy is linear in the target, so this equals the
    weighted mean of both losses (Hinton et al. 2015, "Distilling the Knowledge in a Neural
    Network", at temperature 1). `logit_offset` makes its probabilities those among
    the rows of a sample. Memory: the teacher's weights, once per worker. Raises InputError for
    damaged weights, another kind of model, and incompatible models.
    """
    from rayrec.workloads.recsys.scorer import click_settings, load_scorer

    model, precision = click_settings(Checkpoint(teacher.checkpoint))
    scorer = load_scorer(
        model,
        precision=precision,
        checkpoint=teacher.checkpoint,
        preprocessor=preprocessor,
        device="cpu",
    )
    weight = np.float32(teacher.weight)
    offset = np.float32(logit_offset)

    def targets(rows: EncodedRows) -> np.ndarray:
        return (1 - weight) * rows.label + weight * sigmoid(scorer.score(rows) + offset)

    return targets
