"""Several networks as one model, whose logits are averaged (Lakshminarayanan et al., "Simple and Scalable Predictive
Uncertainty Estimation using Deep Ensembles", NIPS 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import final

import torch
from torch import nn
from torch.nn import functional

from rayrec.layers.keyed_embeddings import Delivery, Embedded, Sequences
from rayrec.layers.mlp import Precision
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.schema import Label


def build_network(config: ClickModelConfig, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
    """What is trained and scores: the network that `build` gives, or an ensemble of several."""
    if config.members == 1:
        return config.build(inputs, precision=precision)
    networks = [config.build(inputs, precision=precision) for _ in range(config.members)]
    return Ensemble(networks, inputs, widths=[config.width] * config.members)


@final
class Ensemble(nn.Module):
    """Networks that take the same dense features, and each its own part of every embedding; the logit is the mean of theirs.

    Each learns as if it were alone: no network's gradient depends on another. They start from different values, which is what
    makes their mean better than any of them.
    """

    def __init__(self, members: Sequence[nn.Module], inputs: ModelInputs, *, widths: Sequence[int]) -> None:
        """`widths`: values of each embedding that each member takes, in their order."""
        super().__init__()
        self.members, self._inputs = nn.ModuleList(members), inputs
        ends = list(accumulate(widths))
        self._columns = [slice(end - width, end) for width, end in zip(widths, ends, strict=True)]

    def forward(self, dense: torch.Tensor, embedded: Embedded) -> dict[str, torch.Tensor]:
        """See `ClickModelConfig.build`: the mean logits by label, and for the loss all that the members gave."""
        given = [
            network(dense, _part(embedded, columns))
            for network, columns in zip(self.members, self._columns, strict=True)
        ]
        outputs = {
            label: torch.stack([of_member[label] for of_member in given]).mean(0) for label in self._inputs.label_names
        }
        for number, of_member in enumerate(given):
            outputs |= {_name(number, name): values for name, values in of_member.items()}
        return outputs

    def loss(self, outputs: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """(rows,): the mean of the members' losses. Its gradient is that of their sum, so that the number of members does not
        change what each learns."""
        losses = []
        for number, network in enumerate(self.members):
            prefix = _name(number, "")
            of_member = {
                name.removeprefix(prefix): values for name, values in outputs.items() if name.startswith(prefix)
            }
            own_loss = getattr(network, "loss", None)
            losses.append(own_loss(of_member, labels) if own_loss else self._loss_of_labels(of_member, labels))
        total = torch.stack(losses).sum(0)
        return total - total.detach() * (1 - 1 / len(losses))

    def _loss_of_labels(self, outputs: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> torch.Tensor:
        main = self._inputs.label
        loss = functional.binary_cross_entropy_with_logits(outputs[main], labels[main], reduction="none")
        for label in self._inputs.more_labels:
            loss = loss + label_losses(label, outputs[label.name], labels[label.name])
        return loss


def label_losses(label: Label, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(rows,): the losses of a further label, 0 for the rows that lack it."""
    there = ~values.isnan()
    values = values.where(there, 0.0)
    if label.kind == "binary":
        return functional.binary_cross_entropy_with_logits(
            logits, values, weight=there.to(logits.dtype), reduction="none"
        )
    return there * (logits - values).square()


def _part(embedded: Embedded, columns: slice) -> Embedded:
    """A member's embeddings: its columns of each embedding."""
    dim = columns.stop - columns.start

    def deliver() -> Delivery:
        values, order = embedded.bags()
        return values.unflatten(1, (len(order), embedded.dim))[:, :, columns].flatten(1), order

    def sequences() -> dict[str, Sequences]:
        return {
            name: Sequences(given.values[:, columns], given.lengths) for name, given in embedded.all_sequences().items()
        }

    return Embedded(embedded.features, dim, deliver, sequences=sequences)


def _name(number: int, output: str) -> str:
    return f"member {number}: {output}"
