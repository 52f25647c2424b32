"""Trained click models as one model whose logit is the mean of theirs: what fits together, and its weights in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.checkpoint import Checkpoint, full_tensors
from rayrec.checkpoint.joining import Place
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.layers.mlp import Precision
from rayrec.models.base import ClickModelConfig
from rayrec.models.ranking.ensemble import EnsembleConfig
from rayrec.workloads.recsys.scorer import (
    PREFIX,
    ClickScorer,
    PlainModel,
    check_weights,
    click_settings,
    empty_model,
    make_scorer_of,
    wanted_weights,
)


@dataclass(frozen=True)
class Joined:
    """The model that checkpoints make together."""

    model: EnsembleConfig
    precision: Precision
    places: tuple[dict[str, Place], ...]
    """Where the weights of each checkpoint are in the model's: tables side by side, networks one after the other."""


def joined(
    checkpoints: Sequence[Checkpoint],
    settings: Sequence[tuple[ClickModelConfig, Precision]],
    *,
    preprocessor: Preprocessor,
) -> Joined:
    """The model of two or more checkpoints that were trained with one Preprocessor; `settings` is what `click_settings` gives for
    each. Reads no weights. Raises InputError for several precisions, and for weights that do not fit their settings."""
    precision = settings[0][1]
    for checkpoint, (_, other) in zip(checkpoints, settings, strict=True):
        if other != precision:
            raise InputError(
                f"{checkpoint.path}: is of precision {other}, and {checkpoints[0].path} of {precision}; give models of one"
            )
    model = EnsembleConfig(models=tuple(alone.replace(embedding_penalty=0.0) for alone, _ in settings))
    return Joined(model, precision, _places(checkpoints, model, preprocessor=preprocessor, precision=precision))


def load_mean_scorer(checkpoints: Sequence[str], *, preprocessor: Preprocessor, device: str) -> ClickScorer:
    """The mean of the models of two or more checkpoints' folders, as `rayrec ensemble` would write it. Memory: all their weights
    once, and one table besides.

    Every checksum is verified. Raises InputError for damaged weights, and for models that do not fit together.
    """
    opened = [Checkpoint(checkpoint) for checkpoint in checkpoints]
    found = joined(opened, [click_settings(checkpoint) for checkpoint in opened], preprocessor=preprocessor)
    model = empty_model(found.model, preprocessor=preprocessor, precision=found.precision)
    weights: dict[str, torch.Tensor] = {}
    for checkpoint, places in zip(opened, found.places, strict=True):
        for name, tensor in full_tensors(checkpoint, PREFIX):
            place = places[name]
            if tensor.shape == place.shape:
                weights[place.name] = tensor
                continue
            whole = weights.setdefault(place.name, torch.empty(place.shape, dtype=tensor.dtype))
            whole[:, place.first_column : place.first_column + tensor.shape[1]] = tensor
    return make_scorer_of(model, weights, device=device)


def _places(
    checkpoints: Sequence[Checkpoint], config: EnsembleConfig, *, preprocessor: Preprocessor, precision: Precision
) -> tuple[dict[str, Place], ...]:
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
    return tuple(found)
