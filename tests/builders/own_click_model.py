"""A click model of somebody's own, in one file as docs/extend.md says, and a recipe of it: what no
file of rayrec's knows.
"""

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import rayrec
from rayrec import recipes
from rayrec.batch import Batch
from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.heads import Head, ItemsHead, VectorHead


@dataclass(frozen=True, kw_only=True)
class OwnConfig(ClickModelConfig):
    """A factorization machine over all features, the numbers together being one of them."""

    scale: float = 1.0
    """Of the numbers."""

    def build(self, inputs: ModelInputs, *, precision: str = "fp32") -> nn.Module:
        return Own(self, inputs)


@dataclass(frozen=True, kw_only=True)
class SlowConfig(OwnConfig):
    """A network that takes long to load."""

    build_s: float = 0.0

    def build(self, inputs: ModelInputs, *, precision: str = "fp32") -> nn.Module:
        time.sleep(self.build_s)
        return super().build(inputs, precision=precision)


class Own(nn.Module):
    def __init__(self, config: OwnConfig, inputs: ModelInputs) -> None:
        super().__init__()
        self.label = inputs.label
        self.scale = config.scale
        self.numbers = nn.Linear(inputs.num_dense, config.embedding_dim)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        vectors = torch.cat(
            [self.numbers(dense * self.scale).unsqueeze(1), embedded.stacked()], dim=1
        )
        pairs = vectors.sum(dim=1) ** 2 - (vectors**2).sum(dim=1)
        return {self.label: pairs.sum(dim=1) / 2 + self.bias}


class WithoutLabel(nn.Module):
    """Its loss is the number of a row, its measure that of the rows above 1, its items the ids 3
    and 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        return {"numbers": dense[:, 0] * self.weight, "user": embedded["item"] * self.weight}

    def loss(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        assert not batch.labels
        return outputs["numbers"]

    def measures(self, outputs: dict[str, torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
        numbers = outputs["numbers"]
        return {"large": numbers.where(numbers > 1, torch.nan)}

    def predict(
        self, outputs: dict[str, torch.Tensor], embedded: KeyedEmbeddings
    ) -> dict[str, torch.Tensor]:
        items = torch.tensor([[3, 1]]).expand(len(outputs["numbers"]), 2)
        return {"best": items, "scores": items.float(), "user": outputs["user"]}


@dataclass(frozen=True, kw_only=True)
class WithoutLabelConfig(ClickModelConfig):
    """On a number and a feature `item`."""

    LABELLED: ClassVar[bool] = False

    def output_heads(self, inputs: ModelInputs) -> tuple[Head, ...]:
        return ItemsHead("best", k=2, feature="item"), VectorHead("user", self.embedding_dim)

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        return ("item",)

    def build(self, inputs: ModelInputs, *, precision: str = "fp32") -> nn.Module:
        return WithoutLabel()


def own_model(path: str | None = None) -> rayrec.TrainConfig:
    """A factorization machine on any log in Criteo's format."""
    return recipes.criteo_demo(path).replace(
        recipe="own_model",
        workload={
            "model": OwnConfig(embedding_dim=8),
            "preset": {"min_count": 1},
            "dense_optimizer": {"learning_rate": 0.003},
        },
        batch_size=64,
        scaling={"num_workers": 1},
    )


def slow_model(path: str | None = None) -> rayrec.TrainConfig:
    return own_model(path).replace(workload={"model": SlowConfig(embedding_dim=4)})


def own_images(path: str | None = None) -> rayrec.TrainConfig:
    """No click model at all."""
    return recipes.mnist_resnet18(path)
