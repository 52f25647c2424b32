"""DCNv3 (Li et al., "DCNv3: Towards Next Generation Deep Cross Network for CTR Prediction",
2024).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from rayrec.batch import Batch
from rayrec.bounds import Count, Share
from rayrec.collectives import global_means
from rayrec.config import InputError
from rayrec.layers.kernels.dropout import dropped
from rayrec.layers.keyed_embeddings import KeyedEmbeddings, fields, number_vectors
from rayrec.layers.mlp import (
    GlobalBatchNorm,
    Precision,
    apply_linear,
    compute_dtype,
    init_values,
    xavier_linear,
)
from rayrec.models.base import ClickModelConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class DCNv3Config(ClickModelConfig):
    """Two cross networks without an MLP, with averaged logits and separate losses. Each layer
    doubles the order of interactions in the deep network, and adds one in the shallow network.
    """

    deep_layers: Count = 3
    """Number of layers of the deep cross network, which multiply with their input."""
    shallow_layers: Count = 4
    """Number of layers of the shallow cross network, which multiply with the embeddings."""
    deep_dropout: Share = 0.1
    """Dropout probability of the deep network's layers."""
    shallow_dropout: Share = 0.2
    """Dropout probability of the shallow network's layers."""
    heads: Count = 1
    """Number of equal parts of every embedding that are crossed separately, with averaged logits.
    The authors' embedding_dim is the width of a part: their 16 with 4 heads is 64 here.
    """
    layer_norm: bool = True
    """Whether to apply layer norm to the input of the mask."""
    batch_norm: bool = False
    """Whether to use batch norm, over the global batch, for each layer's products."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding_dim % (2 * self.heads):
            raise InputError(
                f"DCNv3Config.embedding_dim: must be a multiple of {2 * self.heads}, 2 * heads, "
                f"got {self.embedding_dim}"
            )

    def needs_categories(self) -> bool:
        return False

    def loss_logits(self) -> tuple[str, ...]:
        return "deep", "shallow"

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return DCNv3(self, inputs, precision=precision)


# Shapes, for F fields of width D and H heads. Each head crosses its part of every field:
#
#   numbers and embeddings -> [rows, F, D] -> parts [rows, H, F * D / H]
#   parts -> deep crosses x * (Wx + b) + x        -> logit of each head -> mean [rows]
#   parts -> shallow crosses x0 * (Wx + b) + x    -> logit of each head -> mean [rows]
#   logit = mean of both; each network also has its own loss
class DCNv3(nn.Module):
    def __init__(self, config: DCNv3Config, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._label = inputs.label
        self._heads = config.heads
        self.number_vectors = number_vectors(inputs.num_dense, config.embedding_dim)
        width = (inputs.num_dense + len(inputs.features)) * config.embedding_dim // config.heads
        self.deep = _CrossNetwork(
            width, config.deep_layers, config.deep_dropout, config, precision, deep=True
        )
        self.shallow = _CrossNetwork(
            width, config.shallow_layers, config.shallow_dropout, config, precision, deep=False
        )

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        """Return the label's logits and the logits of each network."""
        vectors = fields(dense, self.number_vectors, embedded)
        # First halves of all fields, then second halves: [rows, heads, fields * dim / heads].
        parts = vectors.unflatten(2, (self._heads, 2, -1)).permute(0, 2, 3, 1, 4).flatten(2)
        deep = self.deep(parts)
        shallow = self.shallow(parts)
        return {self._label: (deep + shallow) * 0.5, "deep": deep, "shallow": shallow}

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the row losses, float32 [rows]: the logit's cross entropy, and each network's
        times the excess of its mean. Means are unweighted over the rows of all workers, and
        gradients flow through them.
        """
        logits = torch.stack([outputs[self._label], outputs["deep"], outputs["shallow"]], dim=1)
        targets = batch.labels[self._label].unsqueeze(1).expand(-1, 3)
        losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        means = global_means(losses) if self.training else losses.mean(0)
        return losses[:, 0] + losses[:, 1:] @ (means[1:] - means[0]).relu()


class _CrossNetwork(nn.Module):
    """Layers x <- a * (z + bias) + x. a is x itself (deep) or the network's input. z is a linear
    half h of the input's width, concatenated with h * relu(norm(h)), which is h with a mask.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        dropout: float,
        config: DCNv3Config,
        precision: Precision,
        *,
        deep: bool,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.biases = nn.ParameterList()
        self.batch_norms = nn.ModuleList()
        self.mask_norms = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(xavier_linear(width, width // 2, bias=False))
            self.biases.append(init_values(torch.empty(width), nn.init.uniform_))
            self.batch_norms.append(
                GlobalBatchNorm(config.heads) if config.batch_norm else nn.Identity()
            )
            self.mask_norms.append(nn.LayerNorm(width // 2) if config.layer_norm else nn.Identity())
        self.logit = xavier_linear(width, 1)
        self._deep = deep
        self._dropout = dropout
        self._dtype = compute_dtype(precision)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the mean logit of the heads [rows] for inputs [rows, heads, width]. Only products
        with weights have the precision's dtype, because values grow with each layer.
        """
        hidden = inputs
        for layer, bias, batch_norm, mask_norm in zip(
            self.layers, self.biases, self.batch_norms, self.mask_norms, strict=True
        ):
            half = apply_linear(
                hidden, layer.get_parameter("weight"), None, dtype=self._dtype
            ).float()
            if isinstance(batch_norm, GlobalBatchNorm):  # One mean for all values of a head
                normal = batch_norm(half.transpose(1, 2).flatten(0, 1))
                half = normal.unflatten(0, (-1, half.shape[2])).transpose(1, 2)
            crossed = torch.cat([half, half * mask_norm(half).relu()], dim=2) + bias
            hidden = (hidden if self._deep else inputs) * crossed + hidden
            hidden = dropped(hidden, self._dropout if self.training else 0.0)
        return self.logit(hidden).squeeze(2).mean(1)
