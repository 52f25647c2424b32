"""DLRM network (Naumov et al., 2019), with pairwise dot products, low-rank crosses, or a product of
two projections. Sharded collections return features by table and worker. Each interaction reorders
them (the dot product for free, by its choice of pairs), so the result does not depend on the
plan.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from rayrec.layers.first_order import FirstOrder, piecewise_linear
from rayrec.layers.kernels.dots import pairwise_dots
from rayrec.layers.keyed_embeddings import KeyedEmbeddings, Order, in_feature_order
from rayrec.layers.mlp import MLP, Precision, compute_dtype, init_values, linear_stack
from rayrec.layers.piecewise import PiecewiseNumbers


class Interaction(nn.Module, ABC):
    """Interaction of dense features [rows, dim] with the pooled embeddings of `features`, to [rows,
    out_features].
    """

    out_features: int

    def __init__(self, features: Sequence[str], *, dim: int) -> None:
        super().__init__()
        self.num_sparse = len(features)
        self.dim = dim

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> torch.Tensor:
        return self.combine(dense, *embedded.pooled_unordered())

    @abstractmethod
    def combine(self, dense: torch.Tensor, sparse: torch.Tensor, order: Order) -> torch.Tensor:
        """Combine `dense` with `sparse` [rows, num_sparse * dim], which has its features in the
        order `order`.
        """


class DotInteraction(Interaction):
    """Dense vector and all pairwise dot products, upper triangle without diagonal (Naumov et al.,
    DLRM, 2019).
    """

    def __init__(self, features: Sequence[str], *, dim: int) -> None:
        super().__init__(features, dim=dim)
        num_sparse = len(features)
        self.out_features = dim + num_sparse * (num_sparse + 1) // 2

    # Dots need no order of features, so arriving embeddings are not copied.
    def combine(self, dense: torch.Tensor, sparse: torch.Tensor, order: Order) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self._plain(dense, in_feature_order(sparse, order, dim=self.dim))
        return pairwise_dots(dense, sparse, order)

    def _plain(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        num_vectors = self.num_sparse + 1
        vectors = torch.cat([dense, sparse.to(dense.dtype)], dim=1).view(-1, num_vectors, self.dim)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        first, second = torch.triu_indices(num_vectors, num_vectors, offset=1, device=dense.device)
        return torch.cat([dense, dots[:, first, second]], dim=1)


class CrossInteraction(Interaction):
    """Low-rank crosses x <- x0 * (W(Vx) + b) + x over all concatenated features (Wang et al., DCN
    V2, 2021).
    """

    def __init__(
        self,
        features: Sequence[str],
        *,
        dim: int,
        num_layers: int,
        low_rank: int,
        precision: Precision = "fp32",
    ) -> None:
        super().__init__(features, dim=dim)
        self.out_features = width = (len(features) + 1) * dim
        self.down = nn.ParameterList(
            nn.Parameter(init_values(torch.empty(low_rank, width), nn.init.xavier_normal_))
            for _ in range(num_layers)
        )
        self.up = nn.ParameterList(
            nn.Parameter(init_values(torch.empty(width, low_rank), nn.init.xavier_normal_))
            for _ in range(num_layers)
        )
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(num_layers))
        self._dtype = compute_dtype(precision)

    def combine(self, dense: torch.Tensor, sparse: torch.Tensor, order: Order) -> torch.Tensor:
        ordered = in_feature_order(sparse, order, dim=self.dim)
        start = crossed = torch.cat([dense, ordered.to(dense.dtype)], dim=1)
        for down, up, bias in zip(self.down, self.up, self.bias, strict=True):
            factor = linear_stack(
                crossed, (down, None, up, bias), relus=(False, False), dtype=self._dtype
            )
            crossed = torch.addcmul(crossed, start, factor)
        return crossed


class ProjectionInteraction(Interaction):
    """Dense vector and the products of two MLPs over all features, [rows, F1, dim] x [rows, dim,
    F2]. The last width of each branch must be a multiple of `dim` (torchrec's
    InteractionProjectionArch).
    """

    def __init__(
        self,
        features: Sequence[str],
        *,
        dim: int,
        first_branch: Sequence[int],
        second_branch: Sequence[int],
        precision: Precision = "fp32",
    ) -> None:
        super().__init__(features, dim=dim)
        width = (len(features) + 1) * dim
        self.first_branch = MLP(width, first_branch, final_activation=True, precision=precision)
        self.second_branch = MLP(width, second_branch, final_activation=True, precision=precision)
        self.out_features = dim + (first_branch[-1] // dim) * (second_branch[-1] // dim)

    def combine(self, dense: torch.Tensor, sparse: torch.Tensor, order: Order) -> torch.Tensor:
        ordered = in_feature_order(sparse, order, dim=self.dim)
        features = torch.cat([dense, ordered.to(dense.dtype)], dim=1)
        rows = dense.shape[0]
        first = self.first_branch(features).view(
            rows, self.first_branch.out_features // self.dim, self.dim
        )
        second = self.second_branch(features).view(
            rows, self.dim, self.second_branch.out_features // self.dim
        )
        return torch.cat([dense, torch.bmm(first, second).flatten(1)], dim=1)


# Shapes, for S features of width D:
#
#   dense [rows, num_dense] -> bottom MLP -> [rows, D]
#   interaction    dot          S + 1 vectors -> D + products of all pairs
#                  cross        S + 1 vectors, concatenated -> (S + 1) * D
#                  projection   two MLPs -> D + F1 * F2 products
#   top MLP -> one logit per label
#
# With `piecewise`, S counts the numbers, too. Each has a vector of width D, before the features'.
#
#   dense [rows, num_dense] -> parts [rows, num_dense, PARTS] -> vectors [rows, num_dense * D]
#                                                             -> bottom MLP, first order
#
# The bottom MLP runs first: embeddings arrive from other workers meanwhile.
class DLRM(nn.Module):
    """Bottom MLP, interaction and top MLP with one logit for each label. `first_order` is added to
    the first logit, and takes the value after the interaction's `dim` of each embedding.
    """

    def __init__(
        self,
        labels: Sequence[str],
        bottom_mlp: MLP,
        interaction: Interaction,
        top_mlp: MLP,
        first_order: FirstOrder | None,
        *,
        piecewise: PiecewiseNumbers | None = None,
    ) -> None:
        """Take the parts. `piecewise`: vectors of the numbers, which the interaction takes before
        those of the features.
        """
        super().__init__()
        self.piecewise = piecewise
        self.bottom_mlp = bottom_mlp
        self.interaction = interaction
        self.top_mlp = top_mlp
        self.first_order = first_order
        self._labels = labels

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        vectors = None
        if self.piecewise is not None:
            parts = self.piecewise.parts(dense)
            dense = parts.flatten(1)
            vectors = self.piecewise(parts).flatten(1)
        elif self.first_order is not None:
            dense = piecewise_linear(dense)
        bottom = self.bottom_mlp(dense)  # During the exchange of embeddings
        if self.first_order is None:
            logits = self._interact(bottom, vectors, embedded).unbind(1)
        else:
            dim = self.interaction.dim
            first, *rest = self._interact(bottom, vectors, embedded.columns(slice(0, dim))).unbind(
                1
            )
            # Strides decide the order of a sum
            weights = embedded.columns(slice(dim, dim + 1)).flattened().contiguous()
            logits = (first + self.first_order.logit(dense, weights), *rest)
        return dict(zip(self._labels, logits, strict=True))

    def _interact(
        self, bottom: torch.Tensor, vectors: torch.Tensor | None, embedded: KeyedEmbeddings
    ) -> torch.Tensor:
        """Return the logits of the top MLP. `vectors`: those of the numbers."""
        if vectors is None:
            return self.top_mlp(self.interaction(bottom, embedded))
        values, order = embedded.pooled_unordered()
        count = vectors.shape[1] // self.interaction.dim
        numbers = (*range(count), *(count + feature for feature in order))
        features = torch.cat([vectors, values], dim=1)
        return self.top_mlp(self.interaction.combine(bottom, features, numbers))
