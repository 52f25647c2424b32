"""What a click model is to everything that trains, scores, exports, serves and plans it. Loads no torch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrec.config import Config, InputError

if TYPE_CHECKING:
    from torch import nn

    from rayrec.layers.mlp import Precision
    from rayrec.schema import Schema


@dataclass(frozen=True)
class ModelInputs:
    """The inputs and outputs of a click model."""

    num_dense: int
    """Number of dense features."""
    features: tuple[str, ...]
    """Names of the categorical features, each of which has a table."""
    label: str = "label"
    """Name of what is predicted."""

    @classmethod
    def of(cls, schema: Schema) -> ModelInputs:
        """Of the model's columns (`Preprocessor.inputs`)."""
        return cls(len(schema.dense), tuple(schema.sparse), schema.label or "label")


@dataclass(frozen=True, kw_only=True)
class ClickModelConfig(Config):
    """The settings of a click model. A model is a subclass in a file of `rayrec.models.ranking`, or of the user's."""

    embedding_dim: int = 16
    """Width of every embedding."""
    embedding_penalty: float = 0.0
    """L2 penalty on the embeddings of every row trained, on top of its loss; holds rare categories back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding_dim < 1:
            raise InputError(f"{type(self).__name__}.embedding_dim: {self.embedding_dim} must be at least 1")

    @classmethod
    def _own_class(cls) -> str | None:
        return f"{cls.__module__}.{cls.__qualname__}"

    @abstractmethod
    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        """The network without its tables: forward(dense, embedded) takes dense features (rows, num_dense) float32 and
        `rayrec.layers.embedded.Embedded`, and gives float32 logits (rows,) by the name of the label, in a dict, which may hold
        more that the network's loss needs.

        The loss is binary cross entropy, unless the network has a method loss(outputs, labels): from what `forward` gave and the
        labels (rows,) float32 by name to each row's loss, float32 (rows,); the framework weights and averages.

        Start values are drawn from torch's global generator. `rows` may be 0.
        """
