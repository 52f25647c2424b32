"""Ensemble of trained click models as one checkpoint, for evaluation, prediction, export and
serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayrec import storage
from rayrec.checkpoint import Checkpoint, open_checkpoint
from rayrec.checkpoint.writer import join
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import PREPROCESSOR_FOLDER
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.scorer import click_settings, load_preprocessor, merge_checkpoints
from rayrec.workloads.recsys.workload import ClickWorkload


def ensemble(
    checkpoints: Sequence[str], out: str, *, configs: Sequence[TrainConfig]
) -> dict[str, Any]:
    """Write a checkpoint whose logit is the mean over two or more click models, atomically into
    folder `out`. The models may differ in kind and width, but not in Preprocessor and precision.
    The checkpoint has no optimizer state. Memory: a few blocks of 16 MiB. `configs`: of each
    checkpoint. Returns JSON values: `out`, `checkpoints` (folders), `models` (kinds),
    `weight_bytes`. Raises InputError for unlike or damaged models, or an existing `out`.
    """
    if len(checkpoints) < 2:
        raise InputError("ensemble: needs at least two checkpoints")
    opened = [open_checkpoint(checkpoint) for checkpoint in checkpoints]
    for checkpoint, config in zip(opened, configs, strict=True):
        if not isinstance(config.workload, ClickWorkload):
            raise InputError(
                f"{checkpoint.path}: recipe {config.recipe} does not predict clicks. Ensembles "
                "need click models."
            )
    settings = [
        click_settings(checkpoint, config)
        for checkpoint, config in zip(opened, configs, strict=True)
    ]
    preprocessor = load_preprocessor(opened[0].path)
    for checkpoint in opened[1:]:
        if load_preprocessor(checkpoint.path).hash() != preprocessor.hash():
            raise InputError(
                f"{checkpoint.path}: Preprocessor does not match {opened[0].path}, so their ids "
                "differ. Train all models with one (--workload.preprocessor DIR)."
            )
    model, targets = merge_checkpoints(opened, settings, preprocessor=preprocessor)
    described = configs[0].replace(workload={"model": model})

    def write_extra_files(folder: str) -> None:
        storage.write_bytes(storage.join(folder, "config.yaml"), described.to_yaml().encode())
        preprocessor.save(storage.join(folder, PREPROCESSOR_FOLDER))

    with storage.writing_folder(out) as folder:
        join(
            folder, list(zip(opened, targets, strict=True)), state={}, extra_files=write_extra_files
        )
        tensors = Checkpoint(folder).manifest()["tensors"]
    return {
        "out": storage.absolute(out),
        "checkpoints": [checkpoint.path for checkpoint in opened],
        "models": [type(alone).__name__.removesuffix("Config") for alone in model.models],
        "weight_bytes": sum(
            chunk["bytes"] for tensor in tensors.values() for chunk in tensor["chunks"]
        ),
    }
