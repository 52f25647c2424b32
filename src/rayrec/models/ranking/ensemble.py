"""Ensemble of different click models that train, score and serve as one, with averaged logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Self

from annotated_types import MinLen

from rayrec.bounds import Zero
from rayrec.config import InputError
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ranking.dlrm import DLRMConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rayrec.layers.mlp import Precision


def _two_kinds() -> tuple[ClickModelConfig, ...]:
    # Imports torch, which command flags avoid
    from rayrec.models.ranking.finalnet import FinalNetConfig

    return DLRMConfig(), FinalNetConfig()


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig(ClickModelConfig):
    """Models with separate parts of every embedding, trained together but independently, or merged
    by `rayrec ensemble`.
    """

    models: Annotated[tuple[ClickModelConfig, ...], MinLen(2)] = field(default_factory=_two_kinds)
    """Two or more models. In a file, each has a `class`, the name of a rayrec model, and its
    settings.
    """
    embedding_dim: Zero = 0
    """Must be 0, because each model sets its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for number, model in enumerate(self.models):
            if not model.LABELLED:
                raise InputError(
                    f"EnsembleConfig.models[{number}]: must predict a label, got "
                    f"{type(model).__name__}. Replace it."
                )
            if model.embedding_penalty:
                raise InputError(
                    f"EnsembleConfig.models[{number}].embedding_penalty: must be 0, got "
                    f"{model.embedding_penalty}. Set embedding_penalty of the ensemble."
                )

    @classmethod
    def replacing(cls, other: ClickModelConfig) -> Self:
        """Return an ensemble of the replaced model and one of another kind."""
        beside = next(type(model) for model in cls().models if type(model) is not type(other))
        return cls.from_kinds((type(other), beside), other)

    @classmethod
    def from_kinds(cls, kinds: Sequence[type[ClickModelConfig]], other: ClickModelConfig) -> Self:
        """Return a model of each kind to replace one model of a recipe. A model of the same kind
        keeps its settings.
        """
        alone = other.replace(embedding_penalty=0.0, members=1)
        models = tuple(alone if kind is type(alone) else kind.replacing(alone) for kind in kinds)
        return cls(models=models, embedding_penalty=other.embedding_penalty, members=other.members)

    def embedding_settings(self) -> dict[str, Any]:
        return super().embedding_settings() | {
            "embedding_dim": max(model.embedding_dim for model in self.models)
        }

    @property
    def width(self) -> int:
        return sum(model.table_width for model in self.models)

    def needs_categories(self) -> bool:
        return any(model.needs_categories() for model in self.models)

    def loss_logits(self) -> tuple[str, ...]:
        return tuple(name for model in self.models for name in model.loss_logits())

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        """Return the sequences of all models. Models that pool them get the sum."""
        sequences = {feature for model in self.models for feature in model.sequences(inputs)}
        return tuple(feature for feature in inputs.features if feature in sequences)

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        from rayrec.models.ensemble import Ensemble, build_network

        networks = [build_network(model, inputs, precision=precision) for model in self.models]
        return Ensemble(
            networks, self.output_heads(inputs), widths=[model.table_width for model in self.models]
        )
