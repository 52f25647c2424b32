"""Ensemble of networks with averaged logits (Lakshminarayanan et al., "Simple and Scalable
Predictive Uncertainty Estimation using Deep Ensembles", NIPS 2017).
"""

import re
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import add
from typing import final

import torch
from torch import nn

from rayrec.batch import Batch
from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.mlp import Precision
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.heads import Head, LabelHead, named_outputs, network_loss


def build_network(
    config: ClickModelConfig, inputs: ModelInputs, *, precision: Precision = "fp32"
) -> nn.Module:
    """Build the network of a configuration, or an ensemble if it has several members."""
    if config.members == 1:
        return config.build(inputs, precision=precision)
    networks = [config.build(inputs, precision=precision) for _ in range(config.members)]
    return Ensemble(networks, config.output_heads(inputs), widths=[config.width] * config.members)


@final
class Ensemble(nn.Module):
    """Networks with the same dense features and separate parts of every embedding. The logit is the
    mean of their logits. Members learn independently, without common gradients, from different
    values, so their mean is better than each of them.
    """

    def __init__(
        self, members: Sequence[nn.Module], heads: Sequence[Head], *, widths: Sequence[int]
    ) -> None:
        """`widths`: number of values that each member takes of each embedding, in order."""
        super().__init__()
        self.members = nn.ModuleList(members)
        self._heads = heads
        self._losses = [network_loss(member) for member in members]
        ends = list(accumulate(widths))
        self._columns = [slice(end - width, end) for width, end in zip(widths, ends, strict=True)]

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        """Return the mean logits by label, and all outputs of the members for the loss."""
        member_outputs = [
            named_outputs(
                network(dense, embedded.columns(columns)), self._heads, where=type(network).__name__
            )
            for network, columns in zip(self.members, self._columns, strict=True)
        ]
        outputs = {
            head.name: torch.stack([values[head.name] for values in member_outputs]).mean(0)
            for head in self._heads
        }
        for number, member in enumerate(member_outputs):
            outputs |= {_name(number, name): values for name, values in member.items()}
        return outputs

    def loss(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the mean of the members' row losses, float32 [rows]. Its gradient is that of their
        sum: members learn as if alone.
        """
        losses = []
        for number, member_loss in enumerate(self._losses):
            prefix = _name(number, "")
            member = {
                name.removeprefix(prefix): values
                for name, values in outputs.items()
                if name.startswith(prefix)
            }
            losses.append(
                member_loss(member, batch) if member_loss else self._label_loss(member, batch)
            )
        total = torch.stack(losses).sum(0)
        return total - total.detach() * (1 - 1 / len(losses))

    def _label_loss(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        return reduce(
            add,
            (
                head.losses(outputs, batch.labels)
                for head in self._heads
                if isinstance(head, LabelHead)
            ),
        )


def _name(number: int, output: str) -> str:
    return f"member {number}: {output}"


def plain_name(output: str) -> str:
    """Return the name of an output without those of members."""
    return re.sub(r"^(member \d+: )+", "", output)
