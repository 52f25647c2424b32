"""Wide & Deep (Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016)."""

from dataclasses import dataclass

import torch
from torch import nn

from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.mlp import Precision
from rayrec.models.base import ModelInputs
from rayrec.models.ranking.deepfm import DeepFM, DeepFMConfig


@dataclass(frozen=True, kw_only=True)
class WideDeepConfig(DeepFMConfig):
    """Linear model and MLP over the same features with added logits."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return WideDeep(self, inputs, precision=precision)


# Logits as in DeepFM without `pairs`. Parameters have the same names, so checkpoints fit both.
class WideDeep(DeepFM):
    """DeepFM's linear model and MLP without products. A cross product of features is a column of
    the data.
    """

    def __init__(
        self, config: WideDeepConfig, inputs: ModelInputs, *, precision: Precision
    ) -> None:
        super().__init__(config, inputs, precision=precision)
        # The logit's bias is in the MLP. This one is constant: 0, or its value in a checkpoint
        # trained with both.
        bias = self.fields.linear.bias.detach()
        del self.fields.linear.bias
        self.fields.linear.register_buffer("bias", bias)

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        fields, wide = self.fields(dense, embedded)
        return {self._label: wide + self.deep(fields.flatten(1))}
