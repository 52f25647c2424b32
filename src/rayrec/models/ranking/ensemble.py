"""Click models of several kinds that are trained, scored and served as one; the logit is the mean of theirs."""

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
    from rayrec.models.ranking.finalnet import FinalNetConfig  # loads torch, which a command's flags do without

    return DLRMConfig(), FinalNetConfig()


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig(ClickModelConfig):
    """Models side by side, each with embeddings of its own: of a table's row, each has its own values. They learn together, each
    as if it were alone, or come from several checkpoints (`rayrec ensemble`)."""

    models: Annotated[tuple[ClickModelConfig, ...], MinLen(2)] = field(default_factory=_two_kinds)
    """The models, two or more. In a file, each has its `class`, which names one of rayrec's models, and its settings."""
    embedding_dim: Zero = 0
    """Must stay 0: each model has its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for number, model in enumerate(self.models):
            if not model.LABELLED:
                raise InputError(
                    f"EnsembleConfig.models[{number}]: must predict a label, got {type(model).__name__}. Choose another model."
                )
            if model.embedding_penalty:
                raise InputError(
                    f"EnsembleConfig.models[{number}].embedding_penalty: {model.embedding_penalty} has no effect within an "
                    "ensemble; set embedding_penalty of the ensemble"
                )

    @classmethod
    def in_place_of(cls, other: ClickModelConfig) -> Self:
        """The model that it takes the place of, and another beside it."""
        beside = next(type(model) for model in cls().models if type(model) is not type(other))
        return cls.of_kinds((type(other), beside), other)

    @classmethod
    def of_kinds(cls, kinds: Sequence[type[ClickModelConfig]], other: ClickModelConfig) -> Self:
        """A model of each kind, in place of one model in a recipe, which stays as it is where it is of such a kind."""
        alone = other.replace(embedding_penalty=0.0, members=1)
        models = tuple(alone if kind is type(alone) else kind.in_place_of(alone) for kind in kinds)
        return cls(models=models, embedding_penalty=other.embedding_penalty, members=other.members)

    def embedding_settings(self) -> dict[str, Any]:
        return super().embedding_settings() | {"embedding_dim": max(model.embedding_dim for model in self.models)}

    @property
    def width(self) -> int:
        return sum(model.table_width for model in self.models)

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        """Those of all models; the models that take their sums get these."""
        taken = {feature for model in self.models for feature in model.sequences(inputs)}
        return tuple(feature for feature in inputs.features if feature in taken)

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        from rayrec.models.ensemble import Ensemble, build_network

        networks = [build_network(model, inputs, precision=precision) for model in self.models]
        return Ensemble(networks, self.output_heads(inputs), widths=[model.table_width for model in self.models])
