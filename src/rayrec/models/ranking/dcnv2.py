"""DCN V2 (Wang et al., "Improved Deep & Cross Network and Practical Lessons for Web-scale Learning
to Rank Systems", 2021).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rayrec.bounds import Count, Sizes, SomeSizes
from rayrec.config import InputError
from rayrec.layers.cross import CrossAndDeep, Crosses, CrossLayer, CrossMixture
from rayrec.layers.keyed_embeddings import KeyedEmbeddings, fields, number_vectors
from rayrec.layers.mlp import Precision
from rayrec.models.base import MLPConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class DCNv2Config(MLPConfig):
    """Cross layers, each of which raises the degree of feature products by one, and an MLP."""

    structure: Literal["parallel", "stacked", "stacked_parallel"] = "parallel"
    """Input of the MLP: the features (parallel) or the output of the cross layers (stacked).
    stacked_parallel has both MLPs.
    """
    cross_layers: Count = 3
    """Number of cross layers."""
    low_rank: Count | None = None
    """Rank of each cross layer's weight, a product of two matrices. None for full rank."""
    experts: Count | None = None
    """Number of low-rank experts with tanh and a gate per cross layer (FuxiCTR's
    use_low_rank_mixture). Needs `low_rank`.
    """
    mlp: Sizes = (400, 400, 400)
    """Layer widths of the MLP, or of the parallel one with stacked_parallel. If empty, there are
    only cross layers.
    """
    stacked_mlp: SomeSizes = (400, 400, 400)
    """Layer widths of the stacked MLP with stacked_parallel."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts is not None and self.low_rank is None:
            raise InputError(
                f"DCNv2Config.experts: needs low_rank, got experts {self.experts}. Set both."
            )
        if self.structure == "stacked_parallel" and not self.mlp:
            raise InputError(
                "DCNv2Config.mlp: must have one or more sizes for structure stacked_parallel, got "
                "(). Set them."
            )

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        def network(width: int) -> CrossAndDeep:
            stacked = self.stacked_mlp
            settings = self.layer_settings(precision)
            crosses = self._crosses(width, precision)
            return CrossAndDeep(
                width,
                crosses,
                mlp=self.mlp,
                stacked_mlp=stacked,
                structure=self.structure,
                **settings,
            )

        return CrossNetwork(self, inputs, network)

    def _crosses(self, width: int, precision: Precision) -> Crosses | CrossMixture:
        if self.low_rank is not None and self.experts is not None:
            return CrossMixture(
                width,
                layers=self.cross_layers,
                experts=self.experts,
                low_rank=self.low_rank,
                precision=precision,
            )
        return Crosses(
            CrossLayer(width, low_rank=self.low_rank, precision=precision)
            for _ in range(self.cross_layers)
        )


# Shapes, for F fields of width D and W = F * D. `CrossAndDeep` combines the branches:
#
#   numbers and embeddings -> x0 [rows, W]
#   parallel            x0 -> crosses [rows, W];  x0 -> MLP;  both concatenated -> logit
#   stacked             x0 -> crosses -> MLP -> logit
#   stacked_parallel    x0 -> crosses -> MLP;  x0 -> MLP;  both concatenated -> logit
class CrossNetwork(nn.Module):
    """Cross layers and MLPs, created by `network` for the width of all features."""

    def __init__(
        self, config: MLPConfig, inputs: ModelInputs, network: Callable[[int], CrossAndDeep]
    ) -> None:
        super().__init__()
        self._label = inputs.label
        self.number_vectors = number_vectors(inputs.num_dense, config.embedding_dim)
        width = (inputs.num_dense + len(inputs.features)) * config.embedding_dim
        self.network = network(width)

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        return {self._label: self.network(fields(dense, self.number_vectors, embedded).flatten(1))}
