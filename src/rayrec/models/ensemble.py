"""Several networks as one model, whose logits are averaged (Lakshminarayanan et al., "Simple and Scalable Predictive
Uncertainty Estimation using Deep Ensembles", NIPS 2017)."""

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import add
from typing import final

import torch
from torch import nn

from rayrec.batch import Batch
from rayrec.layers.keyed_embeddings import Delivery, Embedded, Sequences
from rayrec.layers.mlp import Precision
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.heads import Head, LabelHead, named_outputs, own_loss


def build_network(config: ClickModelConfig, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
    """What is trained and scores: the network that `build` gives, or an ensemble of several."""
    if config.members == 1:
        return config.build(inputs, precision=precision)
    networks = [config.build(inputs, precision=precision) for _ in range(config.members)]
    return Ensemble(networks, config.output_heads(inputs), widths=[config.width] * config.members)


@final
class Ensemble(nn.Module):
    """Networks that take the same dense features, and each its own part of every embedding; the logit is the mean of theirs.

    Each learns as if it were alone: no network's gradient depends on another. They start from different values, which is what
    makes their mean better than any of them.
    """

    def __init__(self, members: Sequence[nn.Module], heads: Sequence[Head], *, widths: Sequence[int]) -> None:
        """`widths`: values of each embedding that each member takes, in their order."""
        super().__init__()
        self.members, self._heads = nn.ModuleList(members), heads
        self._losses = [own_loss(member) for member in members]
        ends = list(accumulate(widths))
        self._columns = [slice(end - width, end) for width, end in zip(widths, ends, strict=True)]

    def forward(self, dense: torch.Tensor, embedded: Embedded) -> dict[str, torch.Tensor]:
        """See `ClickModelConfig.build`: the mean logits by label, and for the loss all that the members gave."""
        given = [
            named_outputs(network(dense, _part(embedded, columns)), self._heads, where=type(network).__name__)
            for network, columns in zip(self.members, self._columns, strict=True)
        ]
        outputs = {head.name: torch.stack([of_member[head.name] for of_member in given]).mean(0) for head in self._heads}
        for number, of_member in enumerate(given):
            outputs |= {_name(number, name): values for name, values in of_member.items()}
        return outputs

    def loss(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """(rows,): the mean of the members' losses. Its gradient is that of their sum, so that the number of members does not
        change what each learns."""
        losses = []
        for number, own in enumerate(self._losses):
            prefix = _name(number, "")
            of_member = {name.removeprefix(prefix): values for name, values in outputs.items() if name.startswith(prefix)}
            losses.append(own(of_member, batch) if own else self._loss_of_labels(of_member, batch))
        total = torch.stack(losses).sum(0)
        return total - total.detach() * (1 - 1 / len(losses))

    def _loss_of_labels(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        return reduce(add, (head.losses(outputs, batch.labels) for head in self._heads if isinstance(head, LabelHead)))


def _part(embedded: Embedded, columns: slice) -> Embedded:
    """A member's embeddings: its columns of each embedding."""
    dim = columns.stop - columns.start

    def deliver() -> Delivery:
        values, order = embedded.bags()
        return values.unflatten(1, (len(order), embedded.dim))[:, :, columns].flatten(1), order

    def sequences() -> dict[str, Sequences]:
        return {name: Sequences(given.values[:, columns], given.lengths) for name, given in embedded.all_sequences().items()}

    def table(feature: str) -> torch.Tensor:
        return embedded.table(feature)[:, columns]

    return Embedded(embedded.features, dim, deliver, sequences=sequences, ids=embedded.ids, table=table)


def _name(number: int, output: str) -> str:
    return f"member {number}: {output}"
