"""A click model with its tables in this process, by the sizes of its tables alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.embeddings import feature_names
from rayrec.models.sharded_model import ClickModel, build_click_model


def whole_model(
    config: ClickModelConfig,
    num_embeddings: Sequence[int],
    *,
    num_dense: int = 13,
    features: Sequence[str] | None = None,
    inputs: ModelInputs | None = None,
    **settings: Any,
) -> ClickModel:
    """Features are named cat_0, cat_1, ... unless `features` or `inputs` say otherwise."""
    inputs = inputs or ModelInputs(num_dense, tuple(features or feature_names(len(num_embeddings))))
    return build_click_model(
        config, inputs, **{"num_embeddings": num_embeddings, "embedding_device": "cpu", **settings}
    )
