"""FinalMLP (Mao et al., "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction", AAAI
2023).
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from rayrec.bounds import Share, Sizes, SomeSizes
from rayrec.config import InputError
from rayrec.layers.keyed_embeddings import KeyedEmbeddings, fields, number_vectors
from rayrec.layers.mlp import Precision, Tower, init_values, xavier_linear
from rayrec.models.base import ClickModelConfig, ModelInputs

NUMBERS: Final = "numbers"
"""Name of all dense features in the context of a gate."""


@dataclass(frozen=True, kw_only=True)
class FinalMLPConfig(ClickModelConfig):
    """Two MLPs over all features, combined with a bilinear form. Gates can weight the features of
    each MLP.
    """

    first_mlp: SomeSizes = (400, 400, 400)
    """Layer widths of the first MLP."""
    second_mlp: SomeSizes = (400,)
    """Layer widths of the second MLP."""
    first_dropout: Share = 0.1
    """Dropout probability of the first MLP's layers."""
    second_dropout: Share = 0.1
    """Dropout probability of the second MLP's layers."""
    batch_norm: bool = False
    """Whether to use batch norm, over the global batch, in each layer."""
    heads: int = 10
    """Number of parts of both MLPs' outputs, combined part by part. Must divide both last
    widths.
    """
    feature_gates: bool = False
    """Whether to multiply the features of each MLP by weights from 0 to 2, computed from its
    context.
    """
    gate_mlp: Sizes = (64,)
    """Widths of the hidden layers of each gate."""
    first_context: tuple[str, ...] = ()
    """Categorical features, and `numbers` for all dense ones, that determine the first MLP's gates.
    Empty learns constants.
    """
    second_context: tuple[str, ...] = ()
    """Context of the second MLP's gates. See first_context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        last = (self.first_mlp[-1], self.second_mlp[-1])
        if self.heads < 1 or any(size % self.heads for size in last):
            raise InputError(
                f"FinalMLPConfig.heads: must divide the last widths of both MLPs, {last}, got "
                f"{self.heads}"
            )
        for name in ("first_context", "second_context"):
            if getattr(self, name) and not self.feature_gates:
                raise InputError(f"FinalMLPConfig.{name}: needs gates. Set feature_gates.")

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        for field in ("first_context", "second_context"):
            _context_indices(self, field, inputs)
        return ()

    def needs_categories(self) -> bool:
        return False

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return FinalMLP(self, inputs, precision=precision)


# Shapes, for F fields of width D, and A and B outputs of the two MLPs:
#
#   numbers and embeddings -> [rows, F * D]
#   times gates of the first context  -> first MLP  -> a [rows, A]
#   times gates of the second context -> second MLP -> b [rows, B]
#   a, b -> a weight each, and a bilinear product in each of the heads -> logit
class FinalMLP(nn.Module):
    """Logit w1 a + w2 b + sum over the heads of a_h W_h b_h, for outputs a and b of the two MLPs.
    The contexts of gates have the same embeddings as the MLPs. In FuxiCTR they have separate
    ones.
    """

    def __init__(
        self, config: FinalMLPConfig, inputs: ModelInputs, *, precision: Precision
    ) -> None:
        super().__init__()
        self._label = inputs.label
        dim = config.embedding_dim
        self._heads = config.heads
        self.number_vectors = number_vectors(inputs.num_dense, dim)
        width = (inputs.num_dense + len(inputs.features)) * dim
        self.first, self.second = (
            Tower(width, sizes, dropout=dropout, batch_norm=config.batch_norm, precision=precision)
            for sizes, dropout in (
                (config.first_mlp, config.first_dropout),
                (config.second_mlp, config.second_dropout),
            )
        )
        self.first_gate: nn.Module | None = None
        self.second_gate: nn.Module | None = None
        if config.feature_gates:
            self.first_gate = _gate(config, "first_context", inputs, width, precision)
            self.second_gate = _gate(config, "second_context", inputs, width, precision)
        first = self.first.out_features
        second = self.second.out_features
        self.first_logit = xavier_linear(first, 1)
        self.second_logit = xavier_linear(second, 1, bias=False)
        # Xavier for a matrix with one output, as in FuxiCTR
        flat = torch.empty(first * second // config.heads, 1)
        shape = (config.heads, first // config.heads, second // config.heads)
        self.products = nn.Parameter(init_values(flat, nn.init.xavier_normal_).view(shape))

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        vectors = fields(dense, self.number_vectors, embedded)
        first_input = second_input = vectors.flatten(1)
        if self.first_gate is not None and self.second_gate is not None:
            first_input, second_input = (
                first_input * self.first_gate(vectors),
                second_input * self.second_gate(vectors),
            )
        first = self.first(first_input).float()
        second = self.second(second_input).float()
        logits = (self.first_logit(first) + self.second_logit(second)).squeeze(1)
        heads = self._heads
        first_heads = first.unflatten(1, (heads, first.shape[1] // heads)).transpose(0, 1)
        second_heads = second.unflatten(1, (heads, second.shape[1] // heads)).transpose(0, 1)
        return {
            self._label: logits + (torch.bmm(first_heads, self.products) * second_heads).sum((0, 2))
        }


class _Gate(nn.Module):
    """Gates from 0 to 2 from the vectors at `indices`: [rows, count, dim] to float32 [rows, count *
    dim].
    """

    def __init__(
        self, indices: tuple[int, ...], width: int, config: FinalMLPConfig, precision: Precision
    ) -> None:
        super().__init__()
        self._context_indices = indices
        self.tower = Tower(
            len(indices) * config.embedding_dim, config.gate_mlp, precision=precision
        )
        self.gate = xavier_linear(self.tower.out_features, width)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        context = torch.cat([vectors[:, index] for index in self._context_indices], dim=1)
        return 2.0 * self.gate(self.tower(context).float()).sigmoid()


class _ConstantGate(nn.Module):
    """Gates from 0 to 2, equal for all rows, float32 [count * dim]. FuxiCTR's MLP of a constant 0
    trains only its last bias.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return 2.0 * self.bias.sigmoid()


def _gate(
    config: FinalMLPConfig, field: str, inputs: ModelInputs, width: int, precision: Precision
) -> nn.Module:
    indices = _context_indices(config, field, inputs)
    return _Gate(indices, width, config, precision) if indices else _ConstantGate(width)


def _context_indices(config: FinalMLPConfig, field: str, inputs: ModelInputs) -> tuple[int, ...]:
    """Return the indices of a context's features among all fields. Raises InputError for an unknown
    feature.
    """
    indices: list[int] = []
    for name in getattr(config, field):
        if name in inputs.features:
            indices.append(inputs.num_dense + inputs.features.index(name))
        elif name == NUMBERS and inputs.num_dense:
            indices.extend(range(inputs.num_dense))
        else:
            names = ", ".join((*inputs.features, *([NUMBERS] if inputs.num_dense else [])))
            raise InputError(
                f"FinalMLPConfig.{field}: feature {name!r} not found. Features are {names}."
            )
    return tuple(indices)
