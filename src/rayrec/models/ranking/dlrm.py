"""DLRM (Naumov et al., 2019) with its interactions. The network is in `layers/dlrm`, so that
drivers do not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from rayrec.bounds import Count, Share, SomeSizes
from rayrec.config import CLASS, InputError, same_class
from rayrec.models.base import ClickModelConfig, ModelInputs, width_with_weight

if TYPE_CHECKING:
    from rayrec.layers.dlrm import DLRM, Interaction
    from rayrec.layers.mlp import Precision


@dataclass(frozen=True, kw_only=True)
class DLRMConfig(ClickModelConfig):
    """Click model with a bottom MLP, one embedding table per sparse feature, an interaction, and a
    top MLP.
    """

    SEVERAL_LABELS: ClassVar[bool] = True

    interaction: Literal["dot", "cross", "projection"] = "cross"
    """Feature interaction: pairwise dots (DLRM), low-rank crosses (DCN V2), or a product of two
    projections.
    """
    embedding_dim: Count = 128
    """Width of every embedding, and of the bottom MLP's output."""
    bottom_mlp: SomeSizes = (512, 256, 128)
    """Layer widths of the MLP over the dense features. The last one must equal embedding_dim."""
    top_mlp: SomeSizes = (1024, 1024, 512, 256, 1)
    """Layer widths of the MLP over the interaction. The last must be 1, the logit. Models with
    several labels have one each.
    """
    batch_norm: bool = False
    """Whether to use batch norm, over the global batch, in the hidden layers of both MLPs."""
    bottom_dropout: Share = 0.0
    """Dropout probability of the bottom MLP's hidden layers."""
    top_dropout: Share = 0.0
    """Dropout probability of the top MLP's hidden layers."""
    cross_layers: Count = 3
    """Number of cross layers (interaction "cross")."""
    cross_low_rank: Count = 512
    """Rank of each cross layer's weight (interaction "cross")."""
    projection_first: SomeSizes = (2048, 2048)
    """Layer widths of the first branch (interaction "projection"). The last one must be a multiple
    of embedding_dim.
    """
    projection_second: SomeSizes = (2048, 2048)
    """Layer widths of the second branch (interaction "projection"). The last one must be a multiple
    of embedding_dim.
    """

    first_order: bool = False
    """Whether to add logistic regression to the main label's logit, with a weight per category and
    piecewise-linear numbers. The bottom MLP gets these, too. Numbers must be standardized.
    """
    piecewise_numbers: bool = False
    """Whether each number has a vector in the interaction, like a category: a piecewise-linear
    function with 32 bins between quantiles of the training rows (Gorishniy et al., 2022). The
    bottom MLP and first_order get the number's part in each bin. Numbers must be standardized.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bottom_mlp[-1] != self.embedding_dim:
            raise InputError(
                f"DLRMConfig.bottom_mlp: must end with embedding_dim {self.embedding_dim}, got "
                f"{self.bottom_mlp[-1]}"
            )
        if self.top_mlp[-1] != 1:
            raise InputError(
                f"DLRMConfig.top_mlp: must end with 1, the logit, got {self.top_mlp[-1]}"
            )
        if self.interaction == "projection":
            for name in ("projection_first", "projection_second"):
                if getattr(self, name)[-1] % self.embedding_dim:
                    raise InputError(
                        f"DLRMConfig.{name}: must end with a multiple of embedding_dim "
                        f"{self.embedding_dim}, got {getattr(self, name)[-1]}"
                    )

    def updated(self, changes: Mapping[str, Any], *, where: str = "") -> Self:
        """Update the settings. A new embedding_dim also sets the bottom MLP's last width, unless it
        is given.
        """
        class_name = str(self._custom_class())
        if (
            "embedding_dim" in changes
            and "bottom_mlp" not in changes
            and same_class(changes.get(CLASS, class_name), class_name)
        ):
            changes = {**changes, "bottom_mlp": (*self.bottom_mlp[:-1], changes["embedding_dim"])}
        return super().updated(changes, where=where)

    @property
    def width(self) -> int:
        return width_with_weight(self.embedding_dim) if self.first_order else self.embedding_dim

    def needs_categories(self) -> bool:
        return False

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> DLRM:
        from rayrec.layers.dlrm import DLRM
        from rayrec.layers.first_order import NUMBER_WIDTH, FirstOrder
        from rayrec.layers.mlp import MLP
        from rayrec.layers.piecewise import PARTS, PiecewiseNumbers

        settings: dict[str, Any] = {"batch_norm": self.batch_norm, "precision": precision}
        num_dense = inputs.num_dense
        scale = 10.0
        piecewise = None
        if self.piecewise_numbers and num_dense:
            piecewise = PiecewiseNumbers(num_dense, self.embedding_dim, ends=inputs.bin_ends)
            # At 10, as with few and equal bins, small logs overfit.
            scale = 1.0
            num_dense *= PARTS
        elif self.first_order:
            num_dense *= NUMBER_WIDTH
        first_order = None
        if self.first_order:
            first_order = FirstOrder(num_dense, number_scale=scale, category_scale=0.5)
        bottom = MLP(
            num_dense,
            self.bottom_mlp,
            final_activation=True,
            dropout=self.bottom_dropout,
            **settings,
        )
        interaction = self._interaction(inputs, precision)
        sizes = (*self.top_mlp[:-1], len(inputs.label_names))
        top = MLP(
            interaction.out_features,
            sizes,
            final_activation=False,
            dropout=self.top_dropout,
            **settings,
        )
        return DLRM(inputs.label_names, bottom, interaction, top, first_order, piecewise=piecewise)

    def _interaction(self, inputs: ModelInputs, precision: Precision) -> Interaction:
        from rayrec.layers.dlrm import CrossInteraction, DotInteraction, ProjectionInteraction

        features = inputs.features
        if self.piecewise_numbers:
            features = (*(f"number {index}" for index in range(inputs.num_dense)), *features)
        dim = self.embedding_dim
        if self.interaction == "dot":
            return DotInteraction(features, dim=dim)
        if self.interaction == "cross":
            return CrossInteraction(
                features,
                dim=dim,
                num_layers=self.cross_layers,
                low_rank=self.cross_low_rank,
                precision=precision,
            )
        return ProjectionInteraction(
            features,
            dim=dim,
            first_branch=self.projection_first,
            second_branch=self.projection_second,
            precision=precision,
        )
