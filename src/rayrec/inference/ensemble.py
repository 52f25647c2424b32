"""Several trained click models as one: a checkpoint that is evaluated, predicted with, exported and served as any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rayrec import storage
from rayrec.checkpoint import Checkpoint, open_checkpoint
from rayrec.checkpoint.joining import Place, join
from rayrec.config import InputError
from rayrec.data.preprocessor import PREPROCESSOR_FOLDER, Preprocessor
from rayrec.models.base import ClickModelConfig
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.workloads.recsys import ClickWorkload
from rayrec.workloads.recsys_scorer import (
    PREFIX,
    PlainModel,
    check_weights,
    click_settings,
    empty_model,
    load_preprocessor,
    wanted_weights,
)

if TYPE_CHECKING:
    from rayrec.layers.mlp import Precision
    from rayrec.workloads.base import TrainConfig


def ensemble(checkpoints: Sequence[str], out: str, *, configs: Sequence[TrainConfig]) -> dict[str, Any]:
    """Writes the checkpoint of a model whose logit is the mean of those of two or more click models, into folder `out`, which
    appears complete or not at all -> `out`, `checkpoints` (the folder of each), `models` (the kind of each), `weight_bytes`.
    Plain JSON values.

    The models may be of different kinds and widths, but must have been trained with one Preprocessor and precision. `configs` are
    those of the checkpoints' config.yaml. There is no optimizer state in the checkpoint: it cannot be trained further.
    Memory: a few blocks of 16 MiB. Raises InputError for what does not fit together, damage, and where `out` exists.
    """
    if len(checkpoints) < 2:
        raise InputError("ensemble: needs two checkpoints or more")
    opened = [open_checkpoint(checkpoint) for checkpoint in checkpoints]
    for checkpoint, config in zip(opened, configs, strict=True):
        if not isinstance(config.workload, ClickWorkload):
            raise InputError(
                f"{checkpoint.path}: recipe {config.recipe} predicts no clicks; an ensemble is of click models"
            )
    settings = [click_settings(checkpoint, config) for checkpoint, config in zip(opened, configs, strict=True)]
    precision = settings[0][1]
    for checkpoint, (_, other) in zip(opened, settings, strict=True):
        if other != precision:
            raise InputError(
                f"{checkpoint.path}: is of precision {other}, and {opened[0].path} of {precision}; give models of one"
            )
    preprocessor = _common_preprocessor(opened)
    model = EnsembleConfig(models=tuple(alone.replace(embedding_penalty=0.0) for alone, _ in settings))
    places = _places(opened, model, preprocessor=preprocessor, precision=precision)
    described = configs[0].replace(workload={"model": model})

    def write_extra_files(folder: str) -> None:
        storage.write_bytes(storage.join(folder, "config.yaml"), described.to_yaml().encode())
        preprocessor.save(storage.join(folder, PREPROCESSOR_FOLDER))

    with storage.writing_folder(out) as folder:
        join(folder, list(zip(opened, places, strict=True)), state={}, extra_files=write_extra_files)
        tensors = Checkpoint(folder).manifest()["tensors"]
    chunks = [chunk for tensor in tensors.values() for chunk in tensor["chunks"]]
    return {
        "out": storage.absolute(out),
        "checkpoints": [checkpoint.path for checkpoint in opened],
        "models": [type(alone).__name__.removesuffix("Config") for alone in model.models],
        "weight_bytes": sum(chunk["bytes"] for chunk in chunks),
    }


def _common_preprocessor(checkpoints: Sequence[Checkpoint]) -> Preprocessor:
    preprocessor = load_preprocessor(checkpoints[0].path)
    for checkpoint in checkpoints[1:]:
        if load_preprocessor(checkpoint.path).hash() != preprocessor.hash():
            raise InputError(
                f"{checkpoint.path}: was trained with another Preprocessor than {checkpoints[0].path}, so that their ids differ; "
                "train all with one (--workload.preprocessor DIR), or average their scores: rayrec compare --ensemble"
            )
    return preprocessor


def _places(
    checkpoints: Sequence[Checkpoint], config: EnsembleConfig, *, preprocessor: Preprocessor, precision: Precision
) -> list[dict[str, Place]]:
    """Where the weights of each checkpoint are in the ensemble's: tables side by side, networks one after the other."""

    def empty(model: ClickModelConfig) -> PlainModel:
        return empty_model(model, preprocessor=preprocessor, precision=precision)

    whole, first_column, found = empty(config), 0, []
    tables, shapes = whole.table_weights(), wanted_weights(whole, preprocessor)
    for number, (checkpoint, model) in enumerate(zip(checkpoints, config.models, strict=True)):
        alone = empty(model)
        wanted = wanted_weights(alone, preprocessor)
        check_weights(checkpoint.path, wanted)
        names = {own: tables[feature] for feature, own in alone.table_weights().items()}
        places = {}
        for own in wanted:
            name = names.get(own, f"members.{number}.{own}")
            places[PREFIX + own] = Place(PREFIX + name, tuple(shapes[name]), first_column if own in names else 0)
        found.append(places)
        first_column += model.table_width
    return found
