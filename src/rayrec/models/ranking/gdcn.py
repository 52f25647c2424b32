"""GDCN (Wang et al., "Towards Deeper, Lighter and Interpretable Cross Network for CTR Prediction",
CIKM 2023).
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from rayrec.bounds import Count, Sizes
from rayrec.layers.cross import CrossAndDeep, Crosses, CrossLayer
from rayrec.layers.mlp import Precision
from rayrec.models.base import MLPConfig, ModelInputs
from rayrec.models.ranking.dcnv2 import CrossNetwork


# A `CrossNetwork` as in DCN V2. Its gate multiplies each cross product by a sigmoid of the layer's
# input.
@dataclass(frozen=True, kw_only=True)
class GDCNConfig(MLPConfig):
    """DCN V2 with gated cross layers, which suppress unhelpful products and make more layers
    useful.
    """

    structure: Literal["parallel", "stacked"] = "parallel"
    """Input of the MLP: the features (parallel) or the output of the cross layers (stacked)."""
    cross_layers: Count = 3
    """Number of gated cross layers."""
    mlp: Sizes = (400, 400, 400)
    """Layer widths of the MLP. If empty, there are only cross layers."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        def network(width: int) -> CrossAndDeep:
            crosses = Crosses(
                CrossLayer(width, gated=True, precision=precision) for _ in range(self.cross_layers)
            )
            return CrossAndDeep(
                width,
                crosses,
                mlp=self.mlp,
                structure=self.structure,
                **self.layer_settings(precision),
            )

        return CrossNetwork(self, inputs, network)
