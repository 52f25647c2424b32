"""How dense and sparse features meet: pairwise dot products, low-rank crosses, or a product of two projections.

A sharded collection delivers its features table by table, worker by worker. Each interaction brings them into the
features' own order (the dot product by the choice of pairs, at no cost), so that the result never depends on the plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rayrec.layers.embedded import Embedded, Order, in_feature_order
from rayrec.layers.mlp import MLP, Precision, compute_dtype, linear_stack, start_values


class _PairwiseDots(torch.autograd.Function):
    """(rows, D), (rows, F*D) -> (rows, D + pairs): the dense vector, then the chosen entries of all dot products."""

    @staticmethod
    def forward(
        ctx: Any, dense: torch.Tensor, sparse: torch.Tensor, pair_of: torch.Tensor, column_of: torch.Tensor
    ) -> torch.Tensor:
        rows, dim = dense.shape
        num_vectors = 1 + sparse.shape[1] // dim
        vectors = torch.cat([dense, sparse.to(dense.dtype)], dim=1).view(rows, num_vectors, dim)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).view(rows, num_vectors * num_vectors)
        # gather with an expanded index uses all threads; index_select along columns uses one.
        pairs = torch.gather(dots, 1, pair_of.expand(rows, -1))
        ctx.save_for_backward(vectors, column_of)
        ctx.sparse_dtype = sparse.dtype
        return torch.cat([dense, pairs], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        vectors, column_of = ctx.saved_tensors
        rows, num_vectors, dim = vectors.shape
        gradient = gradients[0].float()  # float32: gathering two-byte columns is slower, and tables learn in float32
        # d(x_i . x_j) goes to both vectors: a symmetric matrix of gradients times the vectors.
        symmetric = torch.gather(gradient, 1, column_of.expand(rows, -1)).view(rows, num_vectors, num_vectors)
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        result = torch.bmm(symmetric, vectors.float())
        dense_gradient = (result[:, 0] + gradient[:, :dim]).to(vectors.dtype)
        sparse_gradient = result[:, 1:].reshape(rows, (num_vectors - 1) * dim).to(ctx.sparse_dtype)
        return dense_gradient, sparse_gradient, None, None


class Interaction(nn.Module, ABC):
    """(rows, dim) dense and the pooled embeddings of `features` to (rows, out_features)."""

    out_features: int

    def __init__(self, features: Sequence[str], *, dim: int) -> None:
        super().__init__()
        self.num_sparse, self.dim = len(features), dim

    def forward(self, dense: torch.Tensor, embedded: Embedded) -> torch.Tensor:
        return self.combine(dense, *embedded.delivered())

    @abstractmethod
    def combine(self, dense: torch.Tensor, sparse: torch.Tensor, order: Order) -> torch.Tensor:
        """Combine `dense` with `sparse` (rows, num_sparse * dim), whose features are in the order `order`."""


class DotInteraction(Interaction):
    """The dense vector and all pairwise dot products, upper triangle without diagonal (Naumov et al., DLRM, 2019)."""

    def __init__(self, features: Sequence[str], *, dim: int) -> None:
        super().__init__(features, dim=dim)
        num_sparse = len(features)
        self.out_features = dim + num_sparse * (num_sparse + 1) // 2
        self._indices: dict[tuple[Order, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def _pair_indices(self, order: Order, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each pair stands among the dot products, and which output column each dot product feeds."""
        known = self._indices.get((order, device))
        if known is None:
            num_vectors = self.num_sparse + 1
            place_of = torch.empty(num_vectors, dtype=torch.long)
            place_of[torch.tensor([0, *(feature + 1 for feature in order)])] = torch.arange(num_vectors)
            first, second = torch.triu_indices(num_vectors, num_vectors, offset=1)
            first, second = place_of[first], place_of[second]
            columns = torch.zeros(num_vectors, num_vectors, dtype=torch.long)
            columns[first, second] = columns[second, first] = self.dim + torch.arange(first.numel())
            pair_of = first * num_vectors + second
            known = pair_of.view(1, -1).to(device), columns.view(1, -1).to(device)
            self._indices[order, device] = known
        return known

    def combine(self, dense: torch.Tensor, sparse: torch.Tensor, order: Order) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self._plain(dense, in_feature_order(sparse, order, dim=self.dim))
        return _PairwiseDots.apply(dense, sparse, *self._pair_indices(order, dense.device))

    def _plain(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        num_vectors = self.num_sparse + 1
        vectors = torch.cat([dense, sparse.to(dense.dtype)], dim=1).view(-1, num_vectors, self.dim)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        first, second = torch.triu_indices(num_vectors, num_vectors, offset=1, device=dense.device)
        return torch.cat([dense, dots[:, first, second]], dim=1)


class CrossInteraction(Interaction):
    """Low-rank crosses x <- x0 * (W(Vx) + b) + x over all features side by side (Wang et al., DCN V2, 2021)."""

    def __init__(
        self, features: Sequence[str], *, dim: int, num_layers: int, low_rank: int, precision: Precision = "fp32"
    ) -> None:
        super().__init__(features, dim=dim)
        self.out_features = width = (len(features) + 1) * dim
        self.down = nn.ParameterList(
            nn.Parameter(start_values(torch.empty(low_rank, width), nn.init.xavier_normal_)) for _ in range(num_layers)
        )
        self.up = nn.ParameterList(
            nn.Parameter(start_values(torch.empty(width, low_rank), nn.init.xavier_normal_)) for _ in range(num_layers)
        )
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(num_layers))
        self._dtype = compute_dtype(precision)

    def combine(self, dense: torch.Tensor, sparse: torch.Tensor, order: Order) -> torch.Tensor:
        ordered = in_feature_order(sparse, order, dim=self.dim)
        start = crossed = torch.cat([dense, ordered.to(dense.dtype)], dim=1)
        for down, up, bias in zip(self.down, self.up, self.bias, strict=True):
            factor = linear_stack(crossed, (down, None, up, bias), relus=(False, False), dtype=self._dtype)
            crossed = torch.addcmul(crossed, start, factor)
        return crossed


class ProjectionInteraction(Interaction):
    """The dense vector and the products of two MLPs over all features, (rows, F1, dim) x (rows, dim, F2).

    The last size of each branch must be a multiple of `dim` (torchrec's InteractionProjectionArch).
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
        first = self.first_branch(features).view(rows, self.first_branch.out_features // self.dim, self.dim)
        second = self.second_branch(features).view(rows, self.dim, self.second_branch.out_features // self.dim)
        products = torch.bmm(first, second)
        return torch.cat([dense, products.flatten(1)], dim=1)
