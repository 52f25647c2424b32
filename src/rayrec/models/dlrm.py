"""The settings of DLRM and what one row costs; the network itself is in `dlrm_module`, so that this loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from rayrec.config import Config, InputError

if TYPE_CHECKING:
    from torch import nn

    from rayrec.models.dlrm_module import DLRM


@dataclass(frozen=True, kw_only=True)
class DLRMConfig(Config):
    """A click model of a bottom MLP, one embedding table per sparse feature, an interaction, and a top MLP."""

    interaction: Literal["dot", "cross", "projection"] = "cross"
    """How features meet: pairwise dots (DLRM), low-rank crosses (DCN V2), or a product of two projections."""
    embedding_dim: int = 128
    """Width of every embedding, and of the bottom MLP's output."""
    bottom_mlp: tuple[int, ...] = (512, 256, 128)
    """Layer sizes of the MLP over the dense features; the last one equals embedding_dim."""
    top_mlp: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    """Layer sizes of the MLP over the interaction; the last one is 1, the logit."""
    cross_layers: int = 3
    """Number of cross layers (interaction "cross")."""
    cross_low_rank: int = 512
    """Rank of each cross layer's weight (interaction "cross")."""
    projection_first: tuple[int, ...] = (2048, 2048)
    """Layer sizes of the first branch, the last a multiple of embedding_dim (interaction "projection")."""
    embedding_penalty: float = 0.0
    """L2 penalty on the embeddings of every row trained, on top of its loss; holds rare categories back."""
    projection_second: tuple[int, ...] = (2048, 2048)
    """Layer sizes of the second branch, the last a multiple of embedding_dim (interaction "projection")."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("embedding_dim", "cross_layers", "cross_low_rank"):
            if getattr(self, name) < 1:
                raise InputError(f"DLRMConfig.{name}: {getattr(self, name)} must be at least 1")
        for name in ("bottom_mlp", "top_mlp", "projection_first", "projection_second"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 1:
                raise InputError(f"DLRMConfig.{name}: {sizes} needs one or more sizes, each at least 1")
        if self.bottom_mlp[-1] != self.embedding_dim:
            raise InputError(
                f"DLRMConfig.bottom_mlp: ends with {self.bottom_mlp[-1]}, but must end with embedding_dim "
                f"{self.embedding_dim}"
            )
        if self.top_mlp[-1] != 1:
            raise InputError(f"DLRMConfig.top_mlp: ends with {self.top_mlp[-1]}, but must end with 1, the logit")
        if self.interaction == "projection":
            for name in ("projection_first", "projection_second"):
                if getattr(self, name)[-1] % self.embedding_dim:
                    raise InputError(
                        f"DLRMConfig.{name}: ends with {getattr(self, name)[-1]}, but must end with a multiple of "
                        f"embedding_dim {self.embedding_dim}"
                    )

    def build(
        self,
        *,
        num_embeddings: Sequence[int],
        num_dense: int,
        precision: Literal["fp32", "bf16"] = "fp32",
        seed: int = 0,
        embedding_device: str = "meta",
        features: Sequence[str] | None = None,
    ) -> DLRM:
        """The network with its dense part on CPU and its tables on `embedding_device`.

        Tables on "meta" hold no values until they are sharded; "cpu" gives a whole model in one process. All start
        values depend on `seed` alone. `features` names the sparse features (default cat_0, cat_1, ...).
        """
        from rayrec.models.dlrm_module import build_dlrm

        return build_dlrm(
            self,
            num_embeddings=num_embeddings,
            num_dense=num_dense,
            precision=precision,
            seed=seed,
            embedding_device=embedding_device,
            features=features,
        )

    def build_dense_part(
        self, *, num_dense: int, features: Sequence[str], precision: Literal["fp32", "bf16"] = "fp32"
    ) -> nn.Module:
        """The network without its tables, for scoring: logits (rows,) of dense features (rows, num_dense) and pooled embeddings
        (rows, num_sparse * dim) in the order of the features, all float32. Its weights have the names they have in `build`'s."""
        from rayrec.models.dense_part import DensePart

        return DensePart(self, num_dense=num_dense, features=features, precision=precision)


def multiply_adds(config: DLRMConfig, *, num_dense: int = 13, num_sparse: int = 26) -> int:
    """Multiply-adds of the matrix products in one row's forward pass (backward costs about twice as many)."""

    def mlp(in_features: int, sizes: Sequence[int]) -> int:
        return sum(a * b for a, b in pairwise((in_features, *sizes)))

    dim, num_vectors = config.embedding_dim, num_sparse + 1
    width = num_vectors * dim
    if config.interaction == "dot":
        interaction = num_vectors * num_vectors * dim  # the whole square is computed, then its triangle taken
        top_inputs = dim + num_vectors * (num_vectors - 1) // 2
    elif config.interaction == "cross":
        interaction = config.cross_layers * 2 * width * config.cross_low_rank
        top_inputs = width
    else:
        first, second = config.projection_first[-1] // dim, config.projection_second[-1] // dim
        products = first * second
        interaction = mlp(width, config.projection_first) + mlp(width, config.projection_second) + products * dim
        top_inputs = dim + products
    return mlp(num_dense, config.bottom_mlp) + interaction + mlp(top_inputs, config.top_mlp)
